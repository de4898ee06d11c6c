//! Compressed chains: a query that gives only blocks at chosen positions. The answer is bounds on the length of the
//! prefix that each holder holds.
//!
//! Only a hole-free prefix of a holder's blocks counts. Suppose that a holder has the chosen block at position p, but
//! lacks the next chosen block, at position q. Then it has between p + 1 and q leading blocks. By bisection over the
//! chosen blocks, the search finds the first one that each holder lacks. A block counts only behind blocks that agree
//! with all chosen blocks before it.
//!
//! Such a search takes a turn at the runs, as writers do. It needs a turn because it finds blocks in the middle of
//! runs, with a table that can be used only in a turn. So everything that it reads is of one instant.
//!
//! A hash under two parents does not identify its prefix. Then the bounds may be wider, but only for queries whose
//! chain contains such a hash.

use std::collections::HashMap;

use smallvec::{SmallVec, smallvec};

use crate::hash::Position;
use crate::index::directory::{SlotBits, SlotSet};
use crate::index::runs::{Places, Run, RunId, RunWriter, Spot, Wanted, is_same_at, split_by_usable};
use crate::index::shared::IndexShared;
use crate::wire::{PositionsError, QueryKey, check_positions};

use super::depths::{Groups, MatchGroup, finish};
use super::matches::{FoundGroups, MatchedGroups};
use super::{Matches, Search, TierDepth};

/// Blocks of one chain at chosen positions.
#[derive(Debug, Clone, Copy)]
pub struct SparseChain<'a> {
    key: &'a QueryKey,
    positions: &'a [Position],
}

/// Chosen block: its position, and the hash by which it is found.
struct Chosen {
    position: u32,
    hash: Wanted,
    /// Hash of the block before the chosen block, or the fragment of that hash that the query gives. `None` if the
    /// query gives neither.
    parent: Option<u64>,
}

impl<'a> SparseChain<'a> {
    /// Makes the chain that has the blocks of `key`. The block at each index of `key` has the position at the same
    /// index of `positions`.
    ///
    /// # Errors
    ///
    /// [`PositionsError`] if `key` and `positions` do not fit together; see
    /// [`SingleQuery::check`](crate::wire::SingleQuery::check).
    pub fn new(key: &'a QueryKey, positions: &'a [Position]) -> Result<Self, PositionsError> {
        check_positions(key, positions)?;
        Ok(Self { key, positions })
    }

    /// Number of leading blocks that the chain stands for: all blocks up to the last block that the query gives.
    pub fn query_blocks(&self) -> u32 {
        self.positions.last().map_or(0, |last| last.as_u32() + 1)
    }

    /// Maximum number of leading blocks that a holder without any of the chosen blocks can have.
    pub fn unseen_blocks_max(&self) -> u32 {
        self.blocks_before(0)
    }

    /// Number of blocks of the chain before the chosen block number `index`. If there is no such block, returns
    /// [`Self::query_blocks`].
    fn blocks_before(&self, index: usize) -> u32 {
        let position = self.positions.get(index);
        position.map_or(self.query_blocks(), |position| position.as_u32())
    }

    /// Number of leading blocks of the chain up to the chosen block number `index`, that block included.
    fn blocks_through(&self, index: usize) -> u32 {
        let position = self.positions.get(index);
        position.map_or(0, |position| position.as_u32() + 1)
    }

    fn chosen(&self, index: usize) -> Option<Chosen> {
        let position = self.positions.get(index)?.as_u32();
        let (hash, parent) = match self.key {
            QueryKey::LineageHashes(keys) => {
                let key = keys.get(index)?;
                let parent = (position > 0).then(|| key.parent_hash_fragment());
                (Wanted::fragment(key.current_hash_fragment()), parent)
            }
            QueryKey::SequenceHashes(hashes) => {
                let before = index.checked_sub(1);
                let before = before.filter(|before| self.blocks_through(*before) == position);
                let parent = before.and_then(|before| hashes.get(before));
                (Wanted::whole(hashes.get(index)?.0), parent.map(|hash| hash.0))
            }
            // `new` refuses queries by tokens and by block hashes.
            QueryKey::Tokens { .. } | QueryKey::BlockHashes(_) => return None,
        };
        Some(Chosen {
            position,
            hash,
            parent,
        })
    }
}

