//! Assignment of workers to lanes. Each worker has a line of jobs at its lane.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;

use kvatlas_core::index::Namespace;
use kvatlas_core::wire::{NamespaceName, Rank, WorkerName};
use kvatlas_telemetry::EventMetrics;

use super::flow::{Flows, NamespaceFlow};

/// Worker, named by its namespace and its own name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct WorkerKey {
    pub(crate) namespace: NamespaceName,
    pub(crate) worker: WorkerName,
}

/// Key of a holder. The holders of a lane are ordered by their keys.
pub(crate) type HolderKey = (WorkerKey, Rank);

/// Returns the range of keys of all ranks of a worker.
pub(super) fn ranks_of(worker: &WorkerKey) -> RangeInclusive<HolderKey> {
    (worker.clone(), Rank::MIN)..=(worker.clone(), Rank::MAX)
}

/// Number of a lane (a thread that applies events), from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LaneId(pub(crate) usize);

/// Queue (*line*) of one worker's jobs at its lane.
#[derive(Debug)]
pub(crate) struct Line {
    /// Number that distinguishes this line from all other lines.
    pub(super) number: u64,
    flow: Arc<NamespaceFlow>,
    in_flight: AtomicUsize,
    /// Time at which the oldest message came that has not been applied yet, in microseconds. 0 if no message waits.
    waiting_since_us: AtomicU64,
    /// Virtual time of the worker: the time in microseconds that the lane has spent on it, raised after idle times, so
    /// that an idle worker saves up no credit. The lane next serves the worker with the smallest value.
    turn_us: AtomicU64,
    /// Time that the lane has spent on the worker, in microseconds.
    spent_us: AtomicU64,
}

impl Line {
    fn new(number: u64, flow: Arc<NamespaceFlow>) -> Self {
        Self {
            number,
            flow,
            in_flight: AtomicUsize::new(0),
            waiting_since_us: AtomicU64::new(0),
            turn_us: AtomicU64::new(0),
            spent_us: AtomicU64::new(0),
        }
    }

    /// Returns the time that the lane has spent on the worker, in microseconds.
    pub(crate) fn spent_us(&self) -> u64 {
        self.spent_us.load(Ordering::Relaxed)
    }

    pub(super) fn turn_us(&self) -> u64 {
        self.turn_us.load(Ordering::Relaxed)
    }

    pub(super) fn spend(&self, turn_us: u64, elapsed_us: u64) {
        self.turn_us.store(turn_us, Ordering::Relaxed);
        self.spent_us.fetch_add(elapsed_us, Ordering::Relaxed);
    }

    /// Notes that a message of the worker that came at `came_us` waits. Returns true if no other message of the worker
    /// was waiting.
    ///
    /// The caller must hold the lock on the queue of `lane`. The same holds for [`Self::go_on_waiting`] and
    /// [`Self::end_waiting`].
    pub(super) fn begin_waiting(&self, lane: usize, came_us: u64) -> bool {
        let is_first = self.waiting_since_us.load(Ordering::Relaxed) == 0;
        if is_first {
            self.wait_since(lane, came_us);
        }
        is_first
    }

    /// Notes that messages of the worker still wait. The oldest of these messages came at `came_us`.
    pub(super) fn go_on_waiting(&self, lane: usize, came_us: u64) {
        self.wait_since(lane, came_us);
    }

    /// Notes that no message of the worker waits any more.
    pub(super) fn end_waiting(&self, lane: usize) {
        self.wait_since(lane, 0);
    }

    fn wait_since(&self, lane: usize, since_us: u64) {
        let before = self.waiting_since_us.swap(since_us, Ordering::AcqRel);
        if before != since_us {
            self.flow.note_line(lane, self.number, before, since_us);
        }
    }
}

/// Guard of a job on its way to its lane. While the guard exists, the job's worker stays assigned to that lane.
#[derive(Debug)]
pub(crate) struct InFlight(Arc<Line>);

