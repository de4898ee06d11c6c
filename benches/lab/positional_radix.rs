//! A sparse two-level index over positional hashes: position, then hash.

use std::fmt;
use std::hash::Hash;

use dashmap::DashMap;
use dashmap::mapref::one::{Ref, RefMut};
use kvatlas_core::hash::PositionalLineageHash;

use crate::positional::PositionalHash;

/// Number of shards of the map of one position. Two are enough, because a thread that writes to the map mostly has a
/// lock on the outer shard, too.
///
/// More shards would cost memory. A deep sequence makes thousands of these maps, and with the default of four shards
/// per core each map would take kilobytes.
const LEVEL_SHARDS: usize = 2;

/// Values keyed by positional hash, grouped by position.
///
/// Both the group of a position and a key in its group are found in constant time.
///
/// The first value inserted at a position makes the position's map. Removing the last value removes the map. Every
/// method takes `&self`, so threads can share the tree.
///
/// # Guards and deadlock
///
/// [`PositionalRadixTree::prefix`] and [`PositionalRadixTree::position`] return guards that lock a shard of the outer
/// map: `prefix` for writing, `position` for reading. A shard covers many positions. So while a thread holds a guard,
/// it must not call any other method of the same tree: a second lock on the shard can wait forever, even for another
/// position. A guard must not live across an `await` either. Copy what is needed out of the guard and drop it.
///
/// # What concurrent calls see
///
/// Each single operation is atomic. [`PositionalRadixTree::len`], [`PositionalRadixTree::is_empty`] and
/// [`PositionalRadixTree::find_parent`] walk over shards. They see each entry that stays during the whole call. They
/// may miss an entry that is inserted or removed during the call.
pub struct PositionalRadixTree<K, V>
where
    K: PositionalHash + Hash + Eq + Clone,
{
    levels: DashMap<u64, DashMap<K, V>>,
}

impl<K, V> PositionalRadixTree<K, V>
where
    K: PositionalHash + Hash + Eq + Clone,
{
    /// An empty tree.
    pub fn new() -> Self {
        Self {
            levels: DashMap::new(),
        }
    }

    /// Returns the map for the position of `key`, and makes the map if there is none. Does not look up or insert
    /// `key`.
    ///
    /// A map that stays empty is removed only by a later [`PositionalRadixTree::remove`] at its position; it does not
    /// count in [`PositionalRadixTree::len`]. Insert only keys of that position: any other key is not found again.
    ///
    /// The guard locks for writing; see [the deadlock rule](Self#guards-and-deadlock).
    pub fn prefix(&self, key: &K) -> RefMut<'_, u64, DashMap<K, V>> {
        self.levels
            .entry(key.position())
            .or_insert_with(|| DashMap::with_shard_amount(LEVEL_SHARDS))
    }

    /// Returns the map of `position`, or `None` if there is none. The map may be empty.
    ///
    /// The guard locks for reading; see [the deadlock rule](Self#guards-and-deadlock). Values can be changed through
    /// it.
    pub fn position(&self, position: u64) -> Option<Ref<'_, u64, DashMap<K, V>>> {
        self.levels.get(&position)
    }

    /// Takes out the value of `key` and returns it. If the map of the position is empty afterwards, removes the map
    /// too.
    pub fn remove(&self, key: &K) -> Option<V> {
        let position = key.position();
        let (removed, emptied) = {
            let level = self.levels.get(&position)?;
            let removed = level.remove(key);
            (removed, level.is_empty())
        };
        if emptied {
            self.erase_if_empty(position);
        }
        removed.map(|(_, value)| value)
    }

    /// Erases the map of `position` if it is empty. Another thread may have inserted a value since the caller saw it
    /// empty, so the check is repeated under the exclusive lock.
    fn erase_if_empty(&self, position: u64) {
        self.levels.remove_if(&position, |_, level| level.is_empty());
    }

    /// The number of values at all positions. Visits every position.
    pub fn len(&self) -> usize {
        self.levels.iter().map(|level| level.len()).sum()
    }

    /// Whether there is no value at any position.
    pub fn is_empty(&self) -> bool {
        self.levels.iter().all(|level| level.is_empty())
    }
}

impl<V: Clone> PositionalRadixTree<PositionalLineageHash, V> {
    /// Returns a copy of the value of the parent of `hash`, if the tree has the parent. `None` for a first block.
    ///
    /// Looks at all blocks one position before `hash`, so the time grows with their number. If several of these
    /// blocks have the same fragment because hashes collide, returns the value of any one of them.
    pub fn find_parent(&self, hash: &PositionalLineageHash) -> Option<V> {
        let level = self.position(hash.position().checked_sub(1)?)?;
        level
            .iter()
            .find(|entry| hash.is_child_of(entry.key()))
            .map(|entry| entry.value().clone())
    }
}

impl<K, V> Default for PositionalRadixTree<K, V>
where
    K: PositionalHash + Hash + Eq + Clone,
{
    fn default() -> Self {
        Self::new()
    }
}

