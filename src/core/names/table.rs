//! Table of the engine's names for a holder's blocks. A name that equals its block's sequence hash is not in the
//! table.
//!
//! A map leads from each name to the place of its block. The names themselves are stored in columns, one for each
//! run. A column has an array with the first name of each block, and further names in [`Copies`].

use crate::index::runs::{RunId, Spot};
use crate::name_map::NameMap;
use crate::split_map::SplitMap;

use super::alias::{Alias, Aliases};
use super::copies::Copies;

/// Names of a holder's blocks, except names that equal their blocks' sequence hashes.
#[derive(Debug, Default)]
pub(super) struct Names {
    map: NameMap,
    columns: SplitMap<RunId, NameColumn>,
    /// Number of further names in the table: names that are not the first name of their block.
    further: usize,
    /// Bytes that the further names take, in the columns of all runs.
    copies_bytes: usize,
}

/// Names of the blocks of one run.
#[derive(Debug, Default)]
struct NameColumn {
    /// First names of the blocks from the offset `from` on. Entries of blocks that have no names here are
    /// meaningless.
    firsts: Vec<u64>,
    from: u16,
    /// Further names of blocks that have several names.
    copies: Option<Box<Copies>>,
}

/// Returns how many names a block with these `names` has in addition to its first name.
fn further(names: &[Alias]) -> usize {
    names.len().saturating_sub(1)
}

impl Names {
    /// Number of names in the table.
    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    /// Number of blocks that have names in this table.
    pub(super) fn blocks(&self) -> usize {
        self.map.len() - self.further
    }

    /// Whether any block can have several names.
    pub(super) fn has_several(&self) -> bool {
        self.further > 0
    }

    /// Number of bytes that the table takes.
    pub(super) fn bytes(&self) -> usize {
        // First names are in columns, roughly as many as the map has.
        let firsts = self.blocks() * size_of::<u64>();
        let map = usize::try_from(self.map.bytes()).unwrap_or(usize::MAX);
        map + self.columns.bytes() + firsts + self.copies_bytes
    }

    /// Returns the place of the block that has `name`.
    pub(super) fn find(&self, name: u64) -> Option<Spot> {
        if self.map.len() == 0 {
            return None;
        }
        self.map.find(name, |place| {
            let spot = Spot::from_bits(place);
            self.has(spot, name).then_some(spot)
        })
    }

    pub(super) fn prefetch(&self, name: u64) {
        self.map.prefetch(name);
    }

    fn has(&self, spot: Spot, name: u64) -> bool {
        let column = self.columns.get(&spot.run);
        column.is_some_and(|column| column.has(spot.offset, name))
    }

    /// Returns the first name of each block at the offsets `from` to `to`. All these blocks must have names in this
    /// table.
    pub(super) fn firsts(&self, run: RunId, from: u16, to: u16) -> &[u64] {
        let column = self.columns.get(&run);
        column.map_or(&[], |column| column.firsts(from, to))
    }

    /// Returns the names of a block that has names in this table, oldest first. `tiers` are the tiers of the block.
    pub(super) fn of(&self, spot: Spot, tiers: u8) -> Aliases {
        let column = self.columns.get(&spot.run);
        column.map_or_else(Aliases::new, |column| column.names(spot.offset, tiers))
    }

    /// Whether a block can get one more name.
    pub(super) fn has_room(&self, spot: Spot) -> bool {
        let copies = self
            .columns
            .get(&spot.run)
            .and_then(|column| column.copies.as_ref());
        copies.is_none_or(|copies| copies.has_room(spot.offset))
    }

    /// Replaces the names of one block. `before` are its current names in this table; `after` are its new names.
    pub(super) fn replace(&mut self, spot: Spot, before: &[Alias], after: &[Alias]) {
        let is_in = |names: &[Alias], name: u64| names.iter().any(|alias| alias.name == name);
        for Alias { name, .. } in before.iter().filter(|alias| !is_in(after, alias.name)) {
            self.map.remove(*name, spot.bits());
        }
        for Alias { name, .. } in after.iter().filter(|alias| !is_in(before, alias.name)) {
            self.map.insert(*name, spot.bits());
        }
        if before.is_empty() && after.is_empty() {
            return;
        }
        self.further = self.further - further(before) + further(after);
        let column = self.columns.or_default(spot.run);
        self.copies_bytes -= column.copies_bytes();
        column.set(spot.offset, after);
        self.copies_bytes += column.copies_bytes();
    }

    /// Inserts names into the map for consecutive blocks from `at` on. Stops at the first name that another block
    /// has. The first name is inserted without a check, because the caller knows that it is new. Returns the number
    /// of inserted names.
    fn enter(&mut self, at: Spot, names: &[u64]) -> usize {
        let columns = &self.columns;
        let is_equal = |index: usize, place: u64| {
            let (name, other) = (names[index], Spot::from_bits(place));
            // Names that this call has inserted before are not in the column yet.
            let before = usize::from(other.offset.wrapping_sub(at.offset));
            let column = columns.get(&other.run);
            other.run == at.run && before < index && names[before] == name
                || column.is_some_and(|column| column.has(other.offset, name))
        };
        let is_new = |index, equal| index == 0 || equal == 0;
        self.map
            .insert_run(names.iter().copied(), at.bits(), is_equal, is_new)
    }

