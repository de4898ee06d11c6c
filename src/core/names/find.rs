//! Finding a holder's blocks by name, sequence hash or lineage hash.
//!
//! Each name is in exactly one of three tables. The form of a block ([`Form`](super::form::Form)) tells how the engine
//! names the block, and so decides the table. Names of blocks with the form `Hash` are in the runs' table of hashes.
//! Names of blocks with the forms `Own` and `Many` are in the holder's table. Names of blocks without a place are among
//! the orphans, whose parent is unknown.

use smallvec::SmallVec;

use crate::hash::SequenceHash;
use crate::index::runs::{Places, RunWriter, Spot, is_same_at};
use crate::index::share::Attributes;

use super::alias::{Alias, Aliases};
use super::applied::RejectReason;
use super::form::{Form, NameNotes};
use super::orphans::{Key, Orphan};
use super::state::{HolderState, Work};

/// Maximum number of twins that a holder may store before it is emptied. Engines make none: at least 51 bits of two hashes
/// agree by accident only.
const TWINS_MAX: u32 = 32;

/// Place of a block that a holder has. The block is in a run of the index, or it is an orphan, that is, a block whose
/// parent has never arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FoundBlock {
    Placed(Spot),
    Orphan(Key),
}

impl FoundBlock {
    fn key(self, runs: &RunWriter<'_>) -> Key {
        match self {
            Self::Placed(spot) => runs.key(spot),
            Self::Orphan(key) => key,
        }
    }
}

/// Start of a sequence of blocks: position 0, or the place after a block.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Start {
    /// Position of the first block.
    pub(super) position: u64,
    /// Sequence hash of the block before the first block, or the fragment of that hash that is known.
    pub(super) parent: Option<SequenceHash>,
    /// Whether `parent` is a whole sequence hash of the index's own chain.
    pub(super) parent_is_known: bool,
    /// The parent's place, if it has one.
    pub(super) spot: Option<Spot>,
}

impl HolderState {
    /// Returns the block that the engine calls `name`.
    pub(super) fn find_name(&self, name: u64, runs: &RunWriter<'_>) -> Option<FoundBlock> {
        let placed = self.find_spot(name, runs).map(FoundBlock::Placed);
        placed.or_else(|| self.orphans.find_name(name).map(FoundBlock::Orphan))
    }

    /// Returns the place of the block that the engine calls `name`. `None` if only a block without a place has the
    /// name.
    pub(super) fn find_spot(&self, name: u64, runs: &RunWriter<'_>) -> Option<Spot> {
        if let Some(spot) = self.names.find(name) {
            return Some(spot);
        }
        runs.find_place(name, |spot| {
            let held = self.attributes(spot).filter(|_| runs.hash(spot) == name)?;
            (held.form() == Form::Hash).then_some(spot)
        })
    }

    /// Returns the places of all blocks with this lineage hash. There is at most one if each sequence hash is made from
    /// the hash of the parent.
    pub(super) fn find_keys(&self, key: Key, runs: &RunWriter<'_>) -> SmallVec<[Spot; 2]> {
        self.find_keyed(key.current_hash_fragment(), runs, |spot, _| runs.key(spot) == key)
    }

    /// Returns all blocks with this sequence hash. There is at most one if each hash is made from the parent's hash.
    pub(super) fn find_hash(&self, hash: u64, runs: &RunWriter<'_>) -> SmallVec<[FoundBlock; 2]> {
        let placed = self.find_keyed(hash, runs, |spot, held| {
            let own = runs.hash(spot);
            own == hash || !held.is_whole() && is_same_at(runs.position(spot), own, hash)
        });
        let orphans = self.orphans.with_hash(hash).map(FoundBlock::Orphan);
        placed
            .into_iter()
            .map(FoundBlock::Placed)
            .chain(orphans)
            .collect()
    }

    /// Returns the places of those blocks of the holder that the table of hashes finds for `hash` and for which `is_it`
    /// is true. The table can find blocks with other hashes, too, so `is_it` must compare the hash.
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

    /// Counts a rejection that puts the holder in doubt, if a search by this sequence hash, or fragment of it, may miss a
    /// block of the holder: very many blocks have it.
    pub(super) fn doubt_crowded(&self, hash: u64, work: &mut Work<'_>) {
        let is_crowded = work.runs.places_of(hash) == Places::TooMany || self.orphans.is_crowded(hash);
        work.applied
            .reject(RejectReason::CrowdedHash, usize::from(is_crowded));
    }

