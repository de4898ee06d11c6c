//! Changes to the runs. Only one writer at a time makes them: the writer whose turn it is.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::epoch::Guard;
use parking_lot::MutexGuard;

use crate::hash::{Position, PositionalLineageHash, SequenceHash};
use crate::index::directory::HolderSlot;
use crate::index::hook::{point, turn_ends};
use crate::index::usage::Change;
use crate::words;

use super::Wanted;
use super::books::RunBooks;
use super::entry::RosterEntry;
use super::print::CHUNK;
use super::run::Run;
use super::store::RunStore;
use super::{RUN_BLOCKS_MAX, RunId, Spot, current_mask};

/// Maximum number of bytes of replaced memory that is not freed yet. Beyond it, a writer frees the part that no reader
/// uses any more.
const GARBAGE_MAX: usize = 256 * 1024;

/// Turn of one writer at the runs: it holds the lock that is needed to change them. While this value lives, no other
/// thread changes the runs. Some methods release the lock for a while, for example [`Self::pause`]; meanwhile others
/// can change the runs.
pub(crate) struct RunWriter<'s> {
    pub(crate) store: &'s RunStore,
    pub(super) state: MutexGuard<'s, RunBooks>,
    pub(super) guard: Guard,
}

/// Read access to the runs, which does not need the writers' lock. A block does not change during the access if some
/// holder has it, or if [`RunWriter::aside`] protects its run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunView<'g> {
    pub(super) store: &'g RunStore,
    pub(super) guard: &'g Guard,
}

impl<'g> RunView<'g> {
    #[inline]
    pub(super) fn hash(self, spot: Spot) -> u64 {
        let run = self.store.run(spot.run, self.guard);
        run.map_or(0, |run| run.column(self.guard).hash(usize::from(spot.offset)))
    }

    /// Returns the hashes of a run from the offset `from` up to `to`.
    pub(crate) fn hashes(self, run: RunId, from: u16, to: u16) -> impl DoubleEndedIterator<Item = u64> + 'g {
        let column = self.store.run(run, self.guard).map(|run| run.column(self.guard));
        (from..to).map(move |offset| column.map_or(0, |column| column.hash(usize::from(offset))))
    }
}

impl RunStore {
    /// Counts the beginning or the end of a step of a run.
    fn count_step(&self, run: &Run) {
        if run.header.is_last_step() {
            // The wrap-around is counted before it happens.
            self.doubts.wraps.fetch_add(1, Ordering::Release);
        }
        run.header.count_step();
    }

    /// Waits for the lock that is needed to change the runs. While the returned value lives, no other thread changes
    /// the runs.
    pub(crate) fn write(&self) -> RunWriter<'_> {
        RunWriter {
            store: self,
            state: self.books(),
            guard: crate::epoch::pin(),
        }
    }
}

impl<'s> RunWriter<'s> {
    /// Counts a change of the memory that a holder uses outside the runs.
    pub(crate) fn count_usage(&mut self, change: Change) {
        self.state.change.add(change);
    }

    /// Releases the writers' lock for a moment, so that other writers can change the runs. May be called between any
    /// two calls of other methods of this type.
    pub(crate) fn pause(&mut self) {
        self.settle();
        turn_ends();
        MutexGuard::bump(&mut self.state);
        self.guard.repin();
    }

    /// Releases the writers' lock for a moment, and calls `others` meanwhile. `others` may wait for a thread that needs
    /// this lock.
    pub(crate) fn pause_for(&mut self, others: impl FnOnce()) {
        self.settle();
        turn_ends();
        MutexGuard::unlocked_fair(&mut self.state, others);
        self.guard.repin();
    }

    /// Frees the replaced memory that no reader uses any more, if there is much of it. Releases the lock on the runs
    /// for that time. Then adds the changes collected in this turn to the usage.
    fn settle(&mut self) {
        if self.state.garbage > GARBAGE_MAX {
            self.state.garbage = 0;
            let guard = &mut self.guard;
            MutexGuard::unlocked(&mut self.state, || {
                for _ in 0..3 {
                    guard.repin();
                    guard.flush();
                }
                words::give_back(1);
            });
        }
        self.store.change_usage(std::mem::take(&mut self.state.change));
    }

