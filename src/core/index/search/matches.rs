//! The result of a search: holders in groups of equal depth.

use std::sync::Arc;

use arc_swap::Guard as DirectoryGuard;

use crate::wire::DegradedReasons;

use crate::index::directory::{Directory, HolderRecord, HolderSlot, SlotBits, SlotSet};
use crate::stream::StreamTrust;

use super::depths::{Groups, MatchGroup};

/// One holder, with the length of the prefix that it holds.
#[derive(Debug, Clone, Copy)]
pub struct Match<'a> {
    /// The holder, with its status.
    pub holder: &'a Arc<HolderRecord>,
    /// Number of leading blocks of the query that the holder has without a hole. It is 0 only in an answer to a
    /// [`SparseChain`](super::SparseChain), and only if hashes do not form a chain. Otherwise it is at least 1.
    pub matched_blocks: u32,
    /// Maximum number of leading blocks that the holder can have. It is more than `matched_blocks` only if the query
    /// gives just some blocks of a chain.
    pub matched_blocks_max: u32,
    /// Number of leading blocks that a request can reuse: the blocks up to the last resumable one within
    /// `matched_blocks` and [`Search::usable_max`](super::Search). With a [`SparseChain`](super::SparseChain) it is a
    /// lower bound.
    pub usable_blocks: u32,
}

/// Groups of holders, with small or large sets. Small sets are not converted to large sets, because the conversion
/// would take longer than some searches.
#[derive(Debug)]
pub(crate) enum FoundGroups {
    Small(Groups<u64>),
    Any(Box<Groups<SlotSet>>),
}

impl FoundGroups {
    #[inline]
    fn get(&self, index: usize) -> Option<([u32; 3], &[u64])> {
        match self {
            Self::Small(groups) => groups.get(index).map(parts),
            Self::Any(groups) => groups.get(index).map(parts),
        }
    }
}

/// Returns a group's numbers of matched blocks, of possibly matched blocks, and of usable blocks. Also returns its
/// holders, as the words of a set.
#[inline]
fn parts<S: SlotBits>(group: &MatchGroup<S>) -> ([u32; 3], &[u64]) {
    (
        [
            group.matched_blocks,
            group.matched_blocks_max,
            group.usable_blocks,
        ],
        group.slots.words(),
    )
}

/// Number of slots in a word of a set.
const WORD_SLOTS: usize = u64::BITS as usize;

/// Returns the numbers of the slots in the words of a set.
fn slots_of(words: &[u64]) -> impl Iterator<Item = usize> {
    let (mut words, mut left, mut end) = (words.iter(), 0_u64, 0);
    std::iter::from_fn(move || {
        while left == 0 {
            (left, end) = (*words.next()?, end + WORD_SLOTS);
        }
        let slot = end - WORD_SLOTS + left.trailing_zeros() as usize;
        left &= left - 1;
        Some(slot)
    })
}

/// Leading blocks of a query that a holder has in some tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NearBlocks {
    /// Number of leading blocks in the near tiers (the device, or device and host). The count stops at the first
    /// block that lies outside these tiers.
    pub matched_blocks: u32,
    /// Number of the matched blocks that a request can reuse.
    pub usable_blocks: u32,
}

/// Numbers of leading blocks that each holder has on the device, and on device and host together, indexed by slot.
#[derive(Debug)]
pub(super) struct Near(Vec<[NearBlocks; 2]>);

impl Near {
    /// Makes the table from two lists of groups of holders: found on the device, and found on device and host.
    pub(super) fn of<S: SlotBits>(near: &[Groups<S>; 2]) -> Self {
        let words = near.iter().flatten().map(|group| group.slots.words().len());
        let mut blocks = vec![[NearBlocks::default(); 2]; words.max().unwrap_or_default() * WORD_SLOTS];
        for (step, groups) in near.iter().enumerate() {
            for group in groups {
                for slot in slots_of(group.slots.words()) {
                    blocks[slot][step] = NearBlocks {
                        matched_blocks: group.matched_blocks,
                        usable_blocks: group.usable_blocks,
                    };
                }
            }
        }
        Self(blocks)
    }

