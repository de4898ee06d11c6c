//! Changing the runs. Writers take turns.

use std::ops::Range;
use std::sync::atomic::{Ordering, fence};

use crossbeam_epoch::Guard;
use parking_lot::MutexGuard;

use crate::hash::{Position, PositionalLineageHash, SequenceHash};
use crate::index::directory::HolderSlot;
use crate::index::hook::{point, turn_ends};

use super::Wanted;
use super::entry::Entry;
use super::print::CHUNK;
use super::run::{Column, Run, column_words};
use super::store::{RunStore, State};
use super::{RUN_BLOCKS_MAX, RunId, Spot, current_mask, words};

/// How far ahead memory is asked for.
pub(crate) const AHEAD: usize = 16;
/// Replaced memory that is worth a collection.
const GARBAGE_MAX: usize = 256 * 1024;

/// One turn at changing the runs.
pub(crate) struct RunWriter<'s> {
    pub(crate) store: &'s RunStore,
    pub(super) state: MutexGuard<'s, State>,
    pub(super) guard: Guard,
}

/// The runs as whoever has no turn sees them. What a holder has, or keeps with [`RunWriter::aside`], stays as it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunView<'g> {
    store: &'g RunStore,
    guard: &'g Guard,
}

impl<'g> RunView<'g> {
    fn column(self, id: RunId) -> Option<Column<'g>> {
        Some(self.store.slab.get(id, self.guard)?.column(self.guard))
    }

    /// The hashes of a run from `from` on, up to `to`.
    pub(crate) fn hashes(self, run: RunId, from: u16, to: u16) -> impl DoubleEndedIterator<Item = u64> + 'g {
        let column = self.column(run);
        (from..to).map(move |offset| column.map_or(0, |column| column.hash(usize::from(offset))))
    }
}

impl<'s> RunWriter<'s> {
    pub(super) fn new(store: &'s RunStore) -> Self {
        Self {
            store,
            state: store.state().lock(),
            guard: crossbeam_epoch::pin(),
        }
    }

    /// Tells readers whether all blocks are found by their hashes: before they can see any that is not.
    pub(crate) fn show_unplaced(&mut self) {
        self.store.set_unplaced(self.state.unplaced);
    }

    /// Lets others have a turn. All that is between two calls of this type's other functions is a good time.
    pub(crate) fn pause(&mut self) {
        self.collect();
        self.account();
        turn_ends();
        MutexGuard::bump(&mut self.state);
        self.guard.repin();
    }

    /// As [`Self::pause`], with `others` in between, who may wait for whoever has a turn.
    pub(crate) fn pause_for(&mut self, others: impl FnOnce()) {
        self.collect();
        self.account();
        turn_ends();
        MutexGuard::unlocked_fair(&mut self.state, others);
        self.guard.repin();
    }

    /// Tells others how much more is used, or less.
    fn account(&mut self) {
        self.store.change_usage(std::mem::take(&mut self.state.change));
    }

    /// Gives back memory that no reader needs, while others have turns.
    fn collect(&mut self) {
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
    }

    /// Lets others have turns while `work` is done, which changes no run. Of the runs in `kept` nothing is cut off meanwhile.
    pub(crate) fn aside<T>(&mut self, kept: &[RunId], work: impl FnOnce(RunView<'_>) -> T) -> T {
        self.pin(kept, true);
        let (store, guard) = (self.store, &self.guard);
        let done = MutexGuard::unlocked(&mut self.state, || {
            point();
            work(RunView { store, guard })
        });
        self.pin(kept, false);
        done
    }

    fn pin(&self, runs: &[RunId], is_more: bool) {
        for run in runs.iter().filter_map(|run| self.run(*run)) {
            let pins = run.pins.load(Ordering::Relaxed);
            let now = if is_more { pins + 1 } else { pins.saturating_sub(1) };
            run.pins.store(now, Ordering::Relaxed);
        }
    }

    /// The runs, to be looked at alone.
    pub(crate) fn view(&self) -> RunView<'_> {
        RunView {
            store: self.store,
            guard: &self.guard,
        }
    }

