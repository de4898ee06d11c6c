//! Questions, reports and answers of `kv_indexer.v1`. Fields that kvatlas does not need are not declared; decoding skips them.

/// Tier in which a block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(super) enum TierType {
    /// Tier is not known.
    Unknown = 0,
    /// Device memory.
    Hbm = 1,
    /// Memory of the host.
    Dram = 2,
    /// Disk, or storage beyond the disk.
    Ssd = 3,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct MatchExternalKvPrefixRequest {
    /// Hashes of the prompt's blocks, from the first block on.
    #[prost(sfixed64, repeated, tag = "1")]
    pub(super) hashes: Vec<i64>,
    /// Maximum number of leading blocks of `hashes` that are looked for. 0 means all.
    #[prost(uint32, tag = "2")]
    pub(super) max_blocks: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ExternalKvPrefixMatch {
    #[prost(string, tag = "1")]
    pub(super) worker_address: String,
    #[prost(uint32, tag = "2")]
    pub(super) matched_prefix_blocks: u32,
    #[prost(string, tag = "3")]
    pub(super) worker_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct MatchExternalKvPrefixResponse {
    /// Workers that have leading blocks of the prompt. The worker with the largest number of blocks comes first.
    #[prost(message, repeated, tag = "1")]
    pub(super) matches: Vec<ExternalKvPrefixMatch>,
    #[prost(uint32, tag = "2")]
    pub(super) best_prefix_blocks: u32,
    /// Number of blocks of the question that were looked for.
    #[prost(uint32, tag = "3")]
    pub(super) blocks_read: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct MatchExternalKvRequest {
    /// Hashes of the prompt's blocks, from the first block on.
    #[prost(sfixed64, repeated, tag = "1")]
    pub(super) hashes: Vec<i64>,
    /// Whether this look-up is added to the hit counts of the blocks that are found.
    #[prost(bool, tag = "2")]
    pub(super) count_as_hit: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct TierHashes {
    #[prost(enumeration = "TierType", tag = "1")]
    pub(super) tier: i32,
    #[prost(sfixed64, repeated, tag = "2")]
    pub(super) hashes: Vec<i64>,
    /// Components of the cache for each of `hashes`, as bits. Empty if the sender does not name components.
    #[prost(uint32, repeated, tag = "3")]
    pub(super) component_masks: Vec<u32>,
    /// Number of tokens in the block of each of `hashes`. Empty if the sender does not tell the numbers.
    #[prost(uint32, repeated, tag = "4")]
    pub(super) block_sizes: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ExternalKvNodeMatch {
    #[prost(string, tag = "1")]
    pub(super) worker_id: String,
    #[prost(string, tag = "2")]
    pub(super) address: String,
    #[prost(message, repeated, tag = "3")]
    pub(super) hashes_by_tier: Vec<TierHashes>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct MatchExternalKvResponse {
    #[prost(message, repeated, tag = "1")]
    pub(super) matches: Vec<ExternalKvNodeMatch>,
}

/// Components of a worker's cache, with the settings that the rules of each component need.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(super) struct WorkerCacheSpec {
    #[prost(uint32, tag = "1")]
    pub(super) version: u32,
    #[prost(uint32, tag = "2")]
    pub(super) components: u32,
    #[prost(uint32, tag = "3")]
    pub(super) swa_window_tokens: u32,
    /// Tiers from which full attention can reuse blocks, as bits `1 << tier`. The two masks below have the same form,
    /// for windows and for recurrent states.
    #[prost(uint32, tag = "4")]
    pub(super) full_tier_mask: u32,
    #[prost(uint32, tag = "5")]
    pub(super) swa_tier_mask: u32,
    #[prost(uint32, tag = "6")]
    pub(super) mamba_tier_mask: u32,
}

/// Kind of a change of a tier's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(super) enum ExternalKvActionType {
    /// Kind is not known.
    Unknown = 0,
    /// Tier has the action's blocks from now on.
    Report = 1,
    /// Tier no longer has the action's blocks.
    Revoke = 2,
    /// Tier no longer has any blocks.
    ClearAllAtTier = 3,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ExternalKvAction {
    #[prost(enumeration = "ExternalKvActionType", tag = "1")]
    pub(super) r#type: i32,
    #[prost(enumeration = "TierType", tag = "2")]
    pub(super) tier: i32,
    #[prost(sfixed64, repeated, tag = "3")]
    pub(super) hashes: Vec<i64>,
    #[prost(uint32, repeated, tag = "4")]
    pub(super) component_masks: Vec<u32>,
    #[prost(uint32, repeated, tag = "5")]
    pub(super) block_sizes: Vec<u32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ApplyExternalKvBatchRequest {
    #[prost(string, tag = "1")]
    pub(super) worker_id: String,
    #[prost(uint64, tag = "2")]
    pub(super) seq: u64,
    #[prost(message, repeated, tag = "3")]
    pub(super) actions: Vec<ExternalKvAction>,
    #[prost(string, tag = "4")]
    pub(super) worker_address: String,
    #[prost(message, optional, tag = "6")]
    pub(super) cache_spec: Option<WorkerCacheSpec>,
    #[prost(string, tag = "7")]
    pub(super) worker_epoch: String,
    #[prost(bool, tag = "8")]
    pub(super) enforce_sequence: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(super) struct ApplyExternalKvBatchResponse {
    #[prost(uint64, tag = "4")]
    pub(super) applied_seq: u64,
    #[prost(bool, tag = "5")]
    pub(super) duplicate: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ReplaceExternalKvSnapshotRequest {
    #[prost(string, tag = "1")]
    pub(super) worker_id: String,
    #[prost(string, tag = "2")]
    pub(super) worker_address: String,
    #[prost(string, tag = "3")]
    pub(super) worker_epoch: String,
    #[prost(uint64, tag = "4")]
    pub(super) applied_seq: u64,
    #[prost(message, repeated, tag = "5")]
    pub(super) hashes_by_tier: Vec<TierHashes>,
    #[prost(message, optional, tag = "6")]
    pub(super) cache_spec: Option<WorkerCacheSpec>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(super) struct ReplaceExternalKvSnapshotResponse {
    #[prost(uint64, tag = "1")]
    pub(super) applied_seq: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ExpectedWorker {
    #[prost(string, tag = "1")]
    pub(super) worker_id: String,
    #[prost(string, tag = "2")]
    pub(super) worker_address: String,
    #[prost(message, optional, tag = "3")]
    pub(super) cache_spec: Option<WorkerCacheSpec>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ConfigureExpectedWorkersRequest {
    #[prost(message, repeated, tag = "1")]
    pub(super) workers: Vec<ExpectedWorker>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(super) struct ConfigureExpectedWorkersResponse {
    #[prost(uint32, tag = "1")]
    pub(super) total_workers: u32,
    #[prost(uint32, tag = "2")]
    pub(super) ready_workers: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct GetExternalKvHitCountsRequest {
    #[prost(sfixed64, repeated, tag = "1")]
    pub(super) hashes: Vec<i64>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(super) struct HitCountEntry {
    #[prost(sfixed64, tag = "1")]
    pub(super) hash: i64,
    #[prost(uint64, tag = "2")]
    pub(super) hit_count_total: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct GetExternalKvHitCountsResponse {
    #[prost(message, repeated, tag = "1")]
    pub(super) entries: Vec<HitCountEntry>,
}
