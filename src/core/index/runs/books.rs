//! Books of the runs: state that only the writer whose turn it is reads and changes. A turn is the time in which a
//! thread has the lock of the books.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use smallvec::SmallVec;

use super::heads::HeadCounts;
use super::numbers::RunNumbers;
use super::run::{Column, Run, column_words};
use super::waiting::WaitingBlocks;
use super::{RUN_BLOCKS_MAX, RunId, Spot};
use crate::epoch::Guard;
use crate::index::usage::Change;
use crate::name_map::NameMap;
use crate::split_map::SplitMap;
use crate::words::{self, Words, copy};

/// Priority queue of runs that may have blocks to evict. Runs are ordered by the tick of the recency clock in which
/// they were last used before they entered the queue. Each run is in the queue at most once.
pub(super) type Queue = BinaryHeap<Reverse<(u32, RunId)>>;

/// Length of a [`Queue`] below which its memory is not given back.
const QUEUE_MIN: usize = 1024;

/// Blocks of one run that other runs branch off, in order: the block's offset, and the number of runs.
type FollowedBlocks = SmallVec<[(u16, u32); 2]>;

/// Number of bytes that a list takes beside itself.
fn spilled(attached: &FollowedBlocks) -> usize {
    if attached.spilled() {
        attached.capacity() * size_of::<(u16, u32)>()
    } else {
        0
    }
}

/// State of the runs that only a thread with the writers' lock reads and changes.
#[derive(Debug, Default)]
pub(super) struct RunBooks {
    pub(super) numbers: RunNumbers,
    pub(super) births: u32,
    /// Blocks that runs branch off, by run. Runs without such blocks have no entry.
    attached: SplitMap<RunId, FollowedBlocks>,
    /// Number of bytes that the lists in `attached` take beside the map.
    attached_bytes: usize,
    pub(super) heads: HeadCounts,
    /// Table from hashes to the places of all blocks; see `places.rs`.
    pub(super) places: NameMap,
    /// Blocks that the table does not have, because too many other blocks have the same hash.
    pub(super) waiting: WaitingBlocks,
    /// Number of bytes of `places` and `waiting`.
    pub(super) places_bytes: i64,
    /// Number of bytes of the numbers, the attached runs and the queues, as counted last.
    counted: i64,
    /// Changes of the used blocks and bytes that have not been added to the index's usage yet.
    pub(super) change: Change,
    /// Number of bytes that no reader needs and that have not been freed yet.
    pub(super) garbage: usize,
    pub(super) queue: Queue,
    /// Queue of runs that eviction has spared. While some workers have much more than their share of the capacity,
    /// eviction takes blocks of these workers first, and spares the runs of others.
    pub(super) spared: Queue,
    /// Whether eviction has found blocks of greedy workers since it last put the `spared` runs back into the main
    /// queue. A greedy worker has much more than its share of the capacity.
    pub(super) has_found_greedy: bool,
    /// Number of times that `next_victims` will still ignore the workers' shares of the capacity.
    pub(super) unfair_turns: usize,
    /// Number of blocks stored in the current tick of the recency clock.
    pub(super) stored: u64,
}

impl RunBooks {
    /// Replaces the array in `words` by a new one of `len` words. `fill` fills the new words, which are all 0.
    pub(super) fn replace(
        &mut self,
        words: &Words,
        len: usize,
        fill: impl FnOnce(&[AtomicU64]),
        guard: &Guard,
    ) {
        let len = words::rounded(len);
        let before = words.replace(len, fill, guard);
        self.garbage += before * 8;
        self.change.bytes += (len * 8).cast_signed() as i64 - (before * 8).cast_signed() as i64;
    }

    /// Gives a run a new column (array of its hashes and fingerprints) with room for `room` blocks. Copies the first
    /// `kept` blocks there.
    pub(super) fn resize(&mut self, run: &Run, kept: usize, room: usize, guard: &Guard) {
        let old = run.column(guard);
        let room = room.min(usize::from(RUN_BLOCKS_MAX));
        let fill = |words: &[AtomicU64]| old.copy_to(Column::of(run, words), kept);
        self.replace(&run.column, column_words(room), fill, guard);
    }

    /// Records that one more run branches off the block `parent`.
    pub(super) fn attach(&mut self, parent: Spot) {
        let attached = self.attached.or_default(parent.run);
        self.attached_bytes -= spilled(attached);
        match attached.binary_search_by_key(&parent.offset, |(offset, _)| *offset) {
            Ok(index) => attached[index].1 += 1,
            Err(index) => attached.insert(index, (parent.offset, 1)),
        }
        self.attached_bytes += spilled(attached);
    }

    /// Records that one run less branches off the block `parent`. Returns whether no run branches off its run any more.
    pub(super) fn detach(&mut self, parent: Spot) -> bool {
        let Some(attached) = self.attached.get_mut(&parent.run) else {
            return false;
        };
        self.attached_bytes -= spilled(attached);
        if let Ok(index) = attached.binary_search_by_key(&parent.offset, |(offset, _)| *offset) {
            attached[index].1 -= 1;
            if attached[index].1 == 0 {
                attached.remove(index);
            }
        }
        if attached.len() <= attached.inline_size() {
            attached.shrink_to_fit();
        }
        self.attached_bytes += spilled(attached);
        let is_last = attached.is_empty();
        if is_last {
            self.attached.remove(&parent.run);
        }
        is_last
    }

    /// Returns one more than the offset of the last block of `run` that another run branches off; 0 if there is none.
    pub(super) fn attached_end(&self, run: RunId) -> u16 {
        let last = self.attached.get(&run).and_then(|attached| attached.last());
        last.map_or(0, |(offset, _)| offset + 1)
    }

    /// Counts the bytes of the numbers, the attached runs and the queues, and returns them with all changes of the usage
    /// since the last call.
    pub(super) fn take_change(&mut self) -> Change {
        for queue in [&mut self.queue, &mut self.spared] {
            if queue.capacity() > QUEUE_MIN.max(queue.len() * 8) {
                queue.shrink_to(queue.len() * 2);
            }
        }
        let entries = self.queue.capacity() + self.spared.capacity();
        let attached = self.attached.bytes() + self.attached_bytes;
        let bytes = self.numbers.bytes() + attached + entries * size_of::<Reverse<(u32, RunId)>>();
        let counted = bytes.cast_signed() as i64;
        self.change.bytes += counted - std::mem::replace(&mut self.counted, counted);
        std::mem::take(&mut self.change)
    }

    /// Records whether the whole hashes of `blocks` are known, or only fragments of them.
    pub(super) fn mark_short(&mut self, run: &Run, blocks: Range<usize>, is_whole: bool, guard: &Guard) {
        let before = run.short.get(guard);
        if !is_whole && before.len() * 64 < blocks.end {
            let room = blocks.end.div_ceil(64).max(before.len() * 2);
            self.replace(&run.short, room, |next| copy(before, next), guard);
        }
        let short = run.short.get(guard);
        for offset in blocks.take_while(|offset| offset / 64 < short.len()) {
            let (word, bit) = (&short[offset / 64], 1 << (offset % 64));
            if is_whole {
                word.fetch_and(!bit, Ordering::Relaxed);
            } else {
                word.fetch_or(bit, Ordering::Relaxed);
            }
        }
    }
}
