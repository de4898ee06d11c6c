//! Forgetting blocks where there are too many: leaves first, least recently used first, and a parent only after its last child
//! (the lineage-aware eviction of KVBM, on runs instead of single blocks).
//!
//! Whoever evicts takes the blocks from one holder after the other, each under the holder's own lock: so the holder's state and what
//! queries see change in one step.

use crate::wire::DegradedReason;

use super::directory::HolderSlot;
use super::runs::Victim;
use super::shared::{Shared, TotalUsage};

/// At a bound, a little more of the capacity is forgotten than must be, so that not every event has to.
const SLACK: u64 = 64;
/// But no more than this: whoever stores waits for it.
const SLACK_BLOCKS_MAX: u64 = 1024;

impl Shared {
    /// Forgets blocks where this index, or all together, have too many. To be called between turns.
    pub(super) fn make_room(&self) {
        if self.runs.is_bounded() {
            self.evict(|| self.runs.excess_blocks());
            self.total.make_room();
        }
    }

    /// Forgets blocks as long as there is an `excess`, and a few more. Whose they are is degraded first, so that no shortened match
    /// counts as exact.
    fn evict(&self, excess: impl Fn() -> u64) {
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

impl TotalUsage {
    /// Has the largest index forget blocks where all together have too many. No index's turn may be held.
    fn make_room(&self) {
        if self.usage().excess_blocks() == 0 {
            return;
        }
        let members = self.members();
        if let Some(largest) = members.iter().max_by_key(|member| member.runs.bytes()) {
            largest.evict(|| self.usage().excess_blocks());
        }
    }
}
