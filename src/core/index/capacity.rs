//! Forgetting blocks where there are too many: leaves first, least recently used first, and a parent only after its last child
//! (the lineage-aware eviction of KVBM, on runs instead of single blocks).
//!
//! Whoever evicts takes the blocks from one holder after the other, each under the holder's own lock: so the holder's state and what
//! queries see change in one step.

use std::collections::BTreeSet;
use std::sync::Weak;

use parking_lot::MutexGuard;

use crate::wire::DegradedReason;

use super::directory::HolderSlot;
use super::hook::point;
use super::runs::Victim;
use super::shared::{Shared, TotalUsage};

/// At a bound, a little more of the capacity is forgotten than must be, so that not every event has to.
const SLACK: u64 = 64;
/// But no more than this: whoever stores waits for it.
const SLACK_BLOCKS_MAX: u64 = 1024;

/// Others that make room have a turn after so many blocks.
const TURN_BLOCKS: u64 = 256;
/// For each block that it stores, an event forgets so many at most: no block takes as much more than others do.
const SHARE: u64 = 16;

impl Shared {
    /// Forgets blocks where this index, or all together, have too many, after an event that stored so many. To be called between turns.
    ///
    /// What others have stored is for them to make room for: whoever stores little does not wait for what someone else stores.
    pub(super) fn make_room(&self, stored: u64) {
        if self.runs.is_bounded {
            let share = stored.saturating_mul(SHARE) + TURN_BLOCKS;
            self.evict(|| self.runs.usage().excess_blocks(), share);
            self.total.make_room(share);
        }
    }

    /// Forgets blocks as long as there is an `excess`, and a few more, `share` at most. Whose they are is degraded first, so that no
    /// shortened match counts as exact.
    fn evict(&self, excess: impl Fn() -> u64, share: u64) {
        if excess() == 0 {
            return;
        }
        let mut evicting = self.evicting.lock();
        let slack = (self.runs.blocks_max() / SLACK).min(SLACK_BLOCKS_MAX);
        // Whoever was here before may have made room by now.
        let (mut gone, mut turn) = (0, 0);
        let mut wanted = match excess() {
            0 => return,
            now => now + slack,
        };
        while gone < wanted.min(share) {
            if gone >= turn + TURN_BLOCKS {
                turn = gone;
                MutexGuard::bump(&mut evicting);
                // And so may others have done.
                wanted = match excess() {
                    0 => wanted.min(gone + slack),
                    now => gone + now + slack,
                };
            }
            let mut runs = self.runs.write();
            let (before, victims) = (self.runs.usage().blocks.load(), runs.next_victims(wanted - gone));
            drop(runs);
            if victims.is_empty() {
                return;
            }
            self.take(&victims);
            let mut runs = self.runs.write();
            for victim in &victims {
                runs.requeue(victim.run);
            }
            // Others may have stored meanwhile: at least the victims' own blocks count.
            let fewer = before.saturating_sub(self.runs.usage().blocks.load());
            drop(runs);
            gone += fewer.max(victims.len() as u64);
            self.runs.count_evicted(fewer);
        }
    }

    /// Takes blocks from all who have them, from each in one go: whoever is in an event is waited for once.
    fn take(&self, victims: &[Victim]) {
        let slots: BTreeSet<&HolderSlot> = victims.iter().flat_map(|victim| &victim.holders).collect();
        for slot in slots {
            let holder = self.holders.read().get(slot).cloned();
            let Some(holder) = holder else { continue };
            point();
            let mut state = holder.state.lock();
            // It may have removed them, or be another one by now.
            if !state.has_any(victims) {
                continue;
            }
            // Before the blocks go; and under the lock, since a holder that has been cleared meanwhile is certain again.
            holder.record.status.degrade(DegradedReason::Capacity);
            let gone = state.evict(victims, &mut self.runs.write());
            holder.record.status.note_evicted(gone as u64);
        }
    }
}

impl TotalUsage {
    /// Has the largest index forget blocks where all together have too many. No index's turn may be held.
    fn make_room(&self, share: u64) {
        if self.usage.excess_blocks() == 0 {
            return;
        }
        let members: Vec<_> = self.members.lock().iter().filter_map(Weak::upgrade).collect();
        if let Some(largest) = members
            .iter()
            .max_by_key(|member| member.runs.usage().bytes.load())
        {
            largest.evict(|| self.usage.excess_blocks(), share);
        }
    }
}
