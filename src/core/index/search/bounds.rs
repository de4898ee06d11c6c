//! Compressed chains: bounds on how long a prefix each holder holds, from blocks at chosen positions only.
//!
//! A holder's blocks that count are prefix-closed, so one that has the block at position p, but not that at q, holds between
//! p + 1 and q leading blocks. Holders are compared as sets, and bisecting over the chosen blocks finds where each drops out, as the
//! search over whole chains does over positions.
//!
//! # Exactness
//!
//! Two looks at different instants do not bound a depth: a holder can drop from beyond q to below p in one step. So a search that
//! a writer came into is repeated, and after a few times it takes a turn of its own; its bounds are those of one instant.
//!
//! # Storage
//!
//! All this needs of the storage is [`Probe`].

use std::sync::Arc;

use crate::hash::Position;
use crate::wire::{DegradedReasons, PositionsError, QueryKey, check_positions};

use crate::index::block::BlockKey;
use crate::index::directory::{Directory, HolderRecord, SlotBits, SlotSet, StreamTrust};

use super::Search;

/// Blocks chosen from one chain, by position.
#[derive(Debug, Clone, Copy)]
pub struct SparseChain<'a> {
    key: &'a QueryKey,
    positions: &'a [Position],
}

impl<'a> SparseChain<'a> {
    /// The blocks of `key`, each at its place in `positions`.
    ///
    /// # Errors
    ///
    /// Where the two do not fit; see [`SingleQuery::check`](crate::wire::SingleQuery::check).
    pub fn new(key: &'a QueryKey, positions: &'a [Position]) -> Result<Self, PositionsError> {
        check_positions(key, positions)?;
        Ok(Self { key, positions })
    }

    /// How many leading blocks the chain stands for: up to the last one chosen.
    pub fn query_blocks(&self) -> u32 {
        self.positions.last().map_or(0, |last| last.as_u32() + 1)
    }

    /// How many leading blocks a holder of none of those chosen can hold at most.
    pub fn unseen_blocks_max(&self) -> u32 {
        self.position(0).map_or(0, Position::as_u32)
    }

    fn position(&self, index: usize) -> Option<Position> {
        self.positions.get(index).copied()
    }

    /// Whether the block before the one chosen as `index` is chosen, too, or does not exist.
    fn continues(&self, index: usize) -> bool {
        let before = index.checked_sub(1).and_then(|before| self.position(before));
        let follows = before.map_or(Some(Position::ZERO), Position::checked_next);
        self.position(index) == follows
    }

    /// What the block chosen as `index` is found by: all of its hash that was sent, and its parent's where that was sent, too.
    fn name(&self, index: usize) -> Option<BlockKey> {
        match self.key {
            QueryKey::LineageHashes(hashes) => hashes.get(index).copied().map(BlockKey::from),
            QueryKey::SequenceHashes(hashes) => {
                let (current, position) = (*hashes.get(index)?, self.position(index)?);
                let before = index.checked_sub(1).and_then(|before| hashes.get(before));
                Some(BlockKey {
                    position: position.as_u32(),
                    current: current.as_u64(),
                    parent: before.filter(|_| self.continues(index)).map(|hash| hash.as_u64()),
                    is_whole: true,
                })
            }
            // `new` takes neither.
            QueryKey::Tokens { .. } | QueryKey::BlockHashes(_) => None,
        }
    }
}

/// What the search needs of the storage.
pub(crate) trait Probe {
    /// The holders of the blocks with this name, or those `among` them. Only blocks that count.
    fn holders(&self, name: BlockKey, among: Option<&SlotSet>) -> SlotSet;

    /// How often one place was seen with two parents: hashes that are no chain.
    fn chain_conflicts(&self) -> u64;
}

/// One holder and bounds on how long a prefix it holds.
#[derive(Debug, Clone, Copy)]
pub struct Bounds<'a> {
    /// The holder.
    pub holder: &'a Arc<HolderRecord>,
    /// How many leading blocks it holds at least. 0 only where hashes are no chain.
    pub matched_blocks: u32,
    /// How many leading blocks it holds at most.
    pub matched_blocks_max: u32,
}

/// Holders with the same bounds.
#[derive(Debug, Clone)]
struct BoundGroup {
    matched_blocks: u32,
    matched_blocks_max: u32,
    slots: SlotSet,
}