/// Returns, for each holder, bounds on the length of the prefix of `chain` that it holds.
pub(crate) fn find_bounds(shared: &IndexShared, chain: &SparseChain<'_>, search: Search<'_>) -> Matches {
    // The count is read before any run, so that the search notices each state that is replaced from now on.
    let replacements = shared.replacements.load();
    let runs = shared.runs.write();
    let directory = shared.slots.load();
    let asked = search.workers.map(|workers| directory.slots_of(workers));
    let mut sparse = SparseSearch {
        runs: &runs,
        chain,
        steps: known_steps(&runs, chain),
        tiers: search.tiers,
        usable_max: search.usable_max(),
        has_foreign: shared.foreign_holders.load() > 0,
        first_doubles: HashMap::new(),
        found: Groups::new(),
    };
    sparse.run(Front::beginning(asked.unwrap_or_else(|| directory.taken.clone())));
    Matches(Some(Box::new(MatchedGroups {
        groups: FoundGroups::Any(Box::new(finish(sparse.found, search.usable_max(), &directory))),
        near: None,
        directory,
        replacements,
    })))
}

/// Returns the numbers of the chosen blocks that the search looks up. It can't look up a block if the table of hashes
/// does not find all blocks of the index that have its hash.
fn known_steps(runs: &RunWriter<'_>, chain: &SparseChain<'_>) -> Vec<usize> {
    let is_known = |index: &usize| {
        let chosen = chain.chosen(*index);
        chosen.is_none_or(|chosen| runs.places_of(chosen.hash.hash) != Places::TooMany)
    };
    (0..chain.positions.len()).filter(is_known).collect()
}

/// Block of the index that can be a chosen block of the query: it and the blocks before it agree with all chosen
/// blocks up to there. The beginning of all chains if `spot` is `None`.
struct ChosenPlace {
    spot: Option<Spot>,
    /// Holders that have this block and all blocks before it.
    holders: SlotSet,
}

/// Front of the search in one direction: the places of one chosen block.
#[derive(Default)]
struct Front {
    /// Number of chosen blocks up to the places', that block included.
    chosen: usize,
    places: SmallVec<[ChosenPlace; 1]>,
}

impl Front {
    /// Makes the front before the first chosen block.
    fn beginning(holders: SlotSet) -> Self {
        Self {
            chosen: 0,
            places: smallvec![ChosenPlace { spot: None, holders }],
        }
    }

    /// Returns the holders of all places.
    fn holders(&self) -> SlotSet {
        let mut all = SlotSet::default();
        for place in &self.places {
            all.unite(&place.holders);
        }
        all
    }

    /// Removes holders, and places without holders.
    fn subtract(&mut self, holders: &SlotSet) {
        self.places.retain(|place| {
            place.holders.subtract(holders);
            !place.holders.is_empty()
        });
    }
}

struct SparseSearch<'a> {
    runs: &'a RunWriter<'a>,
    chain: &'a SparseChain<'a>,
    /// Numbers of the chosen blocks that are looked up; see [`known_steps`].
    steps: Vec<usize>,
    tiers: TierDepth,
    usable_max: u32,
    /// Whether some holder's hashes are not the contract's chain.
    has_foreign: bool,
    /// Offset of the first block of a run whose hash several blocks have; `u16::MAX` if there is none.
    first_doubles: HashMap<RunId, u16>,
    found: Groups<SlotSet>,
}

