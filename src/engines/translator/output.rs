//! What a translation yields.

use kvatlas_core::hash::{Position, SequenceHash};
use kvatlas_core::wire::{BlockNames, Event, RemovedBlocks, StoredBlocks, Tier};

use crate::reason::ReasonCounts;

use super::chain::Block;

/// Most blocks of one event: an eighth of a megabyte.
const EVENT_BLOCKS_MAX: usize = 16_384;

/// Events of one tier, for one batch of the contract.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TranslationPart {
    /// The tier of all events. [`Event::Cleared`] is for every tier, wherever it stands.
    pub tier: Tier,
    /// The events, in order.
    pub events: Vec<Event>,
}

/// Events of the contract, in order, by tier; and what was left out.
#[derive(Debug, Clone, Default)]
pub struct Translation {
    /// The parts, to be published one after the other.
    pub parts: Vec<TranslationPart>,
    /// What of the engine's batch is not among the events, and why.
    pub reasons: ReasonCounts,
    /// Whether one of the events clears.
    has_cleared: bool,
    /// Lists for further events, so that a steady stream takes no new memory.
    spare: Vec<Vec<SequenceHash>>,
    spare_parts: Vec<Vec<Event>>,
}

/// Most lists that are kept for further events.
const SPARE_MAX: usize = 1024;

impl Translation {
    /// Whether there is neither an event nor a reason.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.reasons.is_empty()
    }

    /// Empties the translation. Its memory is kept for the next.
    pub fn clear(&mut self) {
        self.reasons = ReasonCounts::default();
        self.has_cleared = false;
        while let Some(part) = self.parts.pop() {
            self.recycle(part.events);
        }
    }

    /// Whether one of the events is [`Event::Cleared`].
    pub fn has_cleared(&self) -> bool {
        self.has_cleared
    }

    /// Takes back the lists of events that nobody needs any more.
    fn recycle(&mut self, mut events: Vec<Event>) {
        for event in events.drain(..) {
            self.keep_spare(event);
        }
        if self.spare_parts.len() < SPARE_MAX {
            self.spare_parts.push(events);
        }
    }

    fn keep_spare(&mut self, event: Event) {
        let mut hashes = match event {
            Event::Removed(removed) => removed.hashes,
            Event::Stored(StoredBlocks {
                names: BlockNames::Sequence { hashes, .. },
                ..
            }) => hashes,
            _ => return,
        };
        if self.spare.len() < SPARE_MAX {
            hashes.clear();
            self.spare.push(hashes);
        }
    }

    fn events(&mut self, tier: Tier) -> &mut Vec<Event> {
        if self.parts.last().is_none_or(|part| part.tier != tier) {
            let events = self.spare_parts.pop().unwrap_or_default();
            self.parts.push(TranslationPart { tier, events });
        }
        let last = self.parts.len() - 1;
        &mut self.parts[last].events
    }

    /// Appends an event that is for every tier.
    pub(super) fn push_for_all_tiers(&mut self, event: Event) {
        let tier = self.parts.last().map_or(Tier::DEVICE, |part| part.tier);
        self.has_cleared |= matches!(event, Event::Cleared);
        self.events(tier).push(event);
    }

    /// Appends that `block` is held, to the last event where it continues that.
    pub(super) fn push_stored(&mut self, tier: Tier, block: &Block) {
        if let Some(Event::Stored(StoredBlocks {
            names:
                BlockNames::Sequence {
                    position: Some(position),
                    hashes,
                    ..
                },
            ..
        })) = self.events(tier).last_mut()
        {
            let next = position.as_u64() + hashes.len() as u64;
            let continues = u64::from(block.position) == next && hashes.last().copied() == block.parent;
            if continues && hashes.len() < EVENT_BLOCKS_MAX {
                hashes.push(block.sequence);
                return;
            }
        }
        // A translator checks positions before it takes a block.
        let Ok(position) = Position::new(u64::from(block.position)) else {
            return;
        };
        let mut hashes = self.spare.pop().unwrap_or_default();
        hashes.push(block.sequence);
        let stored = StoredBlocks::by_sequence(block.parent, Some(position), hashes);
        self.events(tier).push(Event::Stored(stored));
    }

    /// Appends that the block is not held any more, to the last event where that is a removal too.
    pub(super) fn push_removed(&mut self, tier: Tier, block: SequenceHash) {
        if let Some(Event::Removed(removed)) = self.events(tier).last_mut()
            && removed.hashes.len() < EVENT_BLOCKS_MAX
        {
            removed.hashes.push(block);
            return;
        }
        let mut hashes = self.spare.pop().unwrap_or_default();
        hashes.push(block);
        let removed = RemovedBlocks::by_sequence(hashes);
        self.events(tier).push(Event::Removed(removed));
    }
}
