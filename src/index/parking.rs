//! Stored events whose parent has not come yet.

use std::collections::HashSet;

use crate::wire::{BlockNames, StoredBlocks, Tier};

/// Bounds on what waits for a parent, per holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParkingLimits {
    /// Most events that wait.
    pub events_max: usize,
    /// Most blocks that wait, in all events together.
    pub blocks_max: usize,
    /// How long an event waits, in microseconds.
    pub wait_us_max: u64,
}

impl Default for ParkingLimits {
    fn default() -> Self {
        Self {
            events_max: 64,
            blocks_max: 65_536,
            wait_us_max: 30_000_000,
        }
    }
}

/// An event that waits.
#[derive(Debug)]
pub(crate) struct ParkedEvent {
    /// What the engine calls the parent.
    pub(crate) parent: u64,
    pub(crate) stored: StoredBlocks,
    pub(crate) tier: Tier,
    /// What the engine calls the blocks of this event that have not been removed while it waited.
    pub(crate) remaining: HashSet<u64>,
    deadline_us: u64,
}

/// The events of one holder that wait for their parents, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Parking {
    events: Vec<ParkedEvent>,
    blocks: usize,
}

impl Parking {
    pub(crate) fn len(&self) -> usize {
        self.events.len()
    }

    /// Forgets what waits; gives it back.
    pub(crate) fn clear(&mut self) -> Vec<ParkedEvent> {
        std::mem::take(self).events
    }

    /// Lets `stored` wait for `parent`; says how many blocks had to be dropped to stay within the bounds.
    pub(crate) fn park(
        &mut self,
        parent: u64,
        stored: StoredBlocks,
        tier: Tier,
        now_us: u64,
        limits: ParkingLimits,
    ) -> usize {
        let mut dropped = 0;
        if limits.events_max == 0 || stored.names.len() > limits.blocks_max {
            return stored.names.len();
        }
        while self.events.len() >= limits.events_max || self.blocks + stored.names.len() > limits.blocks_max {
            dropped += self.take(0).stored.names.len();
        }
        self.blocks += stored.names.len();
        let deadline_us = now_us.saturating_add(limits.wait_us_max);
        let remaining = match (&stored.engine_hashes, &stored.names) {
            (Some(names), _) => names.iter().copied().collect(),
            (None, BlockNames::Sequence { hashes, .. }) => hashes.iter().map(|hash| hash.as_u64()).collect(),
            (None, BlockNames::Lineage(_)) => HashSet::new(),
        };
        self.events.push(ParkedEvent {
            parent,
            stored,
            tier,
            remaining,
            deadline_us,
        });
        dropped
    }

    fn take(&mut self, index: usize) -> ParkedEvent {
        let event = self.events.remove(index);
        self.blocks -= event.stored.names.len();
        event
    }

    /// The oldest event whose parent `is_known` now.
    pub(crate) fn take_ready(&mut self, is_known: impl Fn(u64) -> bool) -> Option<ParkedEvent> {
        let index = self.events.iter().position(|event| is_known(event.parent))?;
        Some(self.take(index))
    }

    /// Drops what has waited too long; says how many blocks that were.
    pub(crate) fn expire(&mut self, now_us: u64) -> usize {
        let mut dropped = 0;
        while self
            .events
            .first()
            .is_some_and(|event| event.deadline_us <= now_us)
        {
            dropped += self.take(0).stored.names.len();
        }
        dropped
    }

    /// Notes that the block called `name` was removed; says whether an event that waits has it.
    pub(crate) fn note_removed(&mut self, name: u64, tier: Tier) -> bool {
        let mut is_noted = false;
        for event in self.events.iter_mut().filter(|event| event.tier == tier) {
            is_noted |= event.remaining.remove(&name);
        }
        is_noted
    }
}
