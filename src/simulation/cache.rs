//! Block cache of one simulated worker. It is bounded, keeps prefixes without holes, and evicts the least recently
//! used blocks first.
//!
//! The blocks form trees: the parent of a block is the block before it in its sequence. Admitting a request touches
//! the longest resident prefix of the request and inserts the rest. When the cache is full, the least recently used
//! **leaf** is evicted. So a block is never evicted before its children, and the cache has no hole at any time. A
//! block of the request that is being admitted is never evicted: see [`PrefixCache::admit`].
//!
//! # Windows and states
//!
//! The cache of a model with [windows or states](super::attention) also keeps *side blocks*. A side block is a block
//! of the windows or states that belongs to a block of full attention. As in vLLM, both kinds of blocks share one
//! pool.
//!
//! - A request keeps side blocks just before the end of its prompt.
//! - If full attention has more of the prompt than the request can reuse, the request also keeps side blocks at the
//!   end of the matched blocks, because another prompt branches off there.
//! - A request releases its side blocks while it decodes. So its side blocks are evicted before its blocks of full
//!   attention.
//! - A block that is computed again replaces its old copy. In vLLM, the old copy stays until it is the least recently
//!   used block.
//!
//! Invariant 1: A block that has a side block is resident, and was last used no earlier than the side block. So the
//! side block is evicted first.
//!
//! A block costs O(log n) for the ordered set of evictable entries, and O(1) otherwise.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroUsize;

use kvatlas_core::hash::SequenceHash;

use super::attention::CacheModel;

/// One resident block.
#[derive(Debug)]
struct ResidentBlock {
    parent: Option<SequenceHash>,
    position: usize,
    children: usize,
    /// Number of the admission that last used the block. An admission takes one request into the cache.
    used: u64,
    /// Number of the admission that last used the block's side block (a block of the windows or states). `None` if the
    /// block has no side block.
    side_used: Option<u64>,
}

/// Effects of admitting one request to the cache.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Admission {
    /// Number of leading blocks of the request that were resident before.
    pub matched_blocks: usize,
    /// Number of leading blocks that the request reused. With full attention alone, this equals `matched_blocks`.
    pub hit_blocks: usize,
    /// Number of leading blocks of the request that are resident now: all blocks, or as many as the cache has room for.
    pub resident_blocks: usize,
    /// Blocks that were evicted, each after its children.
    pub evicted: Vec<SequenceHash>,
    /// Blocks whose side block (a block of the windows or states) was evicted. If such a block was evicted, too, it
    /// is also in `evicted`.
    pub sides_evicted: Vec<SequenceHash>,
    /// Blocks of the request beside which this admission stored a side block (a block of the windows or states).
    pub sides_stored: Vec<SequenceHash>,
}

/// Age of an entry that can be evicted. The first number is the admission that used the entry last. The second is the
/// entry's rank among those that this admission used: side blocks (of windows or states) rank by position, and the
/// leaf ranks last.
type Age = (u64, usize);

/// Rank of a leaf, that is, of the last block that an admission used. The leaf is evicted after all other blocks that
/// the admission used.
const LEAF: usize = usize::MAX;

/// The resident blocks of one worker.
#[derive(Debug)]
pub struct PrefixCache {
    capacity_blocks: usize,
    model: CacheModel,
    blocks: HashMap<SequenceHash, ResidentBlock>,
    side_blocks: usize,
    /// Entries that can be evicted, by age: blocks without children, and side blocks (of windows or states). Each age
    /// is unique, because an admission uses only one path. A path has one leaf, and at most one side block at each
    /// position.
    oldest: BTreeMap<Age, SequenceHash>,
    admissions: u64,
}

impl PrefixCache {
    /// Creates an empty cache for at most `capacity_blocks` blocks. Side blocks (of windows or states) count, too.
    pub fn new(capacity_blocks: NonZeroUsize, model: CacheModel) -> Self {
        Self {
            capacity_blocks: capacity_blocks.get(),
            model,
            blocks: HashMap::new(),
            side_blocks: 0,
            oldest: BTreeMap::new(),
            admissions: 0,
        }
    }