/// The holders found, with bounds.
#[derive(Debug, Default)]
pub struct BoundedMatches {
    directory: Arc<Directory>,
    groups: Vec<BoundGroup>,
    /// How many states had been replaced when the search began.
    replacements: u64,
}

impl BoundedMatches {
    pub(crate) fn begun_at(mut self, replacements: u64) -> Self {
        self.replacements = replacements;
        self
    }

    /// Why the state in which `holder` was found is not certain; as [`Matches::reasons`](super::Matches::reasons).
    pub fn reasons(&self, holder: &HolderRecord, trust: &StreamTrust) -> DegradedReasons {
        holder.reasons_since(self.replacements, trust)
    }

    /// The holders of at least one of the blocks chosen, deepest first; in no particular order within equal bounds.
    ///
    /// A holder that left while the search ran is left out: it holds nothing now.
    pub fn holders(&self) -> impl Iterator<Item = Bounds<'_>> {
        self.groups.iter().flat_map(|group| {
            let holders = group.slots.iter().filter_map(|slot| self.directory.holder(slot));
            holders
                .filter(|holder| !holder.is_retired())
                .map(|holder| Bounds {
                    holder,
                    matched_blocks: group.matched_blocks,
                    matched_blocks_max: group.matched_blocks_max,
                })
        })
    }
}

/// Runs one search. `directory` must have been taken before.
pub(crate) fn find(
    storage: &impl Probe,
    directory: Arc<Directory>,
    chain: &SparseChain<'_>,
    search: Search<'_>,
) -> BoundedMatches {
    let asked = search.workers.map(|workers| directory.slots_of(workers));
    let conflicts = storage.chain_conflicts();
    let mut bounds = SparseSearch {
        storage,
        chain,
        groups: Vec::new(),
    };
    if conflicts == 0 {
        bounds.bisect(asked.as_ref());
    }
    if conflicts != 0 || storage.chain_conflicts() != conflicts {
        bounds.groups.clear();
        bounds.walk(asked.as_ref());
    }
    BoundedMatches {
        directory,
        groups: bounds.groups,
        replacements: 0,
    }
}

/// Chosen blocks between which `candidates` drop out: all of them have `held`, none has `missing`.
struct Stretch {
    held: usize,
    missing: usize,
    candidates: SlotSet,
}

struct SparseSearch<'a, P> {
    storage: &'a P,
    chain: &'a SparseChain<'a>,
    groups: Vec<BoundGroup>,
}