    /// Releases the writers' lock for as long as `work` takes, and then takes the lock again. `work` only reads.
    /// Meanwhile other writers can change the index, but they cut no blocks off the runs in `kept`.
    pub(crate) fn aside<T>(&mut self, kept: &[RunId], work: impl FnOnce(RunView<'_>) -> T) -> T {
        self.pin(kept, 1);
        let (store, guard) = (self.store, &self.guard);
        let done = MutexGuard::unlocked(&mut self.state, || {
            point();
            work(RunView { store, guard })
        });
        self.pin(kept, -1);
        done
    }

    fn pin(&self, runs: &[RunId], by: i32) {
        for run in runs.iter().filter_map(|run| self.run(*run)) {
            let pins = run.pins.load(Ordering::Relaxed);
            run.pins.store(pins.saturating_add_signed(by), Ordering::Relaxed);
        }
    }

    /// Returns the guard of this writer. While the guard lives, memory that can be reached now is not freed.
    pub(crate) fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Returns read access to the runs.
    pub(crate) fn view(&self) -> RunView<'_> {
        RunView {
            store: self.store,
            guard: &self.guard,
        }
    }

    #[inline]
    pub(crate) fn run(&self, id: RunId) -> Option<&Run> {
        self.store.run(id, &self.guard)
    }

    /// One more than the largest run number in use.
    pub(crate) fn runs_end(&self) -> u32 {
        self.state.next
    }