    /// Returns how many blocks are resident. Side blocks (of windows or states) do not count.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block is resident.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Returns the position of a block, or `None` if it is not resident.
    pub fn position(&self, hash: SequenceHash) -> Option<usize> {
        self.blocks.get(&hash).map(|block| block.position)
    }

    /// Returns how many leading blocks of the chain are resident, each at its position, counted block by block.
    ///
    /// This is the simulator's ground truth, and on purpose the most naive way to count.
    pub fn matched_blocks(&self, chain: &[SequenceHash]) -> usize {
        chain
            .iter()
            .enumerate()
            .take_while(|(position, hash)| self.position(**hash) == Some(*position))
            .count()
    }

    /// Returns how many leading blocks a request for the chain can reuse.
    pub fn usable_blocks(&self, chain: &[SequenceHash]) -> usize {
        self.model
            .usable_blocks(chain.len(), self.matched_blocks(chain), |position| {
                let block = chain.get(position).and_then(|hash| self.blocks.get(hash));
                block.is_some_and(|block| block.side_used.is_some())
            })
    }

    /// Admits a request: touches its resident prefix, inserts the rest, and evicts blocks to make room. A chain
    /// longer than the capacity is cut to the capacity.
    ///
    /// No block of the request itself is evicted. For a proof, suppose that the oldest entry were a leaf of the
    /// request. Then this leaf would be the only entry that can be evicted. So all resident blocks would belong to
    /// the request, and it would fit without an eviction.
    pub fn admit(&mut self, chain: &[SequenceHash]) -> Admission {
        self.admissions += 1;
        let mut admission = Admission {
            matched_blocks: self.matched_blocks(chain),
            hit_blocks: self.usable_blocks(chain),
            resident_blocks: chain.len().min(self.capacity_blocks),
            ..Admission::default()
        };
        for position in self.model.tail(admission.hit_blocks) {
            if let Some(hash) = chain.get(position) {
                self.touch_side(*hash);
            }
        }
        let mut parent = None;
        for (position, hash) in chain.iter().enumerate().take(self.capacity_blocks) {
            if position < admission.matched_blocks {
                self.touch(*hash);
            } else {
                if self.is_full() {
                    self.evict_oldest(&mut admission);
                }
                self.insert(*hash, parent, position);
            }
            parent = Some(*hash);
        }
        self.keep_sides(chain, &mut admission);
        admission
    }

    /// Stores side blocks (of windows or states) for blocks that the request computed. Stops when the cache is full
    /// and can evict only blocks that the request itself used.
    fn keep_sides(&mut self, chain: &[SequenceHash], admission: &mut Admission) {
        let end = chain.len().saturating_sub(1);
        let parting = admission.matched_blocks.min(end);
        let computed = chain
            .iter()
            .enumerate()
            .take(admission.resident_blocks)
            .skip(admission.hit_blocks);
        for (position, hash) in computed {
            if !self.model.keeps(position, &[parting, end]) || self.touch_side(*hash) {
                continue;
            }
            if self.is_full() && self.is_oldest_in_use() {
                return;
            }
            if self.is_full() {
                self.evict_oldest(admission);
            }
            self.store_side(*hash);
            admission.sides_stored.push(*hash);
        }
    }

    fn is_full(&self) -> bool {
        self.blocks.len() + self.side_blocks >= self.capacity_blocks
    }

    /// Whether all blocks that can be evicted were used by the request that is being admitted.
    fn is_oldest_in_use(&self) -> bool {
        let oldest = self.oldest.first_key_value();
        oldest.is_none_or(|((used, _), _)| *used == self.admissions)
    }

    fn touch(&mut self, hash: SequenceHash) {
        let Some(block) = self.blocks.get_mut(&hash) else {
            return;
        };
        let before = std::mem::replace(&mut block.used, self.admissions);
        if block.children == 0 {
            self.oldest.remove(&(before, LEAF));
            self.oldest.insert((self.admissions, LEAF), hash);
        }
    }

