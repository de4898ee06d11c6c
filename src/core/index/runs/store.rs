//! The runs of one index.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::epoch::Guard;
use crossbeam_utils::CachePadded;
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::header::Version;
use super::heads::{HeadCounts, Heads};
use super::lookups::Lookups;
use super::name_map::NameMap;
use super::print::Prints;
use super::recency::Queue;
use super::run::Run;
use super::slab::Slab;
use super::writer::RunWriter;
use super::{RunId, Spot, Wanted, current_mask};
use crate::index::settings::Capacity;
use crate::index::usage::{Change, Usage};
use crate::split_map::SplitMap;

/// All runs of one index.
#[derive(Debug)]
pub(crate) struct RunStore {
    pub(super) slab: Slab,
    pub(super) heads: Heads,
    pub(crate) prints: Prints,
    /// The usage of all indexes together.
    total: Arc<Usage>,
    /// Whether there is a bound on how large the index may be.
    pub(crate) is_bounded: bool,
    /// The clock of recency.
    pub(super) tick: AtomicU32,
    turns: CachePadded<Turns>,
    /// Not beside what every event changes.
    pub(super) doubts: CachePadded<Doubts>,
}

#[derive(Debug)]
struct Turns {
    state: Mutex<RunBooks>,
    usage: Usage,
    evicted: AtomicU64,
}

/// Counts of what contradicts that hashes are a chain, or could without being noticed. Every search asks.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    /// How many places have a hash that another one has, too.
    pub(super) doubles: AtomicU64,
    /// Blocks that are not found by their hashes: nobody knows whether others have these, too.
    pub(super) unplaced: AtomicU64,
    /// How many runs have blocks that are not resumable for some holder.
    pub(super) barred: AtomicU64,
    /// How many runs begin with the fragment of another one after the same block.
    pub(super) twins: AtomicU64,
    /// How often the count of a run's steps has come to what it was before.
    pub(super) wraps: AtomicU64,
}

/// A run that has been found by the block before it and its first one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head<'g> {
    pub(crate) id: RunId,
    pub(crate) run: &'g Run,
    pub(crate) version: Version,
}

/// The writers' own knowledge.
#[derive(Debug, Default)]
pub(crate) struct RunBooks {
    pub(super) free: Vec<RunId>,
    /// The number that no run ever had.
    pub(super) next: u32,
    pub(super) births: u32,
    /// How many runs begin after each block, for runs that any begin after.
    pub(super) attached: SplitMap<RunId, BTreeMap<u16, u32>>,
    pub(super) heads: HeadCounts,
    /// Blocks by their hashes, as far as runs are placed.
    pub(super) places: NameMap,
    /// How many blocks are not found by their hashes.
    pub(super) unplaced: u64,
    /// All blocks by their hashes, where a query has needed that lately.
    pub(super) lookups: Option<Box<Lookups>>,
    pub(super) places_bytes: i64,
    /// The changes that are not accounted for.
    pub(crate) change: Change,
    /// Bytes that no reader needs and that have not been given back yet.
    pub(super) garbage: usize,
    pub(super) queue: Queue,
    /// Runs of the queue that are left alone while others have more than their share.
    pub(super) spared: Queue,
    /// Whether some have been found to forget since those were recalled.
    pub(super) has_found_greedy: bool,
    /// For how many turns nobody's share is looked at.
    pub(super) unfair_turns: usize,
    /// Blocks stored in this tick.
    pub(super) stored: u64,
}

impl RunStore {
    pub(crate) fn new(capacity: Capacity, total: Arc<Usage>) -> Self {
        let usage = Usage::of(capacity);
        Self {
            is_bounded: usage.is_bounded() || total.is_bounded(),
            slab: Slab::new(),
            heads: Heads::new(),
            prints: Prints::new(),
            total,
            tick: AtomicU32::new(1),
            turns: CachePadded::new(Turns {
                state: Mutex::new(RunBooks {
                    next: 1,
                    ..RunBooks::default()
                }),
                usage,
                evicted: AtomicU64::new(0),
            }),
            doubts: CachePadded::default(),
        }
    }

