//! Finding a holder's blocks by name or lineage hash, and blocks that have several names.
//!
//! A name is in exactly one of three tables, by the form of its block. Names of the form `Hash` are in the table of
//! hashes of the runs. Names of the forms `Own` and `Many` are in the holder's map. Names of blocks without a place are
//! among the orphans.

use crate::hash::SequenceHash;

use super::HolderState;
use super::copies::Aliases;
use super::orphans::{Alias, Key, Orphan, add_name, withdraw_from};
use super::part::{Attributes, Form};
use super::resolve::Start;
use crate::index::runs::{RunId, RunWriter, Spot, is_same_at};
use smallvec::SmallVec;

/// Block that a holder has, with or without a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    Placed(Spot),
    Orphan(Key),
}

impl Found {
    fn key(self, runs: &RunWriter<'_>) -> Key {
        match self {
            Self::Placed(spot) => runs.key(spot),
            Self::Orphan(key) => key,
        }
    }
}

impl HolderState {
    /// Returns the block that the engine calls `name`.
    pub(super) fn find_name(&self, name: u64, runs: &RunWriter<'_>) -> Option<Found> {
        let placed = self.find_spot(name, runs).map(Found::Placed);
        placed.or_else(|| self.orphans.find_name(name).map(Found::Orphan))
    }

    /// Does as [`Self::find_name`], for a block that has a place.
    pub(super) fn find_spot(&self, name: u64, runs: &RunWriter<'_>) -> Option<Spot> {
        if let Some(spot) = self.find_own(name) {
            return Some(spot);
        }
        runs.find_place(name, |spot| {
            let held = self.attributes(spot).filter(|_| runs.hash(spot) == name)?;
            (held.form() == Form::Hash).then_some(spot)
        })
    }

    pub(super) fn find_own(&self, name: u64) -> Option<Spot> {
        if self.own.len() == 0 {
            return None;
        }
        self.own.find(name, |spot| {
            let part = self.parts.get(&spot.run)?;
            part.has_name(spot.offset, name).then_some(spot)
        })
    }

    /// Returns the places of all blocks with this lineage hash. If hashes are a chain, there is one at most.
    pub(super) fn find_keys(&self, key: Key, runs: &RunWriter<'_>) -> SmallVec<[Spot; 2]> {
        self.find_keyed(key.current_hash_fragment(), runs, |spot, _| runs.key(spot) == key)
    }

    /// Returns all blocks with this sequence hash. If hashes are a chain, there is one at most.
    pub(super) fn find_hash(&self, hash: u64, runs: &RunWriter<'_>) -> SmallVec<[Found; 2]> {
        let placed = self.find_keyed(hash, runs, |spot, held| {
            let own = runs.hash(spot);
            own == hash || !held.is_whole() && is_same_at(runs.position(spot), own, hash)
        });
        let orphans = self.orphans.with_hash(hash).map(Found::Orphan);
        placed.into_iter().map(Found::Placed).chain(orphans).collect()
    }

    /// Returns the places of the holder's blocks that may have `hash` and for which `is_it` is true.
    fn find_keyed(
        &self,
        hash: u64,
        runs: &RunWriter<'_>,
        is_it: impl Fn(Spot, Attributes) -> bool,
    ) -> SmallVec<[Spot; 2]> {
        let mut found = SmallVec::new();
        runs.find_place(hash, |spot| {
            if self.attributes(spot).is_some_and(|held| is_it(spot, held)) {
                found.push(spot);
            }
            None::<()>
        });
        found
    }

    /// Finds the block that an event names as a parent, and returns where its children begin. The event gives the
    /// engine's name for the block, or else its sequence hash. `position` is the position of the first child, if the
    /// event has it. It matters because blocks of that name can stand elsewhere if hashes are no chain.
    pub(super) fn find_parent(
        &self,
        name: u64,
        position: Option<u64>,
        runs: &RunWriter<'_>,
    ) -> Option<Start> {
        let precedes =
            |(key, _): &(Key, Found)| position.is_none_or(|position| position == key.position() + 1);
        let named = self.find_name(name, runs).map(|found| (found.key(runs), found));
        if let Some((key, found)) = named.filter(precedes) {
            return Some(self.start_after(key, found, None, runs));
        }
        let hashed = self.find_hash(name, runs).into_iter();
        let hashed = hashed.map(|found| (found.key(runs), found)).filter(precedes);
        let (key, first) = hashed.min_by_key(|(key, _)| *key)?;
        // If the block was stored by its lineage hash, the event tells the rest of its hash.
        Some(self.start_after(key, first, Some(SequenceHash(name)), runs))
    }

