//! Forgetting blocks where there are too many: leaves first, least recently used first, and a parent only after its last child
//! (the lineage-aware eviction of KVBM, on runs instead of single blocks).
//!
//! Recency is that of runs, in ticks of a clock that goes with the blocks stored: a run has been used when a holder got more of
//! it, or a search looked at it, and it is as recent as the last child it had.
//!
//! Whoever evicts takes the blocks from one holder after the other, each under the holder's own lock: so the holder's state and what
//! queries see change in one step.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::Ordering;

use crate::index::directory::HolderSlot;
use crate::index::indexer::Shared;
use crate::index::runs::{RunId, RunWriter};
use crate::wire::DegradedReason;

/// Ticks in which the whole capacity is stored once.
const TICKS: u64 = 256;
/// At a bound, a little more of the capacity is forgotten than must be, so that not every event has to.
const SLACK: u64 = 64;
/// But no more than this: whoever stores waits for it.
const SLACK_BLOCKS_MAX: u64 = 1024;

/// Runs that may have a leaf, by the tick in which they were used when they were put here; each at most once.
#[derive(Debug, Default)]
pub(crate) struct Queue(BinaryHeap<Reverse<(u32, RunId)>>);

impl Queue {
    /// All runs are gone.
    pub(crate) fn clear(&mut self) {
        self.0 = BinaryHeap::new();
    }
}

/// Blocks to be forgotten: those of a run from `cutoff` on.
struct Victim {
    run: RunId,
    cutoff: u16,
    holders: Vec<HolderSlot>,
}

impl RunWriter<'_> {
    /// Notes that `blocks` were added to a run, which is used now.
    pub(crate) fn note_stored(&mut self, id: RunId, blocks: u64) {
        if !self.store.is_bounded() {
            return;
        }
        let state = self.state_mut();
        state.stored += blocks;
        if state.stored > self.store.blocks_max() / TICKS {
            self.state_mut().stored = 0;
            self.store.count_tick();
        }
        let tick = self.store.tick().unwrap_or_default();
        self.use_run(id, tick);
    }

    /// Notes that a run, which has a leaf now, was used in `tick`.
    pub(crate) fn use_run(&mut self, id: RunId, tick: u32) {
        if !self.store.is_bounded() {
            return;
        }
        let Some(run) = self.run(id) else { return };
        let used = run.used.load(Ordering::Relaxed).max(tick);
        run.used.store(used, Ordering::Relaxed);
        if run.queued.swap(1, Ordering::Relaxed) == 0 {
            self.state_mut().queue.0.push(Reverse((used, id)));
        }
    }

    /// The leaf that was used longest ago, `blocks_max` blocks of it at most.
    fn next_victim(&mut self, blocks_max: u64) -> Option<Victim> {
        loop {
            let Reverse((tick, id)) = self.state_mut().queue.0.pop()?;
            let attached_end = self.attached_end(id);
            let Some(run) = self.run(id) else { continue };
            run.queued.store(0, Ordering::Relaxed);
            let (len, used) = (run.len(), run.used.load(Ordering::Relaxed));
            if len <= attached_end {
                continue;
            }
            if used > tick {
                self.use_run(id, used);
                continue;
            }
            let leaf = u64::from(len - attached_end);
            // No longer than the leaf.
            let cutoff = len - u16::try_from(leaf.min(blocks_max)).unwrap_or(len - attached_end);
            let holders = self.holders_beyond(id, cutoff);
            return Some(Victim {
                run: id,
                cutoff,
                holders,
            });
        }
    }
}

impl Shared {
    /// Forgets blocks as long as there is an `excess`, and a few more. Whose they are is degraded first, so that no shortened match
    /// counts as exact.
    pub(crate) fn evict(&self, excess: impl Fn() -> u64) {
        if excess() == 0 {
            return;
        }
        let _evicting = self.evicting.lock();
        // Whoever was here before may have made room by now.
        let now = excess();
        if now == 0 {
            return;
        }
        let wanted = now + (self.runs.blocks_max() / SLACK).min(SLACK_BLOCKS_MAX);
        let mut gone = 0;
        while gone < wanted {
            let before = self.runs.write().blocks();
            let Some(victim) = self.runs.write().next_victim(wanted - gone) else {
                return;
            };
            for slot in &victim.holders {
                self.take_from(*slot, &victim);
            }
            let mut runs = self.runs.write();
            runs.requeue(victim.run);
            // Others may have stored meanwhile: at least the victim's own blocks count.
            let fewer = before.saturating_sub(runs.blocks());
            drop(runs);
            gone += fewer.max(1);
            self.runs.count_evicted(fewer);
        }
    }

    fn take_from(&self, slot: HolderSlot, victim: &Victim) {
        let Some(holder) = self.holder(slot) else { return };
        // Before the blocks go.
        holder.record.status.degrade(DegradedReason::Capacity);
        let gone = holder
            .state
            .lock()
            .evict(victim.run, victim.cutoff, &mut self.runs.write());
        holder.record.status.note_evicted(gone as u64);
    }
}
