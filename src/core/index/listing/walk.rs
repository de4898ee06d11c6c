//! Walking over all blocks of an index, or over the blocks below one block, while the index changes.
//!
//! # Order
//!
//! A run is an array of consecutive blocks. A run that branches off a block of another run is that run's *child*. So
//! the runs of an index form a forest. A walk meets the runs in depth-first order, each before its children. Of two
//! children, the child that branches off a later block comes first. This is the order of a flat trie
//! ([`crate::trie`]) whose nodes are runs. So a reader needs nothing but a stack:
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
//! A *turn* is the time in which one thread has the lock that is needed to change the runs. The walk first lists all
//! runs, in several short turns. Then it reads the listed runs one by one, each in a turn of its own. So neither
//! queries nor lanes wait long for a walk.
//!
//! A walk reads each run at one instant, but different runs at different instants. It does not meet:
//!
//! - a run that was made after the walk had listed the runs;
//! - a run that was removed before the walk came to it;
//! - a run below such a removed run.
//!
//! So a walk may find a set of blocks for a holder that the holder did not have at any one instant. A caller that
//! needs the holder's state at one instant must also know the changes made during the walk.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::hash::{PositionalLineageHash, SequenceHash};
use crate::index::directory::{HolderSlot, SlotBits, SlotSet};
use crate::index::indexer::PositionalIndexer;
use crate::index::runs::{RosterEntry, RunId, RunWriter, Spot};
use crate::index::search::TierDepth;
use crate::index::shared::IndexShared;

/// Number of runs that a walk lists each time it takes the lock on the runs. Listing them takes some tens of
/// microseconds.
const RUNS_PER_TURN: u32 = 1024;

/// A run in the list of a walk, with the block that the run branches off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ListedRun {
    parent: Option<Spot>,
    run: RunId,
    /// Serial number of the run. If the run is removed and another run gets its run number, the serial numbers differ.
    /// The parent's serial number is not needed, because a run keeps its number as long as it has a child.
    birth: u32,
}

impl ListedRun {
    fn of(turn: &RunWriter<'_>, id: RunId) -> Option<Self> {
        let run = turn.run(id).filter(|run| run.len() > 0)?;
        Some(Self {
            parent: run.parent(),
            run: id,
            birth: run.birth.load(Ordering::Relaxed),
        })
    }

    fn parent_run(&self) -> Option<RunId> {
        self.parent.map(|parent| parent.run)
    }

    /// Returns the offset, within the parent run, of the block that this run branches off.
    fn offset(&self) -> u16 {
        self.parent.map_or(0, |parent| parent.offset)
    }
}

/// Lists all runs, ordered by parent run. Of two children of one run, the child that branches off a later block comes
/// first. The lock is released from time to time, so runs that are made or removed during the call may be missing.
fn list(shared: &IndexShared) -> Vec<ListedRun> {
    let mut runs = Vec::new();
    let mut next = 1;
    loop {
        let turn = shared.runs.write();
        let end = turn.runs_end().min(next + RUNS_PER_TURN);
        if next >= end {
            break;
        }
        runs.extend((next..end).filter_map(|number| ListedRun::of(&turn, RunId::new(number))));
        next = end;
    }
    runs.sort_unstable_by_key(|listed: &ListedRun| {
        (listed.parent_run(), Reverse(listed.offset()), listed.run)
    });
    runs
}

/// A run, an array of consecutive blocks, that a walk has met. If the walk began in the middle of the run, this is only
/// the part from that block on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WalkedRun {
    /// Number of runs on the path from the root to this run, this run included; at least 1.
    pub depth: usize,
    /// Position of the run's first block.
    pub position: usize,
    /// Sequence hashes of the blocks; each block is the child of the previous one. The parent of the first block lies
    /// one position before it, in the parent run. The parent run is the last run before this one that the walk met with
    /// a depth smaller by one.
    pub hashes: Vec<SequenceHash>,
    /// Holders, each with the number of the run's leading blocks that it has. Holders with the most blocks come
    /// first.
    pub(crate) holders: Vec<(HolderSlot, u16)>,
}

impl WalkedRun {
    /// Number of copies of the run's blocks: the number of holders of each block, summed over the blocks.
    pub fn copies(&self) -> usize {
        self.holders.iter().map(|(_, reach)| usize::from(*reach)).sum()
    }
}

/// A walk over an index; see [`PositionalIndexer::walk`] and [`PositionalIndexer::walk_below`].
#[derive(Debug)]
pub struct Walk {
    shared: Arc<IndexShared>,
    runs: Vec<ListedRun>,
    /// Number of blocks to leave out of the run that the walk begins with.
    from: u16,
    /// Runs on the way from a root to the last met run. A run is left out once the walk has tried all its children. The
    /// first entry is no run: its children are the runs with which the walk begins.
    path: Vec<Open>,
    met: WalkedRun,
}

/// A run that has children the walk has not met.
#[derive(Debug)]
struct Open {
    /// Places, in the list of runs, of the children that the walk has not met. Children that branch off later blocks
    /// come first.
    children: Range<usize>,
    /// Number of blocks that the run had when it was met.
    len: u16,
    /// Holders, each with the number of the run's leading blocks that it had. Holders with the most blocks come
    /// first.
    holders: Vec<(HolderSlot, u16)>,
}

impl PositionalIndexer {
    /// Begins a walk over all blocks. The call lists all runs, which takes some tens of nanoseconds for each run.
    pub fn walk(&self) -> Walk {
        let runs = list(&self.shared);
        let roots = children(&runs, None);
        Walk::new(self, runs, roots, 0)
    }

