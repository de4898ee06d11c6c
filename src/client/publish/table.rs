//! Table of the holder's blocks, for daemons that need all of them.
//!
//! The table is an index of one holder. The publisher and the daemon use the same code to decide the meaning of an event. So a
//! daemon is given the state that it would have if it had received every batch.

use kvatlas_core::index::{HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, RegisterError};
use kvatlas_core::wire::{DegradedReason, DegradedReasons, Event, HolderId, Tier};

/// Maximum number of blocks in an event of a full state.
const EVENT_BLOCKS_MAX: usize = 4096;

/// The blocks of one holder.
#[derive(Debug)]
pub(super) struct BlockTable {
    writer: HolderWriter,
    /// Whether the table lacks blocks that the holder may still have, for example because there was no room for them.
    /// This ends only when all blocks are cleared.
    is_short: bool,
}

impl BlockTable {
    pub(super) fn new(settings: NamespaceSettings, id: &HolderId) -> Result<Self, RegisterError> {
        let index = PositionalIndexer::new(settings, IndexLimits::default());
        Ok(Self {
            writer: index.register(id)?,
            is_short: false,
        })
    }

    /// Applies a change. `now_us` is the time in microseconds, on a clock that does not run backwards.
    pub(super) fn apply(&mut self, event: Event, tier: Tier, now_us: u64) {
        let applied = self.writer.apply(event, tier, now_us);
        self.is_short = applied.is_short() || self.is_short && !applied.cleared && !applied.goodbye;
    }

    /// Removes all blocks of the holder from the table. The table then lacks no blocks.
    pub(super) fn clear(&mut self) {
        self.writer.clear();
        self.is_short = false;
    }

    /// Returns the doubts about [`Self::state`]: none, unless it lacks blocks that the holder may still have.
    pub(super) fn doubts(&self) -> DegradedReasons {
        match self.is_short {
            true => DegradedReasons::of(DegradedReason::UpstreamGap),
            false => DegradedReasons::default(),
        }
    }

    /// Drops stored blocks that have waited for their parent for too long. `now_us` is as in [`Self::apply`].
    pub(super) fn expire(&mut self, now_us: u64) {
        self.is_short |= self.writer.expire_parked(now_us).is_short();
    }

    /// Returns all blocks of the holder, parents first. `None` if a stored block still waits for its parent, which
    /// happens only for short times.
    pub(super) fn state(&mut self) -> Option<impl Iterator<Item = (Tier, Event)> + '_> {
        let is_settled = self.writer.status().parked_events.load() == 0;
        is_settled.then(|| self.writer.dump_events(EVENT_BLOCKS_MAX))
    }
}