    fn of_slot(&self, slot: HolderSlot) -> [NearBlocks; 2] {
        self.0.get(slot.index()).copied().unwrap_or_default()
    }
}

/// Holders that a search has found, in groups of equal depth. The inner value is `None` if no holder has any block.
/// The box makes the value cheap to move.
#[derive(Debug)]
pub struct Matches(pub(super) Option<Box<MatchedGroups>>);

/// Groups of holders that a search has found, and the directory in which the search looked up the holders.
#[derive(Debug)]
pub(super) struct MatchedGroups {
    /// Directory in which the search looked up the holders. It is borrowed without a reference count: all queries would
    /// write to the count, which would slow them down.
    pub(super) directory: DirectoryGuard<Arc<Directory>>,
    pub(super) groups: FoundGroups,
    pub(super) near: Option<Near>,
    /// Number of holder states that had been replaced when the search began.
    pub(super) replacements: u64,
}

impl Matches {
    /// Returns the reasons why the state of `holder` that the search saw is not certain.
    pub fn reasons(&self, holder: &HolderRecord, trust: &StreamTrust) -> DegradedReasons {
        let replacements = self.0.as_ref().map_or(0, |found| found.replacements);
        holder.status.reasons_since(replacements, trust)
    }

    /// Returns two counts of a holder's leading blocks: blocks on the device, and blocks on device or host. Each
    /// count ends before the first block outside its tiers. `None` if the search was not made with
    /// [`TierDepth::Each`](super::TierDepth::Each), or found nothing.
    pub fn near_blocks(&self, holder: &HolderRecord) -> Option<[NearBlocks; 2]> {
        Some(self.0.as_ref()?.near.as_ref()?.of_slot(holder.slot()))
    }

    /// Returns the holders with at least one matched block. Holders with the most usable blocks come first, then
    /// those with the most matched blocks. Holders with equal numbers are in no particular order.
    ///
    /// A holder that left during the search is left out: it holds nothing now.
    pub fn holders(&self) -> impl Iterator<Item = Match<'_>> {
        let found = self.0.as_deref();
        // Mostly no holder has left, and then not every holder need be looked at.
        let nobody_left = found.is_none_or(|found| found.directory.is_complete());
        let groups = (0..).map_while(|index| found?.groups.get(index));
        let count = |words: &[u64]| words.iter().map(|word| word.count_ones() as usize).sum::<usize>();
        let most = groups.map(|(_, words)| count(words)).sum();
        // A search keeps only slots that the directory has.
        let least = if nobody_left { most } else { 0 };
        let (mut next, mut depths, mut slots) = (0, [0; 3], slots_of(&[]));
        let holders = std::iter::from_fn(move || {
            let found = found?;
            loop {
                let Some(slot) = slots.next() else {
                    let (blocks, words) = found.groups.get(next)?;
                    (next, depths, slots) = (next + 1, blocks, slots_of(words));
                    continue;
                };
                let holder = found.directory.holder(slot);
                if let Some(holder) = holder.filter(|holder| nobody_left || !holder.is_retired()) {
                    let [matched_blocks, matched_blocks_max, usable_blocks] = depths;
                    return Some(Match {
                        holder,
                        matched_blocks,
                        matched_blocks_max,
                        usable_blocks,
                    });
                }
            }
        });
        Counted { holders, least, most }
    }
}

/// Iterator that knows bounds on the number of remaining items, so that collecting them allocates once.
struct Counted<I> {
    holders: I,
    least: usize,
    most: usize,
}

impl<I: Iterator> Iterator for Counted<I> {
    type Item = I::Item;

    #[inline]
    fn next(&mut self) -> Option<I::Item> {
        (self.least, self.most) = (self.least.saturating_sub(1), self.most.saturating_sub(1));
        self.holders.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.least, Some(self.most))
    }
}
