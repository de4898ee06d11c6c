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

/// Most workers in the namespace of probes: as many probes may run at once.
const PROBING_WORKERS_MAX: usize = 8;
/// Most blocks of one worker in the namespace of probes.
const PROBED_BLOCKS_MAX: usize = 16;
/// Most distinct blocks in the namespace of probes, with the missing blocks before them.
const PROBED_TOTAL_MAX: u64 = 1024;
/// Most bytes in the namespace of probes.
const PROBED_BYTES_MAX: u64 = 4 << 20;

/// Bounds on one index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexLimits {
    /// Maximum number of workers.
    pub workers_max: usize,
    /// Maximum number of data-parallel ranks of one worker.
    pub ranks_per_worker_max: usize,
    /// Maximum number of blocks of one holder.
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

impl IndexLimits {
    /// Returns these bounds, lowered to what probes need. The namespace of probes exists beside the limits on
    /// namespaces, so nobody may keep much in it.
    pub(super) fn of_probes(self) -> Self {
        let Self {
            parking, capacity, ..
        } = self;
        Self {
            workers_max: self.workers_max.min(PROBING_WORKERS_MAX),
            ranks_per_worker_max: 1,
            blocks_per_holder_max: self.blocks_per_holder_max.min(PROBED_BLOCKS_MAX),
            parking: ParkingLimits {
                events_max: parking.events_max.min(PROBED_BLOCKS_MAX),
                blocks_max: parking.blocks_max.min(PROBED_BLOCKS_MAX),
                bytes_max: parking.bytes_max.min(PROBED_BYTES_MAX),
                ..parking
            },
            capacity: Capacity {
                blocks_max: capacity.blocks_max.min(PROBED_TOTAL_MAX),
                bytes_max: capacity.bytes_max.min(PROBED_BYTES_MAX),
            },
        }
    }
}

/// Bounds on the stored events of one holder that wait for their parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParkingLimits {
    /// Maximum number of waiting events of one holder.
    pub events_max: usize,
    /// Maximum number of blocks in all waiting events of one holder together.
    pub blocks_max: usize,
    /// Maximum bytes of waiting events, summed over all holders of all indexes that share a total. One holder may take
    /// a fourth of what the others leave.
    pub bytes_max: u64,
    /// Longest time that an event waits for its parent, in microseconds.
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

/// Bounds on the size of an index, or of several together. At a bound, blocks are evicted. Only leaves are evicted,
/// those first that were stored or matched longest ago.
///
/// The bytes are those of the shared runs, of the tables that find them, and of the state of each holder. Blocks whose
/// parent is unknown, and events that wait for their parent, are not evicted. These two may take an eighth of the
/// capacity, or 1 MiB if that is more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capacity {
    /// Maximum number of distinct blocks.
    pub blocks_max: u64,
    /// Maximum number of bytes.
    pub bytes_max: u64,
}

impl Capacity {
    /// Capacity without any bound.
    pub const UNBOUNDED: Self = Self {
        blocks_max: u64::MAX,
        bytes_max: u64::MAX,
    };
}
