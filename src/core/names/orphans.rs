//! Orphans: blocks whose parent the holder has never had. An orphan's place in the runs is not known yet. So orphans
//! are stored with the holder, and not in the runs.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use smallvec::SmallVec;

use crate::hash::{Position, PositionalLineageHash, SequenceHash};
use crate::index::block::{COMMON_MASK, is_fragment_of};
use crate::index::share::{classes, marked, tier_bit};
use crate::split_map::SplitMap;
use crate::wire::Tier;

use super::alias::{Alias, add_name, withdraw_from};

/// Key of an orphan, a block whose parent is unknown: its lineage hash. Keys are ordered by position, parent and own
/// hash, so orphans with the same parent are next to each other.
pub(super) type Key = PositionalLineageHash;

/// Number of orphans (blocks whose parent is unknown) that are checked at one time, when orphans without a name are
/// dropped. After that many, the locks are released for a moment.
const DROPPED_MAX: usize = 4096;
/// Maximum number of orphans with the same hash bits that a search by sequence hash checks. An orphan is a block whose
/// parent has never arrived.
const SAME_HASH_MAX: usize = 64;

/// Names of an orphan (block whose parent has never arrived), oldest first.
type OrphanNames = SmallVec<[Alias; 1]>;

/// Orphan: a block that has no place in the runs, because its parent has never arrived.
#[derive(Debug)]
pub(super) struct Orphan {
    /// Sequence hash of the block. It is the whole hash only if `is_whole` is true.
    hash: SequenceHash,
    is_whole: bool,
    /// Tiers that hold the block without a name, one bit each. 0 once the block has a name.
    pub(super) nameless: u8,
    pub(super) names: OrphanNames,
    /// Classes of tiers (device, host, all others; one bit each) in which the block is not resumable.
    pub(super) barred: u8,
}

impl Orphan {
    /// Makes an orphan (block whose parent is unknown) that `tiers` hold, under this name if there is one.
    pub(super) fn new(sequence_hash: Option<SequenceHash>, name: Option<u64>, tiers: u8) -> Self {
        Self {
            hash: sequence_hash.unwrap_or(SequenceHash(0)),
            is_whole: sequence_hash.is_some(),
            nameless: if name.is_none() { tiers } else { 0 },
            names: name.into_iter().map(|name| Alias { name, tiers }).collect(),
            barred: 0,
        }
    }

    /// Returns all tiers of the block, with and without a name.
    pub(super) fn tiers(&self) -> u8 {
        let named = self.names.iter().fold(0, |tiers, alias| tiers | alias.tiers);
        self.nameless | named
    }

    /// Marks the block as barred (not resumable) or not barred in one of its tiers.
    pub(super) fn mark(&mut self, tier: Tier, is_barred: bool) {
        self.barred = marked(self.barred, tier, is_barred);
    }

    /// Whether the block's whole hash is known, and is one of its names.
    fn is_named_by_hash(&self) -> bool {
        self.is_whole && self.names.iter().any(|alias| alias.name == self.hash.0)
    }

    /// Returns the whole sequence hash, if it is known.
    pub(super) fn sequence_hash(&self) -> Option<SequenceHash> {
        self.is_whole.then_some(self.hash)
    }
}

fn hash_of(key: Key) -> (u64, Key) {
    (key.current_hash_fragment() & COMMON_MASK, key)
}

/// Orphans of one holder: its blocks that have no place in the runs, because their parents have never arrived.
#[derive(Debug, Default)]
pub(super) struct Orphans {
    blocks: BTreeMap<Key, Orphan>,
    /// Keys of orphans, ordered by the bits of the sequence hash that a lineage hash keeps at every position. An orphan
    /// is left out if its whole hash is one of its names: `by_name` finds it.
    by_hash: BTreeSet<(u64, Key)>,
    /// Keys of orphans, by name. The keys are stored as bytes, which need no padding.
    by_name: SplitMap<u64, [u8; 16]>,
}

impl Orphans {
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Approximate number of bytes that the orphans take.
    pub(super) fn bytes(&self) -> usize {
        // Nodes are half full at least.
        let trees =
            self.blocks.len() * size_of::<(Key, Orphan)>() + self.by_hash.len() * size_of::<(u64, Key)>();
        trees / 4 * 7 + self.by_name.bytes()
    }

    pub(super) fn find_name(&self, name: u64) -> Option<Key> {
        let bytes = self.by_name.get(&name)?;
        Key::from_u128(u128::from_ne_bytes(*bytes)).ok()
    }

    pub(super) fn get(&self, key: Key) -> Option<&Orphan> {
        self.blocks.get(&key)
    }

