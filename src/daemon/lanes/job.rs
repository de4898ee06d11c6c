//! Jobs of a lane.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::traces::OpenSpan;
use kvatlas_core::stream::StreamGeneration;
use kvatlas_telemetry::labels::{DropReason, LabelValue, LaneWork};

use super::clock::now_us;
use super::freshness::MessageArrival;
use super::lane::Lane;
use super::line::Sender;
use super::lost::LostJob;
use super::payloads::Payloads;
use super::queue::LineJob;

/// Job that a lane can be told to do.
pub(crate) enum Job {
    /// Decode messages, and apply their batches.
    Batches(BatchesJob),
    /// Put the holders of a worker in doubt, because messages were dropped at this place in the lane's queue.
    Lost(LostJob),
    /// Do something else, which counts as this kind of work.
    Run(LaneWork, LaneTask),
}

/// Work of a lane that is not about messages: resyncs, snapshots, operators' commands and upkeep.
pub(crate) type LaneTask = Box<dyn FnOnce(&mut Lane) + Send>;

impl Job {
    /// Returns the kind of work for which the job's time is counted.
    pub(super) fn work(&self) -> LaneWork {
        match self {
            Self::Batches(_) | Self::Lost(_) => LaneWork::Events,
            Self::Run(work, _) => *work,
        }
    }
}

/// Time that a lane has spent on each kind of work, in microseconds.
#[derive(Debug, Default)]
pub(crate) struct LaneTimes([AtomicU64; LaneWork::ALL.len()]);

impl LaneTimes {
    pub(super) fn spend(&self, work: LaneWork, elapsed: Duration) {
        let elapsed_us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        self.0[work.index()].fetch_add(elapsed_us, Ordering::Relaxed);
    }

    /// Returns the time spent on `work` so far.
    pub(super) fn spent(&self, work: LaneWork) -> Duration {
        Duration::from_micros(self.0[work.index()].load(Ordering::Relaxed))
    }
}

/// Messages that came one after the other from one worker of the lane.
pub(crate) struct BatchesJob {
    pub(super) sender: Arc<Sender>,
    pub(super) payloads: Payloads,
    pub(super) generation: StreamGeneration,
    pub(super) arrival: MessageArrival,
    /// Trace span that ends with the job. A job with a span has a single message.
    pub(super) span: Option<OpenSpan>,
}

impl LineJob for Job {
    fn messages(&self) -> usize {
        match self {
            Self::Batches(batches) => batches.payloads.len(),
            _ => 1,
        }
    }

    fn is_droppable(&self) -> bool {
        matches!(self, Self::Batches(_))
    }

    fn into_mark(self) -> Result<Self, Self> {
        match self {
            Self::Batches(BatchesJob { sender, payloads, .. }) => {
                let detail = "the queue of its lane is full (events.lane_queue_bytes)";
                let worker = sender.worker.worker.as_str();
                for _ in payloads.iter() {
                    sender
                        .metrics
                        .batch_dropped(DropReason::LaneFull, worker, &detail);
                }
                Ok(Self::Lost(LostJob::of(sender, &payloads)))
            }
            other => Err(other),
        }
    }

    fn merge_mark(&mut self, mark: Self) -> Result<(), Self> {
        match (self, mark) {
            (Self::Lost(lost), Self::Lost(later)) => {
                lost.merge(later);
                Ok(())
            }
            (_, other) => Err(other),
        }
    }
}

/// Snapshot from which a holder is restored.
#[derive(Debug, Clone, Copy, Default)]
pub struct RestoreOrigin {
    /// Generation of the event stream in which the restored holders count as confirmed, unless they were in doubt in
    /// the snapshot.
    pub(super) generation: StreamGeneration,
    /// Time at which the snapshot was begun, by [`now_us`](super::clock::now_us).
    pub(super) taken_us: u64,
    /// Whether the events stream is read from its beginning after the snapshot.
    pub(super) has_whole_stream: bool,
}

impl RestoreOrigin {
    /// Makes the origin of holders from a snapshot of this `age`.
    pub fn new(generation: StreamGeneration, age: Duration) -> Self {
        let age_us = u64::try_from(age.as_micros()).unwrap_or(u64::MAX);
        Self {
            generation,
            taken_us: now_us().saturating_sub(age_us),
            has_whole_stream: false,
        }
    }

    /// Returns the same origin, with a note whether the events stream is read from its beginning after the snapshot.
    pub fn with_whole_stream(self, has_whole_stream: bool) -> Self {
        Self {
            has_whole_stream,
            ..self
        }
    }
}

/// Command of an operator that changes holders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HolderCommand {
    /// Forget the holders, with their epochs and batch numbers.
    Forget,
    /// Put the holders in doubt, so that their publishers are asked for the full state.
    Doubt,
}
