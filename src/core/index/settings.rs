//! The settings of an index: block size and hashing, and bounds.

use serde::{Deserialize, Serialize};

use crate::hash::BlockSize;

/// The chain that the index is keyed by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hashing {
    /// The sequence hashes in events are the contract's chain, or queries use the same foreign one.
    #[default]
    Engine,
    /// The sequence hashes in events are opaque names; the chain is computed from the block hashes or tokens beside them.
    Recompute,
}

impl Hashing {
    /// The word in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Engine => "engine",
            Self::Recompute => "recompute",
        }
    }
}

/// The settings that all caches of a namespace have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NamespaceSettings {
    /// Tokens in a block.
    pub block_size: BlockSize,
    /// Whether publishers say so in their batches. Otherwise the configuration does.
    pub is_size_told: bool,
    /// The chain that the index is keyed by.
    pub hashing: Hashing,
}

impl NamespaceSettings {
    /// Whether a batch that says this of its blocks' size can be taken. Where it says nothing, the size is that of the configuration.
    pub fn takes(&self, told: Option<BlockSize>) -> bool {
        told.map_or(!self.is_size_told, |told| told == self.block_size)
    }
}

/// Bounds on one index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexLimits {
    /// Most workers.
    pub workers_max: usize,
    /// Most data-parallel ranks of one worker.
    pub ranks_per_worker_max: usize,
    /// Most blocks of one holder.
    pub blocks_per_holder_max: usize,
    /// The bounds on what waits for a parent, per holder.
    pub parking: ParkingLimits,
    /// How large the index may be before it forgets blocks.
    pub capacity: Capacity,
}

impl Default for IndexLimits {
    fn default() -> Self {
        Self {
            workers_max: 4096,
            ranks_per_worker_max: 64,
            blocks_per_holder_max: 1 << 24,
            parking: ParkingLimits::default(),
            capacity: Capacity::UNBOUNDED,
        }
    }
}

/// Bounds on what waits for a parent, per holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParkingLimits {
    /// Most events that wait.
    pub events_max: usize,
    /// Most blocks that wait, in all events together.
    pub blocks_max: usize,
    /// Most bytes that wait, of all holders of all indexes that share a total. One holder may take a fourth of what the others leave.
    pub bytes_max: u64,
    /// How long an event waits, in microseconds.
    pub wait_us_max: u64,
}

impl Default for ParkingLimits {
    fn default() -> Self {
        Self {
            events_max: 64,
            blocks_max: 65_536,
            bytes_max: 256 << 20,
            wait_us_max: 30_000_000,
        }
    }
}

/// Bounds on what is shared with queries. At a bound an index forgets blocks: leaves first, least recently stored or matched
/// first.
///
/// Bytes are those of the shared runs, of the tables that lead to them, and of what is kept for each holder. Blocks without a parent, and
/// events that wait for one, are not forgotten: they may take an eighth of the capacity, or 1 MiB where that is more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Most distinct blocks.
    pub blocks_max: u64,
    /// Most bytes.
    pub bytes_max: u64,
}

impl Capacity {
    /// No bounds.
    pub const UNBOUNDED: Self = Self {
        blocks_max: u64::MAX,
        bytes_max: u64::MAX,
    };
}
