//! Searches by fragments of hashes, for cases where several children of one block have the same fragment.
//!
//! A lineage hash keeps only some bits of a sequence hash, its fragment. So it cannot distinguish sequence hashes
//! that agree in these bits. A search by lineage hashes follows all children with the wanted fragment, from run to
//! run. Each holder's depth is the largest depth along any of these branches. By accident, two children of a block
//! have the same fragment only about once in 2^51 blocks. Only runs from which such a child branches off cost a look-up
//! for each block.

use std::cmp::Reverse;

use crate::index::directory::{HolderSlot, SlotBits};

use super::super::hook::point;
use super::super::runs::{Head, Run, Spot, split_by_usable};
use super::{Finder, position, spot};

/// Maximum number of runs on the way back from a run to position 0. No chain has more runs, because each run has at
/// least one block. The bound also ends a walk that goes in a circle: the numbers of its runs may belong to other runs
/// by now.
const PATH_MAX: usize = 1 << 24;

/// Run whose first block fits the query.
struct FittingRun<'g, S, const STEPS: usize> {
    head: Head<'g>,
    /// Position of the run's first block.
    start: usize,
    /// Holders that have all blocks before the run, at each step of tiers; all holders if `None`.
    holders: [Option<S>; STEPS],
}

/// Holders that have the leading blocks of a branch up to the same block.
struct Reached<'g, S> {
    /// Number of the query's leading blocks that they have.
    depth: usize,
    /// Run with the last of these blocks.
    run: &'g Run,
    slots: S,
}

impl<'f, 'g: 'f, S: SlotBits, const STEPS: usize> Finder<'f, '_, 'g, S, STEPS> {
    /// Follows the query along every branch: after each block, along all children whose hashes have the query's
    /// fragment. Records the depth and the usable blocks of each holder.
    pub(super) fn follow_branches(&mut self, candidates: Option<&S>) {
        let reached = self.reach_all(candidates);
        for (step, reached) in reached.into_iter().enumerate() {
            self.settle_branches(step, reached);
        }
        self.is_split = true;
    }

    /// Returns the holders of each branch that fits the query, at each step of tiers. A holder is in the result once for
    /// each run of which it has blocks. All steps follow the same runs, so a run that a writer makes meanwhile counts at
    /// all steps or at none.
    fn reach_all(&mut self, candidates: Option<&S>) -> [Vec<Reached<'g, S>>; STEPS] {
        let (mut branches, mut all) = (Vec::new(), [(); STEPS].map(|()| Vec::new()));
        let candidates = [(); STEPS].map(|()| candidates.cloned());
        self.add_branches(None, 0, &candidates, &mut branches);
        while let Some(FittingRun { head, start, holders }) = branches.pop() {
            let (run, column) = (head.run, head.run.column(self.guard));
            if let Some(tick) = self.store.tick() {
                run.touch(tick);
            }
            point();
            let own = usize::from(run.len()).min(column.capacity());
            let agreed = self.first_difference(run, column, start, own.min(self.chain.len() - start));
            let reached: [_; STEPS] =
                std::array::from_fn(|step| self.reached(step, run, start, agreed, holders[step].as_ref()));
            // A child branches off after the last block that agrees. Only twins branch off before it.
            let first = if run.has_twins() { 1 } else { agreed.max(1) };
            let mut through = [(); STEPS].map(|()| Some(S::default()));
            let mut deeper = reached.each_ref().map(|reached| reached.iter().peekable());
            for blocks in (first..=agreed).rev() {
                for (through, deeper) in through.iter_mut().flatten().zip(&mut deeper) {
                    while let Some(more) = deeper.next_if(|more| more.depth >= start + blocks) {
                        through.unite(&more.slots);
                    }
                }
                if through.iter().flatten().any(|through| !through.is_empty()) {
                    let before = spot(head.id, blocks - 1);
                    self.add_branches(before, start + blocks, &through, &mut branches);
                }
            }
            for (all, reached) in all.iter_mut().zip(reached) {
                all.extend(reached);
            }
        }
        all
    }

    /// Adds the runs that branch off the block `before` and begin with a block that fits the query at `index`.
    fn add_branches(
        &mut self,
        before: Option<Spot>,
        index: usize,
        holders: &[Option<S>; STEPS],
        branches: &mut Vec<FittingRun<'g, S, STEPS>>,
    ) {
        if index >= self.chain.len() {
            return;
        }
        point();
        let fragment = self.chain.hash(index);
        for head in self.store.heads_of(before, position(index), fragment, self.guard) {
            self.looked.push((head.run, head.version));
            branches.push(FittingRun {
                head,
                start: index,
                holders: holders.clone(),
            });
        }
    }

    /// Returns the holders among `among` that have some of the first `agreed` blocks of a run, by the number of blocks
    /// that they have: most blocks first. The run begins at position `start`.
    fn reached(
        &self,
        step: usize,
        run: &'g Run,
        start: usize,
        agreed: usize,
        among: Option<&S>,
    ) -> Vec<Reached<'g, S>> {
        point();
        let entries = run.entries(self.guard);
        let blocks = entries.map(|entry| {
            (
                usize::from(entry.reach(self.steps[step])).min(agreed),
                entry.slot(),
            )
        });
        let is_asked = |(reach, slot): &(usize, HolderSlot)| {
            *reach > 0 && among.is_none_or(|among| among.contains(*slot))
        };
        let mut blocks: Vec<(usize, HolderSlot)> = blocks.filter(is_asked).collect();
        blocks.sort_by_key(|(reach, _)| Reverse(*reach));
        let groups = blocks.chunk_by(|(one, _), (other, _)| one == other);
        let reached = groups.filter_map(|group| {
            let mut slots = S::default();
            group.iter().for_each(|(_, slot)| slots.insert(*slot));
            let depth = start + group.first()?.0;
            Some(Reached { depth, run, slots })
        });
        reached.collect()
    }

    /// Records the depth of each holder, which is its greatest depth on any branch.
    fn settle_branches(&mut self, step: usize, mut reached: Vec<Reached<'g, S>>) {
        reached.sort_by_key(|reached| Reverse(reached.depth));
        let mut seen = S::default();
        for Reached {
            depth,
            run,
            mut slots,
        } in reached
        {
            slots.subtract(&seen);
            seen.unite(&slots);
            if !self.store.has_bars() || slots.is_empty() {
                self.found[step].settle(position(depth), &slots);
                continue;
            }
            let (store, guard, depth) = (self.store, self.guard, position(depth));
            let before = |run: &&'g Run| store.run(run.parent()?.run, guard);
            let path = std::iter::successors(Some(run), before);
            let (end, number) = (depth.min(self.usable_max), self.steps[step]);
            let found = &mut self.found[step];
            split_by_usable(path.take(PATH_MAX), end, number, slots, guard, |usable, slots| {
                found.settle_usable(depth, usable, slots);
            });
        }
    }
}