    /// The entries of a run's holders.
    pub(crate) fn entries(&self, id: RunId) -> impl Iterator<Item = RosterEntry> + '_ {
        self.run(id).into_iter().flat_map(|run| run.entries(&self.guard))
    }

    /// Puts a run back into eviction's queue, if it still has blocks at its end that no child branches off.
    pub(crate) fn requeue(&mut self, id: RunId) {
        if let Some(run) = self.run(id)
            && run.len() > self.attached_end(id)
        {
            self.use_run(id, 0);
        }
    }

    /// Whether the block at `spot` exists, whichever holder has it.
    pub(crate) fn has(&self, spot: Spot) -> bool {
        self.run(spot.run).is_some_and(|run| spot.offset < run.len())
    }

    /// The sequence hash at a place, or the fragment of it that is known.
    #[inline]
    pub(crate) fn hash(&self, spot: Spot) -> u64 {
        self.view().hash(spot)
    }

    pub(crate) fn position(&self, spot: Spot) -> u32 {
        self.run(spot.run).map_or(0, Run::start) + u32::from(spot.offset)
    }

    /// Returns the block before a block; `None` at position 0.
    pub(crate) fn before(&self, spot: Spot) -> Option<Spot> {
        match spot.offset.checked_sub(1) {
            Some(offset) => Some(Spot { offset, ..spot }),
            None => self.run(spot.run)?.parent(),
        }
    }

    /// The lineage hash of a block.
    pub(crate) fn key(&self, spot: Spot) -> PositionalLineageHash {
        let parent = self.before(spot).map_or(0, |before| self.hash(before));
        let position = Position::new(u64::from(self.position(spot))).unwrap_or(Position::MAX);
        PositionalLineageHash::at(position, SequenceHash(parent), SequenceHash(self.hash(spot)))
    }

    /// Whether the block at `spot` has the `wanted` hash. Only the bits that are known of both hashes are compared.
    pub(crate) fn is(&self, spot: Spot, wanted: Wanted) -> bool {
        self.run(spot.run).is_some_and(|run| {
            let position = run.start() + u32::from(spot.offset);
            run.column(&self.guard)
                .is(usize::from(spot.offset), position, wanted, &self.guard)
        })
    }

    /// Returns the place of the `wanted` block after `parent`, or at position 0 if there is no parent.
    pub(crate) fn child(&self, parent: Option<Spot>, position: u32, wanted: Wanted) -> Option<Spot> {
        if let Some(parent) = parent {
            let offset = parent.offset + 1;
            let next = Spot { offset, ..parent };
            if self.has(next) && self.is(next, wanted) {
                return Some(next);
            }
            if !self.run(parent.run)?.is_followed() {
                return None;
            }
        }
        let run = self.store.head(parent, position, wanted, &self.guard)?.id;
        Some(Spot { run, offset: 0 })
    }

    /// Returns one more than the offset of the last block of `run` that a child branches off; 0 if the run has no
    /// child.
    pub(crate) fn attached_end(&self, run: RunId) -> u16 {
        if !self.run(run).is_some_and(Run::is_followed) {
            return 0;
        }
        let attached = self.state.attached.get(&run);
        attached
            .and_then(|attached| attached.last_key_value())
            .map_or(0, |(offset, _)| offset + 1)
    }

    /// Number of leading hashes in `hashes` that agree with the run's blocks from `spot` on.
    fn agreement(&self, spot: Spot, hashes: &[SequenceHash], is_whole: bool) -> usize {
        let Some(run) = self.run(spot.run) else { return 0 };
        let (column, start) = (run.column(&self.guard), run.start());
        let agrees = |(offset, hash): &(u16, &SequenceHash)| {
            let (hash, position) = (hash.0, start + u32::from(*offset));
            let wanted = Wanted { hash, is_whole };
            column.is(usize::from(*offset), position, wanted, &self.guard)
        };
        (spot.offset..run.len()).zip(hashes).take_while(agrees).count()
    }

    /// Finds or makes the blocks of `hashes` after `parent`, as many as lie in one run. Returns the place of the first
    /// block, and the number of blocks handled. `None` if another run is needed and no run number is left.
    ///
    /// [`Self::trim`] later removes those of the blocks that no holder has.
    pub(crate) fn put(
        &mut self,
        parent: Option<Spot>,
        position: u32,
        hashes: &[SequenceHash],
        is_whole: bool,
    ) -> Option<(Spot, usize)> {
        let hash = hashes.first()?.0;
        if let Some(spot) = self.child(parent, position, Wanted { hash, is_whole }) {
            let count = self.agreement(spot, hashes, is_whole);
            if is_whole {
                self.refine(spot, &hashes[..count]);
            }
            // If more of `hashes` can be appended to this run, the next call does that.
            self.use_run(spot.run, self.store.tick().unwrap_or_default());
            return Some((spot, count));
        }
        let is_twin = is_whole && self.child(parent, position, Wanted::fragment(hash)).is_some();
        if let Some(parent) = parent
            && let Some(run) = self.run(parent.run)
            && run.len() == parent.offset + 1
            && run.len() < RUN_BLOCKS_MAX
            && !is_twin
        {
            let offset = run.len();
            let count = self.append(parent.run, hashes, is_whole);
            return Some((Spot { offset, ..parent }, count));
        }
        let run = self.create(parent, position, hash, is_twin)?;
        let count = self.append(run, hashes, is_whole);
        Some((Spot { run, offset: 0 }, count))
    }

    /// Replaces hash fragments of the blocks from `spot` on by the whole hashes in `hashes`.
    pub(crate) fn refine(&self, spot: Spot, hashes: &[SequenceHash]) {
        let Some(run) = self.run(spot.run) else { return };
        let (column, short) = (run.column(&self.guard), run.short.get(&self.guard));
        if short.is_empty() {
            return;
        }
        let from = usize::from(spot.offset);
        let blocks = (from..).zip(hashes);
        for (offset, hash) in blocks.filter(|(offset, _)| run.is_short(*offset, &self.guard)) {
            // The hash comes first: a reader that finds the bit cleared must find the whole hash.
            column.set_hash(offset, hash.0);
            if offset == 0 {
                run.first.store(hash.0, Ordering::Release);
            }
            if offset + 1 == usize::from(run.len()) {
                run.last.store(hash.0, Ordering::Release);
            }
            short[offset / 64].fetch_and(!(1 << (offset % 64)), Ordering::AcqRel);
        }
        self.set_prints(run, from..from + hashes.len(), usize::from(run.len()));
    }

    /// Computes the fingerprints of all chunks of 32 blocks that contain `changed` blocks and lie wholly within the
    /// run's first `len` blocks.
    fn set_prints(&self, run: &Run, changed: Range<usize>, len: usize) {
        let (column, base) = (run.column(&self.guard), run.chunks_from());
        let end = changed.end.saturating_sub(base).div_ceil(CHUNK);
        let whole = len.saturating_sub(base) / CHUNK;
        for chunk in changed.start.saturating_sub(base) / CHUNK..end.min(whole) {
            let first = base + chunk * CHUNK;
            let hashes = std::array::from_fn(|index| SequenceHash(column.hash(first + index)));
            column.set_print(chunk, self.store.prints.of(&hashes));
        }
    }

    fn create(&mut self, parent: Option<Spot>, position: u32, first: u64, is_twin: bool) -> Option<RunId> {
        let state = &mut *self.state;
        let id = state.free.pop().unwrap_or(RunId(state.next));
        if id.0 == RunId::END {
            return None;
        }
        state.next = state.next.max(id.0 + 1);
        state.births = state.births.wrapping_add(1);
        state.change.bytes += self.store.slab.make(id, &self.guard);
        let run = self.store.run(id, &self.guard)?;
        // A search may have found the run that had this number before, and still read its start.
        self.store.count_step(run);
        fence(Ordering::Release);
        run.parent.store(parent.map_or(0, Spot::bits), Ordering::Relaxed);
        run.first.store(first, Ordering::Relaxed);
        run.header.begin_at(position);
        self.store.count_step(run);
        run.is_twin.store(is_twin, Ordering::Relaxed);
        if is_twin {
            // All counts of twins are raised before any holder has a block of the run.
            self.store.doubts.twins.fetch_add(1, Ordering::AcqRel);
        }
        run.birth.store(state.births, Ordering::Release);
        if let Some(parent) = parent {
            let attached = state.attached.or_default(parent.run);
            *attached.entry(parent.offset).or_default() += 1;
            if let Some(run) = self.store.run(parent.run, &self.guard) {
                run.twins.fetch_add(u32::from(is_twin), Ordering::AcqRel);
                run.header.set_followed(true);
            }
        }
        let key = self.store.heads.hash(parent, first & current_mask(position));
        state.change.bytes += self.store.heads.insert(&mut state.heads, key, id, &self.guard);
        if is_twin {
            // A search that has missed the run sees another count at its end than at its beginning.
            self.store.doubts.twin_births.fetch_add(1, Ordering::AcqRel);
        }
        Some(id)
    }

    /// Appends the first of these blocks to a run, as many as fit, and returns their number. `is_whole` tells whether
    /// `hashes` are whole sequence hashes, and not fragments.
    fn append(&mut self, id: RunId, hashes: &[SequenceHash], is_whole: bool) -> usize {
        let Some(run) = self.store.run(id, &self.guard) else {
            return 0;
        };
        let len = usize::from(run.len());
        let count = hashes.len().min(usize::from(RUN_BLOCKS_MAX) - len);
        let end = len + count;
        let capacity = run.column(&self.guard).capacity();
        if capacity < end {
            // A run that grows a second time will mostly grow again, so it gets more room than needed.
            let room = match end {
                end if capacity == 0 => end,
                // A chat adds only a few blocks each time.
                ..512 => end + end / 2,
                end => end + end / 4,
            };
            self.state.resize(run, len, room, &self.guard);
        }
        let column = run.column(&self.guard);
        for (offset, hash) in (len..end).zip(hashes) {
            column.set_hash(offset, hash.0);
        }
        self.state.mark_short(run, len..end, is_whole, &self.guard);
        self.set_prints(run, len..end, end);
        run.mark(len..end, |offset| column.hash(offset));
        run.tops.store(0, Ordering::Relaxed);
        run.last
            .store(column.hash(end.saturating_sub(1)), Ordering::Release);
        run.header.set_len(u16::try_from(end).unwrap_or(0));
        self.state.change.blocks += i64::try_from(count).unwrap_or(0);
        self.place(id, len..end);
        self.note_stored(id, count as u64);
        count
    }

    /// Makes a change that searches see wholly or not at all: `change` sets which blocks of these runs a holder has.
    /// The runs' change counters are raised before and after `change`.
    pub(crate) fn step(&mut self, runs: &[RunId], change: impl FnOnce(&mut Self)) {
        let count = |runs: &Self, id: &RunId| {
            runs.run(*id)
                .into_iter()
                .for_each(|run| runs.store.count_step(run))
        };
        runs.iter().for_each(|id| count(self, id));
        // A reader that sees a change of the step also sees that the step has begun.
        fence(Ordering::Release);
        change(self);
        runs.iter().for_each(|id| count(self, id));
    }

    /// Sets the roster entry of a holder in a run; an empty entry removes the holder's entry. Returns the entry's
    /// place, which the next call for this holder and run takes as `hint`.
    pub(crate) fn set_entry(&mut self, id: RunId, slot: HolderSlot, entry: RosterEntry, hint: u32) -> u32 {
        let Some(run) = self.store.run(id, &self.guard) else {
            return hint;
        };
        let roster = run.roster(&self.guard);
        let is_own = |entry: RosterEntry| !entry.is_none() && entry.slot() == slot;
        let hinted = Some(hint as usize).filter(|hint| is_own(roster.get(*hint)));
        let own = hinted.or_else(|| roster.find(is_own));
        if own.is_none() && entry.is_none() {
            return hint;
        }
        let len = run.len();
        let is_top = |entry: RosterEntry| !entry.is_none() && entry.end() == len;
        let was_top = own.is_some_and(|own| is_top(roster.get(own)));
        let tops = run.tops.load(Ordering::Relaxed);
        let others = tops.saturating_sub(u32::from(was_top));
        run.tops
            .store(others + u32::from(is_top(entry)), Ordering::Relaxed);
        let free = || roster.find(RosterEntry::is_none).unwrap_or(roster.places());
        let index = own.unwrap_or_else(free);
        if let Some([words, room]) = roster.wanting(slot, index) {
            let fill = |list: &[AtomicU64]| roster.copy_to(list, words);
            self.state.replace(&run.more, 1 + words + room, fill, &self.guard);
        }
        run.roster(&self.guard).set(index, slot, entry);
        if entry.is_none() && run.roster(&self.guard).has_empty_list() {
            self.state.replace(&run.more, 0, |_| (), &self.guard);
        }
        u32::try_from(index).unwrap_or(u32::MAX)
    }
}

impl Drop for RunWriter<'_> {
    fn drop(&mut self) {
        self.settle();
    }
}
