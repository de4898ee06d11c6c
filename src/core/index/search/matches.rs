//! What a search finds: holders in groups of equal depth.

use std::sync::Arc;

use arc_swap::Guard as DirectoryGuard;
use smallvec::SmallVec;

use crate::wire::{DegradedReason, DegradedReasons};

use crate::index::directory::{Directory, HolderRecord, SlotBits, SlotSet, StreamTrust};

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

/// Holders that hold the same number of leading blocks, or of which no more is known than the same bounds.
#[derive(Debug, Clone)]
pub(crate) struct MatchGroup<S> {
    pub(super) matched_blocks: u32,
    pub(super) matched_blocks_max: u32,
    pub(super) slots: S,
}

impl<S: SlotBits> MatchGroup<S> {
    /// How deep it is, and its slots in words of 64.
    #[inline]
    fn parts(&self) -> ([u32; 2], &[u64]) {
        ([self.matched_blocks, self.matched_blocks_max], self.slots.words())
    }

    /// Holders whose depth is known exactly.
    pub(super) fn of_depth(depth: u32, slots: S) -> Self {
        Self {
            matched_blocks: depth,
            matched_blocks_max: depth,
            slots,
        }
    }
}

/// Groups of one kind of sets. Mostly there are few: those that have the common prompt, and some that have more.
pub(crate) type Groups<S> = SmallVec<[MatchGroup<S>; 4]>;

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
            Self::Small(groups) => groups.get(index).map(MatchGroup::parts),
            Self::Any(groups) => groups.get(index).map(MatchGroup::parts),
        }
    }
}

/// Puts groups in order, deepest first, without slots that `directory` does not have: one that was given out since has a holder that was not
/// there when the query came.
#[inline]
pub(crate) fn finish<S: SlotBits>(mut groups: Groups<S>, directory: &Directory) -> Groups<S> {
    let taken = S::from_words(directory.taken.words());
    groups.retain(|group| {
        group.slots.intersect(&taken);
        !group.slots.is_empty()
    });
    groups.sort_unstable_by_key(|group| std::cmp::Reverse(group.matched_blocks));
    groups
}

/// The holders found, in groups of equal depth.
#[derive(Debug)]
pub struct Matches {
    /// Borrowed from the current version, without counting a reference that all queries share.
    /// None where nobody has anything: most such queries end before they need it.
    pub(super) directory: Option<DirectoryGuard<Arc<Directory>>>,
    pub(super) groups: FoundGroups,
    /// How many states had been replaced when the search began.
    pub(super) replacements: u64,
}

impl Matches {
    /// Nobody has the first block.
    pub(crate) fn none() -> Self {
        Self {
            directory: None,
            groups: FoundGroups::Small(Groups::new()),
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
