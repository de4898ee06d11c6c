//! Clears. A clear of vLLM doesn't tell which tier it empties. A connector with a pool of blocks
//! (SimpleCPUOffloadConnector) reports a clear of its pool with the same event that reports a clear of the device.
//!
//! In a batch, the events of a connector come after all events of the device. So the place of a clear in its batch
//! mostly shows whether it empties the device or the pool. The first matching row of this table decides:
//!
//! | place of the clear | it empties |
//! |---|---|
//! | before an event of the device | the device |
//! | after an event of a tier beyond the device | the pool |
//! | after an earlier clear and an event of the device that follows that clear | the pool |
//! | elsewhere, if no event has shown a pool so far | the device |
//! | elsewhere | unknown: the device's blocks are dropped, and the holder is in doubt |

use kvatlas_core::wire::{Event, Tier};

use crate::batch::{EngineBatch, EngineChange, EngineEvent};
use crate::reason::Reason;

use super::Translator;
use super::output::Translation;
use super::recalled::Recalled;
use super::tiers::{PerTier, TierSet};

/// The tiers of a holder that a clear empties.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClearedPart {
    /// The device, and the tiers up to [`crate::TranslatorSettings::clears_up_to`].
    Device,
    /// Tiers beyond the device: the clear empties a KV connector's pool of blocks.
    Pool,
    /// Either the device or a connector's pool: the event does not tell which.
    Unknown,
}

/// Whether the event is about blocks on the device. `None` if the event does not name exactly one tier.
fn is_of_device(event: &EngineEvent) -> Option<bool> {
    match &event.change {
        EngineChange::Stored(stored) => Some(stored.tier == Tier::DEVICE),
        EngineChange::Removed(removed) => removed.tier.map(|tier| tier == Tier::DEVICE),
        EngineChange::Created(_) | EngineChange::Moved { .. } | EngineChange::Cleared => None,
    }
}

impl Translator {
    /// Applies a clear. `place` is the index of the clear among the events of `batch`.
    pub(super) fn clear_at(&mut self, batch: &EngineBatch, place: usize, output: &mut Translation) {
        match self.part_cleared(batch.events(), place) {
            ClearedPart::Device => self.clear(output),
            ClearedPart::Pool => self.clear_beyond(output),
            ClearedPart::Unknown => {
                let recalled = self.names_so_far();
                self.clear(output);
                self.recalled = recalled;
                self.note_doubt(Reason::UnclearTier);
            }
        }
    }

    fn part_cleared(&self, events: &[EngineEvent], place: usize) -> ClearedPart {
        // If groups of main attention lie in different tiers, events of the device can come after events of other
        // tiers.
        if !self.settings.has_pool_clears || self.groups.are_apart() {
            return ClearedPart::Device;
        }
        let (before, behind) = events.split_at(place);
        if behind.iter().any(|event| is_of_device(event) == Some(true)) {
            return ClearedPart::Device;
        }
        let is_of_pool = before.iter().any(|event| is_of_device(event) == Some(false));
        let mut after_clear = before
            .iter()
            .skip_while(|event| event.change != EngineChange::Cleared);
        let has_cleared_device = after_clear.any(|event| is_of_device(event) == Some(true));
        if is_of_pool || has_cleared_device {
            return ClearedPart::Pool;
        }
        match self.beyond.may_have_pool() {
            true => ClearedPart::Unknown,
            false => ClearedPart::Device,
        }
    }

    fn clear(&mut self, output: &mut Translation) {
        let held = self.held_tiers();
        self.chain.clear();
        self.groups.clear();
        self.sizes.clear();
        self.adapters.clear();
        self.windows.clear();
        self.step.clear();
        self.beyond.clear(held, self.settings.clears_up_to);
        self.recalled = Recalled::default();
        (self.doubt, self.hides_groups) = (None, false);
        output.push_for_all_tiers(Event::Cleared);
    }

    /// Removes all blocks in tiers beyond the device, after a clear of a connector's pool. Tiers that had blocks stay
    /// in doubt, because other stores, which were not cleared, may have blocks there, too.
    fn clear_beyond(&mut self, output: &mut Translation) {
        let held = self.held_tiers();
        for (lane, name) in self.groups.names_beyond() {
            self.remove_one(Some(lane), name, TierSet::BEYOND, Some(0), output);
        }
        self.beyond.clear(held, self.settings.clears_up_to);
    }

    /// For each tier, whether it may have blocks.
    fn held_tiers(&self) -> PerTier<bool> {
        PerTier::of(|tier| self.groups.has_in(tier) || self.tier_doubt(tier).is_some())
    }
}