impl InFlight {
    /// Returns the line of the worker.
    pub(crate) fn line(&self) -> &Arc<Line> {
        &self.0
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Worker that sends messages, with its namespace and metrics. Exists as long as messages of the worker are on their
/// way to the lane.
pub(crate) struct Sender {
    pub(super) namespace: Arc<Namespace>,
    pub(super) metrics: Arc<EventMetrics>,
    pub(super) worker: WorkerKey,
    pub(super) in_flight: InFlight,
}

/// Lane and line of a worker.
#[derive(Debug)]
struct Assignment {
    lane: LaneId,
    line: Arc<Line>,
}

/// Assignments of all workers to lanes.
#[derive(Debug)]
pub(crate) struct Assignments {
    by_worker: DashMap<WorkerKey, Assignment>,
    workers_of_lane: Box<[AtomicUsize]>,
    lines_made: AtomicU64,
    flows: Arc<Flows>,
}

impl Assignments {
    pub(crate) fn new(lanes: usize, flows: Arc<Flows>) -> Self {
        Self {
            by_worker: DashMap::new(),
            workers_of_lane: (0..lanes).map(|_| AtomicUsize::new(0)).collect(),
            lines_made: AtomicU64::new(0),
            flows,
        }
    }

    /// Returns the lane of `worker`. A worker without a lane gets the lane with the fewest workers.
    pub(crate) fn assign(&self, worker: &WorkerKey) -> (LaneId, InFlight) {
        let entry = self.by_worker.entry(worker.clone());
        let assignment = match entry {
            Entry::Occupied(occupied) => occupied.into_ref(),
            Entry::Vacant(vacant) => {
                let lane = self.least_loaded();
                self.workers_of_lane[lane.0].fetch_add(1, Ordering::Relaxed);
                let number = self.lines_made.fetch_add(1, Ordering::Relaxed);
                let line = Arc::new(Line::new(number, self.flows.of(&worker.namespace)));
                vacant.insert(Assignment { lane, line })
            }
        };
        // Counted while the entry is locked, so that `release` cannot miss the job.
        assignment.line.in_flight.fetch_add(1, Ordering::AcqRel);
        (assignment.lane, InFlight(Arc::clone(&assignment.line)))
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

    /// Frees the lane of a worker that has no holder left. A worker with jobs on their way keeps its lane, and the last
    /// of these jobs calls this function again.
    pub(crate) fn release(&self, worker: &WorkerKey) {
        let is_idle =
            |_: &WorkerKey, assignment: &Assignment| assignment.line.in_flight.load(Ordering::Acquire) == 0;
        if let Some((_, assignment)) = self.by_worker.remove_if(worker, is_idle) {
            self.workers_of_lane[assignment.lane.0].fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns the queue of a worker's jobs, or `None` if the worker has no lane.
    pub(crate) fn line_of(&self, worker: &WorkerKey) -> Option<Arc<Line>> {
        let found = self.by_worker.get(worker)?;
        Some(Arc::clone(&found.line))
    }

    /// Returns the number of workers that have a lane.
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

    fn two_lanes() -> Assignments {
        Assignments::new(2, Arc::new(Flows::new(2)))
    }

    #[test]
    fn a_worker_keeps_its_lane_and_workers_spread() {
        let assignments = two_lanes();
        let (first, _one) = assignments.assign(&worker("a"));
        let (second, _two) = assignments.assign(&worker("b"));
        assert_ne!(first, second);
        assert_eq!(assignments.assign(&worker("a")).0, first);
    }

    #[test]
    fn an_assignment_is_freed_only_when_nothing_is_on_its_way() {
        let assignments = two_lanes();
        let (lane, in_flight) = assignments.assign(&worker("a"));
        assignments.release(&worker("a"));
        assert_eq!(assignments.assign(&worker("a")).0, lane);
        assert_eq!(assignments.len(), 1);
        drop(in_flight);
        assignments.release(&worker("a"));
        assert_eq!(assignments.len(), 0);
    }
}
