//! Finding any block by its hash, for queries: a table that is made for them, and given back soon after the last of them.
//!
//! Events find blocks by their hashes as far as they need it ([`places`](super::places)). Compressed chains need all of them. What a query makes
//! must not stay, nor count as what events have stored: blocks would be forgotten for it. So it is a table of its own. It takes about as much as
//! the hashes themselves, beside the capacity.

use crate::index::block::COMMON_MASK;

use super::places::{EQUAL_MAX, equal_places};
use super::writer::{RunView, RunWriter};
use super::{NameMap, RUN_BLOCKS_MAX, RunId, Spot};

/// The table.
#[derive(Debug)]
pub(super) struct Lookups {
    table: NameMap,
    /// How many places have a hash that another one has, too.
    doubles: u64,
    /// By the number of a run: how many of its blocks are in the table.
    ends: Vec<u16>,
    /// The first run that is not in the table yet. Those before it are entered as they grow.
    next: u32,
    /// Whether a query has used it since it was last said to rest.
    is_used: bool,
}

impl RunWriter<'_> {
    /// Makes all blocks be found by [`Self::look_up`]. Others have turns meanwhile; whoever comes then goes on with it.
    pub(crate) fn look_up_all(&mut self) {
        while self.look_up_more() {
            self.pause();
        }
    }

    /// Enters some blocks, so that all will be found by [`Self::look_up`]; says whether more are missing. Takes as long as a run's blocks.
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

    /// About how many blocks [`Self::look_up_all`] would enter.
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

    /// Enters the blocks of a run that are not in the table, where there is one and it has come to this run; says how many.
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
            // The next one has too many equals.
            from += u16::try_from(added).unwrap_or(0) + 1;
        }
        lookups.ends[id.index()] = end.max(begun);
        usize::from(end.saturating_sub(begun))
    }

    /// Takes the blocks of a run from `from` on, which are cut off next, out of the table.
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

    /// Gives the table back if no query has used it since the last call.
    pub(crate) fn rest_lookups(&mut self) {
        if let Some(lookups) = &mut self.state.lookups
            && !std::mem::take(&mut lookups.is_used)
        {
            self.state.lookups = None;
        }
    }

    /// All places by their hashes, and how many of them have a hash that another one has, too. Events' own table has them where every block is
    /// found in it.
    fn all_places(&self) -> Option<(&NameMap, u64)> {
        if self.state.unplaced == 0 {
            return Some((&self.state.places, self.store.doubles()));
        }
        let lookups = self.state.lookups.as_deref()?;
        Some((&lookups.table, lookups.doubles))
    }

    /// The first place with these bits of a hash for which `check` gives something.
    pub(crate) fn look_up<T>(&self, hash: u64, check: impl FnMut(Spot) -> Option<T>) -> Option<T> {
        let (places, _) = self.all_places()?;
        places.find(hash & COMMON_MASK, check)
    }

    /// How many places a hash has.
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

/// How many places a hash has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LookedUp {
    /// One, or none.
    Single,
    /// Several.
    Several,
    /// So many that not all of them are found.
    TooMany,
}