    #[inline]
    pub(crate) fn run(&self, id: RunId) -> Option<&Run> {
        self.store.slab.get(id, &self.guard)
    }

    fn column(&self, id: RunId) -> Option<Column<'_>> {
        self.view().column(id)
    }

    pub(crate) fn state_mut(&mut self) -> &mut State {
        &mut self.state
    }

    /// One more than the largest number of a run.
    pub(crate) fn runs_end(&self) -> u32 {
        self.state.next
    }

    /// What each holder has of a run.
    pub(crate) fn entries(&self, id: RunId) -> impl Iterator<Item = Entry> + '_ {
        self.run(id).into_iter().flat_map(|run| run.entries(&self.guard))
    }

    /// The holders that have blocks of a run from `cutoff` on.
    pub(crate) fn holders_beyond(&self, id: RunId, cutoff: u16) -> Vec<HolderSlot> {
        let Some(run) = self.run(id) else {
            return Vec::new();
        };
        let entries = run.entries(&self.guard).filter(|entry| entry.end() > cutoff);
        entries.map(Entry::slot).collect()
    }

    /// Lets eviction look at a run again, if it has a leaf left.
    pub(crate) fn requeue(&mut self, id: RunId) {
        if let Some(run) = self.run(id)
            && run.len() > self.attached_end(id)
        {
            self.use_run(id, 0);
        }
    }

    /// Whether the block is there, whoever has it.
    pub(crate) fn has(&self, spot: Spot) -> bool {
        self.run(spot.run).is_some_and(|run| spot.offset < run.len())
    }

    /// The sequence hash at a place, or the fragment of it that is known.
    #[inline]
    pub(crate) fn hash(&self, spot: Spot) -> u64 {
        self.column(spot.run)
            .map_or(0, |column| column.hash(usize::from(spot.offset)))
    }

    /// The hashes of a run from `from` on, up to `to`.
    pub(crate) fn hashes(&self, run: RunId, from: u16, to: u16) -> impl DoubleEndedIterator<Item = u64> + '_ {
        self.view().hashes(run, from, to)
    }

    pub(crate) fn position(&self, spot: Spot) -> u32 {
        self.run(spot.run).map_or(0, Run::start) + u32::from(spot.offset)
    }

    /// The block before a block; none at position 0.
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

    /// Whether the block at a place is the one that is wanted, as far as both hashes are known.
    pub(crate) fn is(&self, spot: Spot, wanted: Wanted) -> bool {
        let (offset, position) = (usize::from(spot.offset), self.position(spot));
        self.column(spot.run)
            .is_some_and(|column| column.is(offset, position, wanted, &self.guard))
    }

    /// The block that is wanted after `parent`.
    pub(crate) fn child(&self, parent: Option<Spot>, position: u32, wanted: Wanted) -> Option<Spot> {
        if let Some(parent) = parent {
            let next = Spot {
                offset: parent.offset + 1,
                ..parent
            };
            if self.has(next) && self.is(next, wanted) {
                return Some(next);
            }
            if !self.run(parent.run)?.is_followed() {
                return None;
            }
        }
        let head = self.store.head(parent, position, wanted, &self.guard)?;
        Some(Spot {
            run: head.id,
            offset: 0,
        })
    }

    /// Runs follow only blocks before this offset; 0 where none does.
    pub(crate) fn attached_end(&self, run: RunId) -> u16 {
        if !self.run(run).is_some_and(Run::is_followed) {
            return 0;
        }
        let attached = self.state.attached.get(&run);
        attached
            .and_then(|attached| attached.last_key_value())
            .map_or(0, |(offset, _)| offset + 1)
    }

    /// How many of these hashes are in the run from `spot` on, one after the other.
    fn agreement(&self, spot: Spot, hashes: &[SequenceHash], is_whole: bool) -> usize {
        let Some(run) = self.run(spot.run) else { return 0 };
        let column = run.column(&self.guard);
        let (position, offset) = (run.start() + u32::from(spot.offset), usize::from(spot.offset));
        let left = usize::from(run.len()).saturating_sub(offset);
        let mut count = 0;
        for (index, hash) in hashes.iter().take(left).enumerate() {
            #[allow(clippy::cast_possible_truncation, reason = "below the length of a run")]
            let position = position + index as u32;
            let wanted = Wanted {
                hash: hash.0,
                is_whole,
            };
            if !column.is(offset + index, position, wanted, &self.guard) {
                break;
            }
            count += 1;
        }
        count
    }

    /// Puts these blocks after `parent`: as many as one run takes. Gives the place of the first, and how many those are. None where
    /// there is no number left for a run.
    ///
    /// Blocks that nobody has in the end go with [`Self::trim`].
    pub(crate) fn put(
        &mut self,
        parent: Option<Spot>,
        position: u32,
        hashes: &[SequenceHash],
        is_whole: bool,
    ) -> Option<(Spot, usize)> {
        let first = hashes.first()?.0;
        let wanted = Wanted {
            hash: first,
            is_whole,
        };
        if let Some(spot) = self.child(parent, position, wanted) {
            let count = self.agreement(spot, hashes, is_whole);
            if is_whole {
                self.refine(spot, &hashes[..count]);
            }
            // More of them may be appended: the next call finds out.
            self.use_run(spot.run, self.store.tick().unwrap_or_default());
            return Some((spot, count));
        }
        let is_twin = is_whole && self.child(parent, position, Wanted::fragment(first)).is_some();
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
        let run = self.create(parent, position, first, is_twin)?;
        let count = self.append(run, hashes, is_whole);
        Some((Spot { run, offset: 0 }, count))
    }

    /// Completes hashes of which only a fragment was known.
    pub(crate) fn refine(&self, spot: Spot, hashes: &[SequenceHash]) {
        let Some(run) = self.run(spot.run) else { return };
        let short = run.short.get(&self.guard);
        if short.is_empty() {
            return;
        }
        let column = run.column(&self.guard);
        for (offset, hash) in (usize::from(spot.offset)..).zip(hashes) {
            if !run.is_short(offset, &self.guard) {
                continue;
            }
            // First the hash: who finds it whole must find all of it.
            column.set_hash(offset, hash.0);
            if offset == 0 {
                run.first.store(hash.0, Ordering::Release);
            }
            if offset + 1 == usize::from(run.len()) {
                run.last.store(hash.0, Ordering::Release);
            }
            if let Some(word) = short.get(offset / 64) {
                word.fetch_and(!(1 << (offset % 64)), Ordering::AcqRel);
            }
        }
        let (base, offset) = (run.chunks_from(), usize::from(spot.offset));
        let last = (offset + hashes.len()).saturating_sub(base).div_ceil(CHUNK);
        let whole = usize::from(run.len()).saturating_sub(base) / CHUNK;
        for chunk in offset.saturating_sub(base) / CHUNK..last.min(whole) {
            self.set_print(run, chunk);
        }
    }

    fn set_print(&self, run: &Run, chunk: usize) {
        let column = run.column(&self.guard);
        let first = run.chunks_from() + chunk * CHUNK;
        let words = std::array::from_fn(|index| SequenceHash(column.hash(first + index)));
        column.set_print(chunk, self.store.prints.of(&words));
    }

    fn create(&mut self, parent: Option<Spot>, position: u32, first: u64, is_twin: bool) -> Option<RunId> {
        let state = &mut *self.state;
        let id = match state.free.pop() {
            Some(id) => id,
            None if state.next < RunId::END => {
                state.next += 1;
                RunId(state.next - 1)
            }
            None => return None,
        };
        state.runs += 1;
        state.births = state.births.wrapping_add(1);
        let births = state.births;
        let grown = self.store.slab.make(id, &self.guard);
        let run = self.store.slab.get(id, &self.guard)?;
        run.parent.store(parent.map_or(0, Spot::bits), Ordering::Relaxed);
        run.first.store(first, Ordering::Relaxed);
        run.header.begin_at(position);
        run.placed.store(0, Ordering::Relaxed);
        run.tops.store(0, Ordering::Relaxed);
        run.pins.store(0, Ordering::Relaxed);
        run.is_twin.store(u32::from(is_twin), Ordering::Relaxed);
        if is_twin {
            // Before anybody has anything of it.
            self.store.count_twin(true);
        }
        run.birth.store(births, Ordering::Release);
        if let Some(parent) = parent {
            *state
                .attached
                .or_default(parent.run)
                .entry(parent.offset)
                .or_default() += 1;
            if let Some(run) = self.store.slab.get(parent.run, &self.guard) {
                run.header.set_followed(true);
            }
        }
        let key = self.store.heads.hash(parent, first & current_mask(position));
        let heads = self.store.heads.insert(&mut state.heads, key, id, &self.guard);
        state.change.bytes += i64::try_from(grown).unwrap_or(0) + heads;
        Some(id)
    }

    /// Adds blocks to the end of a run; says how many.
    fn append(&mut self, id: RunId, hashes: &[SequenceHash], is_whole: bool) -> usize {
        let Some(run) = self.store.slab.get(id, &self.guard) else {
            return 0;
        };
        let len = usize::from(run.len());
        let count = hashes.len().min(usize::from(RUN_BLOCKS_MAX) - len);
        let end = len + count;
        let mut bytes = 0;
        if run.column(&self.guard).capacity() < end {
            let capacity = run.column(&self.guard).capacity();
            // What grows once mostly grows again.
            let room = match end {
                end if capacity == 0 => end,
                // Chats append little each time.
                ..512 => end + end / 2,
                end => end + end / 4,
            };
            bytes = resize(run, len, room, &mut self.state, &self.guard);
        }
        let column = run.column(&self.guard);
        for (offset, hash) in (len..end).zip(hashes) {
            column.set_hash(offset, hash.0);
        }
        bytes += mark_short(run, len..end, is_whole, &mut self.state, &self.guard);
        let chunks = |blocks: usize| blocks.saturating_sub(run.chunks_from()) / CHUNK;
        for chunk in chunks(len)..chunks(end) {
            self.set_print(run, chunk);
        }
        run.tops.store(0, Ordering::Relaxed);
        run.last
            .store(column.hash(end.saturating_sub(1)), Ordering::Release);
        run.header.set_len(u16::try_from(end).unwrap_or(0));
        self.state.change.blocks += i64::try_from(count).unwrap_or(0);
        self.state.change.bytes += bytes;
        self.state.unplaced += count as u64;
        if self.state.places_all {
            self.place(id, u16::try_from(end).unwrap_or(RUN_BLOCKS_MAX));
        }
        self.note_stored(id, count as u64);
        count
    }

    /// Makes a step of a holder, which sets what it has of these runs in `change`.
    pub(crate) fn step(&mut self, runs: &[RunId], change: impl FnOnce(&mut Self)) {
        runs.iter().for_each(|id| self.count_step(*id));
        // Whoever sees a change of the step sees that it has begun.
        fence(Ordering::Release);
        change(self);
        runs.iter().for_each(|id| self.count_step(*id));
    }

    fn count_step(&self, id: RunId) {
        if let Some(run) = self.run(id) {
            if run.header.is_last_step() {
                self.store.count_wrap();
            }
            run.header.count_step();
        }
    }

    /// Sets what a holder has of a run; none where it has nothing. `hint` is what the last call gave for this holder and run.
    pub(crate) fn set_entry(&mut self, id: RunId, slot: HolderSlot, entry: Entry, hint: u32) -> u32 {
        let Some(run) = self.store.slab.get(id, &self.guard) else {
            return hint;
        };
        let more = run.more.get(&self.guard);
        let places = run.entries.len() + more.len();
        let at = |index: usize| {
            run.entries
                .get(index)
                .or_else(|| more.get(index - run.entries.len()))
        };
        let of = |index: usize| {
            at(index).map_or(Entry::default(), |word| {
                Entry::from_bits(word.load(Ordering::Relaxed))
            })
        };
        let is_own = |index: usize| !of(index).is_none() && of(index).slot() == slot;
        let hinted = hint as usize;
        let own = if hinted < places && is_own(hinted) {
            Some(hinted)
        } else {
            (0..places).find(|index| is_own(*index))
        };
        let free = || (0..places).find(|index| of(*index).is_none());
        let len = run.len();
        let old_end = own.map_or(0, |index| of(index).end());
        let tops = run.tops.load(Ordering::Relaxed);
        let (was_top, is_top) = (
            old_end == len && old_end > 0,
            entry.end() == len && !entry.is_none(),
        );
        run.tops.store(
            tops + u32::from(is_top) - u32::from(was_top && tops > 0),
            Ordering::Relaxed,
        );
        let index = match own.or_else(|| if entry.is_none() { None } else { free() }) {
            Some(index) => index,
            None if entry.is_none() => return hint,
            None => {
                let room = (more.len() * 2).max(4);
                let word = |index: usize| more.get(index).map_or(0, |word| word.load(Ordering::Relaxed));
                let before = run.more.replace(room, word, &self.guard);
                self.state.garbage += before * 8;
                self.state.change.bytes += words_changed(room, before);
                places
            }
        };
        let more = run.more.get(&self.guard);
        if let Some(word) = run
            .entries
            .get(index)
            .or_else(|| more.get(index - run.entries.len()))
        {
            word.store(entry.bits(), Ordering::Release);
        }
        if entry.is_none() && !more.is_empty() && more.iter().all(|word| word.load(Ordering::Relaxed) == 0) {
            let before = run.more.replace(0, |_| 0, &self.guard);
            self.state.garbage += before * 8;
            self.state.change.bytes += words_changed(0, before);
        }
        u32::try_from(index).unwrap_or(u32::MAX)
    }
}

