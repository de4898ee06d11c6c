//! Table of the holder's blocks, for daemons that need all of them.
//!
//! The table is an index of one holder. The publisher and the daemon use the same code to decide the meaning of an event. So a
//! daemon is given the state that it would have if it had received every batch.

use kvatlas_core::index::{HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, RegisterError};
use kvatlas_core::wire::{DegradedReason, DegradedReasons, Event, HolderId, Tier};

/// Maximum number of blocks in an event of a full state.
const EVENT_BLOCKS_MAX: usize = 4096;

/// Time for which daemons that ask are refused because stored blocks wait for their parent, in microseconds.
const UNSETTLED_US: u64 = 1_000_000;

/// The blocks of one holder.
#[derive(Debug)]
pub(super) struct BlockTable {
    writer: HolderWriter,
    /// Whether the table lacks blocks that the holder may still have, for example because there was no room for them.
    /// This ends only when all blocks are cleared.
    is_short: bool,
    /// Time since which some stored blocks wait for their parent, in microseconds; `None` if none do.
    unsettled_us: Option<u64>,
}

impl BlockTable {
    pub(super) fn new(settings: NamespaceSettings, id: &HolderId) -> Result<Self, RegisterError> {
        let index = PositionalIndexer::new(settings, IndexLimits::default());
        Ok(Self {
            writer: index.register(id)?,
            is_short: false,
            unsettled_us: None,
        })
    }

    /// Applies a change. `now_us` is the time in microseconds, on a clock that does not run backwards.
    pub(super) fn apply(&mut self, event: Event, tier: Tier, now_us: u64) {
        let applied = self.writer.apply(event, tier, now_us);
        self.is_short = applied.is_short() || self.is_short && !applied.cleared && !applied.goodbye;
        self.note_waiting(now_us);
    }

    fn note_waiting(&mut self, now_us: u64) {
        let is_waiting = self.writer.status().parked_events.load() > 0;
        self.unsettled_us = is_waiting.then(|| self.unsettled_us.unwrap_or(now_us));
    }

    /// Removes all blocks of the holder from the table. The table then lacks no blocks.
    pub(super) fn clear(&mut self) {
        self.writer.clear();
        (self.is_short, self.unsettled_us) = (false, None);
    }

    /// Returns the doubts about [`Self::state`]: none, unless it lacks blocks that the holder may still have.
    pub(super) fn doubts(&self) -> DegradedReasons {
        match self.is_short {
            true => DegradedReasons::of(DegradedReason::UpstreamGap),
            false => DegradedReasons::default(),
        }
    }

    /// Whether a daemon that asks can be given [`Self::state`]. It cannot while stored blocks wait for their parent. If some
    /// have waited for a second, the state leaves them out, and is short from then on. `now_us` is as in [`Self::apply`].
    pub(super) fn settle(&mut self, now_us: u64) -> bool {
        self.is_short |= self.writer.expire_parked(now_us).is_short();
        self.note_waiting(now_us);
        let Some(since_us) = self.unsettled_us else {
            return true;
        };
        let has_waited = now_us.saturating_sub(since_us) >= UNSETTLED_US;
        self.is_short |= has_waited;
        has_waited
    }

    /// Returns all blocks of the holder, parents first.
    pub(super) fn state(&mut self) -> impl Iterator<Item = (Tier, Event)> + '_ {
        self.writer.dump_events(EVENT_BLOCKS_MAX)
    }
}