impl<P: Probe> SparseSearch<'_, P> {
    fn holders(&self, index: usize, among: Option<&SlotSet>) -> SlotSet {
        let name = self.chain.name(index);
        name.map_or_else(SlotSet::default, |name| self.storage.holders(name, among))
    }

    /// How many leading blocks end before the one chosen as `index`.
    fn blocks_before(&self, index: usize) -> u32 {
        self.chain
            .position(index)
            .map_or(self.chain.query_blocks(), Position::as_u32)
    }

    /// How many leading blocks end with the one chosen as `index`.
    fn blocks_through(&self, index: usize) -> u32 {
        self.chain
            .position(index)
            .map_or(0, |position| position.as_u32() + 1)
    }

    fn push(&mut self, matched_blocks: u32, matched_blocks_max: u32, slots: SlotSet) {
        if !slots.is_empty() {
            self.groups.push(BoundGroup {
                matched_blocks,
                matched_blocks_max,
                slots,
            });
        }
    }

    /// Where having a block proves all before it.
    fn bisect(&mut self, asked: Option<&SlotSet>) {
        let mut candidates = self.holders(0, asked);
        let last = self.chain.positions.len().saturating_sub(1);
        // One block is looked at once: whoever has it has all.
        let whole = match last {
            0 => candidates.clone(),
            last => self.holders(last, Some(&candidates)),
        };
        candidates.subtract(&whole);
        let blocks = self.chain.query_blocks();
        self.push(blocks, blocks, whole);
        // Deeper stretches are taken first, so that groups come out deepest first.
        let mut stretches = vec![Stretch {
            held: 0,
            missing: last,
            candidates,
        }];
        while let Some(mut stretch) = stretches.pop() {
            let Stretch { held, missing, .. } = stretch;
            if stretch.candidates.is_empty() {
                continue;
            }
            if missing <= held + 1 {
                let (least, most) = (self.blocks_through(held), self.blocks_before(missing));
                self.push(least, most, stretch.candidates);
                continue;
            }
            let middle = held + (missing - held) / 2;
            let deeper = self.holders(middle, Some(&stretch.candidates));
            stretch.candidates.subtract(&deeper);
            stretches.push(Stretch {
                missing: middle,
                ..stretch
            });
            stretches.push(Stretch {
                held: middle,
                missing,
                candidates: deeper,
            });
        }
    }

    /// Where hashes are no chain: only what was chosen without a gap from position 0 on proves anything, and what is missing still
    /// ends the prefix.
    fn walk(&mut self, asked: Option<&SlotSet>) {
        let mut candidates = self.holders(0, asked);
        let mut proven = u32::from(self.chain.continues(0));
        for index in 1..self.chain.positions.len() {
            if candidates.is_empty() {
                break;
            }
            let deeper = self.holders(index, Some(&candidates));
            candidates.subtract(&deeper);
            self.push(proven, self.blocks_before(index), candidates);
            candidates = deeper;
            if proven == self.blocks_before(index) {
                proven = self.blocks_through(index);
            }
        }
        self.push(proven, self.chain.query_blocks(), candidates);
        self.groups.reverse();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use proptest::prelude::*;

    use crate::hash::SequenceHash;

    use super::*;
    use crate::index::directory::HolderSlot;

    /// Prefix-closed holders of one chain; between two looks each gains or loses at most one block.
    struct Changing {
        depths: RefCell<Vec<u32>>,
        steps: Vec<Vec<i8>>,
        history: RefCell<Vec<Vec<u32>>>,
    }

    impl Probe for Changing {
        fn holders(&self, name: BlockKey, among: Option<&SlotSet>) -> SlotSet {
            let mut depths = self.depths.borrow_mut();
            let has_block = |slot: &HolderSlot| {
                depths[slot.index()] > name.position && among.is_none_or(|among| among.contains(*slot))
            };
            let found = (0..depths.len())
                .filter_map(HolderSlot::new)
                .filter(has_block)
                .collect();
            let mut history = self.history.borrow_mut();
            history.push(depths.clone());
            let steps = &self.steps[history.len() % self.steps.len()];
            for (depth, step) in depths.iter_mut().zip(steps) {
                *depth = depth.saturating_add_signed(i32::from(*step));
            }
            history.push(depths.clone());
            found
        }

        fn chain_conflicts(&self) -> u64 {
            0
        }
    }

    fn positions(chosen: &[bool]) -> Vec<Position> {
        let chosen = (0..).zip(chosen).filter(|(_, is_chosen)| **is_chosen);
        chosen
            .map(|(position, _)| Position::new(position).unwrap())
            .collect()
    }

    proptest! {
        #[test]
        fn bounds_contain_a_depth_of_some_instant_of_the_search(
            chosen in proptest::collection::vec(any::<bool>(), 1..40),
            depths in proptest::collection::vec(0_u32..45, 6),
            steps in proptest::collection::vec(proptest::collection::vec(-1_i8..=1, 6), 1..20),
        ) {
            let positions = positions(&chosen);
            prop_assume!(!positions.is_empty());
            let key = QueryKey::SequenceHashes(vec![SequenceHash(7); positions.len()]);
            let chain = SparseChain::new(&key, &positions).unwrap();
            let changing = Changing { depths: RefCell::new(depths), steps, history: RefCell::default() };
            let mut search = SparseSearch { storage: &changing, chain: &chain, groups: Vec::new() };
            search.bisect(None);
            let groups = search.groups;
            prop_assert!(groups.is_sorted_by_key(|group| std::cmp::Reverse(group.matched_blocks)));
            let history = changing.history.borrow();
            for slot in (0..6).filter_map(HolderSlot::new) {
                let of_slot: Vec<&BoundGroup> = groups.iter().filter(|group| group.slots.contains(slot)).collect();
                prop_assert!(of_slot.len() <= 1);
                let (least, most) = of_slot.first().map_or((0, chain.unseen_blocks_max()), |group| {
                    (group.matched_blocks, group.matched_blocks_max)
                });
                // A holder of all may hold what comes behind the query, which was not asked for.
                let end = chain.query_blocks();
                let was_there = |depths: &Vec<u32>| (least..=most).contains(&depths[slot.index()].min(end));
                prop_assert!(history.iter().any(was_there), "{least}..={most} {history:?}");
            }
        }
    }
}
