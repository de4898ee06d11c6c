//! Forgetting blocks where there are too many: leaves first, least recently used first, and a parent only after its last child
//! (the lineage-aware eviction of KVBM, on runs instead of single blocks).
//!
//! Recency is that of runs, in ticks of a clock that goes with the blocks stored: a run has been used when a holder got more of
//! it, or a search looked at it, and it is as recent as the last child it had.
//!
//! Readers mark a run at most once a tick, so that they don't all write to a hot one.
//!
//! What is taken from a holder is noted for its lane, which makes up for it at its next turn.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::atomic::Ordering;

use crate::hash::PositionalLineageHash;

use super::super::holder_set::HolderSlot;
use super::Spot;
use super::slab::RunId;
use super::writer::RunWriter;

/// Ticks in which the whole capacity is stored once.
const TICKS: u64 = 256;
/// At a bound, a little more of the capacity is forgotten than must be, so that not every event has to.
const SLACK: u64 = 64;
/// But no more than this: whoever stores waits for it.
const SLACK_BLOCKS_MAX: u64 = 1024;
/// After so many blocks, others have a turn.
const TURN_BLOCKS: u64 = 1024;

/// What a holder no longer has, although it did not say so.
#[derive(Debug, Clone)]
pub(crate) struct Evicted {
    pub(crate) run: RunId,
    /// The run that it follows.
    pub(crate) parent: Option<RunId>,
    /// How many blocks of the run the holder has left.
    pub(crate) cutoff: u16,
    /// The blocks, deepest first, for a holder that keeps them one by one.
    pub(crate) keys: Vec<PositionalLineageHash>,
}

/// What eviction keeps in mind. Empty as long as there is no bound.
#[derive(Debug, Default)]
pub(super) struct EvictionState {
    /// Runs that may have a leaf, by the tick in which they were used when they were put here; each at most once.
    queue: BinaryHeap<Reverse<(u32, RunId)>>,
    /// Blocks stored in this tick.
    stored: u64,
    /// What was taken from holders that have not been told yet.
    untold: HashMap<HolderSlot, Vec<Evicted>>,
    /// Holders that keep their blocks one by one.
    keyed: HashSet<HolderSlot>,
}

impl EvictionState {
    /// All runs are gone.
    pub(super) fn forget_queue(&mut self) {
        self.queue = BinaryHeap::new();
    }

    pub(super) fn put(&mut self, tick: u32, run: RunId) {
        self.queue.push(Reverse((tick, run)));
    }
}

impl RunWriter<'_> {
    /// Says whether a holder keeps its blocks one by one, and must be told which have gone.
    pub(crate) fn set_keyed(&mut self, slot: HolderSlot, is_keyed: bool) {
        if !self.store.is_bounded() {
            return;
        }
        if is_keyed {
            self.state.eviction.keyed.insert(slot);
        } else {
            self.state.eviction.keyed.remove(&slot);
        }
    }

    /// What was taken from a holder since this was last asked.
    pub(crate) fn take_evicted(&mut self, slot: HolderSlot) -> Vec<Evicted> {
        if self.state.eviction.untold.is_empty() {
            return Vec::new();
        }
        self.state.eviction.untold.remove(&slot).unwrap_or_default()
    }

    /// Notes that `blocks` were added to `run`, which is used now.
    pub(super) fn note_stored(&mut self, run: RunId, blocks: u64) {
        if !self.store.is_bounded() {
            return;
        }
        let blocks_max = self.store.blocks_max();
        self.state.eviction.stored += blocks;
        if self.state.eviction.stored > blocks_max / TICKS {
            self.state.eviction.stored = 0;
            self.store.tick.fetch_add(1, Ordering::Relaxed);
        }
        self.touch(run, self.store.tick.load(Ordering::Relaxed));
        self.enqueue(run);
    }

    /// Forgets `excess` blocks, and a few more. Tells `note` whose blocks go, before they do.
    pub(crate) fn evict(&mut self, excess: u64, mut note: impl FnMut(HolderSlot, u16)) {
        let wanted = excess + (self.store.blocks_max() / SLACK).min(SLACK_BLOCKS_MAX);
        let (mut gone, mut paused) = (0, 0);
        while gone < wanted {
            let Some(Reverse((tick, run))) = self.state.eviction.queue.pop() else {
                break;
            };
            self.unmark_queued(run);
            let Some(used) = self.last_used(run) else { continue };
            if used > tick {
                self.enqueue(run);
                continue;
            }
            gone += self.evict_tail(run, wanted - gone, &mut note);
            if gone - paused >= TURN_BLOCKS {
                paused = gone;
                self.pause();
            }
        }
        self.store.turns.evicted.fetch_add(gone, Ordering::Relaxed);
    }

    /// Takes up to `blocks_max` blocks that no other follows from the end of a run; says how many.
    fn evict_tail(&mut self, id: RunId, blocks_max: u64, note: &mut impl FnMut(HolderSlot, u16)) -> u64 {
        let (len, leaf_from) = self.leaf(id);
        let leaf = u64::from(len.saturating_sub(leaf_from));
        // No longer than the leaf.
        let count = u16::try_from(leaf.min(blocks_max)).unwrap_or(u16::MAX);
        if count == 0 {
            return 0;
        }
        let cutoff = len - count;
        let parent = self.parent(id);
        for slot in self.holders_beyond(id, cutoff) {
            let before = self.cutoff(id, slot);
            note(slot, before - cutoff);
            let is_keyed = self.state.eviction.keyed.contains(&slot);
            let offsets = if is_keyed { cutoff..before } else { 0..0 };
            let keys = offsets
                .rev()
                .filter_map(|offset| self.key(Spot { run: id, offset }));
            let keys = keys.map(Into::into).collect();
            let untold = self.state.eviction.untold.entry(slot).or_default();
            untold.push(Evicted {
                run: id,
                parent: parent.map(|parent| parent.run),
                cutoff,
                keys,
            });
            self.set_cutoff(id, slot, cutoff);
        }
        if cutoff > leaf_from {
            self.enqueue(id);
        }
        u64::from(count)
    }
}
