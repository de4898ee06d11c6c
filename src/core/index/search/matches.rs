//! What a search finds: holders in groups of equal depth.

use std::sync::Arc;

use arc_swap::Guard as DirectoryGuard;

use crate::wire::{DegradedReason, DegradedReasons};

use crate::index::directory::{Directory, HolderRecord, HolderSlot, SlotBits, SlotSet};
use crate::stream::StreamTrust;

use super::depths::{Groups, MatchGroup};

/// One holder and how long a prefix it holds.
#[derive(Debug, Clone, Copy)]
pub struct Match<'a> {
    /// The holder.
    pub holder: &'a Arc<HolderRecord>,
    /// How many leading blocks it holds, without a hole; at least 1, but where blocks of a [`SparseChain`](super::SparseChain) are no
    /// chain.
    pub matched_blocks: u32,
    /// How many leading blocks it holds at most: more than `matched_blocks` only where a query gives some blocks of a chain.
    pub matched_blocks_max: u32,
}

/// Groups of either kind. Small ones stay as they are: to make larger ones of them would take longer than to find some of them.
#[derive(Debug)]
pub(crate) enum FoundGroups {
    Small(Groups<u64>),
    Any(Groups<SlotSet>),
}

impl FoundGroups {
    #[inline]
    fn get(&self, index: usize) -> Option<([u32; 2], &[u64])> {
        match self {
            Self::Small(groups) => groups.get(index).map(parts),
            Self::Any(groups) => groups.get(index).map(parts),
        }
    }
}

/// How deep a group is, and its slots in words of 64.
#[inline]
fn parts<S: SlotBits>(group: &MatchGroup<S>) -> ([u32; 2], &[u64]) {
    (
        [group.matched_blocks, group.matched_blocks_max],
        group.slots.words(),
    )
}

/// Slots of a word of a set.
const WORD_SLOTS: usize = u64::BITS as usize;

/// The numbers of the slots in the words of a set.
fn slots_of(words: &[u64]) -> impl Iterator<Item = usize> {
    (0..).step_by(WORD_SLOTS).zip(words).flat_map(|(first, word)| {
        let mut left = *word;
        std::iter::from_fn(move || {
            let bit = (left != 0).then(|| left.trailing_zeros() as usize)?;
            left &= left - 1;
            Some(first + bit)
        })
    })
}

/// How many leading blocks the holder in each slot has on the device, and on device and host together.
#[derive(Debug)]
pub(super) struct NearBlocks(Vec<[u32; 2]>);

impl NearBlocks {
    /// From what was found on the device, and on both.
    pub(super) fn of<S: SlotBits>(near: &[Groups<S>; 2]) -> Self {
        let words = near.iter().flatten().map(|group| group.slots.words().len());
        let mut blocks = vec![[0; 2]; words.max().unwrap_or_default() * WORD_SLOTS];
        for (step, groups) in near.iter().enumerate() {
            for group in groups {
                for slot in slots_of(group.slots.words()) {
                    blocks[slot][step] = group.matched_blocks;
                }
            }
        }
        Self(blocks)
    }

    fn of_slot(&self, slot: HolderSlot) -> [u32; 2] {
        self.0.get(slot.index()).copied().unwrap_or_default()
    }
}

/// The holders found, in groups of equal depth.
#[derive(Debug)]
pub struct Matches {
    /// Borrowed from the current version, without counting a reference that all queries share.
    /// None where nobody has anything: most such queries end before they need it.
    pub(super) directory: Option<DirectoryGuard<Arc<Directory>>>,
    pub(super) groups: FoundGroups,
    pub(super) near: Option<NearBlocks>,
    /// How many states had been replaced when the search began.
    pub(super) replacements: u64,
}

impl Matches {
    /// Nobody has the first block.
    pub(crate) fn none() -> Self {
        Self {
            directory: None,
            groups: FoundGroups::Small(Groups::new()),
            near: None,
            replacements: 0,
        }
    }

    /// Why the state in which `holder` was found is not certain.
    ///
    /// Where it has been replaced since the search began, the reasons of now are those of another state than the one that was
    /// searched: the holder counts as unverified.
    pub fn reasons(&self, holder: &HolderRecord, trust: &StreamTrust) -> DegradedReasons {
        let reasons = holder.status.reasons(trust);
        if holder.status.replacement.load() > self.replacements {
            return reasons.with(DegradedReason::Unverified);
        }
        reasons
    }

    /// With [`TierDepth::Each`](super::TierDepth::Each): how many of its blocks a holder has on the device, and how many on device and host
    /// together. Each count ends before the first block that lies elsewhere.
    pub fn near_blocks(&self, holder: &HolderRecord) -> Option<[u32; 2]> {
        Some(self.near.as_ref()?.of_slot(holder.slot()))
    }

    /// The holders with at least one matched block, deepest first; in no particular order within one depth.
    ///
    /// A holder that left while the search ran is left out: it holds nothing now.
    pub fn holders(&self) -> impl Iterator<Item = Match<'_>> {
        let groups = (0..).map_while(|index| self.groups.get(index));
        let count = |words: &[u64]| words.iter().map(|word| word.count_ones() as usize).sum::<usize>();
        let found = groups.map(|(_, words)| count(words)).sum();
        let directory = self.directory.as_ref().map(|directory| &***directory);
        Holders {
            // Mostly nobody has left, and then there is no need to look at every holder.
            nobody_left: directory.is_none_or(Directory::is_complete),
            directory,
            groups: &self.groups,
            next_group: 0,
            matched_blocks: [0; 2],
            words: [].iter(),
            word: 0,
            first_slot: 0,
            left: found,
        }
    }
}

/// See [`Matches::holders`].
struct Holders<'m> {
    directory: Option<&'m Directory>,
    nobody_left: bool,
    groups: &'m FoundGroups,
    next_group: usize,
    /// Of the group whose turn it is, at least and at most.
    matched_blocks: [u32; 2],
    /// What is left of that group, and of the word that begins with `first_slot`.
    words: std::slice::Iter<'m, u64>,
    word: u64,
    first_slot: usize,
    left: usize,
}

impl<'m> Iterator for Holders<'m> {
    type Item = Match<'m>;

    #[inline]
    fn next(&mut self) -> Option<Match<'m>> {
        loop {
            while self.word == 0 {
                if let Some(word) = self.words.next() {
                    (self.word, self.first_slot) = (*word, self.first_slot + 64);
                } else {
                    let (matched_blocks, words) = self.groups.get(self.next_group)?;
                    self.next_group += 1;
                    self.matched_blocks = matched_blocks;
                    self.words = words.iter();
                    // The first word adds 64.
                    self.first_slot = 0;
                }
            }
            let slot = self.first_slot + self.word.trailing_zeros() as usize - 64;
            self.word &= self.word - 1;
            self.left -= 1;
            let directory = self.directory;
            if let Some(holder) = directory.and_then(|directory| directory.holder(slot))
                && (self.nobody_left || !holder.is_retired())
            {
                let [matched_blocks, matched_blocks_max] = self.matched_blocks;
                return Some(Match {
                    holder,
                    matched_blocks,
                    matched_blocks_max,
                });
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        // A search keeps only slots that the directory has.
        let least = if self.nobody_left { self.left } else { 0 };
        (least, Some(self.left))
    }
}
