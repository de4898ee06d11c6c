//! Doubts about a holder: gathers them, and reports them to daemons.

use kvatlas_client::publish::PublisherError;
use kvatlas_core::wire::{DegradedReason, DegradedReasons, Event, Tier};
use kvatlas_engines::{Reason, Translator};

use super::Relay;
use crate::lease::Sight;
use crate::partial::partial_doubts;

/// Doubts about an engine's blocks, as the translator knows them.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockDoubts {
    /// Reason why the translator doubts the engine's blocks; `None` if it does not doubt them.
    pub(super) reason: Option<Reason>,
    /// Doubts that concern some queries only, because the engine's events leave out facts.
    partial: DegradedReasons,
    /// Number of tokens in the engine's blocks, if it is known and not the number that the engine is followed with.
    pub(super) other_block_size: Option<u64>,
    /// Whether the engine's events leave out the facts that show which of its blocks a request can reuse.
    pub(super) hides_groups: bool,
}

impl BlockDoubts {
    pub(super) fn of(blocks: &Translator) -> Self {
        Self {
            reason: blocks.doubt(),
            partial: partial_doubts(blocks),
            other_block_size: blocks.other_block_size(),
            hides_groups: blocks.hides_groups(),
        }
    }

    /// Returns these doubts as daemons are told them. `is_lost` says that the engine is out of sight.
    pub(super) fn to_tell(self, is_lost: bool) -> DegradedReasons {
        let mut doubts = self.partial;
        if self.reason.is_some() {
            doubts = doubts.with(DegradedReason::UpstreamGap);
        }
        if is_lost {
            doubts = doubts.with(DegradedReason::UpstreamLost);
        }
        if self.hides_groups {
            doubts = doubts.with(DegradedReason::UnknownGroups);
        }
        doubts
    }
}

impl Relay {
    /// Inserts `doubts` after the last clear of each part of the translation (the events of one tier). For daemons, a
    /// clear ends every doubt. So the doubts that remain have to follow the clear in the same batch.
    pub(super) fn doubt_what_was_cleared(&mut self, doubts: DegradedReasons) {
        for part in &mut self.translation.parts {
            let clears = part.events.iter().rposition(|event| *event == Event::Cleared);
            if let Some(index) = clears {
                part.events.insert(index + 1, Event::Doubted(doubts));
            }
        }
    }

    pub(in super::super) fn doubts(&self) -> DegradedReasons {
        self.block_doubts.to_tell(self.is_lost)
    }

    /// Reports the doubts to daemons, if they differ from the doubts that were last reported.
    pub(super) async fn tell_doubts_if_new(&mut self) -> Result<(), PublisherError> {
        let doubts = self.doubts();
        if doubts == self.told {
            return Ok(());
        }
        self.tell_doubts(doubts).await
    }

    pub(super) async fn tell_doubts(&mut self, doubts: DegradedReasons) -> Result<(), PublisherError> {
        self.note_told(doubts);
        self.publisher
            .publish(Tier::DEVICE, vec![Event::Doubted(doubts)])
            .await
    }

    pub(super) fn note_told(&mut self, doubts: DegradedReasons) {
        self.told = doubts;
        let is_exact = doubts.of_all_queries().is_empty();
        self.engine_metrics.set_exact(is_exact);
        if let Some(share) = &self.share {
            share.note(match is_exact {
                true => Sight::Whole,
                false if self.is_lost => Sight::None,
                false => Sight::Doubtful,
            });
        }
    }
}
