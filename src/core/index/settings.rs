//! The settings of an index: block size and hashing, and bounds.

use serde::{Deserialize, Serialize};

use crate::hash::BlockSize;
use crate::worded;

worded! {
    /// The chain that the index is keyed by.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Hashing {
        /// The sequence hashes in events. They are the contract's chain, or queries use the same foreign chain.
        #[default]
        Engine => "engine",
        /// The chain that is computed from the block hashes or tokens in events. The sequence hashes beside them are opaque
        /// names.
        Recompute => "recompute",
    }
}

/// The settings that all caches of a namespace have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NamespaceSettings {
    /// Tokens in a block.
    pub block_size: BlockSize,
    /// Whether the block size comes from the publishers' batches. Otherwise it comes from the configuration.
    pub is_size_told: bool,
    /// The chain that the index is keyed by.
    pub hashing: Hashing,
}

impl NamespaceSettings {
    /// Whether a batch that tells this block size can be taken. A batch that tells none is taken only if the size comes
    /// from the configuration.
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
    /// Bounds on the events of one holder that wait for a parent.
    pub parking: ParkingLimits,
    /// Size that the index may have before it evicts blocks.
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

/// Bounds on the stored events of one holder that wait for their parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParkingLimits {
    /// Most events that wait.
    pub events_max: usize,
    /// Most blocks that wait, in all events together.
    pub blocks_max: usize,
    /// Most bytes of events that wait, of all holders of all indexes that share a total. One holder may take a fourth
    /// of what the others leave.
    pub bytes_max: u64,
    /// Longest time that an event waits, in microseconds.
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

/// Bounds on the size of an index, or of several together. At a bound, blocks are evicted: leaves first, least recently
/// stored or matched first.
///
/// Bytes count the shared runs, the tables that find them, and the state of each holder. Blocks without a parent, and
/// events that wait for one, are not evicted. They may take an eighth of the capacity, or 1 MiB if that is more.
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