    /// Marks the side block (of the windows or states) of a block as used now. Returns whether there is one.
    fn touch_side(&mut self, hash: SequenceHash) -> bool {
        let Some((block, before)) = self
            .blocks
            .get_mut(&hash)
            .and_then(|block| block.side_used.map(|used| (block, used)))
        else {
            return false;
        };
        block.side_used = Some(self.admissions);
        self.oldest.remove(&(before, block.position));
        self.oldest.insert((self.admissions, block.position), hash);
        true
    }

    fn insert(&mut self, hash: SequenceHash, parent: Option<SequenceHash>, position: usize) {
        if let Some(block) = parent.and_then(|parent| self.blocks.get_mut(&parent)) {
            if block.children == 0 {
                self.oldest.remove(&(block.used, LEAF));
            }
            block.children += 1;
        }
        let block = ResidentBlock {
            parent,
            position,
            children: 0,
            used: self.admissions,
            side_used: None,
        };
        self.blocks.insert(hash, block);
        self.oldest.insert((self.admissions, LEAF), hash);
    }

    fn store_side(&mut self, hash: SequenceHash) {
        if let Some(block) = self.blocks.get_mut(&hash) {
            block.side_used = Some(self.admissions);
            self.side_blocks += 1;
            self.oldest.insert((self.admissions, block.position), hash);
        }
    }

    fn evict_oldest(&mut self, admission: &mut Admission) {
        match self.oldest.pop_first() {
            Some(((_, LEAF), hash)) => {
                self.remove_leaf(hash);
                admission.evicted.push(hash);
            }
            Some((_, hash)) => {
                if let Some(block) = self.blocks.get_mut(&hash) {
                    block.side_used = None;
                    self.side_blocks -= 1;
                }
                admission.sides_evicted.push(hash);
            }
            None => {}
        }
    }