    /// Number of leading blocks, of `count` blocks from `first` on, that the holder may store. It may store few twins of
    /// blocks that it has: blocks after the same block whose hashes agree in the bits that lineage hashes keep. A query by
    /// lineage hashes follows each of them.
    pub(super) fn without_twins(&mut self, first: Spot, count: usize, runs: &RunWriter<'_>) -> usize {
        if runs.store.twins() == 0 {
            return count;
        }
        for (done, offset) in (first.offset..).take(count).enumerate() {
            let spot = Spot { offset, ..first };
            let is_new = self.attributes(spot).is_none() && runs.may_have_twins(spot);
            if is_new && runs.twins_of(spot).any(|twin| self.attributes(twin).is_some()) {
                if self.twins == TWINS_MAX {
                    return done;
                }
                self.twins += 1;
            }
        }
        count
    }

    /// Finds the block that an event names as a parent, and returns where its children begin. `name` is the engine's
    /// name for the block, or else the block's sequence hash. `position` is the position of the first child, if the
    /// event gives it. If hashes are not made from their parents' hashes, several blocks at different positions can
    /// have this name or hash. Then `position` decides.
    pub(super) fn find_parent(
        &self,
        name: u64,
        position: Option<u64>,
        runs: &RunWriter<'_>,
    ) -> Option<Start> {
        let precedes =
            |(key, _): &(Key, FoundBlock)| position.is_none_or(|position| position == key.position() + 1);
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

    /// Returns where the children of a block begin. `hash` is the block's whole sequence hash, if the caller knows it.
    /// If the holder knows the whole hash, the holder's value is used instead.
    fn start_after(
        &self,
        key: Key,
        found: FoundBlock,
        hash: Option<SequenceHash>,
        runs: &RunWriter<'_>,
    ) -> Start {
        let (spot, known) = match found {
            FoundBlock::Placed(spot) => {
                let is_whole = self.attributes(spot).is_some_and(Attributes::is_whole);
                (Some(spot), is_whole.then(|| SequenceHash(runs.hash(spot))))
            }
            FoundBlock::Orphan(key) => (None, self.orphans.get(key).and_then(Orphan::sequence_hash)),
        };
        let known = known.or(hash);
        // A lineage hash contains only this fragment of the parent's hash, so the fragment is enough for the children.
        let fragment = SequenceHash(key.current_hash_fragment());
        Start {
            position: key.position() + 1,
            parent: Some(known.unwrap_or(fragment)),
            parent_is_known: known.is_some(),
            spot,
        }
    }

    /// Returns the block that already has `name`, if it is not the block at `spot`. The caller is about to give `name`
    /// to the block at `spot`. `form` tells how the engine will then name that block.
    pub(super) fn find_other(
        &self,
        name: u64,
        spot: Spot,
        form: Form,
        runs: &RunWriter<'_>,
    ) -> Option<FoundBlock> {
        // Usually no table, or only one, can have another block of this name.
        let found = match form {
            Form::Hash if self.names.len() == 0 && !runs.has_doubles() => None,
            Form::Own | Form::Many if !self.has_hash_names() => self.names.find(name),
            _ => self.find_spot(name, runs),
        };
        match found {
            Some(found) if found != spot => Some(FoundBlock::Placed(found)),
            Some(_) => None,
            None => self.orphans.find_name(name).map(FoundBlock::Orphan),
        }
    }

    /// Whether the holder may have a block whose name is its own sequence hash.
    pub(super) fn has_hash_names(&self) -> bool {
        self.names.blocks() < self.share.blocks()
    }

    /// Returns the names of a block that has a place, oldest first, each with its tiers. Empty if the block has no
    /// name.
    pub(super) fn names_of(&self, spot: Spot, runs: &RunWriter<'_>) -> Aliases {
        let Some(held) = self.attributes(spot) else {
            return Aliases::new();
        };
        let tiers = held.tiers();
        match held.form() {
            Form::Nameless => Aliases::new(),
            Form::Own | Form::Many => self.names.of(spot, tiers),
            Form::Hash => Aliases::from_iter([Alias {
                name: runs.hash(spot),
                tiers,
            }]),
        }
    }
}