impl Drop for RunWriter<'_> {
    fn drop(&mut self) {
        self.show_unplaced();
        self.collect();
        self.account();
    }
}

/// Gives a run room for `room` blocks, of which the first `kept` are there; says by how many bytes it has grown.
pub(super) fn resize(run: &Run, kept: usize, room: usize, state: &mut State, guard: &Guard) -> i64 {
    let old = run.column(guard);
    let room = room.min(usize::from(RUN_BLOCKS_MAX));
    let prints = room / CHUNK;
    let word = |index: usize| match (index.checked_sub(prints), index.checked_sub(prints * 2)) {
        (None, _) => old.print(index),
        (Some(chunk), None) => old.content(chunk),
        (_, Some(offset)) if offset < kept => old.hash(offset),
        _ => 0,
    };
    let before = run.column.replace(column_words(room), word, guard);
    state.garbage += before * 8;
    words_changed(column_words(room), before)
}

/// Notes of which blocks only fragments are known; says by how many bytes the run has grown.
fn mark_short(run: &Run, blocks: Range<usize>, is_whole: bool, state: &mut State, guard: &Guard) -> i64 {
    let mut grown = 0;
    let before = run.short.get(guard);
    if !is_whole && before.len() * 64 < blocks.end {
        let room = blocks.end.div_ceil(64).max(before.len() * 2);
        let word = |index: usize| before.get(index).map_or(0, |word| word.load(Ordering::Relaxed));
        let gone = run.short.replace(room, word, guard);
        state.garbage += gone * 8;
        grown = words_changed(room, gone);
    }
    let short = run.short.get(guard);
    for offset in blocks.take_while(|offset| offset / 64 < short.len()) {
        let bit = 1 << (offset % 64);
        if is_whole {
            short[offset / 64].fetch_and(!bit, Ordering::Relaxed);
        } else {
            short[offset / 64].fetch_or(bit, Ordering::Relaxed);
        }
    }
    grown
}

/// By how many bytes an array of words has grown.
pub(super) fn words_changed(now: usize, before: usize) -> i64 {
    let bytes = |words: usize| i64::try_from(words * 8).unwrap_or(i64::MAX);
    bytes(now) - bytes(before)
}
