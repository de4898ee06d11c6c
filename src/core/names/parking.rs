//! Parking: stored events are kept (parked) while they wait for a parent that has not arrived yet. A removal that
//! arrives meanwhile is remembered, because the removed block may belong to a waiting event.

use std::collections::{HashMap, HashSet};

use crate::hash::PositionalLineageHash;
use crate::index::settings::ParkingLimits;
use crate::wire::{BlockContent, BlockNames, Resumable, ResumableBlocks, StoredBlocks, Tier};

use super::blocks::NewBlock;

/// Stored event that waits for its parent.
#[derive(Debug)]
pub(crate) struct ParkedEvent {
    /// The engine's name of the parent.
    pub(crate) parent: u64,
    pub(crate) stored: StoredBlocks,
    pub(crate) tier: Tier,
    /// Engine's names of the event's blocks that were not removed while the event waited.
    remaining: HashSet<u64>,
    deadline_us: u64,
    stamp: u64,
}

/// Returns the number of bytes that the blocks of an event take.
fn bytes_of(stored: &StoredBlocks) -> usize {
    let names = match &stored.names {
        BlockNames::Sequence { hashes, .. } => hashes.capacity() * 8,
        BlockNames::Lineage(hashes) => hashes.capacity() * 16,
    };
    let content = match &stored.content {
        None => 0,
        Some(BlockContent::BlockHashes(hashes)) => hashes.capacity() * 8,
        Some(BlockContent::Tokens { tokens, .. }) => tokens.capacity() * 4,
    };
    let own = stored.engine_hashes.as_ref().map_or(0, Vec::capacity);
    let runs = stored.resumable.runs().map_or(0, <[u32]>::len) * size_of::<u32>();
    names + content + runs + own * 8
}

/// Returns the number of bytes of a set of `names` names.
fn bytes_of_names(names: usize) -> usize {
    names * (size_of::<u64>() + 1) / 7 * 8
}

/// Returns the approximate number of bytes that an event takes while it waits.
pub(super) fn bytes_to_wait(stored: &StoredBlocks) -> usize {
    size_of::<ParkedEvent>() + bytes_of(stored) + bytes_of_names(stored.names.len() * 2)
}

impl ParkedEvent {
    fn bytes(&self) -> usize {
        size_of::<Self>() + bytes_of(&self.stored) + bytes_of_names(self.remaining.capacity())
    }

    /// Marks blocks of this event as resumable or not: all blocks that have one of these names or hashes.
    fn mark(&mut self, hashes: &HashSet<u64>, keys: &HashSet<PositionalLineageHash>, resumable: bool) {
        let names = self.stored.engine_hashes.as_ref();
        let is_meant = |index: usize| {
            let has_name = names.and_then(|names| names.get(index));
            let is_named = has_name.is_some_and(|name| hashes.contains(name));
            is_named
                || match &self.stored.names {
                    BlockNames::Sequence { hashes: own, .. } => hashes.contains(&own[index].as_u64()),
                    BlockNames::Lineage(own) => keys.contains(&own[index]),
                }
        };
        let blocks = self.stored.names.len();
        if !(0..blocks).any(is_meant) {
            return;
        }
        let stretches = self.stored.resumable.stretches(blocks);
        let flags = stretches.flat_map(|(stretch, flag)| stretch.map(move |_| flag));
        let flags = flags
            .enumerate()
            .map(|(index, flag)| if is_meant(index) { resumable } else { flag });
        self.stored.resumable = Resumable::from_flags(flags);
    }
}

/// Returns the engine's names of an event's blocks.
pub(super) fn names_in(stored: &StoredBlocks) -> Vec<u64> {
    match (&stored.engine_hashes, &stored.names) {
        (Some(names), _) => names.clone(),
        (None, BlockNames::Sequence { hashes, .. }) => hashes.iter().map(|hash| hash.as_u64()).collect(),
        (None, BlockNames::Lineage(_)) => Vec::new(),
    }
}

/// Maximum number of removals of one holder that are remembered while events wait.
pub(crate) const UNPLACED_MAX: usize = 65_536;

/// Sequence or lineage hash by which an event has removed a block while other events wait for a parent. The removed
/// block may belong to a waiting event. That is known only when the parent of that event has arrived, so the removal is
/// remembered until then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Unplaced {
    /// Removal by sequence hash.
    Hash(u64),
    /// Removal by lineage hash.
    Key(PositionalLineageHash),
}

/// Waiting events of one holder, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Parking {
    events: Vec<ParkedEvent>,
    /// Number of events that have begun to wait so far.
    stamp: u64,
    /// Removals that arrived while an event waited. Each has the value that `stamp` had when it last arrived.
    unplaced: HashMap<(Tier, Unplaced), u64>,
}

impl Parking {
    pub(crate) fn len(&self) -> usize {
        self.events.len()
    }

    /// Number of bytes of the events that wait for a parent, and of the remembered removals.
    pub(crate) fn bytes(&self) -> usize {
        let unplaced = self.unplaced.capacity() * (size_of::<((Tier, Unplaced), u64)>() + 1);
        self.events.iter().map(ParkedEvent::bytes).sum::<usize>() + unplaced / 7 * 8
    }

    /// Forgets the remembered removals, if no event is waiting for a parent.
    pub(crate) fn settle(&mut self) {
        let keeps_room = self.events.capacity() > 0 || self.unplaced.capacity() > 0;
        if self.events.is_empty() && keeps_room {
            (self.events, self.unplaced) = Default::default();
        }
    }

