//! The runs of one index.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::epoch::Guard;
use crossbeam_utils::CachePadded;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;

use super::books::RunBooks;
use super::header::Version;
use super::heads::Heads;
use super::print::Prints;
use super::run::Run;
use super::slab::Slab;
use super::{RunId, Spot, Wanted, current_mask};
use crate::index::settings::Capacity;
use crate::index::usage::{Change, Usage};

/// All runs of one index.
#[derive(Debug)]
pub(crate) struct RunStore {
    pub(super) slab: Slab,
    pub(super) heads: Heads,
    pub(crate) prints: Prints,
    /// The usage of all indexes together.
    total: Arc<Usage>,
    /// Whether the size of the index is bounded.
    pub(crate) is_bounded: bool,
    /// Current tick of the recency clock, which advances with the number of stored blocks.
    pub(super) tick: AtomicU32,
    turns: CachePadded<TurnState>,
    /// Counts that every search reads. They are on other cache lines than the words that every event changes.
    pub(super) doubts: CachePadded<Doubts>,
}

#[derive(Debug)]
struct TurnState {
    state: Mutex<RunBooks>,
    usage: Usage,
    evicted: AtomicU64,
}

/// Counts that make searches more careful if they are above 0. For example, a search compares every hash if some hash
/// has several places. Every search reads these counts.
#[derive(Debug, Default)]
pub(super) struct Doubts {
    /// Number of duplicate hashes among the blocks: a hash at n places counts n - 1 times.
    pub(super) doubles: AtomicU64,
    /// Number of runs in which some holder has blocks that are not resumable.
    pub(super) barred: AtomicU64,
    /// Number of twins: runs made when the block before them already had another child with the same hash fragment.
    pub(super) twins: AtomicU64,
    /// Number of twins that were ever made.
    pub(super) twin_births: AtomicU64,
    /// Number of times that the change counter of any run has wrapped around.
    pub(super) wraps: AtomicU64,
}

/// Run found by the block before it and by the hash of its first block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head<'g> {
    pub(crate) id: RunId,
    pub(crate) run: &'g Run,
    pub(crate) version: Version,
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
            turns: CachePadded::new(TurnState {
                state: Mutex::default(),
                usage,
                evicted: AtomicU64::new(0),
            }),
            doubts: CachePadded::default(),
        }
    }

    /// Waits for the lock of the books, the state that only a writer uses. While the returned guard lives, no other
    /// thread reads or changes the books.
    pub(super) fn books(&self) -> MutexGuard<'_, RunBooks> {
        self.turns.state.lock()
    }

    /// The used part of the capacity: the blocks of runs, and the bytes of all state that grows with events.
    pub(crate) fn usage(&self) -> &Usage {
        &self.turns.usage
    }

    /// Number of blocks evicted so far because the index was too large.
    pub(crate) fn evicted(&self) -> u64 {
        self.turns.evicted.load(Ordering::Relaxed)
    }

    /// Number of duplicate hashes: a hash at n places counts n - 1 times. Above 0, the hashes do not form a chain.
    pub(crate) fn doubles(&self) -> u64 {
        self.doubts.doubles.load(Ordering::Relaxed)
    }

    /// Whether the runs agree with the assumption that hashes are a chain: no two blocks have the same hash.
    #[inline]
    pub(crate) fn is_chain(&self) -> bool {
        self.doubles() == 0
    }

    /// Whether any holder has a block that is not resumable. Suppose that a search reads a run and then calls this. The
    /// result then includes every step that had ended before the search read the run.
    #[inline]
    pub(crate) fn has_bars(&self) -> bool {
        self.doubts.barred.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn count_evicted(&self, blocks: u64) {
        self.turns.evicted.fetch_add(blocks, Ordering::Relaxed);
    }

    /// Adds `change` to the usage of this index and to the total usage. Only a thread with the writers' lock may call
    /// this.
    pub(super) fn change_usage(&self, change: Change) {
        self.turns.usage.change(change, true);
        self.total.change(self.of_total(change), false);
    }

    /// Returns the part of `change` that is added to the total usage. If the total has no bound, only the bytes of
    /// events that wait for a parent are added.
    fn of_total(&self, change: Change) -> Change {
        match self.total.is_bounded() {
            true => change,
            false => Change {
                waiting: change.waiting,
                ..Change::default()
            },
        }
    }

    /// Returns the maximum number of bytes that one holder's waiting events (events that wait for a parent) may take
    /// together. `own` is the number of bytes that they take now. `bytes_max` is the maximum for all holders of all
    /// indexes.
    pub(crate) fn room_to_wait(&self, own: u64, bytes_max: u64) -> u64 {
        self.total.room_to_wait(own, bytes_max)
    }

    /// Whether there is room for more state that eviction cannot free: blocks without a parent, and events that wait
    /// for one.
    pub(crate) fn has_room_aside(&self) -> bool {
        !self.is_bounded || self.turns.usage.has_room_aside() && self.total.has_room_aside()
    }

    /// Whether there is so much room that evicted blocks may be stored again.
    pub(crate) fn has_room(&self) -> bool {
        self.turns.usage.has_room() && self.total.has_room()
    }

    /// Approximate number of blocks that fit into the capacity.
    pub(crate) fn blocks_max(&self) -> u64 {
        self.turns.usage.blocks_max().min(self.total.blocks_max())
    }

    /// Returns the current tick of the recency clock. A search records it as the last use of the runs that it reads.
    /// `None` if the index has no bound.
    #[inline]
    pub(crate) fn tick(&self) -> Option<u32> {
        self.is_bounded.then(|| self.tick.load(Ordering::Relaxed))
    }

    /// Returns all runs that branch off the block `parent` and begin with a block whose hash has this fragment.
    /// Without `parent`, returns such runs at position 0.
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

    /// Number of twins: runs made when the block before them already had another child with the same hash fragment.
    #[inline]
    pub(crate) fn twins(&self) -> u64 {
        self.doubts.twins.load(Ordering::Acquire)
    }

    /// Number of twins that were ever made. If it has grown during a search by fragments, the search may have missed
    /// one.
    #[inline]
    pub(crate) fn twin_births(&self) -> u64 {
        self.doubts.twin_births.load(Ordering::Acquire)
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

    /// Returns the run that begins with the `wanted` block and branches off the block `parent`. If `parent` is `None`,
    /// returns the run that begins with the `wanted` block at position 0. The version in the result is the run's change
    /// counter before the run was compared.
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

    /// Whether a run at position 0 may begin with a block of this hash or hash fragment.
    #[inline]
    pub(crate) fn may_begin(&self, hash: u64) -> bool {
        self.heads
            .may_have_first(self.heads.hash(None, hash & current_mask(0)))
    }

    /// Prefetches the memory that [`Self::head`] reads first.
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
    use super::super::RunWriter;
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
        // No holder has the run's blocks, so the run would be removed with its last branch. The pin keeps it.
        runs.run(first.run).unwrap().pins.store(1, Ordering::Relaxed);
        runs.trim(branches[1]);
        assert_eq!(state(&runs), (0, true, 1));
        runs.trim(branches[0]);
        assert_eq!(state(&runs), (0, false, 0));
    }
}
