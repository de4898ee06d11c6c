//! Jobs of a lane.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::traces::OpenSpan;
use kvatlas_core::index::{Namespace, WalkedHolder};
use kvatlas_core::snapshot::HolderFrame;
use kvatlas_core::snapshot::forest::ForestChunk;
use kvatlas_core::stream::StreamGeneration;
use kvatlas_core::wire::Rank;
use kvatlas_telemetry::EventMetrics;
use kvatlas_telemetry::labels::{DropReason, LabelValue, LaneWork, ResyncFailure};

use super::clock::now_us;
use super::freshness::MessageArrival;
use super::held::ResyncNumber;
use super::holder_resync::{ResyncAnswer, ResyncBegun, ResyncOutcome};
use super::holder_snapshot::{HolderDump, Revisited};
use super::line::{HolderKey, InFlight, Sender, WorkerKey};
use super::lost::LostJob;
use super::payloads::Payloads;
use super::queue::LineJob;

/// Job that a lane can be told to do.
pub(crate) enum Job {
    /// Decode messages, and apply their batches.
    Batches(BatchesJob),
    /// Put the holders of a worker in doubt, because messages were dropped at this place in the lane's queue.
    Lost(LostJob),
    /// Restore a part of a holder's state from a frame (one record) of a snapshot.
    Restore(Box<RestoreJob>),
    /// Store the blocks of this lane's holders from one part of a snapshot's forest (the blocks of many holders
    /// together).
    RestoreForest(Arc<ForestChunk>),
    /// End the restoring of a snapshot: no further blocks follow.
    EndRestore,
    /// Dump the first holder after `after` in the order of keys. Blocks that a walk over the index can find are
    /// included only if `with_blocks` is set.
    DumpNext {
        after: Option<HolderKey>,
        with_blocks: bool,
        generation: StreamGeneration,
        reply: oneshot::Sender<Option<(HolderKey, HolderDump)>>,
    },
    /// Compare a holder with its dump, after a walk over the index has looked for its blocks.
    Revisit {
        holder: HolderKey,
        before: Box<(WalkedHolder, HolderFrame)>,
        generation: StreamGeneration,
        reply: oneshot::Sender<Revisited>,
    },
    /// Do a step of a holder's resync.
    Resync(Box<ResyncJob>),
    /// Carry out a command of an operator.
    Command(CommandJob),
    /// Give up events and held batches that have waited for too long, and look for silent holders.
    Tick {
        /// Whether messages can be received at present.
        is_listening: bool,
    },
    /// Send the reply once all jobs before this one are done.
    Barrier(oneshot::Sender<()>),
}

impl Job {
    /// Returns the kind of work for which the job's time is counted.
    pub(super) fn work(&self) -> LaneWork {
        match self {
            Self::Batches(_) | Self::Lost(_) => LaneWork::Events,
            Self::Resync(_) => LaneWork::Resync,
            Self::Restore(_)
            | Self::RestoreForest(_)
            | Self::EndRestore
            | Self::DumpNext { .. }
            | Self::Revisit { .. } => LaneWork::Snapshot,
            Self::Command(_) | Self::Tick { .. } | Self::Barrier(_) => LaneWork::Upkeep,
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

/// Frame (one record) of a snapshot that concerns a worker of the lane.
pub(crate) struct RestoreJob {
    pub(super) namespace: Arc<Namespace>,
    pub(super) metrics: Arc<EventMetrics>,
    pub(super) worker: WorkerKey,
    pub(super) part: RestorePart,
    pub(super) in_flight: InFlight,
}

/// Snapshot from which a holder is restored.
#[derive(Debug, Clone, Copy, Default)]
pub struct RestoreOrigin {
    /// Generation of the event stream in which a holder that was not in doubt counts as confirmed.
    pub(super) generation: StreamGeneration,
    /// Time at which the snapshot was begun, by [`now_us`](super::clock::now_us).
    pub(super) taken_us: u64,
}

impl RestoreOrigin {
    /// Makes the origin of holders from a snapshot of this `age`.
    pub fn new(generation: StreamGeneration, age: Duration) -> Self {
        let age_us = u64::try_from(age.as_micros()).unwrap_or(u64::MAX);
        Self {
            generation,
            taken_us: now_us().saturating_sub(age_us),
        }
    }
}

/// Content of a snapshot's frame, for a holder of the worker.
#[derive(Debug)]
pub(crate) enum RestorePart {
    /// Beginning of a holder, with the snapshot from which it comes.
    Holder(HolderFrame, RestoreOrigin),
    /// Beginning of a holder whose blocks were stored under other settings than the namespace has now. No blocks of this holder
    /// follow.
    Refused(HolderFrame),
    /// Blocks of the holder of this rank, as an encoded event batch.
    Batch(Rank, Vec<u8>),
    /// Order to forget the holder of this rank, because the rest of its frames cannot be read. A half restored state
    /// must not stay.
    Abandon(Rank),
}

/// Command of an operator that changes holders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HolderCommand {
    /// Forget the holders, with their epochs and batch numbers.
    Forget,
    /// Put the holders in doubt, so that their publishers are asked for the full state.
    Doubt,
}

/// Operator's command for the holders of one worker of the lane.
pub(crate) struct CommandJob {
    pub(super) worker: WorkerKey,
    /// Rank whose holder the command is for. `None` means all ranks.
    pub(super) rank: Option<Rank>,
    pub(super) command: HolderCommand,
    /// Channel that receives the number of holders on which the command was carried out.
    pub(super) reply: oneshot::Sender<u64>,
    pub(super) in_flight: InFlight,
}

/// Step of a resync for a holder of one worker of the lane.
#[derive(Debug)]
pub(crate) struct ResyncJob {
    pub(super) holder: HolderKey,
    pub(super) step: ResyncStep,
    pub(super) in_flight: InFlight,
}

/// Step of a holder's resync.
#[derive(Debug)]
pub(crate) enum ResyncStep {
    /// Hold batches from now on, and reply with the request for the publisher. No reply comes if the holder does not
    /// exist.
    Begin(oneshot::Sender<ResyncBegun>),
    /// Apply the publisher's answer. The publisher was asked in this generation of the event stream; a later generation
    /// means that messages may have been lost.
    Finish {
        number: ResyncNumber,
        answer: ResyncAnswer,
        generation: StreamGeneration,
        reply: oneshot::Sender<ResyncOutcome>,
    },
    /// Apply the held batches without an answer.
    Abandon {
        number: ResyncNumber,
        failure: ResyncFailure,
    },
}