    /// Gives one name to each of some consecutive blocks from `at` on. Stops at the first name that another block
    /// has. These blocks must have no names in this table. Returns the number of names given.
    pub(super) fn insert(&mut self, at: Spot, names: &[u64]) -> usize {
        let count = self.enter(at, names);
        self.columns
            .or_default(at.run)
            .set_firsts(at.offset, &names[..count]);
        count
    }

    /// Gives one more name to each of some consecutive blocks from `at` on. Stops at the first name that another block
    /// has. Each of these blocks must have a name in this table and room for one more. `held` are the tiers of all
    /// blocks, and `tiers` are the tiers of the new names. Returns the number of names given.
    pub(super) fn insert_further(&mut self, at: Spot, names: &[u64], held: u8, tiers: u8) -> usize {
        let count = self.enter(at, names);
        let column = self.columns.or_default(at.run);
        self.copies_bytes -= column.copies_bytes();
        for (offset, name) in (at.offset..).zip(&names[..count]) {
            column.add(offset, held, Alias { name: *name, tiers });
        }
        self.copies_bytes += column.copies_bytes();
        self.further += count;
        count
    }

    /// Removes the names of the blocks at the offsets `from` to `to`. Each of these blocks must have exactly one name
    /// in this table.
    pub(super) fn remove(&mut self, run: RunId, from: u16, to: u16) {
        if let Some(column) = self.columns.get(&run) {
            let names = column.firsts(from, to).iter().copied();
            let first = Spot { run, offset: from };
            self.map.remove_run(names, first.bits(), |_, _| ());
        }
    }

    /// Frees the memory for the names of a run's blocks from the offset `end` on. The holder has none of these blocks
    /// any more.
    pub(super) fn trim(&mut self, run: RunId, end: u16) {
        if let Some(column) = self.columns.get_mut(&run) {
            column.trim(end);
            if end == 0 {
                self.columns.remove(&run);
            }
        }
    }
}

impl NameColumn {
    fn first(&self, offset: u16) -> u64 {
        let index = usize::from(offset).wrapping_sub(usize::from(self.from));
        self.firsts.get(index).copied().unwrap_or(0)
    }

    fn firsts(&self, from: u16, to: u16) -> &[u64] {
        let place = |offset: u16| usize::from(offset.saturating_sub(self.from));
        self.firsts.get(place(from)..place(to)).unwrap_or_default()
    }

    /// Whether the block at `offset`, which has names here, has `name`.
    #[inline]
    fn has(&self, offset: u16, name: u64) -> bool {
        let copies = self.copies.as_ref();
        self.first(offset) == name || copies.is_some_and(|copies| copies.has(offset, name))
    }

    fn names(&self, offset: u16, tiers: u8) -> Aliases {
        let name = self.first(offset);
        let mut names = Aliases::from_iter([Alias { name, tiers }]);
        if let Some(copies) = &self.copies {
            copies.add_to(offset, &mut names);
        }
        names
    }

    fn add(&mut self, offset: u16, tiers: u8, alias: Alias) {
        let mut names = self.names(offset, tiers);
        names.push(alias);
        self.copies.get_or_insert_default().set(offset, &names);
    }

    /// Replaces the names of the block at `offset`.
    fn set(&mut self, offset: u16, names: &[Alias]) {
        if let Some(first) = names.first() {
            self.set_firsts(offset, &[first.name]);
        }
        if names.len() > 1 || self.copies.is_some() {
            let copies = self.copies.get_or_insert_default();
            copies.set(offset, names);
            if copies.is_empty() {
                self.copies = None;
            }
        }
    }

    fn copies_bytes(&self) -> usize {
        let copies = self.copies.as_ref();
        copies.map_or(0, |copies| size_of::<Copies>() + copies.bytes())
    }

    /// Sets the first names of the blocks from `from` on.
    fn set_firsts(&mut self, from: u16, names: &[u64]) {
        if self.firsts.is_empty() {
            self.from = from;
        }
        if from < self.from {
            let gap = usize::from(self.from - from);
            self.firsts.splice(0..0, std::iter::repeat_n(0, gap));
            self.from = from;
        }
        let first = usize::from(from - self.from);
        let end = first + names.len();
        if end > self.firsts.capacity() {
            // A list that grows a second time will mostly grow again.
            let room = if self.firsts.is_empty() {
                end
            } else {
                end + end / 2
            };
            // A reallocation could stay in memory that the allocator keeps for another thread, so new memory is taken.
            let mut grown = Vec::with_capacity(room);
            grown.extend_from_slice(&self.firsts);
            self.firsts = grown;
        }
        self.firsts.resize(self.firsts.len().max(first), 0);
        let (known, new) = names.split_at(names.len().min(self.firsts.len() - first));
        self.firsts[first..first + known.len()].copy_from_slice(known);
        self.firsts.extend_from_slice(new);
    }

    fn trim(&mut self, end: u16) {
        self.firsts.truncate(end.saturating_sub(self.from).into());
        if self.firsts.capacity() > 256 && self.firsts.len() < self.firsts.capacity() / 3 {
            self.firsts.shrink_to(self.firsts.len() * 3 / 2);
        }
    }
}