impl SparseSearch<'_> {
    fn run(&mut self, mut beginning: Front) {
        let Some(first) = self.steps.first().copied() else {
            return self.push(&beginning, self.chain.positions.len());
        };
        let found = self.advance(&mut beginning, first);
        // Holders without any of the chosen blocks are not named.
        if first > 0 {
            self.push(&beginning, first);
        }
        self.bisect(found, 1, self.steps.len());
    }

    /// Records the bounds of the holders at `front`, the place of step number `held - 1`. They lack the chosen block of
    /// step number `missing`.
    fn bisect(&mut self, mut front: Front, held: usize, missing: usize) {
        if front.places.is_empty() {
            return;
        }
        let all = self.steps.len();
        // Mostly some holders have all chosen blocks, so the last one is tried first.
        let middle = match missing == all {
            true => missing.saturating_sub(1),
            false => usize::midpoint(held, missing),
        };
        let Some(index) = self.steps.get(middle).copied().filter(|_| held < missing) else {
            let missing = self.steps.get(missing).copied();
            return self.push(&front, missing.unwrap_or(self.chain.positions.len()));
        };
        let deeper = self.advance(&mut front, index);
        self.bisect(deeper, middle + 1, missing);
        self.bisect(front, held, middle);
    }

    /// Moves the holders that have the chosen block number `index` from `front` to its places, and returns these.
    fn advance(&self, front: &mut Front, index: usize) -> Front {
        let Some(chosen) = self.chain.chosen(index) else {
            return Front::default();
        };
        let mut places = SmallVec::new();
        let among = front.holders();
        self.runs.find_place(chosen.hash.hash, |spot| {
            if self.is_at(spot, &chosen)
                && let Some(holders) = self.holders_along(spot, index, front, among.clone())
            {
                let spot = Some(spot);
                places.push(ChosenPlace { spot, holders });
            }
            None::<()>
        });
        let chosen = index + 1;
        let deeper = Front { chosen, places };
        front.subtract(&deeper.holders());
        deeper
    }

    /// Returns the holders in `among` that have the block at `spot` and all blocks before it. `None` if there are none,
    /// or if one of these blocks is another one than a chosen block before the chosen block number `index`: hashes that
    /// do not follow the contract may bring a block behind another prefix than the query's. Goes back to `front` only.
    fn holders_along(&self, spot: Spot, index: usize, front: &Front, mut among: SlotSet) -> Option<SlotSet> {
        let behind = front
            .chosen
            .checked_sub(1)
            .and_then(|last| self.chain.chosen(last));
        let mut earlier = (front.chosen..index).rev().peekable();
        let mut next = Some(spot);
        let mut reached = None;
        while let Some(at) = next {
            let run = self.runs.run(at.run)?;
            let in_run = |position: u32| {
                let offset = position.checked_sub(run.start())?;
                let offset = u16::try_from(offset).ok()?;
                Some(Spot { offset, ..at })
            };
            let is_in_run = |index: &usize| self.chain.blocks_before(*index) >= run.start();
            while let Some(index) = earlier.next_if(is_in_run) {
                let chosen = self.chain.chosen(index)?;
                in_run(chosen.position).filter(|spot| self.is_at(*spot, &chosen))?;
            }
            self.runs.keep_holders(at, &mut among, self.tiers);
            reached = behind.as_ref().and_then(|behind| in_run(behind.position));
            if among.is_empty() || reached.is_some() {
                break;
            }
            next = run.parent();
        }
        let before = front.places.iter().find(|place| place.spot == reached)?;
        among.intersect(&before.holders);
        (!among.is_empty()).then_some(among)
    }

    fn is_at(&self, spot: Spot, chosen: &Chosen) -> bool {
        let before = || self.runs.before(spot).map_or(0, |before| self.runs.hash(before));
        let is_after = |parent| is_same_at(chosen.position.wrapping_sub(1), parent, before());
        self.runs.position(spot) == chosen.position
            && self.runs.is(spot, chosen.hash)
            && chosen.parent.is_none_or(is_after)
    }

    /// Whether the hashes of the block at `spot` and of all blocks before it stand for their prefixes, as far as the
    /// index can tell: none of them belongs to another block, too.
    fn is_chain(&mut self, spot: Spot) -> bool {
        if self.has_foreign {
            return false;
        }
        let mut next = Some(spot).filter(|_| self.runs.has_doubles());
        while let Some(at) = next {
            let run = self.runs.run(at.run);
            let find = || {
                let hashes = (0..).zip(self.runs.view().hashes(at.run, 0, run.map_or(0, Run::len)));
                let mut doubles = hashes.filter(|(_, hash)| self.runs.places_of(*hash) != Places::Single);
                doubles.next().map_or(u16::MAX, |(offset, _)| offset)
            };
            if *self.first_doubles.entry(at.run).or_insert_with(find) <= at.offset {
                return false;
            }
            next = run.and_then(Run::parent);
        }
        true
    }

    /// Number of leading blocks that the query shares with the chain up to the place `spot` of the last of the first
    /// `chosen` chosen blocks. A lower bound: if hashes do not stand for their prefixes, only the blocks before the
    /// first one that the query leaves out are counted.
    fn shared_blocks(&mut self, chosen: usize, spot: Option<Spot>) -> u32 {
        let (Some(last), Some(spot)) = (chosen.checked_sub(1), spot) else {
            return 0;
        };
        let through = self.chain.blocks_through(last);
        if self.is_chain(spot) {
            return through;
        }
        let given = (0..).zip(self.chain.positions);
        let leading = given
            .take_while(|(index, position)| position.as_u32() == *index)
            .count();
        u32::try_from(leading).unwrap_or(u32::MAX).min(through)
    }

    /// Records the bounds of the holders at `front`. They lack the chosen block number `missing`.
    fn push(&mut self, front: &Front, missing: usize) {
        let matched_blocks_max = self.chain.blocks_before(missing);
        let mut told = SlotSet::default();
        for ChosenPlace { spot, holders } in &front.places {
            let mut slots = holders.clone();
            slots.subtract(&told);
            told.unite(&slots);
            let held = self.shared_blocks(front.chosen, *spot);
            let found = &mut self.found;
            let mut group = |usable_blocks, slots: SlotSet| {
                if !slots.is_empty() {
                    found.push(MatchGroup {
                        matched_blocks: held,
                        matched_blocks_max,
                        usable_blocks,
                        slots,
                    });
                }
            };
            match spot.filter(|_| self.runs.has_bars()) {
                Some(spot) => {
                    let depth = held.min(self.usable_max);
                    self.runs.split(spot, depth, self.tiers, slots, group);
                }
                None => group(held, slots),
            }
        }
    }
}

