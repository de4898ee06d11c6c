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
    /// Whether a daemon was given a state without blocks that waited for their parent. Ends like `is_short`.
    has_given_less: bool,
    /// Time since which some stored blocks wait for their parent, in microseconds; `None` if none do.
    unsettled_us: Option<u64>,
}

impl BlockTable {
    pub(super) fn new(settings: NamespaceSettings, id: &HolderId) -> Result<Self, RegisterError> {
        let index = PositionalIndexer::new(settings, IndexLimits::default());
        Ok(Self {
            writer: index.register(id)?,
            is_short: false,
            has_given_less: false,
            unsettled_us: None,
        })
    }

    /// Applies a change. `now_us` is the time in microseconds, on a clock that does not run backwards.
    pub(super) fn apply(&mut self, event: Event, tier: Tier, now_us: u64) {
        let applied = self.writer.apply(event, tier, now_us);
        if applied.cleared || applied.goodbye {
            (self.is_short, self.has_given_less) = (false, false);
        }
        self.is_short |= applied.is_short();
        self.note_waiting(now_us);
    }

    fn note_waiting(&mut self, now_us: u64) {
        let is_waiting = self.writer.status().parked_events.load() > 0;
        self.unsettled_us = is_waiting.then(|| self.unsettled_us.unwrap_or(now_us));
    }

    /// Removes all blocks of the holder from the table. The table then lacks no blocks.
    pub(super) fn clear(&mut self) {
        self.writer.clear();
        (self.is_short, self.has_given_less, self.unsettled_us) = (false, false, None);
    }

    /// Returns the doubts about the states that daemons were given: none, unless one lacked blocks that the holder may
    /// still have.
    pub(super) fn doubts(&self) -> DegradedReasons {
        doubts_of(self.is_short || self.has_given_less)
    }

    /// Returns the doubts about [`Self::state`] if a daemon that asks can be given it, and notes that it is. `None` while
    /// stored blocks wait for their parent. If some have waited for a second, the state leaves them out, and is in doubt.
    /// `now_us` is as in [`Self::apply`].
    pub(super) fn settle(&mut self, now_us: u64) -> Option<DegradedReasons> {
        self.is_short |= self.writer.expire_parked(now_us).is_short();
        self.note_waiting(now_us);
        let Some(since_us) = self.unsettled_us else {
            return Some(doubts_of(self.is_short));
        };
        if now_us.saturating_sub(since_us) < UNSETTLED_US {
            return None;
        }
        self.has_given_less = true;
        Some(self.doubts())
    }

    /// Returns all blocks of the holder, parents first.
    pub(super) fn state(&mut self) -> impl Iterator<Item = (Tier, Event)> + '_ {
        self.writer.dump_events(EVENT_BLOCKS_MAX)
    }
}

fn doubts_of(is_short: bool) -> DegradedReasons {
    match is_short {
        true => DegradedReasons::of(DegradedReason::UpstreamGap),
        false => DegradedReasons::default(),
    }
}
