//! Questions and answers of `kv_indexer.v1`. Fields that nobody here needs are not declared, and are passed over.

/// The tier in which a block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(super) enum TierType {
    /// Nobody knows.
    Unknown = 0,
    /// On the device.
    Hbm = 1,
    /// In the host's memory.
    Dram = 2,
    /// On a disk, or beyond.
    Ssd = 3,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct MatchExternalKvPrefixRequest {
    /// The prompt's blocks, from the first on.
    #[prost(sfixed64, repeated, tag = "1")]
    pub(super) hashes: Vec<i64>,
    /// Blocks that are looked at, at most; 0 for all.
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
    /// The deepest first.
    #[prost(message, repeated, tag = "1")]
    pub(super) matches: Vec<ExternalKvPrefixMatch>,
    #[prost(uint32, tag = "2")]
    pub(super) best_prefix_blocks: u32,
    /// Blocks of the question that were looked for.
    #[prost(uint32, tag = "3")]
    pub(super) blocks_read: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct MatchExternalKvRequest {
    /// As in a question about a prefix.
    #[prost(sfixed64, repeated, tag = "1")]
    pub(super) hashes: Vec<i64>,
    /// Whether the blocks found count as hits. They do not here.
    #[prost(bool, tag = "2")]
    pub(super) count_as_hit: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct TierHashes {
    #[prost(enumeration = "TierType", tag = "1")]
    pub(super) tier: i32,
    #[prost(sfixed64, repeated, tag = "2")]
    pub(super) hashes: Vec<i64>,
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
