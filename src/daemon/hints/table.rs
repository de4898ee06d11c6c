//! The hints of one namespace: the holders that should soon have blocks.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use kvatlas_core::hash::PositionalLineageHash;
use kvatlas_core::wire::HolderId;

/// Approximate bytes of one block of a hint, in the map and in the hint's own list together.
const BLOCK_BYTES: usize = 160;
/// Approximate bytes of a hint beside its blocks.
const HINT_BYTES: usize = 256;
/// Most holders that are kept for a block, and listed in a reply. The latest holders are kept.
pub(super) const HOLDERS_MAX: usize = 64;

/// Returns the approximate bytes of a hint with so many blocks.
pub(super) fn cost(blocks: usize) -> usize {
    HINT_BYTES + blocks.saturating_mul(BLOCK_BYTES)
}

/// The hints, in the order in which they came.
///
/// A hint is about a whole prefix. So a holder with a claim to a block has a claim to every block before it, unless newer claims have
/// pushed the holder out there. Therefore a block never has more claims than the block before it.
#[derive(Debug, Default)]
pub(super) struct Table {
    claims: HashMap<PositionalLineageHash, Vec<Claim>>,
    hints: VecDeque<KeptHint>,
    /// The number of the next hint.
    next: u64,
    bytes: usize,
}

/// The claim that a holder should have a block.
#[derive(Debug)]
struct Claim {
    holder: Arc<HolderId>,
    /// Number of the latest hint that makes the claim.
    hint: u64,
}

#[derive(Debug)]
struct KeptHint {
    ends: Instant,
    number: u64,
    blocks: Vec<PositionalLineageHash>,
}

impl Table {
    /// Approximate bytes of all hints.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number of hints.
    pub(super) fn len(&self) -> usize {
        self.hints.len()
    }

    /// Keeps a hint until `ends`.
    pub(super) fn add(&mut self, holder: HolderId, blocks: Vec<PositionalLineageHash>, ends: Instant) {
        let (holder, number) = (Arc::new(holder), self.next);
        self.next += 1;
        self.bytes += cost(blocks.len());
        for block in &blocks {
            let claims = self.claims.entry(*block).or_default();
            claims.retain(|claim| claim.holder != holder);
            if claims.len() >= HOLDERS_MAX {
                // The latest stand at the end.
                claims.remove(0);
            }
            claims.push(Claim {
                holder: Arc::clone(&holder),
                hint: number,
            });
        }
        self.hints.push_back(KeptHint { ends, number, blocks });
    }

    /// Forgets hints that have ended by `now`. Returns how many.
    pub(super) fn expire(&mut self, now: Instant) -> u64 {
        let mut expired = 0;
        while self.hints.front().is_some_and(|first| first.ends <= now) {
            self.forget_oldest();
            expired += 1;
        }
        expired
    }

    /// Forgets the oldest hint. Returns whether there was a hint.
    pub(super) fn forget_oldest(&mut self) -> bool {
        let Some(oldest) = self.hints.pop_front() else {
            return false;
        };
        self.bytes = self.bytes.saturating_sub(cost(oldest.blocks.len()));
        for block in &oldest.blocks {
            if let Some(claims) = self.claims.get_mut(block) {
                claims.retain(|claim| claim.hint != oldest.number);
                if claims.is_empty() {
                    self.claims.remove(block);
                }
            }
        }
        true
    }

    /// Returns the holders that should soon have leading blocks of a prompt, each with its number of blocks, the most first. The prompt
    /// has `len` blocks, and `block` returns the hash of each.
    pub(super) fn find(
        &self,
        len: usize,
        mut block: impl FnMut(usize) -> PositionalLineageHash,
    ) -> Vec<(Arc<HolderId>, usize)> {
        let mut found: Vec<(Arc<HolderId>, usize)> = Vec::new();
        // Number of leading blocks that have at least so many claims each, by binary search.
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
            for claim in claims.into_iter().flatten() {
                if found.iter().all(|(known, _)| *known != claim.holder) {
                    found.push((Arc::clone(&claim.holder), depth));
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

    /// A prompt of `len` blocks that parts from others of its `branch` at no block, and from prompts of other branches at block `shared`.
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

    fn depths(table: &Table, asked: &[PositionalLineageHash]) -> HashMap<u32, usize> {
        let found = table.find(asked.len(), |place| asked[place]);
        found.iter().map(|(id, depth)| (id.rank, *depth)).collect()
    }

    #[test]
    fn a_block_keeps_the_latest_holders_and_the_most_blocks_come_first() {
        let (mut table, now) = (Table::default(), Instant::now());
        for (rank, len) in (0..).zip(1..=HOLDERS_MAX + 3) {
            table.add(holder(rank), prompt(0, 0, len), now);
        }
        let asked = prompt(0, 0, 200);
        let found = table.find(asked.len(), |place| asked[place]);
        assert_eq!((found.len(), found[0].1), (HOLDERS_MAX, HOLDERS_MAX + 3));
        assert!(found.is_sorted_by(|one, next| one.1 > next.1));
        while table.forget_oldest() {}
        assert_eq!((table.bytes(), table.claims.len(), table.len()), (0, 0, 0));
    }

    proptest! {
        #[test]
        fn the_table_finds_what_a_list_of_hints_says(
            steps in prop::collection::vec((0_u32..6, 0_u64..4, 0_usize..9, 0_u64..5), 1..60),
            asked in (0_u64..4, 0_usize..12),
        ) {
            /// The blocks that all branches share.
            const SHARED: usize = 3;
            let begun = Instant::now();
            let (mut table, mut now, ttl) = (Table::default(), begun, Duration::from_secs(10));
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
