//! What travels to a lane, and the bounded queue it travels through.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::index::{Namespace, WalkedHolder};
use crate::snapshot::forest::ForestChunk;
use crate::snapshot::{HolderFrame, SnapshotFormat};
use crate::telemetry::labels::ResyncFailure;
use crate::tracking::StreamGeneration;
use crate::wire::Rank;

use super::assignment::{InFlight, WorkerKey};
use super::dump::{HolderDump, Revisited};
use super::held::ResyncNumber;
use super::holder_resync::{ResyncBegun, ResyncOutcome};
use super::resync::ResyncAnswer;

/// A holder's place in the order of a lane.
pub(crate) type HolderKey = (WorkerKey, Rank);

/// A message for a worker of the lane.
#[derive(Debug)]
pub(crate) struct BatchJob {
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) worker: WorkerKey,
    pub(crate) payload: Bytes,
    pub(crate) generation: StreamGeneration,
    pub(crate) in_flight: InFlight,
}

/// A part of a snapshot for a worker of the lane.
#[derive(Debug)]
pub(crate) struct RestoreJob {
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) worker: WorkerKey,
    pub(crate) part: RestorePart,
    pub(crate) in_flight: InFlight,
}

/// A frame of a snapshot.
#[derive(Debug)]
pub(crate) enum RestorePart {
    /// Begins a holder, which is confirmed in this generation.
    Holder(HolderFrame, StreamGeneration),
    /// Blocks of the holder of this rank, as an event batch.
    Batch(Rank, Vec<u8>),
    /// The rest of the holder of this rank cannot be read: what it has is no state that it ever had.
    Abandon(Rank),
}

/// A step of the resync of a worker of the lane.
#[derive(Debug)]
pub(crate) struct ResyncJob {
    pub(crate) holder: HolderKey,
    pub(crate) step: ResyncStep,
    pub(crate) in_flight: InFlight,
}

/// What to do with a holder that is asked for.
#[derive(Debug)]
pub(crate) enum ResyncStep {
    /// Keep back what comes; answers what to ask for. No answer where there is no such holder.
    Begin(oneshot::Sender<ResyncBegun>),
    /// Apply the answer, which was asked for in this generation of the stream.
    Finish {
        number: ResyncNumber,
        answer: ResyncAnswer,
        generation: StreamGeneration,
        reply: oneshot::Sender<ResyncOutcome>,
    },
    /// There is no answer.
    Abandon {
        number: ResyncNumber,
        failure: ResyncFailure,
    },
}

/// What a lane does.
#[derive(Debug)]
pub(crate) enum Job {
    /// Applies a message.
    Batch(BatchJob),
    /// Applies a part of a snapshot.
    Restore(RestoreJob),
    /// Stores what a part of a snapshot's forest has of the lane's holders.
    RestoreForest(Arc<ForestChunk>),
    /// No part of a snapshot's forest follows.
    EndRestore,
    /// Dumps the first holder after this one.
    DumpNext {
        after: Option<HolderKey>,
        generation: StreamGeneration,
        format: SnapshotFormat,
        reply: oneshot::Sender<Option<(HolderKey, HolderDump)>>,
    },
    /// Looks what has become of a holder that was to be met on a walk.
    Revisit {
        holder: HolderKey,
        before: Box<(WalkedHolder, HolderFrame)>,
        generation: StreamGeneration,
        reply: oneshot::Sender<Revisited>,
    },
    /// Takes a step of a resync.
    Resync(ResyncJob),
    /// Times out what waits, and looks who is silent.
    Tick {
        /// Whether messages can be heard now.
        is_listening: bool,
    },
    /// Answers when all jobs before it are done.
    Barrier(oneshot::Sender<()>),
}

/// A job and its share of the queue's budget.
#[derive(Debug)]
pub(crate) struct Queued {
    pub(crate) job: Job,
    bytes: usize,
    backlog: Arc<Backlog>,
    _share: Option<OwnedSemaphorePermit>,
}

impl Drop for Queued {
    fn drop(&mut self) {
        self.backlog.messages.fetch_sub(1, Ordering::Relaxed);
        self.backlog.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// What waits in a queue.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    pub(crate) messages: AtomicUsize,
    pub(crate) bytes: AtomicUsize,
}

/// The lane is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LaneStopped;

/// Bytes that one unit of the budget stands for, so that budgets of many gigabytes fit into 32 bits.
const BYTES_PER_UNIT: usize = 64;
/// What a message costs beside its payload.
const MESSAGE_OVERHEAD_BYTES: usize = 256;

/// The sending end of a lane's queue. Messages wait for room; control jobs, of which there are few, do not.
#[derive(Debug, Clone)]
pub(crate) struct JobSender {
    sender: mpsc::UnboundedSender<Queued>,
    budget: Arc<Semaphore>,
    units_max: usize,
    backlog: Arc<Backlog>,
}

/// A queue that holds at most about `bytes_max`.
pub(crate) fn job_queue(bytes_max: usize) -> (JobSender, mpsc::UnboundedReceiver<Queued>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let units_max = (bytes_max / BYTES_PER_UNIT).clamp(1, Semaphore::MAX_PERMITS);
    let budget = Arc::new(Semaphore::new(units_max));
    (
        JobSender {
            sender,
            budget,
            units_max,
            backlog: Arc::default(),
        },
        receiver,
    )
}

impl JobSender {
    /// Queues a job of about `bytes`, when there is room for it.
    pub(crate) async fn send(&self, job: Job, bytes: usize) -> Result<(), LaneStopped> {
        let units = (bytes + MESSAGE_OVERHEAD_BYTES)
            .div_ceil(BYTES_PER_UNIT)
            .min(self.units_max);
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        let share = Arc::clone(&self.budget)
            .acquire_many_owned(units)
            .await
            .map_err(|_| LaneStopped)?;
        self.push(job, bytes, Some(share))
    }

    /// Queues a control job at once.
    pub(crate) fn send_control(&self, job: Job) -> Result<(), LaneStopped> {
        self.push(job, 0, None)
    }

    fn push(&self, job: Job, bytes: usize, share: Option<OwnedSemaphorePermit>) -> Result<(), LaneStopped> {
        self.backlog.messages.fetch_add(1, Ordering::Relaxed);
        self.backlog.bytes.fetch_add(bytes, Ordering::Relaxed);
        let queued = Queued {
            job,
            bytes,
            backlog: Arc::clone(&self.backlog),
            _share: share,
        };
        self.sender.send(queued).map_err(|_| LaneStopped)
    }

    pub(crate) fn backlog(&self) -> &Backlog {
        &self.backlog
    }
}