    fn remove_leaf(&mut self, hash: SequenceHash) {
        let Some(parent_hash) = self.blocks.remove(&hash).and_then(|block| block.parent) else {
            return;
        };
        if let Some(parent) = self.blocks.get_mut(&parent_hash) {
            parent.children -= 1;
            if parent.children == 0 {
                self.oldest.insert((parent.used, LEAF), parent_hash);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::super::attention::{Attention, Retention};
    use super::super::request::chain_of;
    use super::*;

    fn cache(capacity: usize) -> PrefixCache {
        cache_of(capacity, CacheModel::default())
    }

    fn cache_of(capacity: usize, model: CacheModel) -> PrefixCache {
        PrefixCache::new(NonZeroUsize::new(capacity).unwrap(), model)
    }

    fn states() -> CacheModel {
        CacheModel {
            attention: Attention::States,
            ..CacheModel::default()
        }
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
        // The second admission finds all blocks that fit into the cache, and evicts none of them.
        let again = cache.admit(&long);
        assert_eq!((again.hit_blocks, again.evicted.len()), (3, 0));
    }

    #[test]
    fn a_request_without_blocks_changes_nothing() {
        let mut cache = cache(1);
        assert_eq!(cache.admit(&[]), Admission::default());
        assert!(cache.is_empty());
    }

    #[test]
    fn a_state_is_kept_where_prompts_were_found_to_part() {
        let mut cache = cache_of(40, states());
        let (first, second, third) = (
            chain_of(&[1, 2, 3, 4]),
            chain_of(&[1, 2, 5, 6]),
            chain_of(&[1, 2, 7, 8]),
        );
        assert_eq!(cache.admit(&first).sides_stored, [first[2]]);
        assert_eq!(cache.usable_blocks(&first), 3);
        // Full attention has two blocks of the second prompt, but there is no state after them. So the second request
        // computes all blocks, and stores that state. The third request can reuse it.
        let admission = cache.admit(&second);
        assert_eq!((admission.matched_blocks, admission.hit_blocks), (2, 0));
        assert_eq!(admission.sides_stored, [second[1], second[2]]);
        assert_eq!(cache.admit(&third).hit_blocks, 2);
    }

    #[test]
    fn a_state_goes_before_the_blocks_of_full_attention() {
        let mut cache = cache_of(5, states());
        let first = chain_of(&[1, 2, 3]);
        cache.admit(&first);
        let admission = cache.admit(&chain_of(&[9, 8]));
        assert_eq!(
            (admission.evicted, admission.sides_evicted),
            (vec![first[2]], vec![first[1]])
        );
        assert_eq!(
            (cache.matched_blocks(&first), cache.usable_blocks(&first)),
            (2, 0)
        );
    }

    /// Model of the cache for tests, slow and plain: it keeps whole prefixes of block identifiers, and searches all of them.
    struct Model {
        capacity: usize,
        cache: CacheModel,
        now: u64,
        used: BTreeMap<Vec<u64>, u64>,
        sides: BTreeMap<Vec<u64>, u64>,
    }

    /// Rank of an entry among those that the same request used last. Entries with a lower rank are evicted first: the
    /// side blocks (of windows or states) from the front, then the leaf.
    #[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
    enum Rank {
        Side(usize, Vec<u64>),
        Leaf(Vec<u64>),
    }

    impl Model {
        fn new(capacity: usize, cache: CacheModel) -> Self {
            Self {
                capacity,
                cache,
                now: 0,
                used: BTreeMap::new(),
                sides: BTreeMap::new(),
            }
        }

        /// Returns how many blocks just before the place where a request resumes need a side block (a block of the
        /// windows or states).
        fn tail_blocks(&self) -> usize {
            match self.cache.attention {
                Attention::Full => 0,
                Attention::Window(blocks) => blocks.get(),
                Attention::States => 1,
            }
        }

        fn matched(&self, ids: &[u64]) -> usize {
            (0..=ids.len())
                .rev()
                .find(|length| (1..=*length).all(|end| self.used.contains_key(&ids[..end])))
                .unwrap()
        }

        fn usable(&self, ids: &[u64]) -> usize {
            if self.tail_blocks() == 0 {
                return self.matched(ids);
            }
            let resumes = |end: &usize| {
                (1..=*end)
                    .rev()
                    .take(self.tail_blocks())
                    .all(|end| self.sides.contains_key(&ids[..end]))
            };
            (1..ids.len())
                .rev()
                .filter(|end| *end <= self.matched(ids))
                .find(resumes)
                .unwrap_or(0)
        }

        /// Returns the positions in a prompt, from 1, for whose blocks the cache keeps a side block (a block of the
        /// windows or states).
        fn kept(&self, ids: &[u64]) -> BTreeSet<usize> {
            let tail = |end: usize| (1..=end).rev().take(self.tail_blocks());
            let all = 1..=ids.len();
            let mut kept: BTreeSet<usize> = match self.cache.retention {
                _ if self.tail_blocks() == 0 => return BTreeSet::new(),
                Retention::All => all.collect(),
                Retention::Boundaries => BTreeSet::new(),
                // Like the engine, this also counts the interval after the last whole interval of the prompt.
                Retention::Every(blocks) => (0..=ids.len())
                    .map(|intervals| (intervals + 1) * blocks.get())
                    .flat_map(|end| tail(end).take(blocks.get()))
                    .filter(|end| all.contains(end))
                    .collect(),
            };
            let last = ids.len().saturating_sub(1);
            kept.extend(tail(last));
            kept.extend(tail(self.matched(ids).min(last)));
            kept
        }

        fn admit(&mut self, ids: &[u64]) -> Admission {
            self.now += 1;
            let (matched, hit) = (self.matched(ids), self.usable(ids));
            let kept = self.kept(ids);
            let resident = ids.len().min(self.capacity);
            let mut admission = Admission {
                matched_blocks: matched,
                hit_blocks: hit,
                resident_blocks: resident,
                ..Admission::default()
            };
            for end in 1..=matched {
                self.used.insert(ids[..end].to_vec(), self.now);
            }
            for end in (1..=hit).rev().take(self.tail_blocks()) {
                self.sides.insert(ids[..end].to_vec(), self.now);
            }
            for end in matched + 1..=resident {
                let made = self.make_room(ids, true, &mut admission);
                assert!(made, "something outside the request can go");
                self.used.insert(ids[..end].to_vec(), self.now);
            }
            for end in kept.into_iter().filter(|end| *end > hit && *end <= resident) {
                let side = ids[..end].to_vec();
                if !self.sides.contains_key(&side) {
                    if !self.make_room(ids, false, &mut admission) {
                        break;
                    }
                    admission.sides_stored.extend(chain_of(&side).last());
                }
                self.sides.insert(side, self.now);
            }
            admission
        }

        /// Makes room for one more block by evicting the oldest one, if the cache is full. Returns `false` if no
        /// block may be evicted. Never evicts blocks of full attention that belong to the request `ids`. Evicts side
        /// blocks (of windows or states) that this request used only if `blocks` is set: the room is then needed for
        /// one of its blocks of full attention.
        fn make_room(&mut self, ids: &[u64], blocks: bool, admission: &mut Admission) -> bool {
            if self.used.len() + self.sides.len() < self.capacity {
                return true;
            }
            let has_child = |prefix: &[u64]| {
                self.used
                    .keys()
                    .any(|other| other.len() == prefix.len() + 1 && other.starts_with(prefix))
            };
            let leaves = self
                .used
                .iter()
                .filter(|(prefix, _)| !has_child(prefix) && !ids.starts_with(prefix))
                .map(|(prefix, used)| (*used, Rank::Leaf(prefix.clone())));
            let sides = self
                .sides
                .iter()
                .filter(|(_, used)| blocks || **used < self.now)
                .map(|(prefix, used)| (*used, Rank::Side(prefix.len(), prefix.clone())));
            match leaves.chain(sides).min() {
                Some((_, Rank::Leaf(prefix))) => {
                    assert!(!self.sides.contains_key(&prefix), "invariant 1");
                    self.used.remove(&prefix);
                    admission.evicted.extend(chain_of(&prefix).last());
                }
                Some((_, Rank::Side(_, prefix))) => {
                    self.sides.remove(&prefix);
                    admission.sides_evicted.extend(chain_of(&prefix).last());
                }
                None => return false,
            }
            true
        }
    }

    fn models() -> impl Strategy<Value = CacheModel> {
        let some = || (1_usize..4).prop_map(|blocks| NonZeroUsize::new(blocks).unwrap());
        let attention = prop_oneof![
            Just(Attention::Full),
            some().prop_map(Attention::Window),
            Just(Attention::States),
        ];
        let retention = prop_oneof![
            2 => Just(Retention::Boundaries),
            1 => some().prop_map(Retention::Every),
            1 => Just(Retention::All),
        ];
        (attention, retention).prop_map(|(attention, retention)| CacheModel { attention, retention })
    }

    proptest! {
        #[test]
        fn the_cache_is_the_plain_model(
            capacity in 1_usize..24,
            kind in models(),
            requests in prop::collection::vec(prop::collection::vec(0_u64..3, 0..10), 1..60),
        ) {
            let mut cache = cache_of(capacity, kind);
            let mut model = Model::new(capacity, kind);
            let mut told: BTreeSet<SequenceHash> = BTreeSet::new();
            for ids in &requests {
                let admission = cache.admit(&chain_of(ids));
                prop_assert_eq!(&admission, &model.admit(ids));
                for gone in &admission.sides_evicted {
                    prop_assert!(told.remove(gone));
                }
                told.extend(&admission.sides_stored);
                prop_assert_eq!(told.len(), model.sides.len());
                prop_assert!(cache.len() + cache.side_blocks <= capacity);
                prop_assert_eq!((cache.len(), cache.side_blocks), (model.used.len(), model.sides.len()));
                for prefix in model.used.keys() {
                    let chain = chain_of(prefix);
                    prop_assert_eq!(cache.matched_blocks(&chain), chain.len());
                }
                for ids in &requests {
                    let chain = chain_of(ids);
                    prop_assert_eq!(cache.matched_blocks(&chain), model.matched(ids));
                    prop_assert_eq!(cache.usable_blocks(&chain), model.usable(ids));
                }
            }
        }
    }
}
