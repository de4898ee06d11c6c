//! Usage: the used part of a capacity. The capacity bounds one index, or several indexes together.

use crossbeam_utils::atomic::AtomicCell;

use super::settings::Capacity;

/// Approximate bytes of a distinct block. Eviction divides the bytes to be freed by this number to get a number of
/// blocks.
const BLOCK_BYTES: u64 = 32;

/// Bound on the bytes of blocks without a parent and of waiting events, which have no place in a run. They may take the
/// capacity in bytes divided by this number, or [`ASIDE_BYTES_MIN`] if that is more.
const ASIDE_SHARE: u64 = 8;
const ASIDE_BYTES_MIN: u64 = 1 << 20;

/// Bound on the bytes of the waiting events of one holder (events that wait for a parent). They may take the bytes that
/// the other holders do not use, divided by this number.
const WAITING_SHARE: u64 = 4;

/// Change of the usage: positive if more is used, negative if less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Change {
    /// Change of the number of distinct blocks.
    pub(crate) blocks: i64,
    pub(crate) bytes: i64,
    /// Change of the bytes of state outside the runs: blocks without a parent, and events that wait for a parent. These
    /// bytes are a part of `bytes`.
    pub(crate) aside: i64,
    /// Change of the bytes of events that wait for a parent. These bytes are a part of `aside`.
    pub(crate) waiting: i64,
}

impl Change {
    /// Returns the difference between this value and `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            blocks: self.blocks - before.blocks,
            bytes: self.bytes - before.bytes,
            aside: self.aside - before.aside,
            waiting: self.waiting - before.waiting,
        }
    }

    /// Adds another change to this one.
    pub(crate) fn add(&mut self, more: Self) {
        self.blocks += more.blocks;
        self.bytes += more.bytes;
        self.aside += more.aside;
        self.waiting += more.waiting;
    }
}

/// A capacity, and how much of it is used.
#[derive(Debug)]
pub(crate) struct Usage {
    capacity: Capacity,
    /// Number of distinct blocks.
    pub(crate) blocks: AtomicCell<u64>,
    pub(crate) bytes: AtomicCell<u64>,
    /// Bytes of state outside the runs, which is not evicted: blocks without a parent, and events that wait for a
    /// parent.
    aside: AtomicCell<u64>,
    /// Bytes of events that wait for a parent. They are counted even if the capacity has no bound.
    waiting: AtomicCell<u64>,
}

impl Usage {
    /// Makes the usage of a `capacity`, with nothing used yet.
    pub(crate) fn of(capacity: Capacity) -> Self {
        Self {
            capacity,
            blocks: AtomicCell::new(0),
            bytes: AtomicCell::new(0),
            aside: AtomicCell::new(0),
            waiting: AtomicCell::new(0),
        }
    }

    /// Whether the capacity has any bound.
    pub(crate) fn is_bounded(&self) -> bool {
        self.capacity != Capacity::UNBOUNDED
    }

    /// Adds `change` to the usage. `is_alone` says that no other thread can change the usage at the same time.
    pub(crate) fn change(&self, change: Change, is_alone: bool) {
        let Change {
            blocks,
            bytes,
            aside,
            waiting,
        } = change;
        for (used, change) in [
            (&self.blocks, blocks),
            (&self.bytes, bytes),
            (&self.aside, aside),
            (&self.waiting, waiting),
        ] {
            // Threads that only read these counts need not wait for a write that changes nothing.
            if change == 0 {
                continue;
            }
            // The sum is taken modulo 2^64, so a negative change is subtracted.
            if is_alone {
                used.store(used.load().wrapping_add_signed(change));
            } else {
                used.fetch_add(change.cast_unsigned());
            }
        }
    }

    /// Returns the change that reduces the usage to zero.
    pub(crate) fn all_gone(&self) -> Change {
        let gone = |used: &AtomicCell<u64>| -used.load().cast_signed();
        Change {
            blocks: gone(&self.blocks),
            bytes: gone(&self.bytes),
            aside: gone(&self.aside),
            waiting: gone(&self.waiting),
        }
    }

    /// Whether an eighth of the capacity is free, so that evicted blocks may be stored again. Eviction itself frees
    /// less than an eighth.
    pub(crate) fn has_room(&self) -> bool {
        let fits = |used: u64, max: u64| used <= max - max / 8;
        fits(self.blocks.load(), self.capacity.blocks_max) && fits(self.bytes.load(), self.capacity.bytes_max)
    }

    /// Whether there is room for more state outside the runs, which eviction cannot free. Such state may take only a
    /// small part of the capacity, so that it does not displace blocks of the runs.
    pub(crate) fn has_room_aside(&self) -> bool {
        let bytes_max = self.blocks_max().saturating_mul(BLOCK_BYTES);
        self.aside.load() < (bytes_max / ASIDE_SHARE).max(ASIDE_BYTES_MIN)
    }

    /// Returns the maximum number of bytes that one holder's waiting events (events that wait for a parent) may take
    /// together. `own` is the number of bytes that they take now. `bytes_max` is the limit for all holders together.
    /// One holder may take only a part of the bytes that the other holders do not use, so that later holders find room.
    pub(crate) fn room_to_wait(&self, own: u64, bytes_max: u64) -> u64 {
        let others = self.waiting.load().saturating_sub(own);
        bytes_max.saturating_sub(others) / WAITING_SHARE
    }

    /// Number of bytes of the state that eviction can free: without blocks that have no parent, and waiting events.
    pub(crate) fn evictable_bytes(&self) -> u64 {
        self.bytes.load().saturating_sub(self.aside.load())
    }

    /// Number of blocks to evict so that the bounds on blocks and on bytes are met.
    pub(crate) fn excess_blocks(&self) -> u64 {
        let blocks = self.blocks.load().saturating_sub(self.capacity.blocks_max);
        let bytes = self.bytes.load().saturating_sub(self.capacity.bytes_max);
        blocks.max(bytes.div_ceil(BLOCK_BYTES))
    }

    /// Approximate number of blocks that fit into the capacity.
    pub(crate) fn blocks_max(&self) -> u64 {
        let by_bytes = self.capacity.bytes_max / BLOCK_BYTES;
        self.capacity.blocks_max.min(by_bytes)
    }
}
