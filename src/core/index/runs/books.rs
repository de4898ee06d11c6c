//! Books of the runs: state that only the writer whose turn it is reads and changes. A turn is the time in which a
//! thread has the lock of the books.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use super::heads::HeadCounts;
use super::run::{Column, Run, column_words};
use super::waiting::WaitingBlocks;
use super::{RUN_BLOCKS_MAX, RunId};
use crate::epoch::Guard;
use crate::index::usage::Change;
use crate::name_map::NameMap;
use crate::split_map::SplitMap;
use crate::words::{self, Words, copy};

/// Priority queue of runs that may have blocks to evict. Runs are ordered by the tick of the recency clock in which
/// they were last used before they entered the queue. Each run is in the queue at most once.
pub(super) type Queue = BinaryHeap<Reverse<(u32, RunId)>>;

/// State of the runs that only a thread with the writers' lock reads and changes.
#[derive(Debug, Default)]
pub(super) struct RunBooks {
    pub(super) free: Vec<RunId>,
    /// Smallest run number that has not been used. Numbering restarts when the index has no runs any more.
    pub(super) next: u32,
    pub(super) births: u32,
    /// Number of runs that branch off each block. The keys are the block's run and its offset in that run. Blocks
    /// without such runs have no entry.
    pub(super) attached: SplitMap<RunId, BTreeMap<u16, u32>>,
    pub(super) heads: HeadCounts,
    /// Table from hashes to the places of all blocks; see `places.rs`.
    pub(super) places: NameMap,
    /// Blocks that the table does not have, because too many other blocks have the same hash.
    pub(super) waiting: WaitingBlocks,
    /// Number of bytes of `places` and `waiting`.
    pub(super) places_bytes: i64,
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
