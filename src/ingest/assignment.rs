//! Which lane applies a worker's events.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;

use crate::wire::{NamespaceName, WorkerName};

/// A worker within a namespace.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WorkerKey {
    pub(crate) namespace: NamespaceName,
    pub(crate) worker: WorkerName,
}

/// A lane's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LaneId(pub(crate) usize);

/// A worker's lane, and the messages on their way to it.
#[derive(Debug)]
struct Assignment {
    lane: LaneId,
    in_flight: Arc<AtomicUsize>,
}

/// A message on its way to its lane; while it exists, its worker's assignment cannot change.
#[derive(Debug)]
pub(crate) struct InFlight(Arc<AtomicUsize>);

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The assignments of all workers to lanes.
#[derive(Debug)]
pub(crate) struct Assignments {
    by_worker: DashMap<WorkerKey, Assignment>,
    workers_of_lane: Box<[AtomicUsize]>,
}

impl Assignments {
    pub(crate) fn new(lanes: usize) -> Self {
        Self {
            by_worker: DashMap::new(),
            workers_of_lane: (0..lanes).map(|_| AtomicUsize::new(0)).collect(),
        }
    }

    /// The lane of `worker`: the one it has, or the one with the fewest workers.
    pub(crate) fn assign(&self, worker: &WorkerKey) -> (LaneId, InFlight) {
        let entry = self.by_worker.entry(worker.clone());
        let assignment = match entry {
            Entry::Occupied(occupied) => occupied.into_ref(),
            Entry::Vacant(vacant) => {
                let lane = self.least_loaded();
                self.workers_of_lane[lane.0].fetch_add(1, Ordering::Relaxed);
                vacant.insert(Assignment {
                    lane,
                    in_flight: Arc::default(),
                })
            }
        };
        // Under the entry's lock, so that `release` cannot miss it.
        assignment.in_flight.fetch_add(1, Ordering::AcqRel);
        (assignment.lane, InFlight(Arc::clone(&assignment.in_flight)))
    }

    fn least_loaded(&self) -> LaneId {
        let loads = self
            .workers_of_lane
            .iter()
            .map(|workers| workers.load(Ordering::Relaxed));
        LaneId(
            loads
                .enumerate()
                .min_by_key(|(_, workers)| *workers)
                .map_or(0, |(lane, _)| lane),
        )
    }

    /// Forgets the lane of a worker that has no holder left, unless messages are on their way to it: then a later call does.
    pub(crate) fn release(&self, worker: &WorkerKey) {
        let is_idle =
            |_: &WorkerKey, assignment: &Assignment| assignment.in_flight.load(Ordering::Acquire) == 0;
        if let Some((_, assignment)) = self.by_worker.remove_if(worker, is_idle) {
            self.workers_of_lane[assignment.lane.0].fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// How many workers have a lane.
    pub(crate) fn len(&self) -> usize {
        self.by_worker.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(name: &str) -> WorkerKey {
        WorkerKey {
            namespace: NamespaceName::new("n").unwrap(),
            worker: WorkerName::new(name).unwrap(),
        }
    }

    #[test]
    fn a_worker_keeps_its_lane_and_workers_spread() {
        let assignments = Assignments::new(2);
        let (first, _one) = assignments.assign(&worker("a"));
        let (second, _two) = assignments.assign(&worker("b"));
        assert_ne!(first, second);
        assert_eq!(assignments.assign(&worker("a")).0, first);
    }

    #[test]
    fn an_assignment_is_freed_only_when_nothing_is_on_its_way() {
        let assignments = Assignments::new(2);
        let (lane, in_flight) = assignments.assign(&worker("a"));
        assignments.release(&worker("a"));
        assert_eq!(assignments.assign(&worker("a")).0, lane);
        assert_eq!(assignments.len(), 1);
        drop(in_flight);
        assignments.release(&worker("a"));
        assert_eq!(assignments.len(), 0);
    }
}
