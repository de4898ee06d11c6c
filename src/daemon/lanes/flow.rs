//! The *flow* of each namespace. A query reads from it how long received messages have waited to be applied, and
//! which batches are half applied.
//!
//! A reader takes a lock only if a message has waited for too long, or if a step ([`Steps`]) was open during the
//! search.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use dashmap::DashMap;
use parking_lot::Mutex;

use kvatlas_core::wire::{HolderId, NamespaceName};

/// Maximum number of remembered *steps*, that is, batches that queries must see whole. If more steps end during a
/// search, any holder's batch counts as possibly half applied in that search.
const STEPS_REMEMBERED: usize = 256;

/// Flows of all namespaces. A flow tells which messages wait, and which batches are half applied.
#[derive(Debug)]
pub(crate) struct Flows {
    lanes: usize,
    by_namespace: DashMap<NamespaceName, Arc<NamespaceFlow>>,
}

impl Flows {
    pub(super) fn new(lanes: usize) -> Self {
        Self {
            lanes,
            by_namespace: DashMap::new(),
        }
    }

    /// Returns the flow of a namespace, which tells which messages wait and which batches are half applied. Makes the
    /// flow if it does not exist.
    pub(super) fn of(&self, namespace: &NamespaceName) -> Arc<NamespaceFlow> {
        if let Some(found) = self.get(namespace) {
            return found;
        }
        let made = self
            .by_namespace
            .entry(namespace.clone())
            .or_insert_with(|| Arc::new(NamespaceFlow::new(self.lanes)));
        Arc::clone(&made)
    }

    /// Returns the flow of a namespace, which tells which messages wait and which batches are half applied. `None` if
    /// there is none.
    pub(crate) fn get(&self, namespace: &NamespaceName) -> Option<Arc<NamespaceFlow>> {
        let found = self.by_namespace.get(namespace)?;
        Some(Arc::clone(&found))
    }

    /// Forgets each flow to which nobody else has a reference.
    pub(super) fn prune(&self) {
        self.by_namespace.retain(|_, flow| Arc::strong_count(flow) > 1);
    }
}

/// Flow of one namespace: which messages wait, and which batches are half applied.
#[derive(Debug)]
pub(crate) struct NamespaceFlow {
    lanes: Box<[LaneWaits]>,
    pub(super) steps: Steps,
}

/// Lines (workers' queues) of a namespace in one lane that have messages waiting.
#[derive(Debug, Default)]
struct LaneWaits {
    /// Time at which the oldest waiting message came, in microseconds; 0 if none waits.
    oldest_us: AtomicU64,
    /// Waiting lines, each as a pair: the time since which the line has waited, and the line's number. The lane's queue
    /// is locked while this set changes.
    lines: Mutex<BTreeSet<(u64, u64)>>,
}

impl NamespaceFlow {
    fn new(lanes: usize) -> Self {
        Self {
            lanes: (0..lanes).map(|_| LaneWaits::default()).collect(),
            steps: Steps::default(),
        }
    }

    /// Notes a new oldest message in the queue `line` of a worker: the message that came at `since_us` replaces the
    /// one that came at `before_us`. In both values, 0 means that no message waits.
    pub(super) fn note_line(&self, lane: usize, line: u64, before_us: u64, since_us: u64) {
        let Some(waits) = self.lanes.get(lane) else {
            return;
        };
        let mut lines = waits.lines.lock();
        if before_us > 0 {
            lines.remove(&(before_us, line));
        }
        if since_us > 0 {
            lines.insert((since_us, line));
        }
        let oldest = lines.first().map_or(0, |(since, _)| *since);
        waits.oldest_us.store(oldest, Ordering::Release);
    }

    /// Returns the numbers of the workers' queues (lines) whose oldest message came before `before_us`, in ascending
    /// order.
    pub(super) fn lines_since_before(&self, before_us: u64) -> Vec<u64> {
        let mut numbers = Vec::new();
        for waits in &self.lanes {
            let lines = waits.lines.lock();
            numbers.extend(lines.range(..(before_us, 0)).map(|(_, number)| *number));
        }
        numbers.sort_unstable();
        numbers
    }

