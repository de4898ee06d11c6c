//! Hash map that never grows as a whole. A large map consists of many small maps, each of which grows and shrinks
//! separately.

use std::hash::{BuildHasher, Hash};

use hashbrown::{DefaultHashBuilder, HashMap};

/// Number of entries at which one map is split into [`SPLITS`] small maps.
const WHOLE_MAX: usize = 8192;
/// Number of small maps that a large map consists of.
const SPLITS: usize = 256;

/// Hash map that consists of one map while small, and of [`SPLITS`] small maps once large.
#[derive(Debug)]
pub(crate) struct SplitMap<K, V> {
    /// Maps that hold the entries: none, one, or [`SPLITS`] of them.
    maps: Vec<HashMap<K, V>>,
    chooser: DefaultHashBuilder,
    /// Bytes that the small maps have allocated for entries.
    bytes: usize,
}

impl<K, V> Default for SplitMap<K, V> {
    fn default() -> Self {
        Self {
            maps: Vec::new(),
            chooser: DefaultHashBuilder::default(),
            bytes: 0,
        }
    }
}

impl<K: Hash + Eq, V> SplitMap<K, V> {
    pub(crate) fn is_empty(&self) -> bool {
        self.maps.iter().all(HashMap::is_empty)
    }

    /// Number of bytes that all small maps together have allocated.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes + self.maps.capacity() * size_of::<HashMap<K, V>>()
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "masked to the number of maps")]
    fn place(&self, key: &K) -> usize {
        if self.maps.len() <= 1 {
            return 0;
        }
        self.chooser.hash_one(key) as usize % SPLITS
    }

    #[inline]
    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        self.maps.get(self.place(key))?.get(key)
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let place = self.place(key);
        self.maps.get_mut(place)?.get_mut(key)
    }

    /// Returns the small map in which `key` belongs, after making room there for one more entry.
    fn roomy(&mut self, key: &K) -> &mut HashMap<K, V> {
        match self.maps.as_slice() {
            [] => self.maps.push(HashMap::new()),
            [whole] if whole.len() >= WHOLE_MAX => self.split(),
            _ => {}
        }
        let place = self.place(key);
        let map = &mut self.maps[place];
        if map.len() == map.capacity() {
            self.bytes -= map.allocation_size();
            map.reserve(1);
            self.bytes += map.allocation_size();
        }
        map
    }

    #[cold]
    fn split(&mut self) {
        let old = std::mem::replace(&mut self.maps, (0..SPLITS).map(|_| HashMap::new()).collect());
        for (key, value) in old.into_iter().flatten() {
            let place = self.place(&key);
            self.maps[place].insert(key, value);
        }
        self.bytes = self.maps.iter().map(HashMap::allocation_size).sum();
    }

    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        self.roomy(&key).insert(key, value)
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let place = self.place(key);
        let map = self.maps.get_mut(place)?;
        let gone = map.remove(key)?;
        if map.len() < map.capacity() / 8 {
            self.bytes -= map.allocation_size();
            map.shrink_to(map.len() * 2);
            self.bytes += map.allocation_size();
        }
        if map.is_empty() && self.is_empty() {
            *self = Self::default();
        }
        Some(gone)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.maps.iter().flatten()
    }

    /// Number of small maps. Each has so few keys that a caller can look at all of them ([`Self::keys_of`]) without
    /// delaying other work.
    pub(crate) fn splits(&self) -> usize {
        self.maps.len()
    }

    /// Returns the keys of one of the small maps.
    pub(crate) fn keys_of(&self, number: usize) -> impl Iterator<Item = &K> {
        self.maps.get(number).into_iter().flat_map(HashMap::keys)
    }
}

impl<K: Hash + Eq, V: Default> SplitMap<K, V> {
    /// Returns the value of a key. Inserts the default value if the key is absent.
    #[inline]
    pub(crate) fn or_default(&mut self, key: K) -> &mut V {
        self.roomy(&key).entry(key).or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use kvatlas_lab::random::Random;

    use super::*;

    #[test]
    fn a_split_map_equals_a_whole_one() {
        let mut random = Random::new(5);
        let (mut map, mut model) = (SplitMap::default(), HashMap::new());
        let mut bytes_max = 0;
        for step in 0..200_000_u64 {
            let grows = step < 100_000;
            let key = random.next() % 30_000;
            match random.below(10) {
                0..4 if grows => assert_eq!(map.insert(key, step), model.insert(key, step)),
                4..6 if grows => *map.or_default(key) = *model.entry(key).or_insert(0),
                0..8 => assert_eq!(map.remove(&key), model.remove(&key)),
                _ => assert_eq!(map.get(&key), model.get(&key)),
            }
            assert_eq!(map.is_empty(), model.is_empty());
            bytes_max = bytes_max.max(map.bytes());
        }
        assert!(map.splits() == SPLITS && map.bytes() > model.len() * 16);
        let mut all: Vec<_> = map.iter().map(|(key, value)| (*key, *value)).collect();
        let mut keys: Vec<_> = (0..map.splits())
            .flat_map(|number| map.keys_of(number).copied())
            .collect();
        let mut expected: Vec<_> = model.into_iter().collect();
        all.sort_unstable();
        keys.sort_unstable();
        expected.sort_unstable();
        assert_eq!(all, expected);
        assert!(keys.iter().eq(expected.iter().map(|(key, _)| key)));
        assert!(map.bytes() < bytes_max / 2, "{} of {bytes_max}", map.bytes());
        for key in keys {
            assert!(map.remove(&key).is_some());
        }
        assert_eq!((map.is_empty(), map.bytes()), (true, 0));
    }
}
