//! The shares that regular holders have of the runs, for snapshots: taken on a walk over all of them, and given back run by run.
//!
//! A regular holder, one that has every block with all that come before it, in one tier, by its sequence hash, is nothing but its share
//! of the runs. So many such holders can be taken on one walk, and what they share is met once.
//!
//! A walk meets a holder's runs at different instants, while its events go on to be applied. What it finds is therefore what the holder
//! had before the walk, changed by some of the events since: those events, applied again in order, make it what it has become. That
//! holds as long as only events changed it, and it stayed regular. [`WalkedHolder::is_same_as`] tells.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::hash::SequenceHash;
use crate::index::directory::{HolderRecord, HolderSlot};
use crate::index::holder::Applied;
use crate::index::indexer::PositionalIndexer;
use crate::index::writer::HolderWriter;
use crate::wire::Tier;

use super::walk::{Walk, WalkedRun};

/// A regular holder, to be met on a [`HolderWalk`].
#[derive(Debug)]
pub struct WalkedHolder {
    index: PositionalIndexer,
    slot: HolderSlot,
    record: Arc<HolderRecord>,
    tier: Tier,
    reshaped: u64,
    replacement: u64,
}

impl WalkedHolder {
    /// The tier that all its blocks are in.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Whether this is the same holder as `earlier`, regular all the time since, and changed by nothing but stored and removed blocks and
    /// by eviction.
    pub fn is_same_as(&self, earlier: &Self) -> bool {
        Arc::ptr_eq(&self.record, &earlier.record)
            && (self.reshaped, self.replacement) == (earlier.reshaped, earlier.replacement)
    }

    /// Makes it count as changed: a walk could not be followed everywhere.
    pub fn give_up(&mut self) {
        self.reshaped = u64::MAX;
    }
}

/// How many blocks of a run, from its first, a holder has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HolderPart {
    /// The holder's number.
    pub holder: u32,
    /// How many of the run's blocks; at least 1.
    pub blocks: u16,
}

/// A walk that looks at some holders.
#[derive(Debug)]
pub struct HolderWalk {
    walk: Walk,
    /// Numbers and records.
    members: HashMap<HolderSlot, (u32, Arc<HolderRecord>)>,
    parts: Vec<HolderPart>,
}

impl HolderWalk {
    /// Walks over the index of these holders, each under a number of its own; none where there are no holders. All are of one index.
    pub fn new<'h>(holders: impl IntoIterator<Item = (u32, &'h WalkedHolder)>) -> Option<Self> {
        let mut holders = holders.into_iter().peekable();
        let walk = holders.peek()?.1.index.walk();
        let member =
            |(number, holder): (u32, &WalkedHolder)| (holder.slot, (number, Arc::clone(&holder.record)));
        Some(Self {
            walk,
            members: holders.map(member).collect(),
            parts: Vec::new(),
        })
    }

    /// The next run, and what the holders have of it, by number; none at the end.
    #[allow(
        clippy::should_implement_trait,
        reason = "gives out its buffers again and again, which an iterator cannot"
    )]
    pub fn next(&mut self) -> Option<(&WalkedRun, &[HolderPart])> {
        let run = self.walk.next()?;
        self.parts.clear();
        for (slot, blocks) in &run.holders {
            // A slot is given out again only when its holder is marked as retired: after the look, that tells whose blocks they are.
            if let Some((number, record)) = self.members.get(slot)
                && !record.is_retired()
            {
                self.parts.push(HolderPart {
                    holder: *number,
                    blocks: *blocks,
                });
            }
        }
        self.parts.sort_unstable_by_key(|part| part.holder);
        Some((run, &self.parts))
    }

    /// Goes on after what is below the run that was met last. To be called at most once for a run.
    pub fn skip_subtree(&mut self) {
        self.walk.skip_subtree();
    }
}

/// Consecutive blocks that a holder had.
#[derive(Debug, Clone, Copy)]
pub struct RestoredRun<'a> {
    /// Position of the first block; that of the last is in range.
    pub position: u32,
    /// Sequence hash of the block before it; none at position 0.
    pub parent: Option<SequenceHash>,
    /// The blocks' sequence hashes.
    pub hashes: &'a [SequenceHash],
}

impl HolderWriter {
    /// The holder as a walk can meet it; none where it is not regular, or has nothing.
    pub fn as_walked(&mut self) -> Option<WalkedHolder> {
        self.catch_up();
        let (slot, tier, reshaped) = self.holder.regular(&self.shared.runs)?;
        let shared = Arc::clone(&self.shared);
        Some(WalkedHolder {
            index: PositionalIndexer { shared },
            slot,
            record: Arc::clone(self.record()),
            tier,
            reshaped,
            replacement: self.status().replacement.load(),
        })
    }

    /// Stores runs that a walk has met, parents before children. A run whose parent is not there, because the holder is full or blocks
    /// have been evicted, is left out and counted.
    pub fn restore_runs<'r>(
        &mut self,
        tier: Tier,
        runs: impl IntoIterator<Item = RestoredRun<'r>>,
    ) -> Applied {
        let mut applied = Applied::default();
        for run in runs {
            self.change(&mut applied, true, |turn| {
                turn.restore(run.parent, run.position, run.hashes, tier);
            });
            self.shared.make_room(applied.stored);
        }
        applied
    }
}
