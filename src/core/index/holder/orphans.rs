//! Blocks whose parent the holder has never had: where they belong among the runs is not known yet, so only the holder has them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;

use smallvec::SmallVec;

use super::Outcome;
use crate::hash::{PositionalLineageHash, SequenceHash};
use crate::index::block::{BlockKey, COMMON_MASK};

/// Position, parent fragment and current fragment: in this order those that wait for one block stand together.
type Place = (u64, u64, u64);

fn place_of(key: PositionalLineageHash) -> Place {
    (
        key.position(),
        key.parent_hash_fragment(),
        key.current_hash_fragment(),
    )
}

/// Most blocks with equal hashes that are looked at.
const SAME_HASH_MAX: usize = 64;

/// One of the names of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Alias {
    pub(super) name: u64,
    /// The tiers that hold the block under this name; never none.
    pub(super) tiers: u8,
}

/// The names of a block, oldest first.
pub(super) type Names = SmallVec<[Alias; 1]>;

/// Most names of one block; keeps the names of a holder in proportion to its blocks.
pub(super) const NAMES_MAX: usize = 16;

/// Adds a tier to a name; false where the block has too many names.
pub(super) fn add_name(names: &mut Names, name: u64, tiers: u8) -> bool {
    let is_full = names.len() >= NAMES_MAX;
    match names.iter_mut().find(|alias| alias.name == name) {
        Some(alias) => alias.tiers |= tiers,
        None if is_full => return false,
        None => names.push(Alias { name, tiers }),
    }
    true
}

/// A block without a place.
#[derive(Debug)]
pub(super) struct Orphan {
    pub(super) key: PositionalLineageHash,
    pub(super) sequence_hash: Option<SequenceHash>,
    /// The tiers that hold it without a name; none once it has one.
    pub(super) nameless: u8,
    pub(super) names: Names,
}

fn hash_of(place: Place) -> (u64, Place) {
    (place.2 & COMMON_MASK, place)
}

/// The blocks of a holder that have no place.
#[derive(Debug, Default)]
pub(super) struct Orphans {
    blocks: BTreeMap<Place, Orphan>,
    /// By the bits of the sequence hash that every position keeps.
    by_hash: BTreeSet<(u64, Place)>,
    by_name: HashMap<u64, Place>,
}

impl Orphans {
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// What they take, in bytes, roughly.
    pub(super) fn bytes(&self) -> usize {
        self.blocks.len() * 2 * (size_of::<(Place, Orphan)>() + size_of::<(u64, Place)>())
            + self.by_name.len() * 2 * size_of::<(u64, Place)>()
    }

    pub(super) fn find_name(&self, name: u64) -> Option<PositionalLineageHash> {
        let place = self.by_name.get(&name)?;
        Some(self.blocks.get(place)?.key)
    }

    pub(super) fn get(&self, key: PositionalLineageHash) -> Option<&Orphan> {
        self.blocks.get(&place_of(key))
    }

    /// The blocks with this sequence hash, by position.
    pub(super) fn with_hash(&self, hash: u64) -> impl Iterator<Item = PositionalLineageHash> + '_ {
        let common = hash & COMMON_MASK;
        let places = self.by_hash.range((common, (0, 0, 0))..);
        let places = places
            .take_while(move |(own, _)| *own == common)
            .take(SAME_HASH_MAX);
        let orphans = places.filter_map(|(_, place)| self.blocks.get(place));
        let is_it = move |orphan: &&Orphan| match orphan.sequence_hash {
            Some(own) => own.0 == hash,
            None => BlockKey::from(orphan.key).is_current(hash, false),
        };
        orphans.filter(is_it).map(|orphan| orphan.key)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Orphan> {
        self.blocks.values()
    }

    /// Adds a block that is not there. Its parent has a place.
    pub(super) fn insert(&mut self, orphan: Orphan) {
        let place = place_of(orphan.key);
        for alias in &orphan.names {
            self.by_name.insert(alias.name, place);
        }
        self.by_hash.insert(hash_of(place));
        self.blocks.insert(place, orphan);
    }

    /// Adds a name and a tier, or a tier alone, to a block that is there; false where it has too many names.
    pub(super) fn extend(
        &mut self,
        key: PositionalLineageHash,
        sequence_hash: Option<SequenceHash>,
        name: Option<u64>,
        tiers: u8,
    ) -> bool {
        let place = place_of(key);
        let Some(orphan) = self.blocks.get_mut(&place) else {
            return false;
        };
        orphan.sequence_hash = orphan.sequence_hash.or(sequence_hash);
        match (name, orphan.names.first_mut()) {
            (None, Some(first)) => first.tiers |= tiers,
            (None, None) => orphan.nameless |= tiers,
            (Some(name), _) => {
                // The first name takes over what was stored without one.
                let tiers = tiers | std::mem::take(&mut orphan.nameless);
                if !add_name(&mut orphan.names, name, tiers) {
                    return false;
                }
                self.by_name.insert(name, place);
            }
        }
        true
    }

    /// Takes a block out.
    pub(super) fn remove(&mut self, key: PositionalLineageHash) -> Option<Orphan> {
        let place = place_of(key);
        let orphan = self.blocks.remove(&place)?;
        self.by_hash.remove(&hash_of(place));
        for alias in &orphan.names {
            self.by_name.remove(&alias.name);
        }
        Some(orphan)
    }

    /// A block that waits for the one at `position` with this fragment.
    pub(super) fn child_of(&self, position: u64, fragment: u64) -> Option<PositionalLineageHash> {
        let first = Bound::Included((position + 1, fragment, 0));
        let last = Bound::Included((position + 1, fragment, u64::MAX));
        let (_, orphan) = self.blocks.range((first, last)).next()?;
        Some(orphan.key)
    }

    /// Takes tiers from a block: under one name, or under all. A block that nothing holds any more is gone.
    pub(super) fn withdraw(&mut self, key: PositionalLineageHash, name: Option<u64>, tiers: u8) -> Outcome {
        let Some(orphan) = self.blocks.get_mut(&place_of(key)) else {
            return Outcome::Unknown;
        };
        let mut held = 0;
        if name.is_none() {
            held |= orphan.nameless;
            orphan.nameless &= !tiers;
        }
        for alias in orphan
            .names
            .iter_mut()
            .filter(|alias| name.is_none_or(|name| name == alias.name))
        {
            held |= alias.tiers;
            alias.tiers &= !tiers;
            if alias.tiers == 0 {
                self.by_name.remove(&alias.name);
            }
        }
        orphan.names.retain(|alias| alias.tiers != 0);
        let is_gone = orphan.names.is_empty() && orphan.nameless == 0;
        if is_gone {
            self.remove(key);
        }
        match (held & tiers, is_gone) {
            (0, _) => Outcome::Unknown,
            (_, true) => Outcome::Gone,
            _ => Outcome::Remains,
        }
    }

    /// Takes out all that have no name; says how many.
    pub(super) fn drop_nameless(&mut self) -> usize {
        let nameless = self.blocks.values().filter(|orphan| orphan.names.is_empty());
        let keys: Vec<_> = nameless.map(|orphan| orphan.key).collect();
        for key in &keys {
            self.remove(*key);
        }
        keys.len()
    }
}