impl<K, V> fmt::Debug for PositionalRadixTree<K, V>
where
    K: PositionalHash + Hash + Eq + Clone,
{
    /// Writes only the sizes of the tree. Printing every entry would lock the tree for as long as the writer takes.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("PositionalRadixTree")
            .field("positions", &self.levels.len())
            .field("len", &self.len())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use kvatlas_core::hash::{BlockHash, SequenceHash, lineage_hashes_from};

    use super::*;
    use crate::PositionalSequenceHash;

    type Tree = PositionalRadixTree<PositionalSequenceHash, u32>;

    fn key(position: u64, content: u64) -> PositionalSequenceHash {
        PositionalSequenceHash::new(SequenceHash(content), position, BlockHash(content)).unwrap()
    }

    fn get(tree: &Tree, key: &PositionalSequenceHash) -> Option<u32> {
        tree.position(key.position())?.get(key).map(|value| *value)
    }

    #[test]
    fn a_removal_erases_the_emptied_position_only() {
        let tree = Tree::default();
        assert!(tree.is_empty());
        tree.prefix(&key(3, 1)).insert(key(3, 1), 10);
        tree.prefix(&key(3, 2)).insert(key(3, 2), 20);
        tree.prefix(&key(4, 1)).insert(key(4, 1), 30);
        assert_eq!(
            format!("{tree:?}"),
            "PositionalRadixTree { positions: 2, len: 3 }"
        );

        assert_eq!(tree.remove(&key(3, 1)), Some(10));
        assert_eq!(tree.remove(&key(3, 1)), None);
        assert!(tree.position(3).is_some());
        assert_eq!(tree.remove(&key(3, 2)), Some(20));
        assert!(tree.position(3).is_none());
        assert_eq!(tree.len(), 1);
    }

    #[test]
    fn a_prefix_left_empty_counts_nothing_and_goes_with_the_next_removal() {
        let tree = Tree::new();
        assert!(tree.prefix(&key(9, 1)).is_empty());
        assert!(tree.is_empty());
        assert_eq!(tree.len(), 0);
        assert_eq!(tree.remove(&key(9, 1)), None);
        assert!(tree.position(9).is_none());
    }

    /// Plays one order of steps: a thread removes the last value of a position, then another thread inserts a value,
    /// and then the first thread goes on.
    #[test]
    fn an_insertion_before_the_erasure_survives_it() {
        let tree = Tree::new();
        tree.prefix(&key(5, 1)).insert(key(5, 1), 10);
        tree.erase_if_empty(5);
        assert_eq!(get(&tree, &key(5, 1)), Some(10));
    }

    /// Checks that several threads can empty and fill one position at the same time. No insertion is lost, and no
    /// thread waits forever.
    #[test]
    fn concurrent_removals_lose_no_insertion() {
        let tree = Tree::new();
        let start = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for content in 0..4 {
                let (tree, start) = (&tree, &start);
                scope.spawn(move || {
                    let key = key(5, content);
                    start.wait();
                    for round in 0..20_000 {
                        tree.prefix(&key).insert(key, round);
                        assert_eq!(get(tree, &key), Some(round));
                        assert_eq!(tree.remove(&key), Some(round));
                    }
                });
            }
        });
        assert!(tree.is_empty());
        assert!(tree.position(5).is_none());
    }

    #[test]
    fn a_parent_is_found_across_mode_boundaries() {
        for first in [0_u64, 253, 65_533] {
            let tree = PositionalRadixTree::new();
            let before = (first > 0).then_some(SequenceHash(u64::MAX - 1));
            // Two branches at each position, so that a wrong match would show.
            let branches = [1_u64, 2].map(|branch| {
                let sequence: Vec<_> = (0..5)
                    .map(|index| SequenceHash(u64::MAX << 8 ^ branch << 40 ^ index))
                    .collect();
                lineage_hashes_from(first, before, &sequence)
                    .collect::<Result<Vec<_>, _>>()
                    .unwrap()
            });
            for hash in branches.iter().flatten() {
                tree.prefix(hash).insert(*hash, *hash);
            }
            for branch in &branches {
                assert_eq!(tree.find_parent(&branch[0]), None);
                for pair in branch.windows(2) {
                    assert_eq!(tree.find_parent(&pair[1]), Some(pair[0]));
                }
                tree.remove(&branch[2]);
                assert_eq!(tree.find_parent(&branch[3]), None);
            }
        }
    }

    #[derive(Clone, Debug)]
    enum Operation {
        Insert(PositionalSequenceHash, u32),
        Remove(PositionalSequenceHash),
        Get(PositionalSequenceHash),
    }

    fn operations() -> impl Strategy<Value = Vec<Operation>> {
        let keys = || {
            (prop::sample::select(vec![0_u64, 1, 255, 256, 65_536]), 0_u64..4).prop_map(|(p, c)| key(p, c))
        };
        let operation = prop_oneof![
            (keys(), any::<u32>()).prop_map(|(key, value)| Operation::Insert(key, value)),
            keys().prop_map(Operation::Remove),
            keys().prop_map(Operation::Get),
        ];
        prop::collection::vec(operation, 0..120)
    }

    proptest! {
        #[test]
        fn the_tree_behaves_as_an_ordered_map(operations in operations()) {
            let tree = Tree::new();
            let mut model = BTreeMap::new();
            for operation in operations {
                match operation {
                    Operation::Insert(key, value) => {
                        prop_assert_eq!(tree.prefix(&key).insert(key, value), model.insert(key, value));
                    }
                    Operation::Remove(key) => prop_assert_eq!(tree.remove(&key), model.remove(&key)),
                    Operation::Get(key) => prop_assert_eq!(get(&tree, &key), model.get(&key).copied()),
                }
                prop_assert_eq!(tree.len(), model.len());
                prop_assert_eq!(tree.is_empty(), model.is_empty());
            }
            let mut entries = BTreeMap::new();
            for level in &tree.levels {
                entries.extend(level.iter().map(|entry| (*entry.key(), *entry.value())));
            }
            prop_assert_eq!(&entries, &model);
            let mut positions: Vec<_> = model.keys().map(PositionalSequenceHash::position).collect();
            positions.dedup();
            prop_assert_eq!(tree.levels.len(), positions.len());
        }
    }
}
