//! Shares of regular holders, for snapshots: how many leading blocks of each run a holder has. A walk over all runs
//! reads the shares, and a restore sets them run by run.
//!
//! A holder is *regular* if it meets three conditions:
//!
//! - It has all blocks before each of its blocks.
//! - All its blocks are in one tier.
//! - Each of its blocks is named by the block's sequence hash.
//!
//! Then the holder is described completely by how many leading blocks of each run it has. So one walk can read many
//! regular holders, and visits each common block once.
//!
//! A walk visits a holder's runs at different instants, while events continue to change the holder. So the result for
//! a holder contains some of the changes made during the walk, and lacks others. If all events since the start of the
//! walk are applied again to the result, in order, it becomes the holder's present state. That is true as long as
//! only events changed the holder, and the holder stayed regular. [`WalkedHolder::is_same_as`] checks both.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::index::directory::{HolderRecord, HolderSlot};
use crate::index::indexer::PositionalIndexer;
use crate::wire::Tier;

use super::walk::{Walk, WalkedRun};

/// Holder that a [`HolderWalk`] can look for. The holder is regular: it is described completely by how many leading
/// blocks of each run it has.
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
    /// Returns the form in which a walk over `index` can look for a regular holder, whose blocks are all in `tier`.
    /// `reshaped` is the holder's change counter. It does not count blocks that are added or removed at the ends of the
    /// holder's chains. [`Self::is_same_as`] later compares this counter.
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

    /// Returns the tier of all blocks of the holder.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Returns a number that all holders of the same index have, and no holder of another index. It is valid as long as
    /// one of these values exists.
    pub fn index_number(&self) -> usize {
        Arc::as_ptr(&self.index.shared).addr()
    }

    /// Whether both values describe the same holder, and the holder has stayed regular from `earlier` until now. Only
    /// stored and removed blocks and eviction may have changed it. A regular holder is described by how many leading
    /// blocks of each run it has.
    pub fn is_same_as(&self, earlier: &Self) -> bool {
        Arc::ptr_eq(&self.record, &earlier.record)
            && (self.reshaped, self.replacement) == (earlier.reshaped, earlier.replacement)
    }

    /// Marks the holder as changed, because the walk could not follow its blocks to the end.
    pub fn give_up(&mut self) {
        self.reshaped = u64::MAX;
    }
}

/// Number of leading blocks of a run that one holder has. A run is an array of consecutive blocks in the index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HolderPart {
    /// Number that the caller of [`HolderWalk::new`] gave the holder.
    pub holder: u32,
    /// Number of the run's leading blocks that the holder has; at least 1.
    pub blocks: u16,
}

/// Walk over an index that tells, for each run, how many blocks some chosen holders have.
#[derive(Debug)]
pub struct HolderWalk {
    walk: Walk,
    /// The chosen holders: for each slot, the caller's number of the holder and the holder's record.
    members: HashMap<HolderSlot, (u32, Arc<HolderRecord>)>,
    parts: Vec<HolderPart>,
}

impl HolderWalk {
    /// Begins a walk that looks for these holders, each given with a number that the caller chose. All holders must
    /// belong to one index: see [`WalkedHolder::index_number`]. `None` if there are no holders.
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

    /// Returns the next run of consecutive blocks, and how many of its blocks each holder has, in the order of the
    /// holders' numbers. `None` at the end.
    #[allow(
        clippy::should_implement_trait,
        reason = "gives out its buffers again and again, which an iterator cannot"
    )]
    pub fn next(&mut self) -> Option<(&WalkedRun, &[HolderPart])> {
        let run = self.walk.next()?;
        self.parts.clear();
        for (slot, blocks) in &run.holders {
            // A slot is given out again only after its holder is marked as retired. The mark is read after the entries,
            // so without the mark the blocks are those of this holder.
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

    /// Skips the runs below the run returned last. Must be called at most once for each run.
    pub fn skip_subtree(&mut self) {
        self.walk.skip_subtree();
    }
}