    /// Returns the time at which the oldest waiting message came. A message waits until it has been applied. `None`
    /// if no message waits.
    pub(super) fn oldest_us(&self) -> Option<u64> {
        let lanes = self
            .lanes
            .iter()
            .map(|waits| waits.oldest_us.load(Ordering::Acquire));
        lanes.filter(|oldest| *oldest > 0).min()
    }
}

/// Steps of a namespace. A *step* is a batch that must be seen whole or not at all. A search in the middle of a step
/// sees a state that the holder never had.
///
/// `changes` counts every beginning and every end of a step, as the counter of a seqlock does. A search has seen no
/// step half applied if two conditions hold: no step was open when the search began, and the count has not changed
/// since.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    changes: AtomicU64,
    open: AtomicU64,
    recent: Mutex<RecentSteps>,
}

#[derive(Debug, Default)]
struct RecentSteps {
    /// Steps in the order in which they began. A step's `ended_at` is the value of the change counter at the end of
    /// the step. It is `None` while the step's batch is being applied.
    steps: VecDeque<BatchStep>,
    /// Largest `ended_at` of all forgotten steps, that is, the value of the change counter when the last of them
    /// ended.
    forgotten_until: u64,
}

#[derive(Debug)]
struct BatchStep {
    holder: HolderId,
    begun_at: u64,
    ended_at: Option<u64>,
}

/// Batch that is being applied as one step, so that queries see it whole or not at all. The step ends when this value
/// is dropped.
#[derive(Debug)]
pub(super) struct OpenStep {
    flow: Arc<NamespaceFlow>,
    begun_at: u64,
}

/// Moment at which a search begins. When the search ends, [`NamespaceFlow::seen_in_parts`] needs this mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SearchMark {
    changes: u64,
    is_any_open: bool,
}

/// Holders whose batches a search may have seen half applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SeenInParts {
    /// No holder: the search has seen no half-applied batch.
    Nobody,
    /// The listed holders.
    These(Vec<HolderId>),
    /// Any holder: more steps ended during the search than are remembered.
    Any,
}

impl SeenInParts {
    /// Whether the search may have seen a batch of `holder` half applied.
    pub(crate) fn contains(&self, holder: &HolderId) -> bool {
        match self {
            Self::Nobody => false,
            Self::These(holders) => holders.contains(holder),
            Self::Any => true,
        }
    }
}

impl NamespaceFlow {
    /// Begins a step of `holder`, that is, a batch that must be seen whole.
    pub(super) fn begin_step(self: &Arc<Self>, holder: &HolderId) -> OpenStep {
        let steps = &self.steps;
        let mut recent = steps.recent.lock();
        steps.open.fetch_add(1, Ordering::AcqRel);
        let begun_at = steps.changes.fetch_add(1, Ordering::AcqRel) + 1;
        if recent.steps.len() >= STEPS_REMEMBERED {
            recent.forget_oldest();
        }
        recent.steps.push_back(BatchStep {
            holder: holder.clone(),
            begun_at,
            ended_at: None,
        });
        // A thread that sees a later write to the index also sees the count.
        fence(Ordering::Release);
        OpenStep {
            flow: Arc::clone(self),
            begun_at,
        }
    }

    /// Returns the mark of a search. Must be called just before the search begins.
    pub(crate) fn mark_search(&self) -> SearchMark {
        let steps = &self.steps;
        // The change counter is read before `open`. So if a step begins between the two reads, it counts as open.
        let changes = steps.changes.load(Ordering::Acquire);
        SearchMark {
            changes,
            is_any_open: steps.open.load(Ordering::Acquire) > 0,
        }
    }

