//! Shares that regular holders have of the runs, for snapshots. A walk over all runs reads the shares, and a restore
//! sets them run by run.
//!
//! A holder is regular if it has each block together with all blocks before it, all in one tier, each under its
//! sequence hash. So the numbers of leading blocks that the holder has of each run describe it wholly. So one walk can
//! read many regular holders, and meets the blocks that they have in common once.
//!
//! A walk meets a holder's runs at different instants, while events go on to change the holder. So it finds the
//! holder's blocks from before the walk, changed by some of the events since. If these events are applied again in
//! order, the result is the holder's present state. That is true as long as only events changed the holder, and the
//! holder stayed regular. [`WalkedHolder::is_same_as`] tells whether that is so.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::index::directory::{HolderRecord, HolderSlot};
use crate::index::indexer::PositionalIndexer;
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
    /// Makes the form of a holder that a walk over `index` can meet. All blocks of the holder are in `tier`.
    /// `reshaped`, and the number of its replaced states, show later whether the holder has stayed the same.
    pub(crate) fn new(
        index: PositionalIndexer,
        record: Arc<HolderRecord>,
        tier: Tier,
        reshaped: u64,
    ) -> Self {
        Self {
            index,
            slot: record.slot(),
            tier,
            reshaped,
            replacement: record.status.replacement.load(),
            record,
        }
    }

    /// Returns the tier that all blocks of the holder are in.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Whether this is the same holder as `earlier`, regular all the time since, and changed by nothing but stored and
    /// removed blocks and by eviction.
    pub fn is_same_as(&self, earlier: &Self) -> bool {
        Arc::ptr_eq(&self.record, &earlier.record)
            && (self.reshaped, self.replacement) == (earlier.reshaped, earlier.replacement)
    }

    /// Marks the holder as changed, because its blocks could not be followed through the whole walk.
    pub fn give_up(&mut self) {
        self.reshaped = u64::MAX;
    }
}

/// Share of a run: how many of the run's blocks, from the first, a holder has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HolderPart {
    /// Number that the caller of [`HolderWalk::new`] gave the holder.
    pub holder: u32,
    /// Number of the run's leading blocks that the holder has; at least 1.
    pub blocks: u16,
}

/// Walk that looks at the shares of some holders.
#[derive(Debug)]
pub struct HolderWalk {
    walk: Walk,
    /// Number and record of each holder, by its slot.
    members: HashMap<HolderSlot, (u32, Arc<HolderRecord>)>,
    parts: Vec<HolderPart>,
}

impl HolderWalk {
    /// Begins a walk over the index of these holders, each given with its own number. All holders must be of one index.
    /// `None` if there are no holders.
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

    /// Returns the next run, and the holders' shares of it, in the order of their numbers. `None` at the end.
    #[allow(
        clippy::should_implement_trait,
        reason = "gives out its buffers again and again, which an iterator cannot"
    )]
    pub fn next(&mut self) -> Option<(&WalkedRun, &[HolderPart])> {
        let run = self.walk.next()?;
        self.parts.clear();
        for (slot, blocks) in &run.holders {
            // A slot is given out again only after its holder is marked as retired. Asked after the look, the mark
            // tells whose blocks these are.
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

    /// Skips the runs below the run that was met last. To be called at most once for a run.
    pub fn skip_subtree(&mut self) {
        self.walk.skip_subtree();
    }
}
