//! The hints of one namespace: the holders that should soon have blocks.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvatlas_core::hash::PositionalLineageHash;
use kvatlas_core::wire::{HolderId, PREDICTED_MAX, QueryKey};

/// Approximate size of one block of a hint, in bytes, in the map and in the hint's own list together.
const BLOCK_BYTES: usize = 160;
/// Approximate size of a hint without its blocks, in bytes.
const HINT_BYTES: usize = 256;
/// Maximum number of holders that hints name for one block. Further hints push out the oldest ones. The maximum bounds
/// the memory for a block, and the list in a reply.
const HOLDERS_MAX: usize = PREDICTED_MAX;

/// Returns the approximate size in bytes of a hint with `blocks` blocks.
pub(super) fn cost(blocks: usize) -> usize {
    HINT_BYTES + blocks.saturating_mul(BLOCK_BYTES)
}

/// Kept hint: the expectation that a holder should soon have all blocks of a prompt.
#[derive(Debug)]
pub(crate) struct KeptHint {
    pub(crate) holder: HolderId,
    /// Hashes of the prompt's blocks, as lineage hashes.
    pub(crate) prompt: QueryKey,
    ends: Instant,
    /// Number of the hint; later hints have higher numbers.
    number: u64,
    is_fulfilled: AtomicBool,
}

impl KeptHint {
    /// Returns the number of blocks in the hint's prompt.
    pub(crate) fn len(&self) -> usize {
        self.blocks().len()
    }

    /// Marks the hint as fulfilled: the holder has had all blocks. From now on only the index says what the holder
    /// has.
    pub(crate) fn fulfil(&self) {
        self.is_fulfilled.store(true, Ordering::Relaxed);
    }

    /// Whether the hint is fulfilled, that is, whether the holder has had all blocks.
    pub(super) fn is_fulfilled(&self) -> bool {
        self.is_fulfilled.load(Ordering::Relaxed)
    }

    fn blocks(&self) -> &[PositionalLineageHash] {
        match &self.prompt {
            QueryKey::LineageHashes(blocks) => blocks,
            _ => &[],
        }
    }
}

/// The hints of one namespace, in the order in which they came, and the *claims* of each block. A claim on a block is a
/// hint that names the block. A block has at most one claim of each holder: the holder's latest one.
///
/// A hint is about a whole prefix. So a holder with a claim on a block also has a claim on every block before it. A
/// block has at most [`HOLDERS_MAX`] claims: a further claim replaces the oldest one. Therefore a block never has more
/// claims than the block before it, and searches rely on this order. Fulfilled hints keep their claims, so that the
/// order stays intact, but searches skip them.
#[derive(Debug, Default)]
pub(super) struct HintTable {
    /// Claims of each block: the latest hint of each holder that should have the block, in the order of the hints.
    claims: HashMap<PositionalLineageHash, Vec<Arc<KeptHint>>>,
    hints: VecDeque<Arc<KeptHint>>,
    /// Number that the next hint gets. Hints are numbered in the order in which they come.
    next: u64,
    /// Number of the hint with which the next call of [`Self::look`] begins.
    looked: u64,
    bytes: usize,
}

impl HintTable {
    /// Returns the approximate size of all hints, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the number of hints.
    pub(super) fn len(&self) -> usize {
        self.hints.len()
    }

    /// Keeps a hint until the time `ends`.
    pub(super) fn add(&mut self, holder: HolderId, blocks: Vec<PositionalLineageHash>, ends: Instant) {
        self.bytes += cost(blocks.len());
        let hint = Arc::new(KeptHint {
            holder,
            prompt: QueryKey::LineageHashes(blocks),
            ends,
            number: self.next,
            is_fulfilled: AtomicBool::new(false),
        });
        self.next += 1;
        for block in hint.blocks() {
            let claims = self.claims.entry(*block).or_default();
            claims.retain(|claim| claim.holder != hint.holder);
            if claims.len() >= HOLDERS_MAX {
                // The oldest claim comes first.
                claims.remove(0);
            }
            claims.push(Arc::clone(&hint));
        }
        self.hints.push_back(hint);
    }

