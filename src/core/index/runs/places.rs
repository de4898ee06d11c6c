//! Table from hashes to the places of blocks, whichever holder has them. Events find parents and removed blocks by it.
//! A block is placed if it has been entered into this table.

use std::sync::atomic::Ordering;

use crate::index::block::COMMON_MASK;

use super::writer::{RunView, RunWriter};
use super::{NameMap, RUN_BLOCKS_MAX, RunId, Spot};

/// Most places that the table keeps for one hash. Further blocks with that hash are found by their names alone.
pub(super) const EQUAL_MAX: usize = 16;

/// Number of places in `places` whose hashes have the bits of `key`.
pub(super) fn equal_places(places: &NameMap, key: u64, runs: RunView<'_>) -> usize {
    let mut equal = 0;
    places.find(key, |spot| {
        equal += usize::from(runs.hash(spot) & COMMON_MASK == key);
        None::<()>
    });
    equal
}

impl RunWriter<'_> {
    /// Enters the first `end` blocks of a run into the table. Returns how many had not been entered.
    pub(crate) fn place(&mut self, id: RunId, end: u16) -> usize {
        let Some(run) = self.store.run(id, &self.guard) else {
            return 0;
        };
        let placed = run.placed.load(Ordering::Relaxed);
        let end = end.min(run.len());
        if placed >= end {
            return 0;
        }
        let column = run.column(&self.guard);
        let spot = |offset| Spot { run: id, offset };
        let key_of = |offset: u16| column.hash(usize::from(offset)) & COMMON_MASK;
        let (store, guard, places) = (self.store, &self.guard, &mut self.state.places);
        let (mut doubles, mut from) = (store.doubles(), placed);
        while from < end {
            let is_equal = |index, other| {
                let hash = RunView { store, guard }.hash(other);
                (hash ^ column.hash(usize::from(from) + index)) & COMMON_MASK == 0
            };
            let is_new = |_, equal| {
                doubles += u64::from(equal > 0 && equal < EQUAL_MAX);
                equal < EQUAL_MAX
            };
            let names = (from..end).map(key_of);
            let added = places.insert_run(names, spot(from), is_equal, is_new);
            // The next block's hash has the most places already: the block is passed over.
            from += u16::try_from(added).unwrap_or(0) + 1;
        }
        run.placed.store(end, Ordering::Relaxed);
        self.state.unplaced -= u64::from(end - placed);
        self.account_places(doubles);
        usize::from(end - placed)
    }

    fn account_places(&mut self, doubles: u64) {
        if self.store.doubles() != doubles {
            self.store.doubts.doubles.store(doubles, Ordering::Relaxed);
        }
        let bytes = self.state.places.bytes().cast_signed();
        self.state.change.bytes += bytes - self.state.places_bytes;
        self.state.places_bytes = bytes;
    }

    /// Removes the blocks of a run from `from` on from the tables of hashes. The caller cuts these blocks off next.
    pub(super) fn displace(&mut self, id: RunId, from: u16) {
        self.leave_lookups(id, from);
        let Some(run) = self.store.run(id, &self.guard) else {
            return;
        };
        let to = run.placed.load(Ordering::Relaxed);
        self.state.unplaced -= u64::from(run.len() - to.max(from));
        if from >= to {
            return;
        }
        run.placed.store(from, Ordering::Relaxed);
        let column = run.column(&self.guard);
        let spot = |offset| Spot { run: id, offset };
        let key_of = |offset: u16| column.hash(usize::from(offset)) & COMMON_MASK;
        let (store, guard) = (self.store, &self.guard);
        let (mut doubles, names) = (store.doubles(), (from..to).map(key_of));
        let places = &mut self.state.places;
        places.remove_run(names, spot(from), |places, offset| {
            let view = RunView { store, guard };
            let is_double = doubles > 0 && equal_places(places, key_of(offset), view) > 0;
            doubles -= u64::from(is_double);
        });
        self.account_places(doubles);
    }

    /// Enters all blocks of the runs that `next` gives into the table. Other writers have turns meanwhile.
    pub(crate) fn place_each(&mut self, mut next: impl FnMut(&mut Self) -> Option<RunId>) {
        let mut done = 0;
        while let Some(id) = next(self) {
            done += 1 + self.place(id, RUN_BLOCKS_MAX);
            if done >= usize::from(RUN_BLOCKS_MAX) {
                done = 0;
                self.pause();
            }
        }
    }

    /// Calls `check` with each placed block that may have `hash`, and returns its first `Some`. `check` must compare
    /// the hash itself.
    pub(crate) fn find_place<T>(&self, hash: u64, check: impl FnMut(Spot) -> Option<T>) -> Option<T> {
        self.state.places.find(hash & COMMON_MASK, check)
    }

    /// Whether this hash has several places.
    pub(crate) fn has_double(&self, hash: u64) -> bool {
        self.has_doubles() && equal_places(&self.state.places, hash & COMMON_MASK, self.view()) > 1
    }

    /// Whether some hash has several places.
    pub(crate) fn has_doubles(&self) -> bool {
        self.store.doubles() > 0
    }

    /// Whether the table finds a placed block by its hash. It does not if too many other blocks have the same hash.
    pub(crate) fn is_placed(&self, spot: Spot) -> bool {
        !self.has_doubles()
            || self
                .find_place(self.hash(spot), |other| (other == spot).then_some(()))
                .is_some()
    }

    pub(crate) fn prefetch_place(&self, hash: u64) {
        self.state.places.prefetch(hash & COMMON_MASK);
    }
}
