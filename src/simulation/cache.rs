//! The block cache of one simulated worker: bounded, prefix-aware, least recently used first.
//!
//! The blocks form trees: the parent of a block is the one before it in its sequence. A request is admitted by touching the
//! longest prefix of it that is resident and inserting the rest. At the bound the least recently used **leaf** goes, so a
//! block never goes before its children and the cache has no hole at any time. What goes is never part of the request being
//! admitted: see [`PrefixCache::admit`].
//!
//! A block costs O(log n) for the ordered set of leaves, and O(1) otherwise.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;

use kvatlas_core::hash::SequenceHash;

/// One resident block.
#[derive(Debug)]
struct Block {
    parent: Option<SequenceHash>,
    position: usize,
    children: usize,
    /// The admission that used it last.
    used: u64,
}

/// What an admission did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Admission {
    /// How many leading blocks of the request were resident before.
    pub hit_blocks: usize,
    /// How many leading blocks are resident now: all of them, or as many as the cache has room for.
    pub resident_blocks: usize,
    /// The blocks that went, each after its children.
    pub evicted: Vec<SequenceHash>,
}

/// The resident blocks of one worker.
#[derive(Debug)]
pub struct PrefixCache {
    capacity_blocks: usize,
    blocks: HashMap<SequenceHash, Block>,
    /// The blocks without children by when they were used last. One admission uses one path, and of two blocks on one path
    /// one has a child, so no two leaves have the same time.
    leaves: BTreeMap<u64, SequenceHash>,
    admissions: u64,
}

impl PrefixCache {
    /// An empty cache for at most `capacity_blocks`.
    pub fn new(capacity_blocks: NonZeroUsize) -> Self {
        Self {
            capacity_blocks: capacity_blocks.get(),
            blocks: HashMap::new(),
            leaves: BTreeMap::new(),
            admissions: 0,
        }
    }

    /// How many blocks are resident.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block is resident.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// The position of a block, where it is resident.
    pub fn position(&self, hash: SequenceHash) -> Option<usize> {
        self.blocks.get(&hash).map(|block| block.position)
    }

    /// How many leading blocks of the chain are resident, each at its position, counted block by block.
    ///
    /// This is the simulator's ground truth, and on purpose the most naive way to count.
    pub fn matched_blocks(&self, chain: &[SequenceHash]) -> usize {
        chain
            .iter()
            .enumerate()
            .take_while(|(position, hash)| self.position(**hash) == Some(*position))
            .count()
    }

    /// Admits a request: touches its resident prefix, inserts the rest, evicts what must go. A chain longer than the
    /// capacity is cut to it.
    ///
    /// None of the request's own blocks is evicted. If the oldest leaf were one of them, all leaves would be. Every resident
    /// block would then be part of the request, and the request fits.
    pub fn admit(&mut self, chain: &[SequenceHash]) -> Admission {
        self.admissions += 1;
        let hit_blocks = self.matched_blocks(chain);
        let mut admission = Admission {
            hit_blocks,
            resident_blocks: chain.len().min(self.capacity_blocks),
            evicted: Vec::new(),
        };
        let mut parent = None;
        for (position, hash) in chain.iter().enumerate().take(self.capacity_blocks) {
            if position < hit_blocks {
                self.touch(*hash);
            } else {
                if self.blocks.len() >= self.capacity_blocks {
                    admission.evicted.extend(self.evict_oldest_leaf());
                }
                self.insert(*hash, parent, position);
            }
            parent = Some(*hash);
        }
        admission
    }

    fn touch(&mut self, hash: SequenceHash) {
        let Some(block) = self.blocks.get_mut(&hash) else {
            return;
        };
        let before = std::mem::replace(&mut block.used, self.admissions);
        if block.children == 0 {
            self.leaves.remove(&before);
            self.leaves.insert(self.admissions, hash);
        }
    }

    fn insert(&mut self, hash: SequenceHash, parent: Option<SequenceHash>, position: usize) {
        if let Some(block) = parent.and_then(|parent| self.blocks.get_mut(&parent)) {
            if block.children == 0 {
                self.leaves.remove(&block.used);
            }
            block.children += 1;
        }
        let block = Block {
            parent,
            position,
            children: 0,
            used: self.admissions,
        };
        self.blocks.insert(hash, block);
        self.leaves.insert(self.admissions, hash);
    }

