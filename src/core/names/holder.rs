//! One holder, shared by the lane that applies its events and by threads that evict blocks.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::index::directory::{HolderRecord, HolderSlot};
use crate::index::runs::{RunStore, Victim};
use crate::index::share::{Evictable, Share};
use crate::wire::{DegradedReason, Tier};

use super::applied::{Applied, RejectReason};
use super::state::HolderState;

/// Holder that is shared by its lane (the thread that applies its events), by queries, and by threads that evict
/// blocks.
#[derive(Debug)]
pub(super) struct SharedHolder {
    pub(super) record: Arc<HolderRecord>,
    /// The holder's blocks. They change only under this lock. Queries see each step of changes wholly or not at all.
    pub(super) state: Mutex<HolderState>,
}

/// Number of removed blocks after which a clear of a holder releases the locks for a moment. A clear also does so after
/// changes in [`CLEARED_RUNS`] runs.
const CLEARED_BLOCKS: usize = 4096;
const CLEARED_RUNS: usize = 256;

impl SharedHolder {
    pub(super) fn new(record: Arc<HolderRecord>, slot: HolderSlot) -> Self {
        Self {
            record,
            state: Mutex::new(HolderState::of(Share::new(slot))),
        }
    }

    /// Drops the stored events whose parent did not arrive in time.
    pub(super) fn expire_parked(&self, now_us: u64, runs: &RunStore) -> Applied {
        let mut applied = Applied::default();
        let mut state = self.state.lock();
        let waiting = state.parking.len();
        let dropped = state.parking.expire(now_us);
        if state.parking.len() < waiting {
            applied.reject(RejectReason::ParkingExpired, dropped);
            state.parking.settle();
            state.account(&mut runs.write());
            self.publish_sizes(&state);
        }
        applied
    }

    /// Removes all blocks of the holder, and forgets the events that wait for a parent.
    pub(super) fn clear(&self, runs: &RunStore) {
        let mut state = self.state.lock();
        let mut runs = runs.write();
        let mut blocks = 0;
        for group in state.share.groups() {
            for run in state.share.runs_of(group) {
                blocks += usize::from(state.share.drop_run(run));
                if blocks >= CLEARED_BLOCKS || state.share.touched() >= CLEARED_RUNS {
                    blocks = 0;
                    state.publish(&mut runs);
                    runs.pause_for(|| MutexGuard::bump(&mut state));
                }
            }
        }
        state.publish(&mut runs);
        let fresh = state.emptied();
        let rest = std::mem::replace(&mut *state, fresh);
        state.account(&mut runs);
        drop(runs);
        self.publish_sizes(&state);
        drop(state);
        // The rest can be large. It is freed without locks, so that nobody waits for it.
        drop(rest);
    }

    /// Returns the holder's tier and a change counter, if the holder is regular. A holder is regular if it has each
    /// block together with all blocks before it, all in one tier, each under its sequence hash. The counter does not
    /// count blocks that are added or removed at the ends of the holder's chains. `None` if the holder is not regular,
    /// or has no blocks.
    pub(super) fn regular(&self, runs: &RunStore) -> Option<(Tier, u64)> {
        let (state, runs) = (self.state.lock(), runs.write());
        let is_placed = state.orphans.len() == 0;
        is_placed.then(|| state.share.regular(&runs)).flatten()
    }

    pub(super) fn publish_sizes(&self, state: &HolderState) {
        let parked = u32::try_from(state.parking.len()).unwrap_or(u32::MAX);
        self.record.status.blocks.store(state.blocks() as u64);
        self.record.status.parked_events.store(parked);
    }
}

impl Evictable for SharedHolder {
    fn evict(&self, victims: &[Victim], runs: &RunStore) {
        let mut state = self.state.lock();
        // The holder may have removed the blocks, or another holder may have its slot by now.
        if !state.share.has_any(victims) {
            return;
        }
        // The doubt is recorded before the blocks are removed, and under the holder's lock. So a holder that has been
        // cleared since the eviction began stays certain.
        self.record.status.degrade(DegradedReason::Capacity);
        state.is_cut = true;
        let before = state.share.blocks();
        for victim in victims {
            state.erase(victim.run, victim.cutoff, u16::MAX, |_| true);
        }
        state.publish(&mut runs.write());
        let gone = before - state.share.blocks();
        self.record.status.note_evicted(gone as u64);
    }
}
