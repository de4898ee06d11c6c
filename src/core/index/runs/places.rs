//! Table from a hash to the places of all blocks with that hash, whichever holder has them. Events use the table to
//! find parents and removed blocks. Queries that give only some hashes of a chain use it to find blocks in the middle
//! of runs.

use std::ops::Range;
use std::sync::atomic::Ordering;

use crate::index::block::COMMON_MASK;

use super::writer::{RunView, RunWriter};
use super::{RunId, Spot};
use crate::name_map::NameMap;

/// Maximum number of places that the table keeps for one hash, so that a search ends soon. Further blocks with that hash
/// wait until one of these places becomes free (see `waiting.rs`). The table does not find a block that waits.
const EQUAL_MAX: usize = 16;

/// Number of places in `places` whose blocks have the hash `key`, compared only in the bits of [`COMMON_MASK`].
fn equal_places(places: &NameMap, key: u64, runs: RunView<'_>) -> usize {
    let mut equal = 0;
    places.find(key, |place| {
        equal += usize::from(runs.hash(Spot::from_bits(place)) & COMMON_MASK == key);
        None::<()>
    });
    equal
}

/// Returns the number that stands for the block at `offset` of `run`.
fn place(run: RunId, offset: usize) -> u64 {
    Spot { run, offset: 0 }.bits() + offset as u64
}

impl RunWriter<'_> {
    /// Enters new blocks of a run into the table that finds blocks by hash.
    pub(super) fn place(&mut self, id: RunId, blocks: Range<usize>) {
        let (store, guard, books) = (self.store, &self.guard, &mut *self.state);
        let Some(run) = store.run(id, guard) else { return };
        let column = run.column(guard);
        let (mut doubles, mut from) = (store.doubles(), blocks.start);
        while from < blocks.end {
            let is_equal = |index, other| {
                let hash = RunView { store, guard }.hash(Spot::from_bits(other));
                (hash ^ column.hash(from + index)) & COMMON_MASK == 0
            };
            let is_new = |_, equal| {
                doubles += u64::from(equal > 0);
                equal < EQUAL_MAX
            };
            let names = (from..blocks.end).map(|offset| column.hash(offset) & COMMON_MASK);
            from += books.places.insert_run(names, place(id, from), is_equal, is_new);
            // `insert_run` stops at a block whose hash has the maximum number of places already.
            if from < blocks.end {
                let key = column.hash(from) & COMMON_MASK;
                books.waiting.insert(key, place(id, from));
                from += 1;
            }
        }
        self.account_places(doubles);
    }

    /// Removes blocks of a run from the table that finds blocks by hash. Blocks that wait for one of their places get
    /// them. The caller cuts the removed blocks off next.
    pub(super) fn displace(&mut self, id: RunId, blocks: Range<usize>) {
        let (store, guard, books) = (self.store, &self.guard, &mut *self.state);
        let Some(run) = store.run(id, guard) else { return };
        let (column, from) = (run.column(guard), blocks.start);
        let key_of = |offset: usize| column.hash(offset) & COMMON_MASK;
        let mut doubles = store.doubles();
        let waiting = &mut books.waiting;
        if !waiting.is_empty() {
            let gone = blocks.clone();
            let gone = gone.filter(|offset| waiting.remove(key_of(*offset), place(id, *offset)));
            doubles -= gone.count() as u64;
        }
        let mut free: Vec<u64> = Vec::new();
        books
            .places
            .remove_run(blocks.map(key_of), place(id, from), |places, index| {
                if doubles == 0 {
                    return;
                }
                let (view, key) = (RunView { store, guard }, key_of(from + index));
                let is_awaited = waiting.next(key).is_some();
                let is_double = is_awaited || equal_places(places, key, view) > 0;
                doubles -= u64::from(is_double);
                free.extend(is_awaited.then_some(key));
            });
        for key in free {
            if let Some(next) = books.waiting.next(key) {
                books.waiting.remove(key, next);
                books.places.insert(key, next);
            }
        }
        self.account_places(doubles);
    }

    fn account_places(&mut self, doubles: u64) {
        if self.store.doubles() != doubles {
            self.store.doubts.doubles.store(doubles, Ordering::Relaxed);
        }
        let bytes = (self.state.places.bytes() + self.state.waiting.bytes()).cast_signed();
        self.state.change.bytes += bytes - self.state.places_bytes;
        self.state.places_bytes = bytes;
    }

    /// Calls `check` with each block that may have `hash`, until `check` returns `Some`. Returns this value. Blocks
    /// with other hashes may come, too, so `check` must compare the hash.
    pub(crate) fn find_place<T>(&self, hash: u64, mut check: impl FnMut(Spot) -> Option<T>) -> Option<T> {
        let places = &self.state.places;
        places.find(hash & COMMON_MASK, |place| check(Spot::from_bits(place)))
    }

    /// Returns how many places a hash has: at most one, several, or too many for the table to find all of them.
    pub(crate) fn places_of(&self, hash: u64) -> Places {
        if !self.has_doubles() {
            return Places::Single;
        }
        let key = hash & COMMON_MASK;
        match equal_places(&self.state.places, key, self.view()) {
            0 | 1 => Places::Single,
            EQUAL_MAX.. if self.state.waiting.next(key).is_some() => Places::TooMany,
            _ => Places::Several,
        }
    }

    /// Whether any hash has several places.
    pub(crate) fn has_doubles(&self) -> bool {
        self.store.doubles() > 0
    }

    /// Whether the table finds a block by its hash. It does not if too many other blocks have the same hash.
    pub(crate) fn is_placed(&self, spot: Spot) -> bool {
        let waiting = &self.state.waiting;
        waiting.is_empty() || !waiting.contains(self.hash(spot) & COMMON_MASK, spot.bits())
    }

    pub(crate) fn prefetch_place(&self, hash: u64) {
        self.state.places.prefetch(hash & COMMON_MASK);
    }
}

/// Number of places that the blocks with one hash have, in three classes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Places {
    /// The hash has at most one place.
    Single,
    /// The hash has several places.
    Several,
    /// The hash has more places than [`EQUAL_MAX`], so the table does not find all of them.
    TooMany,
}