    fn evict_oldest_leaf(&mut self) -> Option<SequenceHash> {
        let (_, hash) = self.leaves.pop_first()?;
        let block = self.blocks.remove(&hash)?;
        if let Some((parent_hash, parent)) = block
            .parent
            .and_then(|parent| Some((parent, self.blocks.get_mut(&parent)?)))
        {
            parent.children -= 1;
            if parent.children == 0 {
                self.leaves.insert(parent.used, parent_hash);
            }
        }
        Some(hash)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::request::chain_of;
    use super::*;

    fn cache(capacity: usize) -> PrefixCache {
        PrefixCache::new(NonZeroUsize::new(capacity).unwrap())
    }

    #[test]
    fn the_least_recently_used_leaf_goes_first() {
        let mut cache = cache(4);
        let (first, second, third) = (chain_of(&[1, 2]), chain_of(&[1, 3]), chain_of(&[9]));
        cache.admit(&first);
        cache.admit(&second);
        cache.admit(&third);
        let admission = cache.admit(&chain_of(&[1, 3, 4]));
        assert_eq!(
            (admission.hit_blocks, admission.resident_blocks, admission.evicted),
            (2, 3, vec![first[1]])
        );
        assert_eq!(cache.matched_blocks(&first), 1);
        assert_eq!(cache.matched_blocks(&third), 1);
    }

    #[test]
    fn a_chain_longer_than_the_cache_is_cut() {
        let mut cache = cache(3);
        cache.admit(&chain_of(&[8, 9]));
        let long = chain_of(&[1, 2, 3, 4, 5]);
        let admission = cache.admit(&long);
        assert_eq!((admission.hit_blocks, admission.resident_blocks), (0, 3));
        assert_eq!(admission.evicted.len(), 2);
        assert_eq!((cache.len(), cache.matched_blocks(&long)), (3, 3));
        // Again: everything that there is room for is there, and stays.
        let again = cache.admit(&long);
        assert_eq!((again.hit_blocks, again.evicted.len()), (3, 0));
    }

    #[test]
    fn a_request_without_blocks_changes_nothing() {
        let mut cache = cache(1);
        assert_eq!(cache.admit(&[]), Admission::default());
        assert!(cache.is_empty());
    }

    /// The same cache, as slow and as plain as can be: whole prefixes by identifiers, searched from one end to the other.
    #[derive(Default)]
    struct Model {
        capacity: usize,
        now: u64,
        used: BTreeMap<Vec<u64>, u64>,
    }

    impl Model {
        fn admit(&mut self, ids: &[u64]) -> Admission {
            self.now += 1;
            let prefixes: Vec<_> = (1..=ids.len().min(self.capacity))
                .map(|length| ids[..length].to_vec())
                .collect();
            let hit_blocks = prefixes
                .iter()
                .take_while(|prefix| self.used.contains_key(*prefix))
                .count();
            let mut evicted = Vec::new();
            for prefix in &prefixes[..hit_blocks] {
                self.used.insert(prefix.clone(), self.now);
            }
            for prefix in &prefixes[hit_blocks..] {
                if self.used.len() == self.capacity {
                    let oldest = self.oldest_leaf(ids);
                    self.used.remove(&oldest);
                    evicted.extend(chain_of(&oldest).last().copied());
                }
                self.used.insert(prefix.clone(), self.now);
            }
            Admission {
                hit_blocks,
                resident_blocks: prefixes.len(),
                evicted,
            }
        }

        fn oldest_leaf(&self, ids: &[u64]) -> Vec<u64> {
            let has_child = |prefix: &[u64]| {
                self.used
                    .keys()
                    .any(|other| other.len() == prefix.len() + 1 && other.starts_with(prefix))
            };
            let (oldest, _) = self
                .used
                .iter()
                .filter(|(prefix, _)| !has_child(prefix) && !ids.starts_with(prefix))
                .min_by_key(|(_, used)| **used)
                .expect("something outside the request can go");
            oldest.clone()
        }
    }

    proptest! {
        #[test]
        fn the_cache_is_the_plain_model(
            capacity in 1_usize..24,
            requests in prop::collection::vec(prop::collection::vec(0_u64..3, 0..10), 1..60),
        ) {
            let mut cache = cache(capacity);
            let mut model = Model { capacity, ..Model::default() };
            for ids in &requests {
                let admission = cache.admit(&chain_of(ids));
                prop_assert_eq!(&admission, &model.admit(ids));
                prop_assert!(cache.len() <= capacity);
                prop_assert_eq!(cache.len(), model.used.len());
                for prefix in model.used.keys() {
                    let chain = chain_of(prefix);
                    prop_assert_eq!(cache.matched_blocks(&chain), chain.len());
                }
            }
        }
    }
}
