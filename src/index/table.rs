//! The shared table: lineage hash → holders. The seam behind which the storage can change.
//!
//! Entries are spread over shards, each a hash table behind a reader-writer lock that is held for one entry's access.
//! An entry is found by its (position, current fragment); the full lineage hash is compared. So two entries that differ
//! only in the parent fragment meet, and the table notices that hashes are no chain.

use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::hash_table::Entry as Slot;
use hashbrown::{DefaultHashBuilder, HashTable};
use parking_lot::RwLock;

use crate::hash::PositionalLineageHash;

use super::holder_set::{HolderSet, HolderSlot};

/// Many more shards than cores, so that lanes and queries seldom meet.
const SHARDS: usize = 256;

/// A block's place apart from its parent: position and current fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    position: u32,
    fragment: u64,
}

impl Place {
    pub(crate) fn of(key: PositionalLineageHash) -> Self {
        Self {
            position: position(key),
            fragment: key.current_hash_fragment(),
        }
    }

    /// The place of `key`'s parent; none at position 0.
    pub(crate) fn of_parent(key: PositionalLineageHash) -> Option<Self> {
        let position = position(key).checked_sub(1)?;
        Some(Self {
            position,
            fragment: key.parent_hash_fragment(),
        })
    }

    pub(crate) fn hash(self, hasher: &DefaultHashBuilder) -> u64 {
        hasher.hash_one(self)
    }
}

fn position(key: PositionalLineageHash) -> u32 {
    crate::hash::Position::from(key).as_u32()
}

#[derive(Debug)]
struct Entry {
    key: PositionalLineageHash,
    holders: HolderSet,
}

#[derive(Debug, Default)]
struct Shard {
    entries: RwLock<HashTable<Entry>>,
}

/// Lineage hash → holders, shared by all lanes and queries of one index.
#[derive(Debug)]
pub(crate) struct EntryTable {
    shards: Box<[Shard]>,
    hasher: DefaultHashBuilder,
    entries: AtomicU64,
    chain_conflicts: AtomicU64,
    /// What readers could see, step by step, where a test of the consistency contract asks for it.
    #[cfg(test)]
    pub(crate) steps: parking_lot::Mutex<Option<Vec<Step>>>,
}

/// One change of the table.
#[cfg(test)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    pub(crate) key: PositionalLineageHash,
    pub(crate) is_insertion: bool,
}

