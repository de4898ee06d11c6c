//! Holders grouped by depth, the result of a search. A holder's depth is the number of leading blocks of the query
//! that it has.

use smallvec::SmallVec;

use crate::index::directory::{Directory, HolderSlot, SlotBits};

/// Number of groups of holders at which a single holder makes no new group. A single holder's depth is compared with
/// the depths of the last groups, at most this many.
const GROUPS_MAX: usize = 8;

/// Holders that have the same number of leading blocks, or the same bounds on it.
#[derive(Debug, Clone)]
pub(crate) struct MatchGroup<S> {
    pub(super) matched_blocks: u32,
    pub(super) matched_blocks_max: u32,
    /// Number of blocks that these holders can use; a lower bound if only bounds are known.
    pub(super) usable_blocks: u32,
    pub(super) slots: S,
}

impl<S: SlotBits> MatchGroup<S> {
    /// Makes the group of holders whose depth, `depth`, is known exactly.
    fn of_depth(depth: u32, slots: S) -> Self {
        Self {
            matched_blocks: depth,
            matched_blocks_max: depth,
            usable_blocks: depth,
            slots,
        }
    }
}

/// Groups of holders. `S` is the kind of set that holds them. Usually there are few groups: holders that have only the
/// beginning that many prompts share, and some that have more.
pub(crate) type Groups<S> = SmallVec<[MatchGroup<S>; 4]>;

/// Sorts groups of holders: most usable blocks first, then greatest depth. No more than `usable_max` blocks count as
/// usable. Removes slots that `directory` does not have: they were assigned to new holders after the query came.
#[inline]
pub(crate) fn finish<S: SlotBits>(
    mut groups: Groups<S>,
    usable_max: u32,
    directory: &Directory,
) -> Groups<S> {
    let taken = S::from_words(directory.taken.words().iter().copied());
    groups.retain(|group| {
        group.usable_blocks = group.usable_blocks.min(usable_max);
        group.slots.intersect(&taken);
        !group.slots.is_empty()
    });
    // Both counts are put into one number, so that one comparison is enough.
    let blocks =
        |group: &MatchGroup<S>| u64::from(group.usable_blocks) << 32 | u64::from(group.matched_blocks);
    groups.sort_unstable_by_key(|group| std::cmp::Reverse(blocks(group)));
    groups
}

/// Depths of the holders that a search has found so far.
#[derive(Debug)]
pub(super) struct Depths<S> {
    groups: Groups<S>,
    /// Holders that belong to no group, each with its depth. A holder comes here if there are [`GROUPS_MAX`] groups
    /// already and its depth is not that of one of the last groups.
    others: Vec<(u32, HolderSlot)>,
}

impl<S> Default for Depths<S> {
    #[inline]
    fn default() -> Self {
        Self {
            groups: Groups::new(),
            others: Vec::new(),
        }
    }
}

impl<S: SlotBits> Depths<S> {
    /// Records `depth` (number of leading blocks of the query) for the holders in `slots`. Does nothing if `depth` is
    /// 0.
    #[inline]
    pub(super) fn settle(&mut self, depth: u32, slots: &S) {
        if depth == 0 || slots.is_empty() {
            return;
        }
        match self.groups.iter_mut().find(|group| group.matched_blocks == depth) {
            Some(group) => group.slots.unite(slots),
            None => self.groups.push(MatchGroup::of_depth(depth, slots.clone())),
        }
    }

    /// Records the depth of one holder that the search leaves behind: the holder has `depth` leading blocks of the
    /// query, at least 1. Usually many holders have the same depth.
    #[inline]
    pub(super) fn leave(&mut self, depth: u32, slot: HolderSlot) {
        let mut last = self.groups.iter_mut().rev().take(GROUPS_MAX);
        if let Some(group) = last.find(|group| group.matched_blocks == depth) {
            group.slots.insert(slot);
        } else if self.groups.len() < GROUPS_MAX {
            let mut slots = S::default();
            slots.insert(slot);
            self.groups.push(MatchGroup::of_depth(depth, slots));
        } else {
            self.others.push((depth, slot));
        }
    }

    /// Splits the holders of each depth by how many of their blocks are usable. Calls `split` with a depth, the holders
    /// of that depth, and a function. `split` divides the holders, and calls the function once for each number of
    /// usable blocks, with the number and the holders that have it.
    pub(super) fn split(&mut self, mut split: impl FnMut(u32, S, &mut dyn FnMut(u32, S))) {
        if !self.others.is_empty() {
            self.group_others();
            self.others = Vec::new();
        }
        // Most groups stay whole.
        for place in 0..self.groups.len() {
            let group = &mut self.groups[place];
            let (depth, slots) = (group.matched_blocks, std::mem::take(&mut group.slots));
            let mut is_placed = false;
            split(depth, slots, &mut |usable, slots| {
                if std::mem::replace(&mut is_placed, true) {
                    return self.settle_usable(depth, usable, slots);
                }
                let group = &mut self.groups[place];
                (group.usable_blocks, group.slots) = (usable, slots);
            });
        }
    }

    /// Records that the holders in `slots` have depth `depth` and can use `usable` of these blocks.
    pub(super) fn settle_usable(&mut self, depth: u32, usable: u32, slots: S) {
        if depth > 0 {
            let group = MatchGroup::of_depth(depth, slots);
            self.groups.push(MatchGroup {
                usable_blocks: usable,
                ..group
            });
        }
    }

    /// Returns the groups of holders with equal depth, in order. Leaves out holders that `directory` does not have.
    #[inline]
    pub(super) fn finish(mut self, usable_max: u32, directory: &Directory) -> Groups<S> {
        if !self.others.is_empty() {
            self.group_others();
        }
        finish(self.groups, usable_max, directory)
    }

    /// Puts the holders that were found one by one into groups of equal depth.
    #[cold]
    fn group_others(&mut self) {
        self.others.sort_unstable();
        // The loop adds groups, each with a depth that no later holder has. So only the earlier groups need be
        // searched.
        let known = self.groups.len();
        for group in self.others.chunk_by(|one, other| one.0 == other.0) {
            let (depth, slots) = (group[0].0, group.iter().map(|(_, slot)| *slot));
            let mut groups = self.groups[..known].iter_mut();
            if let Some(known) = groups.find(|group| group.matched_blocks == depth) {
                slots.for_each(|slot| known.slots.insert(slot));
            } else {
                let mut set = S::default();
                slots.for_each(|slot| set.insert(slot));
                self.groups.push(MatchGroup::of_depth(depth, set));
            }
        }
    }
}