    /// Returns the orphans that can have this sequence hash.
    pub(super) fn with_hash(&self, hash: u64) -> impl Iterator<Item = Key> + '_ {
        let common = hash & COMMON_MASK;
        let first = Key::at(Position::ZERO, SequenceHash(0), SequenceHash(0));
        let keys = self.by_hash.range((common, first)..).take(SAME_HASH_MAX);
        let keys = keys.take_while(move |(own, _)| *own == common);
        let is_it = move |key: &Key| match self.blocks.get(key).map(Orphan::sequence_hash) {
            Some(Some(own)) => own.0 == hash,
            _ => is_fragment_of(*key, hash),
        };
        let named = self.find_name(hash).filter(is_it);
        let others = keys.map(|(_, key)| *key).filter(is_it);
        named
            .into_iter()
            .chain(others.filter(move |key| Some(*key) != named))
    }

    /// Whether so many orphans have the bits of this sequence hash that [`Self::with_hash`] may miss some.
    pub(super) fn is_crowded(&self, hash: u64) -> bool {
        let first = Key::at(Position::ZERO, SequenceHash(0), SequenceHash(0));
        let mut keys = self.by_hash.range((hash & COMMON_MASK, first)..);
        keys.nth(SAME_HASH_MAX)
            .is_some_and(|(own, _)| *own == hash & COMMON_MASK)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (Key, &Orphan)> {
        self.blocks.iter().map(|(key, orphan)| (*key, orphan))
    }

    /// Inserts an orphan: a block whose parent the holder does not have.
    pub(super) fn insert(&mut self, key: Key, orphan: Orphan) {
        for alias in &orphan.names {
            self.by_name.insert(alias.name, key.as_u128().to_ne_bytes());
        }
        if !orphan.is_named_by_hash() {
            self.by_hash.insert(hash_of(key));
        }
        self.blocks.insert(key, orphan);
    }

    /// Adds a name with tiers, or only tiers, to an orphan. Also stores its whole hash, if it was not known before.
    /// Returns `false` if the orphan is absent or has too many names.
    pub(super) fn extend(
        &mut self,
        key: Key,
        sequence_hash: Option<SequenceHash>,
        name: Option<u64>,
        tiers: u8,
    ) -> bool {
        let Some(orphan) = self.blocks.get_mut(&key) else {
            return false;
        };
        if let Some(hash) = sequence_hash.filter(|_| !orphan.is_whole) {
            (orphan.hash, orphan.is_whole) = (hash, true);
        }
        match (name, orphan.names.first_mut()) {
            (None, Some(first)) => first.tiers |= tiers,
            (None, None) => orphan.nameless |= tiers,
            (Some(name), _) => {
                // Tiers that held the block without a name now hold it under its first name.
                let tiers = tiers | std::mem::take(&mut orphan.nameless);
                if !add_name(&mut orphan.names, name, tiers) {
                    return false;
                }
                self.by_name.insert(name, key.as_u128().to_ne_bytes());
            }
        }
        true
    }

    /// Marks an orphan as barred (not resumable) or not barred in a tier. Returns `false` if the orphan is not in that
    /// tier.
    pub(super) fn mark(&mut self, key: Key, tier: Tier, is_barred: bool) -> bool {
        let orphan = self.blocks.get_mut(&key);
        let Some(orphan) = orphan.filter(|orphan| orphan.tiers() & tier_bit(tier) != 0) else {
            return false;
        };
        orphan.mark(tier, is_barred);
        true
    }

    /// Removes an orphan and returns it.
    pub(super) fn remove(&mut self, key: Key) -> Option<Orphan> {
        let orphan = self.blocks.remove(&key)?;
        self.by_hash.remove(&hash_of(key));
        for alias in &orphan.names {
            self.by_name.remove(&alias.name);
        }
        Some(orphan)
    }

    /// Whether any orphan (block whose parent is unknown) waits for a parent at `position` with this hash or fragment.
    pub(super) fn is_awaited(&self, position: u64, hash: u64) -> bool {
        let Ok(position) = Position::new(position + 1) else {
            return false;
        };
        let key = |current| Key::at(position, SequenceHash(hash), SequenceHash(current));
        self.blocks.range(key(0)..=key(u64::MAX)).next().is_some()
    }

    /// Removes an orphan (block whose parent is unknown) that waits for a parent at `position` with this fragment, and
    /// returns it.
    pub(super) fn take_child(&mut self, position: u32, fragment: u64) -> Option<(Key, Orphan)> {
        let position = Position::new(u64::from(position) + 1).ok()?;
        let key = |current| Key::at(position, SequenceHash(fragment), SequenceHash(current));
        let key = *self.blocks.range(key(0)..=key(u64::MAX)).next()?.0;
        Some((key, self.remove(key)?))
    }

    /// Removes tiers from an orphan (block whose parent is unknown), under one name or under all names. Returns whether
    /// the orphan was in any of these tiers. An orphan without tiers is removed.
    pub(super) fn withdraw(&mut self, key: Key, name: Option<u64>, tiers: u8) -> bool {
        let Some(orphan) = self.blocks.get_mut(&key) else {
            return false;
        };
        let mut withdrawn = withdraw_from(&mut orphan.names, name, tiers, |name| {
            self.by_name.remove(&name);
        });
        if name.is_none() {
            withdrawn |= orphan.nameless & tiers;
            orphan.nameless &= !tiers;
        }
        orphan.barred &= classes(orphan.tiers());
        if !orphan.is_named_by_hash() {
            self.by_hash.insert(hash_of(key));
        }
        if orphan.names.is_empty() && orphan.nameless == 0 {
            self.remove(key);
        }
        withdrawn != 0
    }

    /// Checks some orphans (blocks whose parents are unknown) after the key `before`, and removes each that has no
    /// name. Returns the number of removed orphans, and the key of the last orphan checked, if any.
    pub(super) fn drop_nameless(&mut self, before: Option<Key>) -> (usize, Option<Key>) {
        let after = before.map_or(Bound::Unbounded, Bound::Excluded);
        let some = self.blocks.range((after, Bound::Unbounded)).take(DROPPED_MAX);
        let some: Vec<(Key, bool)> = some
            .map(|(key, orphan)| (*key, orphan.names.is_empty()))
            .collect();
        let nameless = some.iter().filter(|(_, is_nameless)| *is_nameless);
        let dropped = nameless.map(|(key, _)| drop(self.remove(*key))).count();
        (dropped, some.last().map(|(key, _)| *key))
    }
}
