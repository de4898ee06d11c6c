//! The directory of holders: slot → holder, in versions that queries read without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;

use crate::wire::{HolderId, WorkerName};

use super::holder_set::{HolderSlot, SlotBits, SlotSet};
use super::status::HolderStatus;
use super::worker_slots::WorkerSlots;

/// A registered holder, as queries and the lane share it.
#[derive(Debug)]
pub struct HolderRecord {
    /// Who it is.
    pub id: HolderId,
    /// Whether its state is certain, and how large it is.
    pub status: HolderStatus,
    /// Becomes true for good when the holder has left.
    retired: AtomicBool,
}

impl HolderRecord {
    /// Whether the holder has left the index.
    pub fn is_retired(&self) -> bool {
        self.retired.load(Ordering::Acquire)
    }
}

/// One version of the directory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Directory {
    holders: Vec<Option<Arc<HolderRecord>>>,
    /// The slots that have a holder.
    taken: SlotSet,
    by_worker: WorkerSlots,
    /// How many holders had left when this version was made, and how many have until now.
    departures: u64,
    departures_now: Arc<AtomicU64>,
}

impl Directory {
    /// The holder in the slot of this number. A slot that was given out after this version was made has none.
    #[inline]
    pub(crate) fn holder(&self, slot: usize) -> Option<&Arc<HolderRecord>> {
        self.holders.get(slot)?.as_ref()
    }

    /// Whether all slots fit into one word.
    #[inline]
    pub(crate) fn is_small(&self) -> bool {
        self.holders.len() <= u64::BITS as usize
    }

    /// The slots that have a holder in this version.
    pub(crate) fn taken(&self) -> &SlotSet {
        &self.taken
    }

    /// All holders, by slot.
    pub(crate) fn holders(&self) -> impl Iterator<Item = &Arc<HolderRecord>> {
        self.holders.iter().flatten()
    }

    /// The slots of these workers.
    pub(crate) fn slots_of(&self, workers: &[WorkerName]) -> SlotSet {
        workers
            .iter()
            .flat_map(|worker| self.by_worker.of(worker))
            .copied()
            .collect()
    }

    /// Whether nobody has left since this version was made.
    pub(crate) fn is_complete(&self) -> bool {
        self.departures_now.load(Ordering::Acquire) == self.departures
    }

    pub(crate) fn workers(&self) -> usize {
        self.by_worker.workers()
    }
}

/// Why a holder cannot be registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// The holder is registered already and has a writer.
    #[error("holder {0} is registered already")]
    Registered(HolderId),
    /// The namespace has as many workers as it may have.
    #[error("{workers} workers are registered; no more are allowed (limits.max_workers_per_namespace)")]
    TooManyWorkers {
        /// The limit.
        workers: usize,
    },
    /// The worker has as many ranks as it may have.
    #[error("worker {worker} has {ranks} ranks; no more are allowed (limits.max_ranks_per_worker)")]
    TooManyRanks {
        /// The worker.
        worker: WorkerName,
        /// The limit.
        ranks: usize,
    },
    /// All slots are taken.
    #[error("all {slots} holder slots are taken")]
    NoSlot {
        /// How many there are.
        slots: usize,
    },
}

/// The current directory, and the lock under which it changes.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    current: ArcSwap<Directory>,
    changing: Mutex<()>,
}

impl Slots {
    /// The current version.
    pub(crate) fn load(&self) -> Guard<Arc<Directory>> {
        self.current.load()
    }

    /// Gives `id` a slot.
    pub(crate) fn register(
        &self,
        id: &HolderId,
        workers_max: usize,
        ranks_max: usize,
    ) -> Result<(HolderSlot, Arc<HolderRecord>), RegisterError> {
        let _changing = self.changing.lock();
        let mut next = Directory::clone(&self.current.load());
        let ranks = next.by_worker.of(&id.worker);
        let is_own = |slot: &HolderSlot| next.holder(slot.index()).is_some_and(|holder| holder.id == *id);
        if ranks.iter().any(is_own) {
            return Err(RegisterError::Registered(id.clone()));
        }
        if ranks.is_empty() && next.workers() >= workers_max {
            return Err(RegisterError::TooManyWorkers { workers: workers_max });
        }
        if ranks.len() >= ranks_max {
            return Err(RegisterError::TooManyRanks {
                worker: id.worker.clone(),
                ranks: ranks_max,
            });
        }
        let free = next.holders.iter().position(Option::is_none);
        let free = free.unwrap_or(next.holders.len());
        let slots = HolderSlot::COUNT_MAX;
        let slot = HolderSlot::new(free).ok_or(RegisterError::NoSlot { slots })?;
        let record = Arc::new(HolderRecord {
            id: id.clone(),
            status: HolderStatus::default(),
            retired: AtomicBool::new(false),
        });
        next.holders.resize(next.holders.len().max(free + 1), None);
        next.holders[free] = Some(Arc::clone(&record));
        next.taken.insert(slot);
        next.by_worker.add(&id.worker, slot);
        self.current.store(Arc::new(next));
        Ok((slot, record))
    }

    /// Frees the slot of a holder that has no blocks left in the table.
    pub(crate) fn release(&self, slot: HolderSlot) {
        let _changing = self.changing.lock();
        let mut next = Directory::clone(&self.current.load());
        let Some(record) = next.holders.get_mut(slot.index()).and_then(Option::take) else {
            return;
        };
        next.taken.remove(slot);
        // Before the slot can be given out again: a search that still has the old version drops the holder.
        record.retired.store(true, Ordering::Release);
        next.departures = next.departures_now.fetch_add(1, Ordering::AcqRel) + 1;
        next.by_worker.remove(&record.id.worker, slot);
        self.current.store(Arc::new(next));
    }
}