    /// Forgets hints whose time has ended by `now`. Returns the number of forgotten hints that were not fulfilled. A
    /// hint is fulfilled once its holder has had all blocks of the hint.
    pub(super) fn expire(&mut self, now: Instant) -> u64 {
        let mut unfulfilled = 0;
        while self.hints.front().is_some_and(|first| first.ends <= now) {
            let forgotten = self.forget_oldest();
            unfulfilled += u64::from(forgotten.is_some_and(|hint| !hint.is_fulfilled()));
        }
        unfulfilled
    }

    /// Forgets the oldest hint, and returns it.
    pub(super) fn forget_oldest(&mut self) -> Option<Arc<KeptHint>> {
        let oldest = self.hints.pop_front()?;
        self.bytes = self.bytes.saturating_sub(cost(oldest.len()));
        for block in oldest.blocks() {
            if let Some(claims) = self.claims.get_mut(block) {
                claims.retain(|claim| claim.number != oldest.number);
                if claims.is_empty() {
                    self.claims.remove(block);
                }
            }
        }
        Some(oldest)
    }

    /// Returns at most `max` hints that are not fulfilled. Each call continues where the previous call ended. After the
    /// newest hint, it begins again with the oldest one.
    pub(super) fn look(&mut self, max: usize) -> Vec<Arc<KeptHint>> {
        let first = self.hints.partition_point(|hint| hint.number < self.looked);
        let behind = self.hints.range(first..).chain(self.hints.range(..first));
        let open = behind.filter(|hint| !hint.is_fulfilled());
        let looked: Vec<Arc<KeptHint>> = open.take(max).cloned().collect();
        self.looked = looked.last().map_or(0, |last| last.number + 1);
        looked
    }