    /// Removes all events that wait for a parent, and returns them. Also forgets the removals that were remembered for
    /// these events.
    pub(crate) fn clear(&mut self) -> Vec<ParkedEvent> {
        std::mem::take(self).events
    }

    /// Keeps `stored` until `parent` arrives. To stay within the bounds, drops older events or `stored` itself. Returns
    /// the number of dropped blocks, not counting blocks that were removed while they waited.
    pub(crate) fn park(
        &mut self,
        parent: u64,
        stored: StoredBlocks,
        tier: Tier,
        now_us: u64,
        limits: ParkingLimits,
    ) -> usize {
        let blocks = stored.names.len();
        if limits.events_max == 0 || blocks > limits.blocks_max {
            return blocks;
        }
        self.stamp += 1;
        let (mut waiting, mut dropped) = (self.blocks(), 0);
        while self.events.len() >= limits.events_max || waiting + blocks > limits.blocks_max {
            let oldest = self.events.remove(0);
            waiting -= oldest.stored.names.len();
            dropped += oldest.remaining.len();
        }
        let deadline_us = now_us.saturating_add(limits.wait_us_max);
        let remaining = names_in(&stored).into_iter().collect();
        self.events.push(ParkedEvent {
            parent,
            stored,
            tier,
            remaining,
            deadline_us,
            stamp: self.stamp,
        });
        dropped
    }

    /// Number of blocks in all events that wait for a parent.
    fn blocks(&self) -> usize {
        self.events.iter().map(|event| event.stored.names.len()).sum()
    }

    /// Removes the oldest event for whose parent `is_known` returns true, and returns it.
    pub(crate) fn take_ready(&mut self, mut is_known: impl FnMut(u64) -> bool) -> Option<ParkedEvent> {
        let index = self.events.iter().position(|event| is_known(event.parent))?;
        Some(self.events.remove(index))
    }

    /// Drops the events that have waited too long. Returns the number of dropped blocks, not counting blocks that
    /// were removed while they waited.
    pub(crate) fn expire(&mut self, now_us: u64) -> usize {
        let is_due = |event: &&ParkedEvent| event.deadline_us <= now_us;
        let due = self.events.iter().take_while(is_due).count();
        let dropped = self.events.drain(..due);
        dropped.map(|event| event.remaining.len()).sum()
    }

    /// Records a removal by sequence or lineage hash, if any event is waiting for its parent. If a waiting event has
    /// the removed block, the block will not be stored with that event. Returns the number of blocks that had to be
    /// dropped to stay within the bounds.
    pub(crate) fn note_unplaced(&mut self, removed: Unplaced, tier: Tier) -> usize {
        let Some(oldest) = self.events.first().map(|event| event.stamp) else {
            return 0;
        };
        self.unplaced.insert((tier, removed), self.stamp);
        if self.unplaced.len() <= UNPLACED_MAX {
            return 0;
        }
        self.unplaced.retain(|_, stamp| *stamp >= oldest);
        if self.unplaced.len() <= UNPLACED_MAX / 2 {
            return 0;
        }
        self.drop_all()
    }

    /// Drops all events that wait for a parent, and the removals that were remembered for these events. Returns the
    /// number of lost blocks.
    pub(super) fn drop_all(&mut self) -> usize {
        let dropped = self.events.iter().map(|event| event.remaining.len()).sum();
        (self.events, self.unplaced) = Default::default();
        dropped
    }

    /// Whether a block of an event that waited is still to be stored, because it was not removed while the event
    /// waited.
    pub(super) fn keeps(&self, event: &ParkedEvent, block: &NewBlock) -> bool {
        let is_removed = |removed| {
            let stamp = self.unplaced.get(&(event.tier, removed));
            stamp.is_some_and(|stamp| *stamp >= event.stamp)
        };
        let hash = block.sequence_hash.map(|hash| Unplaced::Hash(hash.as_u64()));
        block.name.is_some_and(|name| event.remaining.contains(&name))
            && !is_removed(Unplaced::Key(block.key))
            && !hash.is_some_and(is_removed)
    }

    /// Marks blocks of the events that wait in `tier` as resumable or not. If `blocks` has lineage hashes, drops the
    /// waiting events that give their blocks by sequence hashes: the lineage hashes of their blocks are not known yet.
    /// Returns the number of dropped blocks.
    pub(crate) fn mark(&mut self, blocks: &ResumableBlocks, tier: Tier) -> usize {
        if self.events.is_empty() {
            return 0;
        }
        let hashes: HashSet<u64> = blocks.hashes.iter().map(|hash| hash.as_u64()).collect();
        let keys: HashSet<PositionalLineageHash> = blocks.lineage_hashes.iter().copied().collect();
        let mut dropped = 0;
        self.events.retain_mut(|event| {
            let is_by_hash = matches!(event.stored.names, BlockNames::Sequence { .. });
            let is_lost = event.tier == tier && is_by_hash && !keys.is_empty();
            if event.tier == tier && !is_lost {
                event.mark(&hashes, &keys, blocks.resumable);
            }
            dropped += if is_lost { event.remaining.len() } else { 0 };
            !is_lost
        });
        dropped
    }

    /// Records that the block called `name` was removed. Returns whether an event that waits for a parent has that
    /// block.
    pub(crate) fn note_removed(&mut self, name: u64, tier: Tier) -> bool {
        let mut is_noted = false;
        for event in self.events.iter_mut().filter(|event| event.tier == tier) {
            is_noted |= event.remaining.remove(&name);
        }
        is_noted
    }
}
