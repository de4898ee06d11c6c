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
//! The runs are listed first, in short turns, and then looked at one by one in turns of their own, so neither queries nor lanes wait
//! long for a walk. Each run is met as it was at one instant; different runs at different instants. What comes after the list is made is not met,
//! what goes before its turn is not, and neither is what follows a run that has gone. So what a walk finds of one holder need not be
//! what it had at any instant: whoever needs that must know what changed meanwhile.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::hash::{PositionalLineageHash, SequenceHash};
use crate::index::directory::{HolderSlot, SlotBits, SlotSet};
use crate::index::indexer::PositionalIndexer;
use crate::index::runs::{RunId, RunWriter, Spot};
use crate::index::search::TierDepth;
use crate::index::shared::Shared;

/// Runs listed in one turn: some tens of microseconds.
const RUNS_PER_TURN: u32 = 1024;

/// A run, told from others that had its number before or will have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Life {
    run: RunId,
    birth: u32,
}

/// A run and what it follows.
#[derive(Debug, Clone, Copy)]
struct Listed {
    parent: Option<Life>,
    /// Of the block that it follows in its parent.
    offset: u16,
    own: Life,
}

/// Lists all runs by parent, those that follow later blocks first. Writers have turns meanwhile: what comes or goes then may be missing or
/// be there.
fn list(shared: &Shared) -> Vec<Listed> {
    let mut runs = Vec::new();
    let mut next = 1;
    loop {
        let turn = shared.runs.write();
        let end = turn.runs_end().min(next + RUNS_PER_TURN);
        if next >= end {
            break;
        }
        runs.extend((next..end).filter_map(|number| listed(&turn, RunId::new(number))));
        next = end;
    }
    runs.sort_unstable_by_key(|listed: &Listed| (listed.parent, Reverse(listed.offset), listed.own));
    runs
}

fn life(turn: &RunWriter<'_>, id: RunId) -> Option<Life> {
    let run = turn.run(id).filter(|run| run.len() > 0)?;
    let birth = run.birth.load(Ordering::Relaxed);
    Some(Life { run: id, birth })
}

fn listed(turn: &RunWriter<'_>, id: RunId) -> Option<Listed> {
    let own = life(turn, id)?;
    let parent = turn.run(id)?.parent();
    Some(Listed {
        parent: parent.and_then(|parent| life(turn, parent.run)),
        offset: parent.map_or(0, |parent| parent.offset),
        own,
    })
}

/// A run, or the part of one that is below the block at which a walk began.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WalkedRun {
    /// How many runs lie on the path to this one, itself included; at least 1.
    pub depth: usize,
    /// Position of the first block.
    pub position: usize,
    /// The blocks' sequence hashes, each the child of the one before. The first is a child of the block one position before it in the
    /// run of the next smaller depth that was met last.
    pub hashes: Vec<SequenceHash>,
    /// Who has how many of the blocks, from the first; deepest first.
    pub(crate) holders: Vec<(HolderSlot, u16)>,
}

impl WalkedRun {
    /// Pairs of a holder and one of the blocks that it has.
    pub fn copies(&self) -> usize {
        self.holders.iter().map(|(_, reach)| usize::from(*reach)).sum()
    }

    fn fill(&mut self, depth: usize, turn: &RunWriter<'_>, first: Spot, above: Option<&SlotSet>) {
        self.depth = depth;
        self.position = turn.position(first) as usize;
        let len = turn.run(first.run).map_or(0, |run| run.len());
        self.hashes.clear();
        self.hashes
            .extend(turn.hashes(first.run, first.offset, len).map(SequenceHash));
        self.holders.clear();
        for entry in turn.entries(first.run) {
            let reach = entry.reach(2).saturating_sub(first.offset);
            if reach > 0 && above.is_none_or(|above| above.contains(entry.slot())) {
                self.holders.push((entry.slot(), reach));
            }
        }
        self.holders
            .sort_unstable_by_key(|(slot, reach)| (Reverse(*reach), *slot));
    }
}