    /// Takes a turn at changing the store.
    pub(crate) fn write(&self) -> RunWriter<'_> {
        RunWriter {
            store: self,
            state: self.turns.state.lock(),
            guard: crate::epoch::pin(),
        }
    }

    /// The used part of the capacity: blocks of runs, and bytes of everything that events make grow.
    pub(crate) fn usage(&self) -> &Usage {
        &self.turns.usage
    }

    /// How many blocks were forgotten because there were too many.
    pub(crate) fn evicted(&self) -> u64 {
        self.turns.evicted.load(Ordering::Relaxed)
    }

    /// How many places have a hash that another one has, too: hashes that are no chain.
    pub(crate) fn doubles(&self) -> u64 {
        self.doubts.doubles.load(Ordering::Relaxed)
    }

    /// Whether every block is found by its hash, and none has that of another one: as far as is known, hashes are a chain.
    #[inline]
    pub(crate) fn is_chain(&self) -> bool {
        self.doubles() == 0 && self.doubts.unplaced.load(Ordering::Relaxed) == 0
    }

    /// Whether a block of some holder is not resumable. To be asked after a look at a run: then what a step before has barred is known.
    #[inline]
    pub(crate) fn has_bars(&self) -> bool {
        self.doubts.barred.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn count_evicted(&self, blocks: u64) {
        self.turns.evicted.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Accounts for what has changed. Only for the one writer.
    pub(super) fn change_usage(&self, change: Change) {
        self.turns.usage.change(change, true);
        self.total.change(self.of_total(change), false);
    }

    /// The part of a change that counts in the total: all where that is bounded, else what waits alone.
    fn of_total(&self, change: Change) -> Change {
        match self.total.is_bounded() {
            true => change,
            false => Change {
                waiting: change.waiting,
                ..Change::default()
            },
        }
    }

    /// How many bytes of events a holder may have wait, which has `own` already, where all of all indexes together may have `bytes_max`.
    pub(crate) fn room_to_wait(&self, own: u64, bytes_max: u64) -> u64 {
        self.total.room_to_wait(own, bytes_max)
    }

    /// Whether there is room for more of what no eviction gives back.
    pub(crate) fn has_room_aside(&self) -> bool {
        !self.is_bounded || self.turns.usage.has_room_aside() && self.total.has_room_aside()
    }

    /// Whether there is room for blocks that were forgotten.
    pub(crate) fn has_room(&self) -> bool {
        self.turns.usage.has_room() && self.total.has_room()
    }

    /// How many blocks fit, roughly.
    pub(crate) fn blocks_max(&self) -> u64 {
        self.turns.usage.blocks_max().min(self.total.blocks_max())
    }

    /// The tick in which what a search looks at is used; none where nobody asks.
    #[inline]
    pub(crate) fn tick(&self) -> Option<u32> {
        self.is_bounded.then(|| self.tick.load(Ordering::Relaxed))
    }

    /// All runs that go on after `parent` with a block of this fragment.
    pub(crate) fn heads_of<'g>(
        &self,
        parent: Option<Spot>,
        position: u32,
        fragment: u64,
        guard: &'g Guard,
    ) -> SmallVec<[Head<'g>; 2]> {
        let key = self.heads.hash(parent, fragment & current_mask(position));
        let mut found = SmallVec::new();
        let wanted = Wanted::fragment(fragment);
        self.heads.find(key, guard, |id| {
            found.extend(self.head_at(id, parent, position, wanted, guard));
            None::<()>
        });
        found
    }

    /// How many runs begin with the fragment of another one after the same block.
    #[inline]
    pub(crate) fn twins(&self) -> u64 {
        self.doubts.twins.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn wraps(&self) -> u64 {
        self.doubts.wraps.load(Ordering::Acquire)
    }

    /// The run `id`, if there is one.
    #[inline]
    pub(crate) fn run<'g>(&self, id: RunId, guard: &'g Guard) -> Option<&'g Run> {
        self.slab.get(id, guard)
    }

    /// The run that goes on after `parent`, or begins at position 0, with the block that is wanted; and its version, from before that was
    /// found out.
    #[inline]
    pub(crate) fn head<'g>(
        &self,
        parent: Option<Spot>,
        position: u32,
        wanted: Wanted,
        guard: &'g Guard,
    ) -> Option<Head<'g>> {
        let key = self.heads.hash(parent, wanted.hash & current_mask(position));
        self.heads
            .find(key, guard, |id| self.head_at(id, parent, position, wanted, guard))
    }

    #[inline]
    fn head_at<'g>(
        &self,
        id: RunId,
        parent: Option<Spot>,
        position: u32,
        wanted: Wanted,
        guard: &'g Guard,
    ) -> Option<Head<'g>> {
        let run = self.slab.get(id, guard)?;
        let version = run.version();
        let is_it = run.is_head(parent, position, wanted, guard);
        is_it.then_some(Head { id, run, version })
    }

    /// Whether a run can begin at position 0 with a block of this hash, or fragment.
    #[inline]
    pub(crate) fn may_begin(&self, hash: u64) -> bool {
        self.heads
            .may_have_first(self.heads.hash(None, hash & current_mask(0)))
    }

    /// Asks for the memory that [`Self::head`] looks at first.
    #[inline]
    pub(crate) fn prefetch_head(&self, parent: Option<Spot>, position: u32, hash: u64, guard: &Guard) {
        let key = self.heads.hash(parent, hash & current_mask(position));
        self.heads.prefetch(key, guard);
    }
}

