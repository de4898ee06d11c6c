//! Compressed chains: a query that gives only blocks at chosen positions. The answer is bounds on the length of the
//! prefix that each holder holds.
//!
//! Only a hole-free prefix of a holder's blocks counts. Suppose that a holder has the chosen block at position p, but
//! lacks the next chosen block, at position q. Then it has between p + 1 and q leading blocks. By bisection over the
//! chosen blocks, the search finds the first one that each holder lacks.
//!
//! Such a search takes a turn at the runs, as writers do. It needs a turn because it finds blocks in the middle of
//! runs, with a table that can be used only in a turn. So everything that it reads is of one instant.
//!
//! A hash under two parents does not identify its prefix. Then the bounds may be wider, but only for queries whose
//! chain contains such a hash.

use std::collections::HashMap;

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
    let mut sparse = SparseSearch {
        runs: &runs,
        chain,
        tiers: search.tiers,
        usable_max: search.usable_max(),
        is_chain: true,
        found: Groups::new(),
    };
    let has_foreign = shared.foreign_holders.load() > 0;
    sparse.is_chain = !has_foreign && (!runs.has_doubles() || sparse.meets_no_double());
    let asked = search.workers.map(|workers| directory.slots_of(workers));
    let first = sparse.holders(0, asked.as_ref().unwrap_or(&directory.taken));
    match sparse.is_chain {
        true => sparse.bisect(0, chain.positions.len(), first),
        false => sparse.walk(first),
    }
    Matches(Some(Box::new(MatchedGroups {
        groups: FoundGroups::Any(Box::new(finish(sparse.found, search.usable_max(), &directory))),
        near: None,
        directory,
        replacements,
    })))
}

struct SparseSearch<'a> {
    runs: &'a RunWriter<'a>,
    chain: &'a SparseChain<'a>,
    tiers: TierDepth,
    usable_max: u32,
    /// Whether, as far as is known, the hashes of this query identify their prefixes.
    is_chain: bool,
    found: Groups<SlotSet>,
}

