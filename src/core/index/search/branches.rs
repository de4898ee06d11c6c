//! Searches by fragments of hashes, for cases where several children of one block have the same fragment.
//!
//! A lineage hash keeps only some bits of a sequence hash, its fragment. So it cannot distinguish sequence hashes
//! that agree in these bits. A search by lineage hashes follows all children with the wanted fragment, block by
//! block. Each holder's depth is the largest depth along any of these branches. By accident, two children of a block
//! have the same fragment only about once in 2^51 blocks.

use smallvec::SmallVec;

use crate::index::directory::SlotBits;

use super::super::hook::point;
use super::super::runs::{Spot, Wanted, split_by_usable};
use super::{Finder, position};

/// Maximum number of runs on the way back from a run to position 0. No chain has more runs, because each run has at
/// least one block. The bound also ends a walk that goes in a circle: the numbers of its runs may belong to other runs
/// by now.
const PATH_MAX: usize = 1 << 24;

impl<S: SlotBits, const STEPS: usize> Finder<'_, '_, '_, S, STEPS> {
    /// Follows the query along every branch: after each block, along all children whose hashes have the query's
    /// fragment. Records the depth and the usable blocks of each holder.
    pub(super) fn follow_branches(&mut self, candidates: Option<&S>) {
        for step in 0..STEPS {
            self.follow_step(step, candidates);
        }
        self.is_split = true;
    }

    fn follow_step(&mut self, step: usize, candidates: Option<&S>) {
        let mut paths: Vec<(usize, Option<Spot>, Option<S>)> = vec![(0, None, candidates.cloned())];
        let mut next = 0;
        while let Some((index, before, among)) = paths.get(next).cloned() {
            next += 1;
            if index >= self.chain.len() {
                continue;
            }
            let fragment = self.chain.hash(index);
            for child in self.children(before, index, fragment) {
                let through = self.holders_of(step, child, among.as_ref());
                if !through.is_empty() {
                    paths.push((index + 1, Some(child), Some(through)));
                }
            }
        }
        // Later paths are at least as deep as earlier ones, so each holder is counted at its greatest depth.
        let mut seen = S::default();
        for (depth, last, slots) in paths.into_iter().rev() {
            let mut slots = slots.unwrap_or_default();
            slots.subtract(&seen);
            seen.unite(&slots);
            if !self.store.has_bars() || slots.is_empty() {
                self.found[step].settle(position(depth), &slots);
                continue;
            }
            let (store, guard, depth) = (self.store, self.guard, position(depth));
            let run = |spot: Spot| store.run(spot.run, guard);
            let path = std::iter::successors(last.and_then(run), |own| own.parent().and_then(run));
            let (end, number) = (depth.min(self.usable_max), self.steps[step]);
            let found = &mut self.found[step];
            split_by_usable(path.take(PATH_MAX), end, number, slots, guard, |usable, slots| {
                found.settle_usable(depth, usable, slots);
            });
        }
    }

    /// Returns the blocks with this hash fragment that follow `before`, or that are at position 0.
    fn children(&mut self, before: Option<Spot>, index: usize, fragment: u64) -> SmallVec<[Spot; 2]> {
        let mut found = SmallVec::new();
        point();
        if let Some(before) = before
            && let Some(run) = self.store.run(before.run, self.guard)
        {
            let next = Spot {
                offset: before.offset + 1,
                ..before
            };
            let (column, offset) = (run.column(self.guard), usize::from(next.offset));
            let wanted = Wanted::fragment(fragment);
            if next.offset < run.len() && column.is(offset, position(index), wanted, self.guard) {
                found.push(next);
            }
        }
        for head in self.store.heads_of(before, position(index), fragment, self.guard) {
            self.looked.push((head.run, head.version));
            let (run, offset) = (head.id, 0);
            found.push(Spot { run, offset });
        }
        found
    }

    fn holders_of(&self, step: usize, spot: Spot, among: Option<&S>) -> S {
        let mut found = S::default();
        let Some(run) = self.store.run(spot.run, self.guard) else {
            return found;
        };
        if let Some(tick) = self.store.tick() {
            run.touch(tick);
        }
        point();
        for entry in run.entries(self.guard) {
            let slot = entry.slot();
            let reach = entry.reach(self.steps[step]);
            if reach > spot.offset && among.is_none_or(|among| among.contains(slot)) {
                found.insert(slot);
            }
        }
        found
    }
}
