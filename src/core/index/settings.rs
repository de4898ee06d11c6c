//! The settings of an index: block size and hashing, and bounds.

use serde::{Deserialize, Serialize};

use crate::hash::BlockSize;
use crate::worded;

worded! {
    /// Hash chain by which the index identifies blocks.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Hashing {
        /// The chain that the sequence hashes in events form. It is the contract's chain, or another chain whose hashes
        /// queries give, too.
        #[default]
        Engine => "engine",
        /// The chain computed from the block hashes or tokens in events. The sequence hashes in the same events are
        /// opaque names.
        Recompute => "recompute",
    }
}

/// Settings of a namespace, which are the same for all its holders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NamespaceSettings {
    /// Number of tokens in a block.
    pub block_size: BlockSize,
    /// Whether the block size was taken from the publishers' batches. Otherwise it was taken from the configuration.
    pub is_size_told: bool,
    /// Hash chain by which the index identifies blocks.
    pub hashing: Hashing,
    /// Whether the namespace's name gives a hash scheme. If so, the hashes in events are the scheme's, and are not
    /// compared with the contract's chain.
    pub has_scheme: bool,
}

impl NamespaceSettings {
    /// Whether the namespace accepts a batch that gives this block size. A batch without a block size is accepted only
    /// if the configuration gives the size.
    pub fn takes(&self, told: Option<BlockSize>) -> bool {
        told.map_or(!self.is_size_told, |told| told == self.block_size)
    }
}

/// Maximum number of workers in the namespace of probes ([`PROBE_NAME`](crate::wire::PROBE_NAME)).
const PROBING_WORKERS_MAX: usize = 8;
/// Maximum number of ranks of a worker in the namespace of probes ([`PROBE_NAME`](crate::wire::PROBE_NAME)). Each probe
/// has a rank of its own. So at most this many probes of one worker can run at the same time.
const PROBING_RANKS_MAX: usize = 8;
/// Maximum number of blocks of one worker in the namespace of probes ([`PROBE_NAME`](crate::wire::PROBE_NAME)).
const PROBED_BLOCKS_MAX: usize = 16;
/// Maximum number of distinct blocks in the namespace of probes ([`PROBE_NAME`](crate::wire::PROBE_NAME)). Missing
/// blocks in holes before these blocks count, too.
const PROBED_TOTAL_MAX: u64 = 1024;
/// Maximum number of bytes that the namespace of probes ([`PROBE_NAME`](crate::wire::PROBE_NAME)) takes.
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
    /// Maximum size of the index; beyond it, blocks are evicted.
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
    /// Returns these bounds, lowered to what the probes of `kvatlas doctor` need. The namespace of probes comes on top
    /// of the maximum number of namespaces, so it may take only little memory.
    pub(super) fn of_probes(self) -> Self {
        let Self {
            parking, capacity, ..
        } = self;
        Self {
            workers_max: self.workers_max.min(PROBING_WORKERS_MAX),
            ranks_per_worker_max: self.ranks_per_worker_max.min(PROBING_RANKS_MAX),
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
    /// Maximum number of events of one holder that wait for their parent.
    pub events_max: usize,
    /// Maximum number of blocks in all events of one holder that wait for their parent.
    pub blocks_max: usize,
    /// Maximum number of bytes that waiting events (events that wait for their parent) may take. The bound is for all
    /// holders of all indexes with a common total. One holder may take a fourth of the bytes that the other holders do
    /// not use.
    pub bytes_max: u64,
    /// Maximum time that an event waits for its parent, in microseconds.
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

/// Bounds on the size of one index, or of several indexes together. At a bound, leaves (blocks at the ends of chains)
/// are evicted: first those that were stored or matched longest ago.
///
/// The bytes include the shared runs, the tables that find runs, and the state of each holder. Blocks whose parent is
/// unknown, and events that wait for their parent, are not evicted. Together they may take an eighth of the capacity,
/// or 1 MiB if that is more.
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