impl Drop for RunStore {
    fn drop(&mut self) {
        self.total
            .change(self.of_total(self.turns.usage.all_gone()), false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::SequenceHash;

    #[test]
    fn a_run_whose_count_of_steps_begins_anew_is_noticed() {
        let capacity = Capacity::UNBOUNDED;
        let store = RunStore::new(capacity, Arc::new(Usage::of(capacity)));
        let mut runs = store.write();
        let (first, _) = runs.put(None, 0, &[SequenceHash(1)], true).unwrap();
        let version = runs.run(first.run).unwrap().version();
        runs.step(&[first.run], |_| {});
        assert_eq!(store.wraps(), 0);
        assert!(!runs.run(first.run).unwrap().is_still(version));
        runs.run(first.run).unwrap().header.set_last_step();
        runs.step(&[first.run], |_| {});
        assert_eq!(store.wraps(), 1);
    }

    #[test]
    fn a_run_is_followed_as_long_as_another_begins_after_one_of_its_blocks() {
        let capacity = Capacity::UNBOUNDED;
        let store = RunStore::new(capacity, Arc::new(Usage::of(capacity)));
        let mut runs = store.write();
        let (first, _) = runs.put(None, 0, &[1, 2, 3].map(SequenceHash), true).unwrap();
        let state = |runs: &RunWriter<'_>| {
            let run = runs.run(first.run).unwrap();
            (run.start(), run.is_followed(), runs.attached_end(first.run))
        };
        assert_eq!(state(&runs), (0, false, 0));
        let branches = [0, 1].map(|offset| {
            let after = Spot { offset, ..first };
            let hashes = [SequenceHash(9)];
            let (branch, _) = runs
                .put(Some(after), u32::from(offset) + 1, &hashes, true)
                .unwrap();
            branch.run
        });
        assert_eq!(state(&runs), (0, true, 2));
        // Nobody holds its blocks: it would go with the last branch.
        runs.run(first.run).unwrap().pins.store(1, Ordering::Relaxed);
        runs.trim(branches[1]);
        assert_eq!(state(&runs), (0, true, 1));
        runs.trim(branches[0]);
        assert_eq!(state(&runs), (0, false, 0));
    }
}