    /// Returns the holders whose batches a search may have seen half applied. The search began at `mark` and has just
    /// ended.
    pub(crate) fn seen_in_parts(&self, mark: SearchMark) -> SeenInParts {
        fence(Ordering::Acquire);
        let steps = &self.steps;
        if !mark.is_any_open && steps.changes.load(Ordering::Acquire) == mark.changes {
            return SeenInParts::Nobody;
        }
        let recent = steps.recent.lock();
        if recent.forgotten_until > mark.changes {
            return SeenInParts::Any;
        }
        let may_be_seen = |step: &&BatchStep| step.ended_at.is_none_or(|ended| ended > mark.changes);
        let mut holders: Vec<HolderId> = Vec::new();
        for step in recent.steps.iter().filter(may_be_seen) {
            if !holders.contains(&step.holder) {
                holders.push(step.holder.clone());
            }
        }
        match holders.is_empty() {
            true => SeenInParts::Nobody,
            false => SeenInParts::These(holders),
        }
    }
}

impl RecentSteps {
    /// Forgets the oldest remembered step (a batch that must be seen whole) that has ended.
    fn forget_oldest(&mut self) {
        let oldest = self.steps.iter().position(|step| step.ended_at.is_some());
        let forgotten = oldest.and_then(|index| self.steps.remove(index));
        if let Some(ended) = forgotten.and_then(|step| step.ended_at) {
            self.forgotten_until = self.forgotten_until.max(ended);
        }
    }
}

impl Drop for OpenStep {
    fn drop(&mut self) {
        let steps = &self.flow.steps;
        let mut recent = steps.recent.lock();
        let ended_at = steps.changes.fetch_add(1, Ordering::AcqRel) + 1;
        let begun_at = self.begun_at;
        if let Some(step) = recent.steps.iter_mut().rfind(|step| step.begun_at == begun_at) {
            step.ended_at = Some(ended_at);
        }
        steps.open.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::WorkerName;

    use super::*;

    fn holder(name: &str) -> HolderId {
        HolderId {
            worker: WorkerName::new(name).unwrap(),
            rank: 0,
        }
    }

    #[test]
    fn the_oldest_message_of_all_lines_and_lanes_counts() {
        let flow = NamespaceFlow::new(2);
        assert_eq!(flow.oldest_us(), None);
        flow.note_line(0, 1, 0, 50);
        flow.note_line(1, 2, 0, 40);
        flow.note_line(1, 3, 0, 45);
        assert_eq!(flow.oldest_us(), Some(40));
        flow.note_line(1, 2, 40, 60);
        assert_eq!(flow.oldest_us(), Some(45));
        flow.note_line(1, 3, 45, 0);
        flow.note_line(0, 1, 50, 0);
        assert_eq!(flow.oldest_us(), Some(60));
        flow.note_line(1, 2, 60, 0);
        assert_eq!(flow.oldest_us(), None);
    }

    #[test]
    fn a_search_knows_whom_it_may_have_seen_in_parts() {
        let flow = Arc::new(NamespaceFlow::new(1));
        let before = flow.mark_search();
        assert_eq!(flow.seen_in_parts(before), SeenInParts::Nobody);
        let step = flow.begin_step(&holder("a"));
        let during = flow.mark_search();
        let these = SeenInParts::These(vec![holder("a")]);
        assert_eq!(flow.seen_in_parts(before), these);
        assert_eq!(flow.seen_in_parts(during), these);
        drop(step);
        assert_eq!(flow.seen_in_parts(before), these);
        assert_eq!(flow.seen_in_parts(during), these);
        assert_eq!(flow.seen_in_parts(flow.mark_search()), SeenInParts::Nobody);
    }

    #[test]
    fn where_too_many_batches_have_ended_anybody_may_have_been_seen_in_parts() {
        let flow = Arc::new(NamespaceFlow::new(1));
        let before = flow.mark_search();
        let lasting = flow.begin_step(&holder("long"));
        for _ in 0..STEPS_REMEMBERED {
            drop(flow.begin_step(&holder("a")));
        }
        assert_eq!(flow.seen_in_parts(before), SeenInParts::Any);
        // A step that is still open is never forgotten.
        let now = flow.mark_search();
        assert_eq!(flow.seen_in_parts(now), SeenInParts::These(vec![holder("long")]));
        drop(lasting);
    }
}
