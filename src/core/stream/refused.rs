//! Publishers whose batches are dropped, so that nothing is known of their holders' blocks. The reasons: there is no room for the holders,
//! their blocks are not of the namespace's size, or their messages cannot be read.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};

use parking_lot::RwLock;
use serde::Serialize;

use crate::wire::{HolderId, Rank, WorkerName};

/// Most workers that are listed at a time. If so many are listed, further workers may be refused without being
/// listed.
const WORKERS_MAX: usize = 4096;
/// Most ranks of a worker that are listed at a time. All other ranks count as one.
const RANKS_MAX: usize = 64;

/// Refused holders of one namespace.
#[derive(Debug, Default)]
pub(crate) struct RefusedHolders(RwLock<HashMap<WorkerName, RefusedWorker>>);

/// A worker whose batches are dropped, so that it has no holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RefusedPublisher {
    /// Name of the worker.
    pub worker: WorkerName,
    /// The word by which metrics count its last dropped batch.
    pub reason: &'static str,
    /// Time of the first dropped batch, in microseconds since the Unix epoch.
    pub since_us: u64,
}

/// Times of a dropped batch.
#[derive(Debug, Clone, Copy)]
pub struct RefusedAt {
    /// Time by a clock that does not run backwards, in microseconds.
    pub listened_us: u64,
    /// Time in microseconds since the Unix epoch.
    pub unix_us: u64,
}

/// The dropped batches of a worker: the time of the last one for each rank, in microseconds.
#[derive(Debug, Default)]
struct RefusedWorker {
    /// Time of the first dropped batch, in microseconds since the Unix epoch.
    since_us: u64,
    /// The reason why the last batch was dropped, in one word.
    reason: &'static str,
    ranks: BTreeMap<Rank, u64>,
    /// The time of the last batch from ranks beyond [`RANKS_MAX`].
    more: Option<u64>,
    /// The time of the last batch whose rank could not be read.
    unread: Option<u64>,
}

impl RefusedWorker {
    fn holders(&self) -> usize {
        self.ranks.len() + usize::from(self.more.is_some()) + usize::from(self.unread.is_some())
    }

    fn note(&mut self, rank: Option<Rank>, now_us: u64) {
        let Some(rank) = rank else {
            self.unread = Some(now_us);
            return;
        };
        let has_room = self.ranks.len() < RANKS_MAX;
        match self.ranks.get_mut(&rank) {
            Some(last_us) => *last_us = now_us,
            None if has_room => _ = self.ranks.insert(rank, now_us),
            None => self.more = Some(now_us),
        }
    }
}