/// A walk over an index; see [`PositionalIndexer::walk`] and [`PositionalIndexer::walk_below`].
#[derive(Debug)]
pub struct Walk {
    shared: Arc<Shared>,
    runs: Vec<Listed>,
    /// How many blocks to leave out of the run that it begins with.
    from: u16,
    /// The open runs, behind those that it begins with.
    path: Vec<Open>,
    met: WalkedRun,
}

/// A run whose children are still to be met.
#[derive(Debug, Default)]
struct Open {
    /// Those of later blocks come first.
    children: Range<usize>,
    /// How many blocks of it were met.
    len: u16,
    /// What each holder had of it, deepest first, from its first block on.
    holders: Vec<(HolderSlot, u16)>,
}

impl PositionalIndexer {
    /// Walks over all blocks. Lists the runs at once, which takes some tens of nanoseconds for each.
    pub fn walk(&self) -> Walk {
        let runs = list(&self.shared);
        let roots = children(&runs, None);
        Walk::new(self, runs, roots, 0)
    }

    /// Walks over a block and all below it; none where nobody has the block. Lists all runs of the index, as [`Self::walk`] does.
    pub fn walk_below(&self, block: PositionalLineageHash) -> Option<Walk> {
        let mut turn = self.shared.runs.write();
        turn.place_all();
        let first = turn.find_place(block.current_hash_fragment(), |spot| {
            (turn.key(spot) == block).then_some(spot)
        })?;
        let own = life(&turn, first.run)?;
        drop(turn);
        let runs = list(&self.shared);
        let index = runs.iter().position(|listed| listed.own == own)?;
        Some(Walk::new(self, runs, index..index + 1, first.offset))
    }
}

/// The runs that follow a block of `parent`, those of later blocks first; those at position 0 where it is none.
fn children(runs: &[Listed], parent: Option<Life>) -> Range<usize> {
    let start = runs.partition_point(|listed| listed.parent < parent);
    start..runs.partition_point(|listed| listed.parent <= parent)
}

impl Walk {
    fn new(index: &PositionalIndexer, runs: Vec<Listed>, roots: Range<usize>, from: u16) -> Self {
        let roots = Open {
            children: roots,
            ..Open::default()
        };
        Self {
            shared: Arc::clone(&index.shared),
            runs,
            from,
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
        loop {
            let is_root = self.path.len() == 1;
            let open = self.path.last_mut()?;
            let Some(index) = open.children.next() else {
                self.path.pop();
                continue;
            };
            let Some(Listed { own, offset, .. }) = self.runs.get(index).copied() else {
                continue;
            };
            // What follows a block that has come since its run was met has come since then, too.
            if !is_root && offset >= open.len {
                continue;
            }
            let count = open.holders.partition_point(|(_, reach)| *reach > offset);
            let above = open.holders[..count].iter().map(|(slot, _)| *slot).collect();
            let (from, above) = if is_root {
                (self.from, None)
            } else {
                (0, Some(above))
            };
            if self.meet(own, from, above) {
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

    /// Meets a run, of which only holders count that have what is `above` it; what that is has to be found out where it is the first.
    fn meet(&mut self, wanted: Life, from: u16, above: Option<SlotSet>) -> bool {
        let turn = self.shared.runs.write();
        let len = turn.run(wanted.run).map_or(0, |run| run.len());
        if life(&turn, wanted.run) != Some(wanted) || len <= from {
            return false;
        }
        let first = Spot {
            run: wanted.run,
            offset: from,
        };
        let above = match above {
            None if turn.position(first) > 0 => {
                let directory = self.shared.slots.load();
                Some(turn.holders_to(first, directory.taken(), TierDepth::All))
            }
            above => above,
        };
        self.met.fill(self.path.len(), &turn, first, above.as_ref());
        let mut children = children(&self.runs, Some(wanted));
        let of_children = &self.runs[children.clone()];
        children.end = children.start + of_children.partition_point(|listed| listed.offset >= from);
        let holders = self.met.holders.iter();
        let holders = holders.map(|(slot, reach)| (*slot, reach + from)).collect();
        self.path.push(Open {
            children,
            len,
            holders,
        });
        true
    }
}