    /// Returns where the children of a block begin. `hash` is its whole sequence hash, unless another one is known.
    fn start_after(&self, key: Key, found: Found, hash: Option<SequenceHash>, runs: &RunWriter<'_>) -> Start {
        let (spot, known) = match found {
            Found::Placed(spot) => {
                let is_whole = self.attributes(spot).is_some_and(Attributes::is_whole);
                (Some(spot), is_whole.then(|| SequenceHash(runs.hash(spot))))
            }
            Found::Orphan(key) => (None, self.orphans.get(key).and_then(Orphan::sequence_hash)),
        };
        let known = known.or(hash);
        // The fragment is all that a lineage hash needs of its parent, so it can stand in for the whole.
        let fragment = SequenceHash(key.current_hash_fragment());
        Start {
            position: key.position() + 1,
            parent: Some(known.unwrap_or(fragment)),
            parent_is_known: known.is_some(),
            spot,
        }
    }

    /// Returns the block that `name` means, if that is another block than the one at `spot`. `form` is the form in
    /// which the block at `spot` is to have the name.
    pub(super) fn find_other(
        &self,
        name: u64,
        spot: Spot,
        form: Form,
        runs: &RunWriter<'_>,
    ) -> Option<Found> {
        // Mostly no table has anything that a name can clash with.
        let found = match form {
            Form::Hash if self.own.len() == 0 && !runs.has_doubles() => None,
            Form::Own | Form::Many if !self.has_hash_names() => self.find_own(name),
            _ => self.find_spot(name, runs),
        };
        match found {
            Some(found) if found != spot => Some(Found::Placed(found)),
            Some(_) => None,
            None => self.orphans.find_name(name).map(Found::Orphan),
        }
    }

    /// Whether some block may be named by its hash.
    pub(super) fn has_hash_names(&self) -> bool {
        self.own.len() - self.further < self.placed
    }

    /// Removes a name from a block. A block that loses its last name is removed.
    pub(super) fn drop_name(&mut self, found: Found, name: u64) {
        match found {
            Found::Orphan(key) => {
                self.orphans.withdraw(key, Some(name), u8::MAX);
            }
            Found::Placed(spot) => {
                if self.withdraw_many(spot, Some(name), u8::MAX).is_none() {
                    self.erase(spot.run, spot.offset, spot.offset + 1, |_| true);
                }
            }
        }
    }

    /// Gives a further name to a block that has a place, or adds tiers to a name that it has. Without `name`, that is
    /// its first name. Returns false if the block has too many names.
    pub(super) fn name_again(
        &mut self,
        spot: Spot,
        name: Option<u64>,
        tiers: u8,
        runs: &RunWriter<'_>,
    ) -> bool {
        let Some(held) = self.attributes(spot) else {
            return false;
        };
        let (mut names, end) = (self.names_of(spot, runs), spot.offset + 1);
        let Some(name) = name.or_else(|| names.first().map(|alias| alias.name)) else {
            self.set(spot, end, held.with_more(tiers));
            return true;
        };
        if names.is_empty() {
            // The first name takes over what was stored without one.
            let form = self.form_of(spot, name, held.is_whole(), runs);
            let held = held.with_form(form).with_more(tiers);
            self.set(spot, end, held);
            if form == Form::Own {
                self.own.insert(name, spot);
                let tiers = held.tiers();
                self.set_names(spot, &[Alias { name, tiers }]);
            }
            return true;
        }
        let (before, mut form) = (names.len(), held.form());
        if !add_name(&mut names, name, tiers) {
            return false;
        }
        if names.len() > before {
            if form == Form::Hash {
                self.own.insert(names[0].name, spot);
            }
            self.own.insert(name, spot);
            self.further += 1;
            form = Form::Many;
        }
        self.set(spot, end, held.with_form(form).with_more(tiers));
        if form == Form::Many {
            self.set_names(spot, &names);
        }
        true
    }

