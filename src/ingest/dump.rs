//! A holder's state as a snapshot takes it.

use crate::index::WalkedHolder;
use crate::snapshot::HolderFrame;
use crate::wire::{Event, EventBatch, Rank, Tier};

/// Most blocks in an event of a dump; keeps frames small whatever the configuration allows on the wire.
pub(super) const DUMP_EVENT_BLOCKS_MAX: usize = 4096;
/// A batch of a dump is closed when it has this many blocks.
const DUMP_BATCH_BLOCKS: usize = 16_384;

/// A holder's state at one instant: how far its batches were applied, and events that rebuild it.
#[derive(Debug)]
pub struct HolderDump {
    /// Who it is, and its cursor.
    pub frame: HolderFrame,
    /// The events, in order, each with its tier.
    pub(super) events: Vec<(Tier, Event)>,
    /// The holder as it can be met on a walk. Then there are no events.
    pub walked: Option<WalkedHolder>,
}

/// A holder after a walk that was to meet it.
#[derive(Debug)]
pub enum Revisited {
    /// What the walk has found, and the batches since the first dump, make it what it is.
    Unchanged,
    /// They do not: this is what it is.
    Changed(Box<HolderDump>),
    /// It has left.
    Gone,
}

impl HolderDump {
    /// The events as encoded batches, in order. The lane only collects events; encoding them is left to whoever writes them.
    pub fn batches(self) -> impl Iterator<Item = Vec<u8>> {
        let HolderFrame { epoch, seq, rank, .. } = self.frame;
        let mut events = self.events.into_iter().peekable();
        std::iter::from_fn(move || {
            let tier = events.peek()?.0;
            let mut batch = empty_batch(epoch, seq, rank, tier);
            let mut blocks = 0;
            while blocks < DUMP_BATCH_BLOCKS
                && batch.events.len() < DUMP_EVENT_BLOCKS_MAX
                && let Some((_, event)) = events.next_if(|(next, _)| *next == tier)
            {
                blocks += match &event {
                    Event::Stored(stored) => stored.names.len(),
                    _ => 0,
                };
                batch.events.push(event);
            }
            Some(batch.encode())
        })
    }
}

fn empty_batch(epoch: u64, seq: u64, rank: Rank, tier: Tier) -> EventBatch {
    EventBatch {
        epoch,
        seq: seq.max(1),
        rank,
        time_us: None,
        tier,
        events: Vec::new(),
    }
}