    /// Returns the holders that should soon have leading blocks of a prompt, each with the number of these blocks. The
    /// largest number comes first. The prompt has `len` blocks, and `block` returns the hash of each block.
    pub(super) fn find(
        &self,
        len: usize,
        mut block: impl FnMut(usize) -> PositionalLineageHash,
    ) -> Vec<(Arc<KeptHint>, usize)> {
        let mut found: Vec<(Arc<KeptHint>, usize)> = Vec::new();
        // Returns, by binary search, the number of leading blocks that have at least `claims` claims each.
        let mut depth_of = |claims: usize| {
            let (mut low, mut high) = (0, len);
            while low < high {
                let middle = usize::midpoint(low, high);
                match self.claims.get(&block(middle)) {
                    Some(some) if some.len() >= claims => low = middle + 1,
                    _ => high = middle,
                }
            }
            low
        };
        let mut depths: Vec<usize> = Vec::new();
        for claims in 1..=HOLDERS_MAX {
            match depth_of(claims) {
                0 => break,
                depth => depths.push(depth),
            }
        }
        depths.dedup();
        for depth in depths {
            let claims = self.claims.get(&block(depth - 1));
            for claim in claims.into_iter().flatten().filter(|claim| !claim.is_fulfilled()) {
                if found.iter().all(|(known, _)| known.holder != claim.holder) {
                    found.push((Arc::clone(claim), depth));
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use proptest::prelude::*;

    use kvatlas_core::hash::{Position, SequenceHash};
    use kvatlas_core::wire::WorkerName;

    use super::*;

    fn holder(number: u32) -> HolderId {
        HolderId {
            worker: WorkerName::new("w").unwrap(),
            rank: number,
        }
    }

    /// Returns a prompt of `len` blocks. Prompts of the same `branch` have the same blocks. Prompts of different branches have
    /// only the blocks before block `shared` in common.
    fn prompt(branch: u64, shared: usize, len: usize) -> Vec<PositionalLineageHash> {
        let hash = |place: usize| {
            let own = if place < shared { 0 } else { branch + 1 };
            SequenceHash(own * 1_000_003 + place as u64 + 1)
        };
        let key = |place: usize| {
            let parent = place.checked_sub(1).map_or(SequenceHash(0), hash);
            PositionalLineageHash::at(Position::new(place as u64).unwrap(), parent, hash(place))
        };
        (0..len).map(key).collect()
    }

    fn depths(table: &HintTable, asked: &[PositionalLineageHash]) -> HashMap<u32, usize> {
        let found = table.find(asked.len(), |place| asked[place]);
        found
            .iter()
            .map(|(hint, depth)| (hint.holder.rank, *depth))
            .collect()
    }

    #[test]
    fn a_block_keeps_the_latest_holders_and_the_most_blocks_come_first() {
        let (mut table, now) = (HintTable::default(), Instant::now());
        for (rank, len) in (0..).zip(1..=HOLDERS_MAX + 3) {
            table.add(holder(rank), prompt(0, 0, len), now);
        }
        let asked = prompt(0, 0, 200);
        let found = table.find(asked.len(), |place| asked[place]);
        assert_eq!((found.len(), found[0].1), (HOLDERS_MAX, HOLDERS_MAX + 3));
        assert!(found.is_sorted_by(|one, next| one.1 > next.1));
        while table.forget_oldest().is_some() {}
        assert_eq!((table.bytes(), table.claims.len(), table.len()), (0, 0, 0));
    }

    #[test]
    fn fulfilled_hints_are_passed_over_and_others_of_the_holder_are_not() {
        const SHARED: usize = 3;
        let (mut table, now) = (HintTable::default(), Instant::now());
        let (one, other) = (prompt(0, SHARED, 8), prompt(1, SHARED, 6));
        table.add(holder(0), one.clone(), now + Duration::from_secs(1));
        table.add(holder(0), other.clone(), now + Duration::from_secs(2));
        table.add(holder(1), other.clone(), now + Duration::from_secs(2));
        let looked = table.look(2);
        assert_eq!(looked.iter().map(|hint| hint.len()).collect::<Vec<_>>(), [8, 6]);
        looked[1].fulfil();
        assert_eq!(depths(&table, &one), HashMap::from([(0, 8), (1, SHARED)]));
        assert_eq!(depths(&table, &other), HashMap::from([(1, 6)]));
        // The next look continues after the last hint of the previous look, and then begins again with the first hint.
        let ranks = |table: &mut HintTable, max| {
            table
                .look(max)
                .iter()
                .map(|hint| hint.holder.rank)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            (ranks(&mut table, 1), ranks(&mut table, 9)),
            (vec![1], vec![0, 1])
        );
        assert_eq!(
            table.expire(now + Duration::from_secs(1)),
            1,
            "the first one was not fulfilled"
        );
        assert_eq!(
            table.expire(now + Duration::from_secs(2)),
            1,
            "one of the others was"
        );
        assert_eq!((table.bytes(), table.claims.len(), table.len()), (0, 0, 0));
    }

    proptest! {
        #[test]
        fn the_table_finds_what_a_list_of_hints_says(
            steps in prop::collection::vec((0_u32..6, 0_u64..4, 0_usize..9, 0_u64..5), 1..60),
            asked in (0_u64..4, 0_usize..12),
        ) {
            /// Number of leading blocks that the prompts of all branches share.
            const SHARED: usize = 3;
            let begun = Instant::now();
            let (mut table, mut now, ttl) = (HintTable::default(), begun, Duration::from_secs(10));
            let mut hints: Vec<(u32, Vec<PositionalLineageHash>, Instant)> = Vec::new();
            for (number, branch, len, seconds) in steps {
                now += Duration::from_secs(seconds);
                table.expire(now);
                hints.retain(|(_, _, ends)| *ends > now);
                let blocks = prompt(branch, SHARED, len);
                table.add(holder(number), blocks.clone(), now + ttl);
                hints.push((number, blocks, now + ttl));
                let asked = prompt(asked.0, SHARED, asked.1);
                let mut expected: HashMap<u32, usize> = HashMap::new();
                for (number, blocks, _) in &hints {
                    let same = blocks.iter().zip(&asked).take_while(|(one, other)| one == other).count();
                    if same > 0 {
                        let most = expected.entry(*number).or_default();
                        *most = same.max(*most);
                    }
                }
                prop_assert_eq!(depths(&table, &asked), expected);
                prop_assert_eq!(table.len(), hints.len());
            }
        }
    }
}