impl RunWriter<'_> {
    /// Splits the holders in `slots` by how many of the first `depth` blocks of a chain they can use. The chain ends
    /// with the block at `spot`, and the holders have all its blocks.
    fn split(
        &self,
        spot: Spot,
        depth: u32,
        tiers: TierDepth,
        slots: SlotSet,
        found: impl FnMut(u32, SlotSet),
    ) {
        let run = |spot: Spot| self.run(spot.run);
        let path = std::iter::successors(run(spot), |own| own.parent().and_then(run));
        split_by_usable(path, depth, tiers.step(), slots, self.guard(), found);
    }

    /// Returns the holders in `among` that have the block at `spot` and all blocks before it, in these tiers.
    pub(crate) fn holders_to(&self, spot: Spot, among: &SlotSet, tiers: TierDepth) -> SlotSet {
        let (mut holding, mut next) = (among.clone(), Some(spot));
        while let Some(spot) = next.filter(|_| !holding.is_empty()) {
            self.keep_holders(spot, &mut holding, tiers);
            next = self.run(spot.run).and_then(Run::parent);
        }
        holding
    }

    /// Removes the holders that lack the block at `spot` in these tiers.
    fn keep_holders(&self, spot: Spot, holders: &mut SlotSet, tiers: TierDepth) {
        let entries = self.entries(spot.run);
        let have_it = entries.filter(|entry| entry.reach(tiers.step()) > spot.offset);
        holders.intersect(&have_it.map(|entry| entry.slot()).collect());
    }
}