impl EntryTable {
    pub(crate) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
            // Seeded per process: a publisher cannot choose hashes that meet in one bucket.
            hasher: DefaultHashBuilder::default(),
            entries: AtomicU64::new(0),
            chain_conflicts: AtomicU64::new(0),
            #[cfg(test)]
            steps: parking_lot::Mutex::default(),
        }
    }

    fn shard(&self, hash: u64) -> &Shard {
        // The top bits: the table inside the shard uses the low bits and the top seven for its tags.
        let index = usize::try_from(hash >> 32).unwrap_or_default() % SHARDS;
        &self.shards[index]
    }

    #[cfg(test)]
    fn note_step(&self, key: PositionalLineageHash, is_insertion: bool) {
        if let Some(steps) = &mut *self.steps.lock() {
            steps.push(Step { key, is_insertion });
        }
    }

    /// Adds `slot` to the holders of `key`; says whether it is new there.
    pub(crate) fn insert(&self, key: PositionalLineageHash, slot: HolderSlot) -> bool {
        #[cfg(test)]
        self.note_step(key, true);
        let place = Place::of(key);
        let hash = place.hash(&self.hasher);
        let mut meets_other_parent = false;
        let is_same = |entry: &Entry| {
            let is_same = entry.key == key;
            meets_other_parent |= !is_same && Place::of(entry.key) == place;
            is_same
        };
        let mut entries = self.shard(hash).entries.write();
        match entries.entry(hash, is_same, |entry| Place::of(entry.key).hash(&self.hasher)) {
            Slot::Occupied(mut entry) => entry.get_mut().holders.insert(slot),
            Slot::Vacant(vacant) => {
                if meets_other_parent {
                    // Before the entry can be seen, so that no search that sees it trusts the chain.
                    self.chain_conflicts.fetch_add(1, Ordering::SeqCst);
                }
                vacant.insert(Entry {
                    key,
                    holders: HolderSet::single(slot),
                });
                self.entries.fetch_add(1, Ordering::Relaxed);
                true
            }
        }
    }

    /// Takes `slot` out of the holders of `key`, and erases the entry with its last holder.
    pub(crate) fn remove(&self, key: PositionalLineageHash, slot: HolderSlot) -> bool {
        #[cfg(test)]
        self.note_step(key, false);
        let hash = Place::of(key).hash(&self.hasher);
        let mut entries = self.shard(hash).entries.write();
        let Ok(mut entry) = entries.find_entry(hash, |entry| entry.key == key) else {
            return false;
        };
        let was_in = entry.get_mut().holders.remove(slot);
        if entry.get().holders.is_empty() {
            entry.remove();
            self.entries.fetch_sub(1, Ordering::Relaxed);
            // A shard that has become sparse gives its memory back; the factor keeps this rare.
            if entries.capacity() > 64 && entries.len() < entries.capacity() / 8 {
                let kept = entries.len() * 2;
                entries.shrink_to(kept, |entry| Place::of(entry.key).hash(&self.hasher));
            }
        }
        was_in
    }

    /// What `view` says about the holders of `key`; none where nobody holds it.
    pub(crate) fn read<T>(
        &self,
        key: PositionalLineageHash,
        view: impl FnOnce(&HolderSet) -> T,
    ) -> Option<T> {
        let hash = Place::of(key).hash(&self.hasher);
        let entries = self.shard(hash).entries.read();
        entries
            .find(hash, |entry| entry.key == key)
            .map(|entry| view(&entry.holders))
    }

    /// Shows `view` the holders of all keys with the position and the current fragment of `key`, whatever their parents. There is
    /// more than one only where hashes are no chain.
    pub(crate) fn read_any_parent(&self, key: PositionalLineageHash, mut view: impl FnMut(&HolderSet)) {
        let place = Place::of(key);
        let hash = place.hash(&self.hasher);
        let entries = self.shard(hash).entries.read();
        entries
            .iter_hash(hash)
            .filter(|entry| Place::of(entry.key) == place)
            .for_each(|entry| view(&entry.holders));
    }

    /// How many entries there are.
    pub(crate) fn len(&self) -> u64 {
        self.entries.load(Ordering::Relaxed)
    }

    /// How often an entry met another of its position and current fragment with another parent.
    pub(crate) fn chain_conflicts(&self) -> u64 {
        self.chain_conflicts.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use crate::hash::{Position, SequenceHash};

    use super::*;

    fn key(position: u64, parent: u64, current: u64) -> PositionalLineageHash {
        PositionalLineageHash::at(
            Position::new(position).unwrap(),
            SequenceHash(parent),
            SequenceHash(current),
        )
    }

    #[test]
    fn an_emptied_entry_is_erased() {
        let table = EntryTable::new();
        let (first, second) = (HolderSlot::new(0).unwrap(), HolderSlot::new(1).unwrap());
        assert!(table.insert(key(1, 5, 6), first));
        assert!(table.insert(key(1, 5, 6), second));
        assert!(!table.insert(key(1, 5, 6), second));
        assert_eq!(table.len(), 1);
        assert!(table.remove(key(1, 5, 6), first));
        assert!(!table.remove(key(1, 5, 6), first));
        assert_eq!(table.read(key(1, 5, 6), HolderSet::len), Some(1));
        assert!(table.remove(key(1, 5, 6), second));
        assert_eq!(table.read(key(1, 5, 6), HolderSet::len), None);
        assert_eq!(table.len(), 0);
    }

    #[test]
    fn a_second_parent_for_one_place_is_noticed() {
        let table = EntryTable::new();
        let slot = HolderSlot::new(0).unwrap();
        for current in 0..500 {
            table.insert(key(1, 5, current), slot);
            table.insert(key(2, 5, current), slot);
        }
        assert_eq!(table.chain_conflicts(), 0);
        table.insert(key(2, 7, 250), slot);
        assert_eq!(table.chain_conflicts(), 1);
    }

    #[test]
    fn memory_goes_back_after_a_mass_removal() {
        let table = EntryTable::new();
        let slot = HolderSlot::new(0).unwrap();
        for current in 0..100_000 {
            table.insert(key(1, 5, current), slot);
        }
        for current in 0..100_000 {
            table.remove(key(1, 5, current), slot);
        }
        let capacity: usize = table
            .shards
            .iter()
            .map(|shard| shard.entries.read().capacity())
            .sum();
        assert!(capacity <= SHARDS * 64, "{capacity} places are still allocated");
    }
}
