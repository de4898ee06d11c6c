//! Eviction: forgetting blocks when there are too many. The least recently used leaves go first, and a parent goes
//! only after its last child. This is the lineage-aware eviction of KVBM, on runs instead of single blocks.
//!
//! # Shares
//!
//! A worker's share is a total divided by the number of workers that hold blocks. All ranks of a worker count as one.
//! The total is the capacity, or the number of all holders' blocks if that is larger. In this number, a block that
//! several holders have counts once for each of them.
//!
//! A worker with much more than its share is *greedy*. Blocks that only greedy workers hold are evicted first. So a
//! worker that stores without end loses its own blocks, even if other workers' blocks were used longer ago.
//!
//! # How blocks are taken
//!
//! The evicting thread takes the blocks from one holder after another, each under that holder's own lock. So a
//! holder's state and the holder's entries, which queries read, change in one step.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::sync::Weak;

use parking_lot::MutexGuard;

use crate::wire::WorkerName;

use super::directory::{HolderSlot, SlotSet};
use super::hook::point;
use super::runs::Victim;
use super::shared::{IndexShared, TotalUsage};

/// Eviction frees more than necessary: the capacity divided by this number, or [`SLACK_BLOCKS_MAX`] if that is less. So
/// not every event at the bound has to evict.
const SLACK: u64 = 64;
/// Maximum number of blocks that eviction frees beyond those that it has to free. The bound is small because a storing
/// event waits for the eviction.
const SLACK_BLOCKS_MAX: u64 = 1024;

/// Number of evicted blocks after which the evicting thread lets other threads evict.
const TURN_BLOCKS: u64 = 256;
/// Maximum number of blocks that an event evicts for each block that it stores. Evicting that many always frees enough
/// memory, because no block takes 16 times as much memory as another.
const SHARE: u64 = 16;

/// Holders of workers that have much more than their share of the capacity.
#[derive(Debug)]
pub(super) struct Greedy {
    slots: SlotSet,
    /// Number of blocks in a worker's share of the capacity.
    share: u64,
}

impl IndexShared {
    /// Evicts blocks if this index has too many, or if all indexes together have too many. `stored` is the number of
    /// blocks that the last event stored. The caller must not hold the lock of the runs.
    ///
    /// The maximum number of evicted blocks is in proportion to `stored`. So a writer that stores few blocks does not
    /// wait for the eviction that another writer's many blocks require.
    pub(crate) fn make_room(&self, stored: u64) {
        if self.runs.is_bounded {
            let share = stored.saturating_mul(SHARE) + TURN_BLOCKS;
            self.evict(|| self.runs.usage().excess_blocks(), share);
            self.total.make_room(share);
        }
    }

    /// Evicts as many blocks as `excess` returns, and a few more. Stops after about `share` blocks, even if that is
    /// less. First marks the holders of these blocks as degraded, so that no shortened match counts as exact. Returns
    /// whether there was a block to evict, or no need to.
    fn evict(&self, excess: impl Fn() -> u64, share: u64) -> bool {
        if excess() == 0 {
            return true;
        }
        let mut evicting = self.evicting.lock();
        let greedy = self.greedy();
        let slack = (self.runs.blocks_max() / SLACK).min(SLACK_BLOCKS_MAX);
        // Another thread may have made room while this one waited for the lock.
        let (mut gone, mut turn) = (0, 0);
        let mut wanted = match excess() {
            0 => return true,
            now => now + slack,
        };
        while gone < wanted.min(share) {
            if gone >= turn + TURN_BLOCKS {
                turn = gone;
                MutexGuard::bump(&mut evicting);
                // Other threads may have made room meanwhile.
                wanted = match excess() {
                    0 => wanted.min(gone + slack),
                    now => gone + now + slack,
                };
            }
            let greedy = greedy.as_ref().map(|greedy| &greedy.slots);
            let mut runs = self.runs.write();
            let before = self.runs.usage().blocks.load();
            let victims = runs.next_victims(wanted - gone, greedy);
            drop(runs);
            if victims.is_empty() {
                break;
            }
            self.take(&victims);
            let mut runs = self.runs.write();
            for victim in &victims {
                runs.requeue(victim.run);
            }
            // Other writers may have stored blocks meanwhile, so the difference can be too small. At least one block is
            // gone for each victim.
            let fewer = before.saturating_sub(self.runs.usage().blocks.load());
            drop(runs);
            gone += fewer.max(victims.len() as u64);
            self.runs.count_evicted(fewer);
        }
        gone > 0
    }

    /// Returns the holders of workers that have more than five fourths of their share of the capacity. `None` if there
    /// is no such worker, if there is only one worker, or if there is no bound.
    pub(super) fn greedy(&self) -> Option<Greedy> {
        let directory = self.slots.load();
        if directory.workers < 2 || !self.runs.is_bounded {
            return None;
        }
        let (mut by_worker, mut held) = (HashMap::<&WorkerName, u64>::new(), 0);
        for holder in directory.holders() {
            let blocks = holder.status.blocks.load();
            held += blocks;
            if blocks > 0 {
                *by_worker.entry(&holder.id.worker).or_default() += blocks;
            }
        }
        let share = self.runs.blocks_max().max(held) / (by_worker.len() as u64).max(1);
        let is_greedy = |blocks: &u64| *blocks > share.saturating_add(share / 4);
        if !by_worker.values().any(is_greedy) {
            return None;
        }
        let of_greedy = directory
            .holders()
            .filter(|holder| by_worker.get(&holder.id.worker).is_some_and(is_greedy));
        Some(Greedy {
            slots: of_greedy.map(|holder| holder.slot()).collect(),
            share,
        })
    }

    /// Whether a worker has less than half of its share of the capacity, while other workers have much more than
    /// theirs. Such a worker may get evicted blocks back even if there is no room.
    pub(super) fn is_short_of_share(&self, worker: &WorkerName) -> bool {
        self.greedy().is_some_and(|greedy| {
            let directory = self.slots.load();
            let own = directory.holders_of(std::slice::from_ref(worker));
            let blocks: u64 = own.map(|holder| holder.status.blocks.load()).sum();
            blocks < greedy.share / 2
        })
    }

    /// Removes the blocks in `victims` from every holder that has any of them. If a holder is applying an event, the
    /// call waits for the holder's lock. It locks each holder only once for all blocks.
    fn take(&self, victims: &[Victim]) {
        let slots: BTreeSet<&HolderSlot> = victims.iter().flat_map(|victim| &victim.holders).collect();
        for slot in slots {
            let holder = self.holders.read().get(slot).cloned();
            let Some(holder) = holder else { continue };
            point();
            holder.evict(victims, &self.runs);
        }
    }
}

impl TotalUsage {
    /// Evicts blocks of the largest index that has any to evict, if all indexes together have too many. The caller must
    /// not hold the lock of any index's runs.
    fn make_room(&self, share: u64) {
        if self.usage.excess_blocks() == 0 {
            return;
        }
        let mut members: Vec<_> = self.members.lock().iter().filter_map(Weak::upgrade).collect();
        members.sort_by_cached_key(|member| Reverse(member.runs.usage().bytes.load()));
        // Blocks whose parent is unknown count as well, and cannot be evicted.
        let _ = members
            .iter()
            .any(|member| member.evict(|| self.usage.excess_blocks(), share));
    }
}
