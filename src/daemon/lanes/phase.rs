//! Phases of a holder's resync, and the calls that lead from one phase to another. A cell is the phase after the call:
//!
//! | phase | `hold` | `ask` | `end` | `end` of another | `release` |
//! |---|---|---|---|---|---|
//! | `Flowing` | `Waiting` | `Asking` | `Flowing` | `Flowing` | `Flowing` |
//! | `Waiting` | `Waiting` | `Asking` | `Waiting` | `Waiting` | `Flowing`, let go |
//! | `Asking` | `Asking` | `Asking` | `Flowing`, let go | `Asking` | `Flowing`, let go |
//!
//! The column "`end` of another" is the end of a resync that is not the present one.
//!
//! Batches are held in the phases `Waiting` and `Asking`. If a cell says "let go", the call returns the held batches. A
//! batch for which there is no room changes nothing.

use super::held::{HeldBatches, HoldingLimits, NoRoom, ResyncNumber};
use super::sequence::ReceivedBatch;

/// Phase of a holder's resync. In two of the phases, batches are held.
#[derive(Debug, Default)]
pub(super) enum Phase {
    /// Batches are applied as they come.
    #[default]
    Flowing,
    /// Batches are missing, and the publisher has not been asked yet.
    Waiting(HeldBatches),
    /// Publisher has been asked, in the resync of this number.
    Asking(ResyncNumber, HeldBatches),
}

impl Phase {
    /// Returns the held batches, or `None` while batches are applied as they come.
    pub(super) fn held(&self) -> Option<&HeldBatches> {
        match self {
            Self::Flowing => None,
            Self::Waiting(held) | Self::Asking(_, held) => Some(held),
        }
    }

    /// Returns the held batches for changes, or `None` while batches are applied as they come.
    pub(super) fn held_mut(&mut self) -> Option<&mut HeldBatches> {
        match self {
            Self::Flowing => None,
            Self::Waiting(held) | Self::Asking(_, held) => Some(held),
        }
    }

    /// Whether the resync `number` is under way, that is, whether the publisher has been asked in it.
    pub(super) fn is_asking(&self, number: ResyncNumber) -> bool {
        matches!(self, Self::Asking(asked, _) if *asked == number)
    }

    /// Holds a batch until the missing batches before it have come.
    pub(super) fn hold(
        &mut self,
        received: ReceivedBatch,
        limits: &HoldingLimits,
        now_us: u64,
    ) -> Result<(), NoRoom> {
        if let Some(held) = self.held_mut() {
            return held.push(received, limits);
        }
        let mut held = HeldBatches::new(limits, now_us);
        held.push(received, limits)?;
        *self = Self::Waiting(held);
        Ok(())
    }

    /// Notes that the publisher has been asked, in the resync with this number.
    pub(super) fn ask(&mut self, number: ResyncNumber, limits: &HoldingLimits, now_us: u64) {
        let mut held = self.release().unwrap_or_else(|| HeldBatches::new(limits, now_us));
        held.begin(now_us);
        *self = Self::Asking(number, held);
    }

    /// Ends the resync `number`. Returns the held batches, or `None` if this resync is not under way.
    pub(super) fn end(&mut self, number: ResyncNumber) -> Option<HeldBatches> {
        self.is_asking(number).then(|| self.release()).flatten()
    }

    /// Stops waiting for an answer. Returns the held batches, or `None` if batches are applied as they come.
    pub(super) fn release(&mut self) -> Option<HeldBatches> {
        match std::mem::take(self) {
            Self::Flowing => None,
            Self::Waiting(held) | Self::Asking(_, held) => Some(held),
        }
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::stream::StreamGeneration;
    use kvatlas_lab::transitions::table;

    use super::super::tests::batch;
    use super::*;

    const OWN: ResyncNumber = ResyncNumber(1);
    const OTHER: ResyncNumber = ResyncNumber(2);

    fn limits() -> HoldingLimits {
        HoldingLimits::new(true, 1 << 20, 1 << 20, 1)
    }

    fn received() -> ReceivedBatch {
        ReceivedBatch {
            batch: batch(7, Vec::new()),
            generation: StreamGeneration::default(),
            bytes: 100,
        }
    }

    /// Returns a phase by its `name`. Every phase except `Flowing` gets one held batch.
    fn state(name: &str) -> Phase {
        let mut phase = Phase::default();
        if name != "Flowing" {
            phase.hold(received(), &limits(), 0).unwrap();
        }
        if name == "Asking" {
            phase.ask(OWN, &limits(), 0);
        }
        assert_eq!(word(&phase, None), name);
        phase
    }

    fn word(phase: &Phase, let_go: Option<HeldBatches>) -> String {
        let name = match phase {
            Phase::Flowing => "Flowing",
            Phase::Waiting(_) => "Waiting",
            Phase::Asking(..) => "Asking",
        };
        match let_go {
            Some(held) => {
                assert!(!held.is_empty());
                format!("{name}, let go")
            }
            None => name.to_owned(),
        }
    }

    #[test]
    fn phases_change_as_the_table_says() {
        let (changes, rows) = table(include_str!("phase.rs"), 0);
        assert_eq!(changes, ["hold", "ask", "end", "end of another", "release"]);
        assert_eq!(rows.len(), 3);
        let change = |phase: &mut Phase, change: &str| match change {
            "hold" => phase.hold(received(), &limits(), 0).map(|()| None).unwrap(),
            "ask" => {
                phase.ask(OWN, &limits(), 0);
                None
            }
            "end" => phase.end(OWN),
            "end of another" => phase.end(OTHER),
            _ => phase.release(),
        };
        for ((name, cells), expected) in rows.iter().zip(["Flowing", "Waiting", "Asking"]) {
            assert_eq!(name, expected);
            for (cell, name_of_change) in cells.iter().zip(&changes) {
                let mut phase = state(name);
                let let_go = change(&mut phase, name_of_change);
                assert_eq!(*cell, word(&phase, let_go), "{name}, {name_of_change}");
            }
        }
    }

    #[test]
    fn a_batch_without_room_changes_no_phase() {
        let none = HoldingLimits::new(true, 1 << 20, 1, 1);
        for name in ["Flowing", "Waiting", "Asking"] {
            let mut phase = state(name);
            assert!(phase.hold(received(), &none, 0).is_err());
            assert_eq!(word(&phase, None), name);
        }
    }

    #[test]
    fn a_resync_that_was_asked_again_supersedes_the_first() {
        let mut phase = state("Asking");
        phase.ask(OTHER, &limits(), 0);
        assert!(phase.end(OWN).is_none() && phase.is_asking(OTHER));
        assert!(phase.end(OTHER).is_some_and(|held| !held.is_empty()));
    }
}
