//! Walking over all blocks of an index, or over those below one block, while it changes.
//!
//! # Order
//!
//! The blocks of an index are a forest, and its runs are one, too: a run that branches off another one's block is the other's child. A
//! walk meets the runs in depth-first order, each before its children; of two children the one that branches off later comes first.
//! That is the order of a flat trie ([`crate::trie`]) whose nodes are runs, so whoever follows needs a stack and no more:
//!
//! ```text
//! run 2, from position 0   a b c d e f g      holders: w1 has 7 blocks of it, w2 has 7, w3 has 3
//! run 3, from position 3         x y z        holders: w3 has 3       (child of c)
//! run 4, from position 7                 h i  holders: w2 has 2       (child of g)
//!
//! met: run 2 (depth 1, position 0), run 4 (depth 2, position 7), run 3 (depth 2, position 3)
//! ```
//!
//! # What a walk sees
//!
//! The runs are listed first, in short turns, and then looked at one by one without a turn, so neither queries nor lanes wait for a
//! walk. Each run is met as it was at one instant; different runs at different instants. What comes after the list is made is not met,
//! what goes before its turn is not, and neither is what follows a run that has gone. So what a walk finds of one holder need not be
//! what it had at any instant: whoever needs that must know what changed meanwhile.

use std::ops::Range;
use std::sync::Arc;

use crate::hash::{PositionalLineageHash, SequenceHash};

use super::holder_set::{HolderSlot, SlotSet};
use super::indexer::{PositionalIndexer, Shared};
use super::runs::{BlockKey, Life, Listing, Run, RunStore, View};

/// A run, or the part of one that is below the block at which a walk began.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WalkedRun {
    depth: usize,
    position: usize,
    hashes: Vec<SequenceHash>,
    /// Deepest first.
    pub(super) holders: Vec<(HolderSlot, u16)>,
}

impl WalkedRun {
    /// A run that no index has, and that nobody holds.
    #[cfg(test)]
    pub(crate) fn sample(depth: usize, position: usize, hashes: Vec<SequenceHash>) -> Self {
        Self {
            depth,
            position,
            hashes,
            holders: Vec::new(),
        }
    }

    /// How many runs lie on the path to this one, itself included; at least 1.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Position of the first block.
    pub fn position(&self) -> usize {
        self.position
    }

    /// The blocks' sequence hashes, each the child of the one before. The first is a child of the block one position before it in the
    /// run of the next smaller depth that was met last.
    pub fn hashes(&self) -> &[SequenceHash] {
        &self.hashes
    }

    /// How many holders have more than `offset` of the blocks.
    pub fn holders_beyond(&self, offset: usize) -> usize {
        self.holders
            .partition_point(|(_, cutoff)| usize::from(*cutoff) > offset)
    }

    fn fill(&mut self, depth: usize, run: &Run, view: View<'_>, from: u16) {
        self.depth = depth;
        self.position = run.start() + usize::from(from);
        self.hashes.clear();
        let offsets = usize::from(from)..usize::from(view.len());
        self.hashes
            .extend(offsets.map(|offset| SequenceHash(run.hash(offset))));
        self.holders.clear();
        view.for_each_level::<SlotSet>(None, |cutoff, slots| {
            self.holders.extend(slots.iter().map(|slot| (slot, cutoff)));
        });
        if from > 0 {
            self.holders.retain_mut(|(_, cutoff)| {
                *cutoff = cutoff.saturating_sub(from);
                *cutoff > 0
            });
        }
    }
}

/// A walk over an index; see [`PositionalIndexer::walk`] and [`PositionalIndexer::walk_below`].
#[derive(Debug)]
pub struct Walk {
    shared: Arc<Shared>,
    listing: Listing,
    /// The run to begin with, and how many of its blocks to leave out, where the walk does not begin at the roots.
    first: Option<(Life, u16)>,
    /// The open runs.
    path: Vec<Open>,
    met: WalkedRun,
}

/// A run whose children are still to be met.
#[derive(Debug)]
struct Open {
    children: Range<usize>,
    /// How many blocks of it were met.
    len: u16,
}

impl PositionalIndexer {
    /// Walks over all blocks; over none of a radix tree. Lists the runs at once, which takes some tens of nanoseconds for each.
    pub fn walk(&self) -> Walk {
        let runs = self.shared().storage.runs();
        let listing = runs.map(RunStore::list).unwrap_or_default();
        let roots = Open {
            children: listing.roots(),
            len: 0,
        };
        Walk::new(self, listing, None, roots)
    }

    /// Walks over a block and all below it; none where nobody has the block. Lists all runs of the index, as [`Self::walk`] does.
    pub fn walk_below(&self, block: PositionalLineageHash) -> Option<Walk> {
        let runs = self.shared().storage.runs()?;
        let listing = runs.list();
        let spot = runs.spot(&BlockKey::from(block))?;
        let nothing = Open {
            children: 0..0,
            len: 0,
        };
        Some(Walk::new(
            self,
            listing,
            Some((runs.life(spot)?, spot.offset)),
            nothing,
        ))
    }
}

impl Walk {
    fn new(index: &PositionalIndexer, listing: Listing, first: Option<(Life, u16)>, roots: Open) -> Self {
        Self {
            shared: Arc::clone(index.shared()),
            listing,
            first,
            path: vec![roots],
            met: WalkedRun::default(),
        }
    }

    /// The next run; none at the end.
    #[allow(
        clippy::should_implement_trait,
        reason = "gives out its one buffer again and again, which an iterator cannot"
    )]
    pub fn next(&mut self) -> Option<&WalkedRun> {
        if let Some((life, from)) = self.first.take()
            && self.meet(life, from)
        {
            return Some(&self.met);
        }
        loop {
            let open = self.path.last_mut()?;
            let Some(index) = open.children.next() else {
                self.path.pop();
                continue;
            };
            let (open_len, is_root) = (open.len, self.path.len() == 1);
            let Some((life, offset)) = self.listing.run(index) else {
                continue;
            };
            // What follows a block that has come since its run was met has come since then, too.
            if (is_root || offset < open_len) && self.meet(life, 0) {
                return Some(&self.met);
            }
        }
    }

    /// Goes on after what is below the run that was met last. To be called at most once for a run.
    pub fn skip_subtree(&mut self) {
        if self.path.len() > 1 {
            self.path.pop();
        }
    }

    fn meet(&mut self, life: Life, from: u16) -> bool {
        let guard = crossbeam_epoch::pin();
        let runs = self.shared.storage.runs();
        let Some((run, view)) = runs.and_then(|runs| runs.look(life, &guard)) else {
            return false;
        };
        if view.len() <= from {
            return false;
        }
        self.met.fill(self.path.len(), run, view, from);
        let mut children = self.listing.children(life);
        // Those of later blocks come first.
        let is_below = |index: &usize| self.listing.run(*index).is_some_and(|(_, offset)| offset >= from);
        children.end = children.start + children.clone().take_while(is_below).count();
        self.path.push(Open {
            children,
            len: view.len(),
        });
        true
    }
}