impl SparseSearch<'_> {
    /// Whether each hash that this search uses belongs to a single block. Checks the hash of each block of the index
    /// that can be a block of the query, and of all blocks before that block.
    fn meets_no_double(&self) -> bool {
        let mut first_doubles: HashMap<RunId, u16> = HashMap::new();
        let mut first_double = |run: RunId, end: u16| {
            let find = || {
                let hashes = (0..).zip(self.runs.view().hashes(run, 0, end));
                let mut doubles = hashes.filter(|(_, hash)| self.runs.places_of(*hash) != Places::Single);
                doubles.next().map_or(u16::MAX, |(offset, _)| offset)
            };
            *first_doubles.entry(run).or_insert_with(find)
        };
        let mut meets = |spot: Spot| {
            let mut next = Some(spot);
            while let Some(at) = next {
                let own = self.runs.run(at.run);
                if first_double(at.run, own.map_or(0, Run::len)) <= at.offset {
                    return true;
                }
                next = own.and_then(Run::parent);
            }
            false
        };
        let mut is_clear = |index| {
            let Some(chosen) = self.chain.chosen(index).filter(|_| self.is_known(index)) else {
                // Some of the blocks that the query may mean are not found.
                return false;
            };
            let met = self.runs.find_place(chosen.hash.hash, |spot| {
                (self.is_at(spot, &chosen) && meets(spot)).then_some(())
            });
            met.is_none()
        };
        (0..self.chain.positions.len()).all(&mut is_clear)
    }

    /// Whether the table of hashes finds all blocks of the index that have the hash of the chosen block number `index`.
    /// Also `true` if there is no such chosen block.
    fn is_known(&self, index: usize) -> bool {
        let chosen = self.chain.chosen(index);
        chosen.is_none_or(|chosen| self.runs.places_of(chosen.hash.hash) != Places::TooMany)
    }

    /// Returns the holders in `among` that have the chosen block number `index` and all blocks before it. If hashes are
    /// not a chain, the table of hashes may not find all blocks with the hash; then returns all of `among`.
    fn holders(&self, index: usize, among: &SlotSet) -> SlotSet {
        let mut found = SlotSet::default();
        let Some(chosen) = self.chain.chosen(index).filter(|_| !among.is_empty()) else {
            return found;
        };
        if !self.is_chain && !self.is_known(index) {
            return among.clone();
        }
        self.runs.find_place(chosen.hash.hash, |spot| {
            if self.is_at(spot, &chosen) {
                found.unite(&self.runs.holders_to(spot, among, self.tiers));
            }
            None::<()>
        });
        found
    }

    fn is_at(&self, spot: Spot, chosen: &Chosen) -> bool {
        let before = || self.runs.before(spot).map_or(0, |before| self.runs.hash(before));
        let is_after = |parent| is_same_at(chosen.position.wrapping_sub(1), parent, before());
        self.runs.position(spot) == chosen.position
            && self.runs.is(spot, chosen.hash)
            && chosen.parent.is_none_or(is_after)
    }

    /// Records the bounds of the holders in `slots`. These holders have the chosen block number `index` and at least
    /// `held` leading blocks, but lack the chosen block number `missing`.
    fn push(&mut self, index: usize, held: u32, missing: usize, slots: SlotSet) {
        if slots.is_empty() {
            return;
        }
        let matched_blocks_max = self.chain.blocks_before(missing);
        let group = |usable_blocks, slots| MatchGroup {
            matched_blocks: held,
            matched_blocks_max,
            usable_blocks,
            slots,
        };
        if !self.runs.has_bars() {
            return self.found.push(group(held, slots));
        }
        let mut found = Groups::new();
        let mut rest = slots;
        // If the hashes are no chain, the query does not tell which blocks lie between the chosen blocks.
        if self.is_chain
            && let Some(chosen) = self.chain.chosen(index)
        {
            self.runs.find_place(chosen.hash.hash, |spot| {
                if self.is_at(spot, &chosen) {
                    let own = self.runs.holders_to(spot, &rest, self.tiers);
                    rest.subtract(&own);
                    self.runs.split(
                        spot,
                        held.min(self.usable_max),
                        self.tiers,
                        own,
                        |usable, slots| {
                            found.push(group(usable, slots));
                        },
                    );
                }
                None::<()>
            });
        }
        if !rest.is_empty() {
            found.push(group(0, rest));
        }
        self.found.extend(found);
    }

    /// Records the bounds of `holders`, which have the chosen block number `held`, but lack the chosen block number
    /// `missing`. The hashes must form a chain: then a holder that has a block also has all blocks before it.
    fn bisect(&mut self, held: usize, missing: usize, mut holders: SlotSet) {
        if holders.is_empty() {
            return;
        }
        if missing <= held + 1 {
            return self.push(held, self.chain.blocks_through(held), missing, holders);
        }
        // Mostly some holders have all chosen blocks, so the last one is tried first.
        let is_first = missing == self.chain.positions.len();
        let middle = if is_first {
            missing - 1
        } else {
            usize::midpoint(held, missing)
        };
        let deeper = self.holders(middle, &holders);
        holders.subtract(&deeper);
        self.bisect(middle, missing, deeper);
        self.bisect(held, middle, holders);
    }

    /// Records the bounds of `holders` if hashes are not a chain. A holder's block may then follow other blocks than
    /// the query's. So the lower bound counts only the chosen blocks before the first block that the query leaves out.
    /// The upper bound is the same as for a chain: a missing block ends the prefix.
    fn walk(&mut self, mut holders: SlotSet) {
        let mut proven = 0;
        for index in 0..self.chain.positions.len() {
            if proven == self.chain.blocks_before(index) && self.is_known(index) {
                proven = self.chain.blocks_through(index);
            }
            let deeper = self.holders(index + 1, &holders);
            holders.subtract(&deeper);
            self.push(index, proven, index + 1, holders);
            holders = deeper;
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
            let entries = self.entries(spot.run);
            let have_it = entries.filter(|entry| entry.reach(tiers.step()) > spot.offset);
            holding.intersect(&have_it.map(|entry| entry.slot()).collect());
            next = self.run(spot.run).and_then(Run::parent);
        }
        holding
    }
}
