//! The directory of holders: a table from slots to holders. A slot is a holder's number in sets of holders. Each
//! change makes a new version of the directory, and queries read a version without a lock.

use std::collections::HashSet;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::{ArcSwap, Guard};
use hashbrown::{DefaultHashBuilder, HashTable};
use parking_lot::Mutex;

use crate::index::settings::IndexLimits;
use crate::stream::{DoubtCounter, DoubtfulHolders, HolderStatus, RefusedHolders, StreamTrust};
use crate::wire::{HolderId, WorkerName};

use super::holder_set::{HolderSlot, SlotBits, SlotSet};

/// Record of a registered holder, shared by queries and the lane, the thread that applies the holder's events.
#[derive(Debug)]
pub struct HolderRecord {
    /// The holder's worker and rank.
    pub id: HolderId,
    /// Status of the holder: whether its state is certain, and how large it is.
    pub status: HolderStatus,
    slot: HolderSlot,
    /// Whether the holder has left the index. Never becomes false again.
    retired: AtomicBool,
}

impl HolderRecord {
    /// Returns the holder's slot: its number in sets of holders.
    pub(crate) fn slot(&self) -> HolderSlot {
        self.slot
    }

    /// Whether the holder has left the index.
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }
}

/// One version of the directory, a table from slots to holders.
#[derive(Debug, Clone, Default)]
pub(crate) struct Directory {
    holders: Vec<Option<Arc<HolderRecord>>>,
    /// Set of the slots that have a holder.
    pub(crate) taken: SlotSet,
    /// Table from worker names to the worker's slots. The table stores only slots and no names, so copying it for a
    /// new version is cheap.
    by_worker: HashTable<HolderSlot>,
    hasher: DefaultHashBuilder,
    /// Number of workers that have a slot.
    pub(crate) workers: usize,
    /// Number of holders that had left when this version of the directory was made. `departures_now` counts on, so it
    /// is larger if a holder has left since.
    departures: u64,
    departures_now: Arc<AtomicU64>,
}

impl Directory {
    /// Returns the holder in the slot with this number. `None` if the slot was assigned after this version of the
    /// directory was made.
    #[inline]
    pub(crate) fn holder(&self, slot: usize) -> Option<&Arc<HolderRecord>> {
        self.holders.get(slot)?.as_ref()
    }

    /// Number of slots that have a holder.
    pub(crate) fn len(&self) -> usize {
        self.by_worker.len()
    }

    /// Whether all assigned slots fit in one word of 64 slots.
    #[inline]
    pub(crate) fn is_small(&self) -> bool {
        self.holders.len() <= u64::BITS as usize
    }

    /// Returns all holders, in the order of their slots.
    pub(crate) fn holders(&self) -> impl Iterator<Item = &Arc<HolderRecord>> {
        self.holders.iter().flatten()
    }

    /// Returns the slots of a worker.
    fn ranks_of(&self, worker: &WorkerName) -> impl Iterator<Item = HolderSlot> {
        let slots = self.by_worker.iter_hash(self.hasher.hash_one(worker)).copied();
        slots.filter(|slot| {
            let holder = self.holder(slot.index());
            holder.is_some_and(|holder| holder.id.worker == *worker)
        })
    }

    /// Returns the slots of these workers.
    pub(crate) fn slots_of(&self, workers: &[WorkerName]) -> SlotSet {
        workers.iter().flat_map(|worker| self.ranks_of(worker)).collect()
    }

    /// Returns the holders of these workers, each once.
    pub(crate) fn holders_of(&self, workers: &[WorkerName]) -> impl Iterator<Item = &Arc<HolderRecord>> {
        let workers: HashSet<&WorkerName> = workers.iter().collect();
        let slots = workers.into_iter().flat_map(|worker| self.ranks_of(worker));
        slots.filter_map(|slot| self.holder(slot.index()))
    }

    /// Whether no holder has left since this version of the directory was made.
    pub(crate) fn is_complete(&self) -> bool {
        self.departures_now.load(Ordering::Acquire) == self.departures
    }
}

/// Reason why a holder cannot be registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// The holder is registered already and has a writer.
    #[error("holder {0} is registered already")]
    Registered(HolderId),
    /// The namespace has the maximum number of workers already.
    #[error("{workers} workers are registered; no more are allowed (limits.max_workers_per_namespace)")]
    TooManyWorkers {
        /// Maximum number of workers.
        workers: usize,
    },
    /// The worker has the maximum number of ranks already.
    #[error("worker {worker} has {ranks} ranks; no more are allowed (limits.max_ranks_per_worker)")]
    TooManyRanks {
        /// The worker of the holder.
        worker: WorkerName,
        /// Maximum number of ranks of one worker.
        ranks: usize,
    },
    /// All slots (numbers for holders) are taken.
    #[error("all {slots} holder slots are taken")]
    NoSlot {
        /// Number of slots.
        slots: usize,
    },
}

/// The current version of the directory, and the lock that a thread holds to change it.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    current: ArcSwap<Directory>,
    changing: Mutex<()>,
    doubts: DoubtCounter,
}

impl Slots {
    /// Returns the current version of the directory.
    pub(crate) fn load(&self) -> Guard<Arc<Directory>> {
        self.current.load()
    }

