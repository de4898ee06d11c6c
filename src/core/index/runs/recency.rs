//! Recency: how recently runs were used. This decides which blocks are evicted first. Time is counted in ticks of a
//! clock that advances with the number of blocks stored.
//!
//! A run counts as used when a holder gets more of its blocks, or when a search reads it. When a child run is removed,
//! its parent becomes at least as recent as the child was. A *leaf* is the end of a run: the blocks after the last
//! block that a child branches off.

use std::cmp::Reverse;
use std::sync::atomic::Ordering;

use crate::index::directory::{HolderSlot, SlotBits, SlotSet};

use super::RunId;
use super::entry::RosterEntry;
use super::run::Run;
use super::writer::RunWriter;

/// Maximum number of leaves (ends of runs) that are chosen for eviction at one time. [`VICTIM_BLOCKS_MAX`] is the
/// number of blocks at which choosing stops.
const VICTIMS_MAX: usize = 64;
const VICTIM_BLOCKS_MAX: u64 = 256;
/// Maximum number of leaves (ends of runs) that eviction spares at one time, while it looks for blocks of greedy
/// workers. A greedy worker has much more than its share of the capacity.
///
/// If eviction finds no such blocks in a whole pass over the queue, it ignores the shares for some time. It then takes
/// leaves of any worker: once for every [`SPARED_PER_TURN`] spared leaves.
const SPARED_MAX: usize = 4096;
const SPARED_PER_TURN: usize = 16;
/// Number of ticks that the recency clock makes while as many blocks are stored as fit into the capacity.
const TICKS: u64 = 256;

/// Blocks to evict: the blocks of `run` from the offset `cutoff` on. `holders` are all holders that have any of these
/// blocks.
pub(crate) struct Victim {
    pub(crate) run: RunId,
    pub(crate) cutoff: u16,
    pub(crate) holders: Vec<HolderSlot>,
}

impl RunWriter<'_> {
    /// Records that `blocks` blocks were added to a run, which counts as a use of the run now.
    pub(crate) fn note_stored(&mut self, id: RunId, blocks: u64) {
        if !self.store.is_bounded {
            return;
        }
        self.state.stored += blocks;
        if self.state.stored > self.store.blocks_max() / TICKS {
            self.state.stored = 0;
            self.store.tick.fetch_add(1, Ordering::Relaxed);
        }
        self.use_run(id, self.store.tick().unwrap_or_default());
    }

    /// Records that a run was used in `tick`, a unit of the recency clock. Adds the run to the queue of eviction, if it
    /// is in no queue.
    pub(crate) fn use_run(&mut self, id: RunId, tick: u32) {
        if !self.store.is_bounded {
            return;
        }
        let Some(run) = self.run(id) else { return };
        let used = run.used.load(Ordering::Relaxed).max(tick);
        run.used.store(used, Ordering::Relaxed);
        if !self.state.numbers.set_queued(id, true) {
            self.state.queue.push(Reverse((used, id)));
        }
    }

    /// Returns the leaves (ends of runs) that were used longest ago: about `blocks_max` blocks at most, and no more
    /// leaves than are evicted at one time. `greedy` are the holders of workers with much more than their share of the
    /// capacity. If `greedy` is given and the call finds leaves that only these holders have, it returns no other
    /// leaves.
    pub(crate) fn next_victims(&mut self, blocks_max: u64, greedy: Option<&SlotSet>) -> Vec<Victim> {
        let Some(greedy) = greedy else {
            self.recall_spared();
            return self.victims_of(blocks_max, None);
        };
        if self.state.unfair_turns > 0 {
            self.state.unfair_turns -= 1;
            return self.victims_of(blocks_max, None);
        }
        let victims = self.victims_of(blocks_max, Some(greedy));
        if !victims.is_empty() {
            self.state.has_found_greedy = true;
            return victims;
        }
        if self.state.queue.is_empty() {
            self.recall_spared();
            // A whole pass over all leaves has found no blocks of greedy workers. So the next turns ignore the shares.
            if !std::mem::take(&mut self.state.has_found_greedy) {
                self.state.unfair_turns = self.state.queue.len() / SPARED_PER_TURN;
            }
        }
        self.victims_of(blocks_max, None)
    }

    /// Puts the runs that eviction has passed over back into the queue of runs to evict.
    fn recall_spared(&mut self) {
        let spared = std::mem::take(&mut self.state.spared);
        self.state.queue.extend(spared);
    }

    fn victims_of(&mut self, blocks_max: u64, greedy: Option<&SlotSet>) -> Vec<Victim> {
        let (mut victims, mut blocks, mut spared) = (Vec::new(), 0, 0);
        while victims.len() < VICTIMS_MAX && blocks < blocks_max.min(VICTIM_BLOCKS_MAX) && spared < SPARED_MAX
        {
            let Some((tick, victim)) = self.next_victim(blocks_max - blocks) else {
                break;
            };
            let is_greedy = |slot: &HolderSlot| greedy.is_none_or(|greedy| greedy.contains(*slot));
            if !victim.holders.iter().all(is_greedy) {
                self.state.numbers.set_queued(victim.run, true);
                self.state.spared.push(Reverse((tick, victim.run)));
                spared += 1;
                continue;
            }
            let len = self.run(victim.run).map_or(0, Run::len);
            blocks += u64::from(len.saturating_sub(victim.cutoff));
            victims.push(victim);
        }
        victims
    }

    /// Removes from the queue the leaf (end of a run) that was used longest ago. Returns its last use, as a tick of the
    /// recency clock, and at most `blocks_max` blocks of the leaf.
    fn next_victim(&mut self, blocks_max: u64) -> Option<(u32, Victim)> {
        loop {
            let Reverse((tick, id)) = self.state.queue.pop()?;
            self.state.numbers.set_queued(id, false);
            let attached_end = self.attached_end(id);
            let Some(run) = self.run(id) else { continue };
            let (len, used) = (run.len(), run.used.load(Ordering::Relaxed));
            if len <= attached_end {
                continue;
            }
            if used > tick {
                self.use_run(id, used);
                continue;
            }
            // The evicted blocks are the end of the leaf, or the whole leaf.
            let blocks = u16::try_from(blocks_max).unwrap_or(u16::MAX);
            let cutoff = len.saturating_sub(blocks).max(attached_end);
            let holding = self.entries(id).filter(|entry| entry.end() > cutoff);
            let holders = holding.map(RosterEntry::slot).collect();
            let victim = Victim {
                run: id,
                cutoff,
                holders,
            };
            return Some((tick, victim));
        }
    }
}
