//! The result of a translation.

use kvatlas_core::hash::{Position, SequenceHash};
use kvatlas_core::wire::{BlockNames, Event, RemovedBlocks, Resumable, ResumableBlocks, StoredBlocks, Tier};

use crate::reason::ReasonCounts;

use super::block::Block;

/// Maximum number of blocks in one event: an eighth of a megabyte of hashes.
const EVENT_BLOCKS_MAX: usize = 16_384;

/// Consecutive events of one tier. A publisher sends each part as one batch of the contract.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TranslationPart {
    /// The tier that all events of the part are about. Exception: an [`Event::Cleared`] is about every tier, whatever
    /// this field says.
    pub tier: Tier,
    /// The events, in order.
    pub events: Vec<Event>,
}

/// Events of the contract, in order and by tier, with counts of the parts that were left out.
#[derive(Debug, Clone, Default)]
pub struct Translation {
    /// The parts, to be published one after the other.
    pub parts: Vec<TranslationPart>,
    /// Reasons why parts of the engine's batch are not among the events, each with the number of such parts.
    pub reasons: ReasonCounts,
    /// Number of leading events of the last part to which no block may be appended any more. The next block begins a
    /// new event instead.
    sealed: usize,
    /// Whether one of the events is [`Event::Cleared`].
    has_cleared: bool,
    /// Emptied lists of hashes, which further events use again. So a steady stream of events allocates no memory.
    spare: Vec<Vec<SequenceHash>>,
    spare_parts: Vec<Vec<Event>>,
}

/// A point in a translation: all events before it were appended earlier than all events after it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TranslationMark {
    parts: usize,
    events: usize,
}

/// Maximum number of lists that are kept for further events.
const SPARE_MAX: usize = 1024;

impl Translation {
    /// Whether the translation has no events and no counted reasons.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.reasons.is_empty()
    }

    /// Empties the translation. Its memory is kept for the next.
    pub fn clear(&mut self) {
        self.reasons = ReasonCounts::default();
        (self.has_cleared, self.sealed) = (false, 0);
        while let Some(part) = self.parts.pop() {
            self.recycle(part.events);
        }
    }

    /// Whether one of the events is [`Event::Cleared`].
    pub fn has_cleared(&self) -> bool {
        self.has_cleared
    }

    /// Empties a list of events that is no longer needed, and keeps its memory and that of the events for reuse.
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
            Event::Resumable(blocks) => blocks.hashes,
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
            self.sealed = 0;
        }
        let last = self.parts.len() - 1;
        &mut self.parts[last].events
    }

    /// Appends an event that is about every tier, such as a clear.
    pub(super) fn push_for_all_tiers(&mut self, event: Event) {
        let tier = self.parts.last().map_or(Tier::DEVICE, |part| part.tier);
        self.has_cleared |= matches!(event, Event::Cleared);
        self.events(tier).push(event);
    }

    /// The last event of the last part, if blocks of `tier` may still be appended to it.
    fn open(&mut self, tier: Tier) -> Option<&mut Event> {
        let sealed = self.sealed;
        let events = self.events(tier);
        if events.len() <= sealed {
            None
        } else {
            events.last_mut()
        }
    }

    /// The place of the next event.
    pub(crate) fn mark(&self) -> TranslationMark {
        TranslationMark {
            parts: self.parts.len(),
            events: self.parts.last().map_or(0, |part| part.events.len()),
        }
    }

    /// Finishes all events, so that later blocks begin a new event.
    pub(crate) fn seal(&mut self) {
        self.sealed = self.mark().events;
    }

    /// The events that were appended since the place `mark`, with their tiers.
    pub(crate) fn parts_since(&self, mark: TranslationMark) -> impl Iterator<Item = (Tier, &[Event])> {
        let from = mark.parts.saturating_sub(1);
        self.parts
            .iter()
            .enumerate()
            .skip(from)
            .map(move |(number, part)| {
                let first = if number < mark.parts { mark.events } else { 0 };
                (part.tier, part.events.get(first..).unwrap_or_default())
            })
    }

    /// The parts with events that were appended since the place `mark`, each with the index of its first such event.
    fn since(&mut self, mark: TranslationMark) -> impl Iterator<Item = (&mut TranslationPart, usize)> {
        let from = mark.parts.saturating_sub(1);
        let parts = self.parts.iter_mut().enumerate().skip(from);
        parts.map(move |(number, part)| (part, if number < mark.parts { mark.events } else { 0 }))
    }

    /// Sets in each stored event since `mark` which of its blocks are resumable: a request can go on after such a block. Calls
    /// `is_resumable` in the order in which the blocks were stored.
    pub(super) fn set_resumable(
        &mut self,
        mark: TranslationMark,
        mut is_resumable: impl FnMut(Tier, SequenceHash) -> bool,
    ) {
        for (part, from) in self.since(mark) {
            for event in part.events.iter_mut().skip(from) {
                if let Event::Stored(stored) = event
                    && let BlockNames::Sequence { hashes, .. } = &stored.names
                {
                    let flags = hashes.iter().map(|hash| is_resumable(part.tier, *hash));
                    stored.resumable = Resumable::from_flags(flags);
                }
            }
        }
    }

    /// Appends events that tell whether `blocks`, which are held, are resumable: whether a request can continue after
    /// them. If `mark` is given, inserts the events at that point instead, before the later events of the tier.
    pub(super) fn push_resumable(
        &mut self,
        tier: Tier,
        mut blocks: Vec<SequenceHash>,
        is_resumable: bool,
        mark: Option<TranslationMark>,
    ) {
        while !blocks.is_empty() {
            let rest = blocks.split_off(blocks.len().min(EVENT_BLOCKS_MAX));
            let hashes = std::mem::replace(&mut blocks, rest);
            let event = Event::Resumable(ResumableBlocks::by_sequence(hashes, is_resumable));
            let newer =
                |(part, from): &(&mut TranslationPart, usize)| part.tier == tier && part.events.len() > *from;
            match mark.and_then(|mark| self.since(mark).find(newer)) {
                Some((part, from)) => part.events.insert(from, event),
                None => self.events(tier).push(event),
            }
        }
    }

    /// Appends `block` as held: to the last event if the block continues it, else in a new event.
    pub(super) fn push_stored(&mut self, tier: Tier, block: &Block) {
        if let Some(Event::Stored(StoredBlocks {
            names:
                BlockNames::Sequence {
                    position: Some(position),
                    hashes,
                    ..
                },
            ..
        })) = self.open(tier)
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

    /// Appends the block as no longer held: to the last event if that is a removal, else in a new event.
    pub(super) fn push_removed(&mut self, tier: Tier, block: SequenceHash) {
        if let Some(Event::Removed(removed)) = self.open(tier)
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
