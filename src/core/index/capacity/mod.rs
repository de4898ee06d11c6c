//! How large indexes may be: bounds on blocks and bytes, of one index and of all together.

mod eviction;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

pub(crate) use eviction::Queue;

use super::indexer::Shared;
use super::settings::Capacity;

/// What a distinct block takes, roughly: how many blocks to forget for some bytes.
const BLOCK_BYTES: u64 = 32;

/// What several indexes use together, and who they are.
#[derive(Debug, Default)]
pub struct TotalUsage {
    usage: Arc<Usage>,
    members: Mutex<Vec<Weak<Shared>>>,
}

impl TotalUsage {
    /// Nothing used of `capacity`.
    pub fn of(capacity: Capacity) -> Self {
        Self {
            usage: Arc::new(Usage::of(capacity)),
            members: Mutex::default(),
        }
    }

    /// What is used.
    pub(crate) fn usage(&self) -> &Arc<Usage> {
        &self.usage
    }

    pub(super) fn join(&self, index: &Arc<Shared>) {
        if self.usage.is_bounded() {
            let mut members = self.members.lock();
            members.retain(|member| member.strong_count() > 0);
            members.push(Arc::downgrade(index));
        }
    }

    /// Has the largest index forget blocks where all together have too many. No index's turn may be held.
    pub(super) fn make_room(&self) {
        if self.usage.excess_blocks() == 0 {
            return;
        }
        let members: Vec<Arc<Shared>> = self.members.lock().iter().filter_map(Weak::upgrade).collect();
        if let Some(largest) = members.iter().max_by_key(|member| member.runs.bytes()) {
            largest.evict(|| self.usage.excess_blocks());
        }
    }
}

/// A capacity and what is used of it.
#[derive(Debug)]
pub(crate) struct Usage {
    capacity: Capacity,
    blocks: AtomicU64,
    bytes: AtomicU64,
}

impl Default for Usage {
    fn default() -> Self {
        Self::of(Capacity::UNBOUNDED)
    }
}

impl Usage {
    /// Nothing used of `capacity`.
    pub(crate) fn of(capacity: Capacity) -> Self {
        Self {
            capacity,
            blocks: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        }
    }

    /// Whether there is a bound at all.
    pub(crate) fn is_bounded(&self) -> bool {
        self.capacity != Capacity::UNBOUNDED
    }

    /// Distinct blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Relaxed)
    }

    /// Bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// More is used, or less.
    pub(crate) fn change(&self, blocks: i64, bytes: i64) {
        for (used, change) in [(&self.blocks, blocks), (&self.bytes, bytes)] {
            // Whoever only reads these counts need not wait for a write that says nothing.
            if change != 0 {
                // Wraps around, and so subtracts what is below 0.
                used.fetch_add(change.cast_unsigned(), Ordering::Relaxed);
            }
        }
    }

    /// How many blocks are too many.
    pub(crate) fn excess_blocks(&self) -> u64 {
        let blocks = self.blocks().saturating_sub(self.capacity.blocks_max);
        let bytes = self.bytes().saturating_sub(self.capacity.bytes_max);
        blocks.max(bytes.div_ceil(BLOCK_BYTES))
    }

    /// How many blocks fit, roughly.
    pub(crate) fn blocks_max(&self) -> u64 {
        let by_bytes = self.capacity.bytes_max / BLOCK_BYTES;
        self.capacity.blocks_max.min(by_bytes)
    }
}
