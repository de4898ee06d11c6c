//! Questions, reports and answers of `kv_indexer.v1`. Fields that kvatlas does not need are not declared; decoding skips them.

/// Declares messages as structs, and lists them in [`MESSAGES`], from which the service's description is made. A field
/// is written as `NAME: TYPE = NUMBER, [FORM]`, where the form is the field's attributes for prost.
macro_rules! messages {
    ($($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $of:ty = $tag:tt, [$($form:tt)*];)* })*) => {
        $(
            $(#[$about])*
            #[derive(Clone, PartialEq, prost::Message)]
            pub(super) struct $name {
                $($(#[$doc])* #[prost($($form)*, tag = $tag)] pub(super) $field: $of,)*
            }
        )*

        /// Messages with their fields.
        pub(super) const MESSAGES: &[(&str, &[Field])] = &[$((
            stringify!($name),
            &[$(Field {
                name: stringify!($field),
                number: $tag,
                of: stringify!($of),
                form: stringify!($($form)*),
            },)*],
        ),)*];
    };
}

/// Declared field of a message.
pub(super) struct Field {
    /// Name of the field.
    pub(super) name: &'static str,
    /// Number of the field.
    pub(super) number: i32,
    /// Type of the field in Rust.
    pub(super) of: &'static str,
    /// Attributes of the field for prost: the kind of its values, and `repeated` or `optional`.
    pub(super) form: &'static str,
}

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

messages! {
    MatchExternalKvPrefixRequest {
        /// Hashes of the prompt's blocks, from the first block on.
        hashes: Vec<i64> = 1, [sfixed64, repeated];
        /// Maximum number of leading blocks of `hashes` that are looked for. 0 means all.
        max_blocks: u32 = 2, [uint32];
    }

    ExternalKvPrefixMatch {
        worker_address: String = 1, [string];
        matched_prefix_blocks: u32 = 2, [uint32];
        worker_id: String = 3, [string];
    }

    MatchExternalKvPrefixResponse {
        /// Workers that have leading blocks of the prompt. The worker with the largest number of blocks comes first.
        matches: Vec<ExternalKvPrefixMatch> = 1, [message, repeated];
        best_prefix_blocks: u32 = 2, [uint32];
        /// Number of blocks of the question that were looked for.
        blocks_read: u32 = 3, [uint32];
    }

    MatchExternalKvRequest {
        /// Hashes of the prompt's blocks, from the first block on.
        hashes: Vec<i64> = 1, [sfixed64, repeated];
    }

    TierHashes {
        tier: i32 = 1, [enumeration = "TierType"];
        hashes: Vec<i64> = 2, [sfixed64, repeated];
        /// Components of the cache for each of `hashes`, as bits. Empty if the sender does not name components.
        component_masks: Vec<u32> = 3, [uint32, repeated];
        /// Number of tokens in the block of each of `hashes`. Empty if the sender does not tell the numbers.
        block_sizes: Vec<u32> = 4, [uint32, repeated];
    }

    ExternalKvNodeMatch {
        worker_id: String = 1, [string];
        address: String = 2, [string];
        hashes_by_tier: Vec<TierHashes> = 3, [message, repeated];
    }

    MatchExternalKvResponse {
        matches: Vec<ExternalKvNodeMatch> = 1, [message, repeated];
    }

    /// Components of a worker's cache, with the settings that the rules of each component need.
    #[derive(Copy)]
    WorkerCacheSpec {
        version: u32 = 1, [uint32];
        components: u32 = 2, [uint32];
        swa_window_tokens: u32 = 3, [uint32];
        /// Tiers from which full attention can reuse blocks. Each tier is the bit `1 << tier`. `swa_tier_mask` has the
        /// same form for windows, and `mamba_tier_mask` for recurrent states.
        full_tier_mask: u32 = 4, [uint32];
        swa_tier_mask: u32 = 5, [uint32];
        mamba_tier_mask: u32 = 6, [uint32];
    }

    ExternalKvAction {
        r#type: i32 = 1, [enumeration = "ExternalKvActionType"];
        tier: i32 = 2, [enumeration = "TierType"];
        hashes: Vec<i64> = 3, [sfixed64, repeated];
        component_masks: Vec<u32> = 4, [uint32, repeated];
        block_sizes: Vec<u32> = 5, [uint32, repeated];
    }

    ApplyExternalKvBatchRequest {
        worker_id: String = 1, [string];
        seq: u64 = 2, [uint64];
        actions: Vec<ExternalKvAction> = 3, [message, repeated];
        worker_address: String = 4, [string];
        cache_spec: Option<WorkerCacheSpec> = 6, [message, optional];
        worker_epoch: String = 7, [string];
        enforce_sequence: bool = 8, [bool];
    }

    #[derive(Copy, Eq)]
    ApplyExternalKvBatchResponse {
        applied_seq: u64 = 4, [uint64];
        duplicate: bool = 5, [bool];
    }

    ReplaceExternalKvSnapshotRequest {
        worker_id: String = 1, [string];
        worker_address: String = 2, [string];
        worker_epoch: String = 3, [string];
        applied_seq: u64 = 4, [uint64];
        hashes_by_tier: Vec<TierHashes> = 5, [message, repeated];
        cache_spec: Option<WorkerCacheSpec> = 6, [message, optional];
    }

    #[derive(Copy, Eq)]
    ReplaceExternalKvSnapshotResponse {
        applied_seq: u64 = 1, [uint64];
    }

    ExpectedWorker {
        worker_id: String = 1, [string];
        worker_address: String = 2, [string];
        cache_spec: Option<WorkerCacheSpec> = 3, [message, optional];
    }

    ConfigureExpectedWorkersRequest {
        workers: Vec<ExpectedWorker> = 1, [message, repeated];
    }

    #[derive(Copy, Eq)]
    ConfigureExpectedWorkersResponse {
        total_workers: u32 = 1, [uint32];
        ready_workers: u32 = 2, [uint32];
    }
}
