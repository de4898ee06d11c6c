//! Table from the hashes of all blocks to their places, for queries. The first query that needs the table makes it. The
//! table is freed soon after the last such query.
//!
//! The table of events ([`places`](super::places)) has only blocks that events need to find by their hashes. Queries by
//! compressed chains need all blocks. Memory that a query takes must not stay, and must not count as stored by events:
//! otherwise blocks would be evicted for it. So queries have a table of their own. The table takes about as much memory
//! as the hashes themselves, and does not count in the capacity.

use crate::index::block::COMMON_MASK;

use super::places::{EQUAL_MAX, equal_places};
use super::writer::{RunView, RunWriter};
use super::{NameMap, RUN_BLOCKS_MAX, RunId, Spot};

/// Table of the places of all blocks, by their hashes; see the module.
#[derive(Debug)]
pub(super) struct Lookups {
    table: NameMap,
    /// Number of places in the table beyond the first of their hash.
    doubles: u64,
    /// Number of each run's blocks that are in the table, by the run's number.
    ends: Vec<u16>,
    /// Number of the first run that has not been entered yet. Runs before it are entered further as they grow.
    next: u32,
    /// Whether a query has used the table since the last [`RunWriter::rest_lookups`].
    is_used: bool,
}

impl RunWriter<'_> {
    /// Enters all blocks into the table, so that [`Self::look_up`] finds them. Other writers have turns meanwhile.
    /// Another query that comes then goes on with the same work.
    pub(crate) fn look_up_all(&mut self) {
        while self.look_up_more() {
            self.pause();
        }
    }

    /// Enters about as many blocks as a full run has, for [`Self::look_up`]. Returns whether blocks are still missing.
    pub(crate) fn look_up_more(&mut self) -> bool {
        let mut done = 0;
        while self.state.unplaced > 0 {
            let end = self.state.next;
            let lookups = self.state.lookups.get_or_insert_with(|| {
                Box::new(Lookups {
                    table: NameMap::default(),
                    doubles: 0,
                    ends: Vec::new(),
                    next: 1,
                    is_used: true,
                })
            });
            lookups.is_used = true;
            if lookups.next >= end {
                return false;
            }
            let id = RunId(lookups.next);
            lookups.next += 1;
            done += 1 + self.enter_lookups(id);
            if done >= usize::from(RUN_BLOCKS_MAX) {
                return true;
            }
        }
        false
    }

    /// Approximate number of blocks that [`Self::look_up_all`] would enter.
    pub(crate) fn not_looked_up(&self) -> u64 {
        if self.state.unplaced == 0 {
            return 0;
        }
        let runs = u64::from(self.state.next);
        let entered = self.state.lookups.as_deref();
        let missing = runs.saturating_sub(entered.map_or(1, |lookups| u64::from(lookups.next)));
        // As if all runs were of one length.
        self.store.usage().blocks.load().saturating_mul(missing) / runs.max(1)
    }

    /// Enters the blocks of a run that are not in the table yet, and returns how many. Does nothing if there is no
    /// table, or if the table has not come to this run.
    pub(super) fn enter_lookups(&mut self, id: RunId) -> usize {
        let (store, guard) = (self.store, &self.guard);
        let Some(lookups) = self
            .state
            .lookups
            .as_deref_mut()
            .filter(|lookups| id.0 < lookups.next)
        else {
            return 0;
        };
        let Some(run) = store.run(id, guard) else {
            return 0;
        };
        if lookups.ends.len() <= id.index() {
            lookups.ends.resize(id.index() + 1, 0);
        }
        let (end, column) = (run.len(), run.column(guard));
        let begun = lookups.ends[id.index()];
        let mut from = begun;
        let Lookups { table, doubles, .. } = lookups;
        while from < end {
            let is_equal = |index, other| {
                let hash = RunView { store, guard }.hash(other);
                (hash ^ column.hash(usize::from(from) + index)) & COMMON_MASK == 0
            };
            let is_new = |_, equal| {
                *doubles += u64::from(equal > 0 && equal < EQUAL_MAX);
                equal < EQUAL_MAX
            };
            let names = (from..end).map(|offset| column.hash(usize::from(offset)) & COMMON_MASK);
            let first = Spot {
                run: id,
                offset: from,
            };
            let added = table.insert_run(names, first, is_equal, is_new);
            // The next block's hash has the most places already: the block is passed over.
            from += u16::try_from(added).unwrap_or(0) + 1;
        }
        lookups.ends[id.index()] = end.max(begun);
        usize::from(end.saturating_sub(begun))
    }

    /// Removes the blocks of a run from `from` on from the table. The caller cuts these blocks off next.
    pub(super) fn leave_lookups(&mut self, id: RunId, from: u16) {
        let (store, guard) = (self.store, &self.guard);
        let Some(lookups) = self.state.lookups.as_deref_mut() else {
            return;
        };
        let Some(end) = lookups.ends.get_mut(id.index()) else {
            return;
        };
        let to = std::mem::replace(end, from.min(*end));
        let Some(run) = store.run(id, guard).filter(|_| from < to) else {
            return;
        };
        let column = run.column(guard);
        let key_of = |offset: u16| column.hash(usize::from(offset)) & COMMON_MASK;
        let doubles = &mut lookups.doubles;
        let names = (from..to).map(key_of);
        lookups.table.remove_run(
            names,
            Spot {
                run: id,
                offset: from,
            },
            |table, offset| {
                let view = RunView { store, guard };
                let is_double = *doubles > 0 && equal_places(table, key_of(offset), view) > 0;
                *doubles -= u64::from(is_double);
            },
        );
        if lookups.table.len() == 0 {
            self.state.lookups = None;
        }
    }

    /// Frees the table if no query has used it since the last call.
    pub(crate) fn rest_lookups(&mut self) {
        if let Some(lookups) = &mut self.state.lookups
            && !std::mem::take(&mut lookups.is_used)
        {
            self.state.lookups = None;
        }
    }

    /// Returns a table of all places by their hashes, and the number of places beyond the first of their hash. It is
    /// the table of events if that has every block. `None` if neither table is there.
    fn all_places(&self) -> Option<(&NameMap, u64)> {
        if self.state.unplaced == 0 {
            return Some((&self.state.places, self.store.doubles()));
        }
        let lookups = self.state.lookups.as_deref()?;
        Some((&lookups.table, lookups.doubles))
    }

    /// Calls `check` with each block that may have `hash`, and returns its first `Some`. `check` must compare the hash
    /// itself.
    pub(crate) fn look_up<T>(&self, hash: u64, check: impl FnMut(Spot) -> Option<T>) -> Option<T> {
        let (places, _) = self.all_places()?;
        places.find(hash & COMMON_MASK, check)
    }

    /// Returns whether a hash has one place at most, several places, or too many to find all.
    pub(crate) fn looked_up(&self, hash: u64) -> LookedUp {
        let equal = match self.all_places() {
            Some((places, 1..)) => equal_places(places, hash & COMMON_MASK, self.view()),
            _ => 1,
        };
        match equal {
            0 | 1 => LookedUp::Single,
            2..EQUAL_MAX => LookedUp::Several,
            _ => LookedUp::TooMany,
        }
    }

    /// Whether some hash has several places.
    pub(crate) fn has_equal_lookups(&self) -> bool {
        self.all_places().is_some_and(|(_, doubles)| doubles > 0)
    }

    /// Bytes of the table.
    #[cfg(test)]
    pub(crate) fn lookups_bytes(&self) -> u64 {
        let lookups = self.state.lookups.as_deref();
        lookups.map_or(0, |lookups| lookups.table.bytes() + lookups.ends.len() as u64 * 2)
    }
}

/// Number of places of a hash, as far as a query needs to know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LookedUp {
    /// One, or none.
    Single,
    /// Several.
    Several,
    /// So many that not all of them are found.
    TooMany,
}