    /// Writes the names of a block into its part.
    fn set_names(&mut self, spot: Spot, names: &[Alias]) {
        if let Some(part) = self.parts.get_mut(&spot.run) {
            self.copies_bytes -= part.copies_bytes();
            part.set_aliases(spot.offset, names);
            self.copies_bytes += part.copies_bytes();
        }
    }

    /// Returns the form in which a block at `spot` can keep its one name.
    pub(super) fn form_of(&self, spot: Spot, name: u64, is_whole: bool, runs: &RunWriter<'_>) -> Form {
        match is_whole && runs.hash(spot) == name && runs.is_placed(spot) {
            true => Form::Hash,
            false => Form::Own,
        }
    }

    /// Removes tiers from one name, or from all names, of a block that has several names. Returns whether any of these
    /// tiers held the block. `None` if the block does not have several names.
    pub(super) fn withdraw_many(&mut self, spot: Spot, name: Option<u64>, tiers: u8) -> Option<bool> {
        if self.further == 0 {
            return None;
        }
        let part = self.parts.get_mut(&spot.run)?;
        let held = part.get(spot.offset).filter(|held| held.form() == Form::Many)?;
        let mut names = part.aliases(spot.offset, held.tiers());
        let before = (names.len(), part.copies_bytes());
        let withdrawn = withdraw_from(&mut names, name, tiers, |name| {
            self.own.remove(name, spot);
        });
        part.set_aliases(spot.offset, &names);
        self.further -= (before.0 - 1) - names.len().saturating_sub(1);
        self.copies_bytes = self.copies_bytes - before.1 + part.copies_bytes();
        let left = names.iter().fold(0, |left, alias| left | alias.tiers);
        let next = match names.len() {
            0 => None,
            1 => Some(held.with_tiers(left).with_form(Form::Own)),
            _ => Some(held.with_tiers(left)),
        };
        if next != Some(held) {
            part.set(spot.offset, spot.offset + 1, next);
            self.touch(spot.run);
        }
        self.placed -= usize::from(next.is_none());
        Some(withdrawn != 0)
    }

    /// Removes the blocks from `from` to `to` whose form satisfies `is_it` from the holder, and their names from the
    /// tables.
    pub(super) fn erase(&mut self, run: RunId, from: u16, to: u16, is_it: impl Fn(Form) -> bool) {
        let mut at = from;
        while at < to {
            let Some(part) = self.parts.get(&run) else { return };
            let (mut end, held) = part.extent(at, to);
            match held.map(Attributes::form).filter(|form| is_it(*form)) {
                None => {}
                Some(Form::Many) => {
                    self.withdraw_many(Spot { run, offset: at }, None, u8::MAX);
                    end = at + 1;
                }
                Some(form) => self.erase_uniform(run, at, end, form),
            }
            at = end;
        }
    }

    /// Removes blocks of one form, none of which has several names, from the holder.
    pub(super) fn erase_uniform(&mut self, run: RunId, from: u16, to: u16, form: Form) {
        let Some(part) = self.parts.get_mut(&run) else {
            return;
        };
        if form == Form::Own {
            let names = part.names(from, to).iter().copied();
            self.own.remove_run(names, Spot { run, offset: from }, |_, _| ());
        }
        part.set(from, to, None);
        self.placed -= usize::from(to - from);
        self.touch(run);
    }

    /// Returns the names of a block that has a place, oldest first, each with its tiers. Empty if the block has no
    /// name.
    pub(super) fn names_of(&self, spot: Spot, runs: &RunWriter<'_>) -> Aliases {
        let part = self.parts.get(&spot.run);
        let held = part.and_then(|part| Some((part, part.get(spot.offset)?)));
        let Some((part, held)) = held else {
            return Aliases::new();
        };
        match held.form() {
            Form::Nameless => Aliases::new(),
            Form::Own | Form::Many => part.aliases(spot.offset, held.tiers()),
            Form::Hash => Aliases::from_iter([Alias {
                name: runs.hash(spot),
                tiers: held.tiers(),
            }]),
        }
    }
}
