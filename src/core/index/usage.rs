//! What is used of a capacity, by one index or by several together.

use std::sync::atomic::{AtomicU64, Ordering};

use super::settings::Capacity;

/// What a distinct block takes, roughly: how many blocks to forget for some bytes.
const BLOCK_BYTES: u64 = 32;

/// What has no place among the runs may take this share of the capacity, or this many bytes.
const ASIDE_SHARE: u64 = 8;
const ASIDE_BYTES_MIN: u64 = 1 << 20;

/// More of what is used, or less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Change {
    /// Distinct blocks.
    pub(crate) blocks: i64,
    pub(crate) bytes: i64,
    /// Bytes of what has no place among the runs: a part of `bytes`.
    pub(crate) aside: i64,
}

/// A capacity and what is used of it.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    capacity: Capacity,
    blocks: AtomicU64,
    bytes: AtomicU64,
    /// Bytes of what has no place among the runs, and so is not evicted.
    aside: AtomicU64,
}

impl Usage {
    /// Nothing used of `capacity`.
    pub(crate) fn of(capacity: Capacity) -> Self {
        Self {
            capacity,
            ..Self::default()
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

    /// More is used, or less. `is_alone`: nobody else can change it at the same time.
    pub(crate) fn change(&self, change: Change, is_alone: bool) {
        let Change { blocks, bytes, aside } = change;
        for (used, change) in [(&self.blocks, blocks), (&self.bytes, bytes), (&self.aside, aside)] {
            // Whoever only reads these counts need not wait for a write that says nothing.
            if change == 0 {
                continue;
            }
            // Wraps around, and so subtracts what is below 0.
            if is_alone {
                let now = used.load(Ordering::Relaxed).wrapping_add_signed(change);
                used.store(now, Ordering::Relaxed);
            } else {
                used.fetch_add(change.cast_unsigned(), Ordering::Relaxed);
            }
        }
    }

    /// All that is used, as what it would be to take it away.
    pub(crate) fn all_gone(&self) -> Change {
        let gone = |used: &AtomicU64| -used.load(Ordering::Relaxed).cast_signed();
        Change {
            blocks: gone(&self.blocks),
            bytes: gone(&self.bytes),
            aside: gone(&self.aside),
        }
    }

    /// Bytes of what has no place among the runs.
    pub(crate) fn aside(&self) -> u64 {
        self.aside.load(Ordering::Relaxed)
    }

    /// Whether it has a small part of the capacity: blocks with a place must not have to give way to it.
    pub(crate) fn has_room_aside(&self) -> bool {
        let bytes_max = self.blocks_max().saturating_mul(BLOCK_BYTES);
        self.aside() < (bytes_max / ASIDE_SHARE).max(ASIDE_BYTES_MIN)
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