    /// Returns the number of holders whose states are not certain. `replacements` is the number of times so far that a
    /// holder's whole state was replaced.
    pub(crate) fn doubtful(&self, trust: &StreamTrust, replacements: u64) -> DoubtfulHolders {
        self.doubts.count(trust, replacements, |is_doubtful| {
            let holders = self.load();
            let doubtful = holders.holders().filter(|holder| is_doubtful(&holder.status));
            doubtful.count()
        })
    }

    /// Returns the holders that got no slot and whose batches were dropped.
    pub(crate) fn refused(&self) -> &RefusedHolders {
        &self.doubts.refused
    }

    /// Registers the holder `id` under a free slot, which is its number in sets of holders.
    pub(crate) fn register(
        &self,
        id: &HolderId,
        limits: &IndexLimits,
    ) -> Result<(HolderSlot, Arc<HolderRecord>), RegisterError> {
        let _changing = self.changing.lock();
        let mut next = Directory::clone(&self.current.load());
        let is_own = |slot: HolderSlot| next.holder(slot.index()).is_some_and(|holder| holder.id == *id);
        if next.ranks_of(&id.worker).any(is_own) {
            return Err(RegisterError::Registered(id.clone()));
        }
        let ranks = next.ranks_of(&id.worker).count();
        if ranks == 0 && next.workers >= limits.workers_max {
            let workers = limits.workers_max;
            return Err(RegisterError::TooManyWorkers { workers });
        }
        if ranks >= limits.ranks_per_worker_max {
            return Err(RegisterError::TooManyRanks {
                worker: id.worker.clone(),
                ranks: limits.ranks_per_worker_max,
            });
        }
        let free = next.holders.iter().position(Option::is_none);
        let free = free.unwrap_or(next.holders.len());
        let slot = HolderSlot::new(free).ok_or(RegisterError::NoSlot { slots: free })?;
        let record = Arc::new(HolderRecord {
            id: id.clone(),
            status: self.doubts.new_status(),
            slot,
            retired: AtomicBool::new(false),
        });
        next.holders.resize(next.holders.len().max(free + 1), None);
        next.holders[free] = Some(Arc::clone(&record));
        next.taken.insert(slot);
        next.workers += usize::from(ranks == 0);
        let hash = |slot: &HolderSlot| {
            let holder = next.holders[slot.index()].as_ref();
            holder.map_or(0, |holder| next.hasher.hash_one(&holder.id.worker))
        };
        next.by_worker.insert_unique(hash(&slot), slot, hash);
        self.current.store(Arc::new(next));
        self.refused().forget_registered(id);
        self.doubts.note_change();
        Ok((slot, record))
    }

    /// Frees the slot of a holder, which is its number in the index. The holder must have no blocks left in the runs.
    pub(crate) fn release(&self, slot: HolderSlot) {
        let _changing = self.changing.lock();
        let mut next = Directory::clone(&self.current.load());
        let Some(record) = next.holders.get_mut(slot.index()).and_then(Option::take) else {
            return;
        };
        next.taken.remove(slot);
        // The mark is set before the slot can be given to another holder. So a search that still uses the old version
        // of the directory leaves this holder out.
        record.retired.store(true, Ordering::Release);
        next.departures = next.departures_now.fetch_add(1, Ordering::AcqRel) + 1;
        let worker = &record.id.worker;
        let hash = next.hasher.hash_one(worker);
        if let Ok(own) = next.by_worker.find_entry(hash, |other| *other == slot) {
            own.remove();
        }
        let is_last = next.ranks_of(worker).next().is_none();
        next.workers -= usize::from(is_last);
        self.current.store(Arc::new(next));
        self.doubts.note_change();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_keeps_the_workers_that_it_had() {
        let name = |number: usize| WorkerName::new(&format!("gpu-{number}")).unwrap();
        let slot = |number: usize| HolderSlot::new(number).unwrap();
        let id = |number: usize| HolderId {
            worker: name(number / 2),
            rank: u32::try_from(number % 2).unwrap(),
        };
        let of = |version: &Directory, worker: usize| {
            let mut slots: Vec<_> = version.ranks_of(&name(worker)).collect();
            slots.sort_unstable();
            slots
        };
        let slots = Slots::default();
        let mut versions = vec![slots.current.load_full()];
        for number in 0..500 {
            slots.register(&id(number), &IndexLimits::default()).unwrap();
            versions.push(slots.current.load_full());
        }
        for (count, version) in versions.iter().enumerate() {
            assert_eq!(version.workers, count.div_ceil(2));
            for number in 0..250 {
                let expected: Vec<_> = (number * 2..count.min(number * 2 + 2)).map(slot).collect();
                assert_eq!(of(version, number), expected, "{number} of {count}");
            }
        }
        let released = |number: usize| {
            slots.release(slot(number));
            slots.release(slot(number));
            let last = slots.current.load();
            (last.workers, of(&last, 0))
        };
        assert_eq!(released(1), (250, vec![slot(0)]));
        assert_eq!(released(0), (249, Vec::new()));
        assert_eq!(of(&versions[499], 0), [slot(0), slot(1)]);
    }
}