impl RefusedHolders {
    /// Notes a dropped batch. `rank` is `None` if the batch cannot be read. Returns whether there are more refused
    /// holders now.
    pub(crate) fn note(
        &self,
        worker: &WorkerName,
        rank: Option<Rank>,
        reason: &'static str,
        at: RefusedAt,
    ) -> bool {
        let mut refused = self.0.write();
        let has_room = refused.len() < WORKERS_MAX;
        let known = match refused.entry(worker.clone()) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(_) if !has_room => return false,
            Entry::Vacant(place) => place.insert(RefusedWorker {
                since_us: at.unix_us,
                ..RefusedWorker::default()
            }),
        };
        let before = known.holders();
        known.note(rank, at.listened_us);
        known.reason = reason;
        known.holders() > before
    }

    /// Forgets a holder that has left. Returns whether the holder was listed.
    pub(crate) fn forget(&self, id: &HolderId) -> bool {
        self.change(&id.worker, |known| _ = known.ranks.remove(&id.rank))
    }

    /// Forgets a holder that is registered now. Also forgets its worker's unreadable batches, which the registered
    /// holder's own doubt now covers.
    pub(crate) fn forget_registered(&self, id: &HolderId) {
        self.change(&id.worker, |known| {
            known.ranks.remove(&id.rank);
            known.unread = None;
        });
    }

    /// Forgets holders for whose last batch's time `is_over` holds. Returns whether there were any.
    pub(crate) fn expire(&self, is_over: impl Fn(u64) -> bool) -> bool {
        if self.0.read().is_empty() {
            return false;
        }
        let mut refused = self.0.write();
        let mut has_changed = false;
        refused.retain(|_, known| {
            let before = known.holders();
            known.ranks.retain(|_, last_us| !is_over(*last_us));
            for last in [&mut known.more, &mut known.unread] {
                *last = last.filter(|last_us| !is_over(*last_us));
            }
            has_changed |= known.holders() < before;
            known.holders() > 0
        });
        if refused.is_empty() {
            *refused = HashMap::new();
        }
        has_changed
    }

    /// Number of refused holders of `workers`, or of all workers. At least 1 if some refused workers may not be
    /// listed.
    pub(crate) fn count(&self, workers: Option<&[WorkerName]>) -> usize {
        let refused = self.0.read();
        if refused.is_empty() {
            return 0;
        }
        let holders = match workers {
            None => refused.values().map(RefusedWorker::holders).sum(),
            Some(workers) => {
                let workers: HashSet<_> = workers.iter().collect();
                let known = workers.iter().filter_map(|worker| refused.get(*worker));
                known.map(RefusedWorker::holders).sum::<usize>()
            }
        };
        holders.max(refused.len() / WORKERS_MAX)
    }

    /// The first `max` refused workers by name.
    pub(crate) fn named(&self, max: usize) -> Vec<RefusedPublisher> {
        let refused = self.0.read();
        let known = refused.iter().map(|(name, known)| RefusedPublisher {
            worker: name.clone(),
            reason: known.reason,
            since_us: known.since_us,
        });
        let mut named: Vec<_> = known.collect();
        named.sort_unstable_by(|one, other| one.worker.cmp(&other.worker));
        named.truncate(max);
        named
    }

    fn change(&self, worker: &WorkerName, change: impl FnOnce(&mut RefusedWorker)) -> bool {
        if !self.0.read().contains_key(worker) {
            return false;
        }
        let mut refused = self.0.write();
        let Some(known) = refused.get_mut(worker) else {
            return false;
        };
        let before = known.holders();
        change(known);
        let now = known.holders();
        if now == 0 {
            refused.remove(worker);
        }
        now < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(number: usize) -> WorkerName {
        WorkerName::new(&format!("gpu-{number}")).unwrap()
    }

    fn id(rank: Rank) -> HolderId {
        HolderId {
            worker: worker(0),
            rank,
        }
    }

    fn at(now_us: u64) -> RefusedAt {
        RefusedAt {
            listened_us: now_us,
            unix_us: 1000 + now_us,
        }
    }

    #[test]
    fn many_ranks_of_one_worker_take_no_room_of_others() {
        let refused = RefusedHolders::default();
        for rank in 0..10_000 {
            refused.note(&worker(0), Some(rank), "undecodable", at(u64::from(rank)));
        }
        assert_eq!(refused.count(None), RANKS_MAX + 1);
        assert!(refused.note(&worker(1), Some(0), "undecodable", at(1)));
        let of = |workers: &[usize]| {
            let workers: Vec<_> = workers.iter().map(|number| worker(*number)).collect();
            refused.count(Some(&workers))
        };
        assert_eq!(of(&[2]), 0, "nothing of it was dropped");
        let first = RefusedPublisher {
            worker: worker(0),
            reason: "undecodable",
            since_us: 1000,
        };
        assert_eq!(refused.named(1), [first], "since its first batch");
        assert_eq!(refused.named(9).len(), 2);
        assert_eq!((of(&[1]), of(&[1, 1])), (1, 1));
        // Those that are not known by their numbers stay until they are silent.
        for rank in 0..10_000 {
            refused.forget_registered(&id(rank));
        }
        assert_eq!(of(&[0]), 1);
        assert!(refused.expire(|last_us| last_us < 10_000));
        assert_eq!(refused.count(None), 0);
    }

    #[test]
    fn as_many_workers_are_known_as_there_is_room_for() {
        let refused = RefusedHolders::default();
        for number in 0..WORKERS_MAX + 10 {
            assert_eq!(
                refused.note(&worker(number), Some(0), "undecodable", at(number as u64)),
                number < WORKERS_MAX
            );
        }
        assert_eq!(refused.count(None), WORKERS_MAX);
        let last = [worker(WORKERS_MAX + 9)];
        assert_eq!(refused.count(Some(&last)), 1, "it may be");
        // Whoever is heard again stays.
        assert!(!refused.note(&worker(3), Some(0), "undecodable", at(1_000_000)));
        assert!(refused.expire(|last_us| last_us < 2000));
        assert!(!refused.expire(|last_us| last_us < 2000));
        assert_eq!(refused.count(None), WORKERS_MAX - 1999);
        assert_eq!(refused.count(Some(&[worker(3), worker(1999)])), 1);
        assert_eq!(refused.count(Some(&last)), 0);
        assert!(refused.expire(|_| true));
        assert_eq!(refused.count(None), 0);
    }

    #[test]
    fn what_cannot_be_read_is_the_doubt_of_the_workers_next_holder() {
        let refused = RefusedHolders::default();
        assert!(refused.note(&worker(0), None, "undecodable", at(1)));
        assert!(!refused.note(&worker(0), None, "undecodable", at(2)));
        assert!(refused.note(&worker(0), Some(1), "undecodable", at(2)));
        assert_eq!(refused.count(None), 2);
        assert!(!refused.forget(&id(0)) && refused.forget(&id(1)) && !refused.forget(&id(1)));
        assert_eq!(refused.count(None), 1);
        refused.forget_registered(&id(0));
        assert_eq!(refused.count(None), 0);
    }
}