    /// Begins a walk over a block and all blocks below it. `None` if nobody has the block. Lists all runs of the
    /// index, as [`Self::walk`] does.
    pub fn walk_below(&self, block: PositionalLineageHash) -> Option<Walk> {
        let runs = list(&self.shared);
        let (index, offset) = find(&self.shared, &runs, block)?;
        Some(Walk::new(self, runs, index..index + 1, offset))
    }
}

/// Finds a block in `runs`. Returns the place of its run in `runs`, and the block's offset in the run. Looks at each
/// run in turn, because a table made for this search would need memory.
fn find(shared: &IndexShared, runs: &[ListedRun], block: PositionalLineageHash) -> Option<(usize, u16)> {
    let mut index = 0;
    for some in runs.chunks(RUNS_PER_TURN as usize) {
        let turn = shared.runs.write();
        for listed in some {
            let run = turn.run(listed.run);
            let offset = run.and_then(|run| {
                let offset = block.position().checked_sub(u64::from(run.start()))?;
                u16::try_from(offset).ok().filter(|offset| *offset < run.len())
            });
            let spot = offset.map(|offset| Spot {
                run: listed.run,
                offset,
            });
            if let Some(spot) = spot
                && turn.key(spot) == block
                && ListedRun::of(&turn, listed.run) == Some(*listed)
            {
                return Some((index, spot.offset));
            }
            index += 1;
        }
    }
    None
}

/// Returns the places in `runs` of the children of the run `parent`. If `parent` is `None`, returns the places of the
/// runs at position 0.
fn children(runs: &[ListedRun], parent: Option<RunId>) -> Range<usize> {
    let start = runs.partition_point(|listed| listed.parent_run() < parent);
    start..runs.partition_point(|listed| listed.parent_run() <= parent)
}

impl Walk {
    fn new(index: &PositionalIndexer, runs: Vec<ListedRun>, roots: Range<usize>, from: u16) -> Self {
        let roots = Open {
            children: roots,
            len: u16::MAX,
            holders: Vec::new(),
        };
        Self {
            shared: Arc::clone(&index.shared),
            runs,
            from,
            path: vec![roots],
            met: WalkedRun::default(),
        }
    }

    /// Returns the next run, or `None` at the end.
    #[allow(
        clippy::should_implement_trait,
        reason = "gives out its one buffer again and again, which an iterator cannot"
    )]
    pub fn next(&mut self) -> Option<&WalkedRun> {
        loop {
            let is_root = self.path.len() == 1;
            let open = self.path.last_mut()?;
            let Some(listed) = open.children.next().map(|index| self.runs[index]) else {
                self.path.pop();
                continue;
            };
            // The child branches off a block that its parent run got after the walk read the parent. So the child is
            // new, too.
            let offset = listed.offset();
            if offset >= open.len {
                continue;
            }
            let count = open.holders.partition_point(|(_, reach)| *reach > offset);
            let above = || open.holders[..count].iter().map(|(slot, _)| *slot).collect();
            let (from, above) = match is_root {
                true => (self.from, None),
                false => (0, Some(above())),
            };
            if self.meet(listed, from, above) {
                return Some(&self.met);
            }
        }
    }

    /// Skips the runs below the run returned last. Must be called at most once for each run.
    pub fn skip_subtree(&mut self) {
        if self.path.len() > 1 {
            self.path.pop();
        }
    }

    /// Reads a run and makes it the current one. Returns `false` if the run has been removed, or no longer has a block
    /// at the offset `from`. A holder counts only if it has all blocks before the run. `above` are the holders that
    /// have these blocks. If the walk begins with this run, `above` is `None`, and the call finds these holders itself.
    fn meet(&mut self, listed: ListedRun, from: u16, above: Option<SlotSet>) -> bool {
        let turn = self.shared.runs.write();
        let run = listed.run;
        let len = turn.run(run).map_or(0, |run| run.len());
        if ListedRun::of(&turn, run) != Some(listed) || len <= from {
            return false;
        }
        let first = Spot { run, offset: from };
        let position = turn.position(first);
        let above = match above {
            None if position > 0 => {
                let directory = self.shared.slots.load();
                Some(turn.holders_to(first, &directory.taken, TierDepth::All))
            }
            above => above,
        };
        let entries = turn.entries(run).filter(|entry| {
            let is_above = |above: &SlotSet| above.contains(entry.slot());
            entry.reach(TierDepth::All.step()) > from && above.as_ref().is_none_or(is_above)
        });
        let met = &mut self.met;
        (met.depth, met.position) = (self.path.len(), position as usize);
        met.hashes.clear();
        met.hashes
            .extend(turn.view().hashes(run, from, len).map(SequenceHash));
        met.holders.clear();
        let reach = |entry: RosterEntry| entry.reach(TierDepth::All.step()) - from;
        met.holders
            .extend(entries.map(|entry| (entry.slot(), reach(entry))));
        met.holders
            .sort_unstable_by_key(|(slot, reach)| (Reverse(*reach), *slot));
        let mut children = children(&self.runs, Some(run));
        let of_children = &self.runs[children.clone()];
        children.end = children.start + of_children.partition_point(|listed| listed.offset() >= from);
        let holders = met.holders.iter();
        let holders = holders.map(|(slot, reach)| (*slot, reach + from)).collect();
        self.path.push(Open {
            children,
            len,
            holders,
        });
        true
    }
}
