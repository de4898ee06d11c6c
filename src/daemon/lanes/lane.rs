//! A lane: one thread that applies the events of the workers assigned to it, in order.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};

use crate::traces::OpenSpan;
use kvatlas_config::Live;
use kvatlas_core::index::{Namespace, RegisterError, WalkedHolder};
use kvatlas_core::snapshot::HolderFrame;
use kvatlas_core::snapshot::forest::ForestChunk;
use kvatlas_core::stream::StreamGeneration;
use kvatlas_core::wire::{DecodeError, EventBatch, HolderId, Rank, Tier};
use kvatlas_telemetry::EventMetrics;
use kvatlas_telemetry::labels::{DropReason, LabelValue, LaneWork, ResyncFailure};

use super::absent::{Absent, ranks_of};
use super::clock::LaneClock;
use super::flow::Flows;
use super::held::{HoldingLimits, ResyncNumber};
use super::holder::{Afterwards, Clocks, Context, Holder};
use super::holder_resync::{ResyncAnswer, ResyncBegun, ResyncOutcome};
use super::holder_snapshot::{HolderDump, Revisited};
use super::line::{Assignments, InFlight, WorkerKey};
use super::liveness::{ListeningClock, Silence};
use super::lost::LostJob;
use super::payloads::Payloads;
use super::queue::{JobReceiver, LineJob};
use super::refused::NoHolder;
use super::sequence::ReceivedBatch;
use super::settings::{LaneLimits, LaneSettings, LivenessSettings, epoch_max_at};
use super::tally::Tally;

/// A holder's key. The holders of a lane are in the order of their keys.
pub(crate) type HolderKey = (WorkerKey, Rank);

/// The jobs that a lane can be told to do.
pub(crate) enum Job {
    /// Decode messages and apply their batches.
    Batches(BatchesJob),
    /// Doubt the holders of a worker: messages were dropped here.
    Lost(LostJob),
    /// Take over a frame of a snapshot.
    Restore(Box<RestoreJob>),
    /// Store the blocks that the lane's holders have in a part of a snapshot's forest.
    RestoreForest(Arc<ForestChunk>),
    /// The snapshot ends here: no further part of a forest follows.
    EndRestore,
    /// Dump the first holder behind `after`. Blocks that a walk over the index can find are included only if `with_blocks` is set.
    DumpNext {
        after: Option<HolderKey>,
        with_blocks: bool,
        generation: StreamGeneration,
        reply: oneshot::Sender<Option<(HolderKey, HolderDump)>>,
    },
    /// Compare a holder with its dump, after a walk over the index.
    Revisit {
        holder: HolderKey,
        before: Box<(WalkedHolder, HolderFrame)>,
        generation: StreamGeneration,
        reply: oneshot::Sender<Revisited>,
    },
    /// Take a step of a holder's resync.
    Resync(Box<ResyncJob>),
    /// Do what an operator wants.
    Command(CommandJob),
    /// Time out events and held batches that have waited for too long, and look for silent holders.
    Tick {
        /// Whether messages can be received now.
        is_listening: bool,
    },
    /// Reply that all jobs before this one are done.
    Barrier(oneshot::Sender<()>),
}

impl Job {
    /// The kind of work that the lane's time for the job counts as.
    fn work(&self) -> LaneWork {
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

/// The time that a lane has spent on each kind of work, in microseconds.
#[derive(Debug, Default)]
pub(crate) struct LaneTimes([AtomicU64; LaneWork::ALL.len()]);

impl LaneTimes {
    fn spend(&self, work: LaneWork, elapsed: Duration) {
        let elapsed_us = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        self.0[work.index()].fetch_add(elapsed_us, Ordering::Relaxed);
    }

    /// The time spent on `work` so far.
    pub(super) fn spent(&self, work: LaneWork) -> Duration {
        Duration::from_micros(self.0[work.index()].load(Ordering::Relaxed))
    }
}

/// A worker with messages on their way to the lane, with its namespace and metrics.
pub(crate) struct Sender {
    pub(super) namespace: Arc<Namespace>,
    pub(super) metrics: Arc<EventMetrics>,
    pub(super) worker: WorkerKey,
    pub(super) in_flight: InFlight,
}

/// Messages of a worker of the lane that came one after the other.
pub(crate) struct BatchesJob {
    pub(super) sender: Arc<Sender>,
    pub(super) payloads: Payloads,
    pub(super) generation: StreamGeneration,
    /// Trace span that ends with the job. A job with a span is a single message.
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

/// A frame of a snapshot for a worker of the lane.
pub(crate) struct RestoreJob {
    pub(super) namespace: Arc<Namespace>,
    pub(super) metrics: Arc<EventMetrics>,
    pub(super) worker: WorkerKey,
    pub(super) part: RestorePart,
    pub(super) in_flight: InFlight,
}

/// The role of a snapshot's frame for its holder.
#[derive(Debug)]
pub(crate) enum RestorePart {
    /// Begins a holder. If it was not in doubt, it counts as confirmed in this generation.
    Holder(HolderFrame, StreamGeneration),
    /// Begins a holder whose blocks were stored under other settings than the namespace has now. The holder comes without its blocks.
    Refused(HolderFrame),
    /// Has blocks of the holder of this rank, as an event batch.
    Batch(Rank, Vec<u8>),
    /// Forgets the holder of this rank: the rest of it cannot be read, and it never was in this half-restored state.
    Abandon(Rank),
}

/// The commands that change holders.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HolderCommand {
    /// Forget the holders, with their epochs and batch numbers.
    Forget,
    /// Doubt the holders, so that their publishers are asked for the full state.
    Doubt,
}

/// A command about a worker of the lane.
pub(crate) struct CommandJob {
    pub(super) worker: WorkerKey,
    /// Rank to act on; all ranks if `None`.
    pub(super) rank: Option<Rank>,
    pub(super) command: HolderCommand,
    /// Receives the number of holders that the command was carried out on.
    pub(super) reply: oneshot::Sender<u64>,
    pub(super) in_flight: InFlight,
}

/// A step of the resync of a worker of the lane.
#[derive(Debug)]
pub(crate) struct ResyncJob {
    pub(super) holder: HolderKey,
    pub(super) step: ResyncStep,
    pub(super) in_flight: InFlight,
}

/// The steps of a resync.
#[derive(Debug)]
pub(crate) enum ResyncStep {
    /// Hold batches from now on, and reply what to ask the publisher for. No reply comes if there is no such holder.
    Begin(oneshot::Sender<ResyncBegun>),
    /// Apply the publisher's answer to the request that was made in this generation of the stream.
    Finish {
        number: ResyncNumber,
        answer: ResyncAnswer,
        generation: StreamGeneration,
        reply: oneshot::Sender<ResyncOutcome>,
    },
    /// Go on without an answer: apply the held batches.
    Abandon {
        number: ResyncNumber,
        failure: ResyncFailure,
    },
}

/// The holders of one lane, and the parts that the lane needs to apply jobs to them.
pub(crate) struct Lane {
    pub(super) holders: BTreeMap<HolderKey, Box<Holder>>,
    /// Holders whose blocks come in a snapshot's forests, by their numbers there. Filled only while a snapshot is restored.
    pub(super) in_forest: HashMap<u32, (HolderKey, Tier)>,
    pub(super) absent: Arc<Absent>,
    assignments: Arc<Assignments>,
    flows: Arc<Flows>,
    pub(super) limits: Live<LaneLimits>,
    pub(super) holding: HoldingLimits,
    liveness: Arc<LivenessSettings>,
    listening: ListeningClock,
    /// Notified when a holder begins to wait for missing batches.
    pub(super) doubts: Arc<Notify>,
    pub(super) clock: LaneClock,
    pub(super) tally: Tally,
    /// Holder of the last batch, taken out of `holders` for now. Mostly the next batch is for the same holder.
    current: Option<(HolderKey, Box<Holder>)>,
}

impl Lane {
    pub(super) fn new(
        assignments: Arc<Assignments>,
        flows: Arc<Flows>,
        absent: Arc<Absent>,
        settings: &LaneSettings,
        liveness: Arc<LivenessSettings>,
        doubts: Arc<Notify>,
        limits: Live<LaneLimits>,
    ) -> Self {
        Self {
            holders: BTreeMap::new(),
            in_forest: HashMap::new(),
            absent,
            assignments,
            flows,
            limits,
            holding: settings.holding_limits(),
            liveness,
            listening: ListeningClock::default(),
            doubts,
            clock: LaneClock::new(),
            tally: Tally::default(),
            current: None,
        }
    }

    /// Works until the queue's sending end is gone and the queue is empty.
    pub(crate) fn run(mut self, queue: &JobReceiver<Job>, times: &LaneTimes) {
        let mut jobs = Vec::new();
        let mut done = None;
        while let Some(turn) = queue.next(done, &mut jobs) {
            self.clock.begin_turn();
            let mut since = Duration::ZERO;
            let mut rest = jobs.drain(..).peekable();
            while let Some(job) = rest.next() {
                let work = job.work();
                self.work(job);
                if rest.peek().is_none_or(|next| next.work() != work) {
                    self.clock.lap();
                    let now = self.clock.turn_elapsed();
                    times.spend(work, now - since);
                    since = now;
                }
            }
            drop(rest);
            self.tally.count();
            done = Some((turn, since));
        }
    }

    /// Does one job. A reply that nobody waits for any more is ignored.
    fn work(&mut self, job: Job) {
        if !matches!(job, Job::Batches(_)) {
            self.put_back();
        }
        match job {
            Job::Batches(batches) => self.apply(batches),
            Job::Lost(lost) => self.note_lost(lost),
            Job::Restore(restore) => self.restore(*restore),
            Job::RestoreForest(chunk) => self.restore_forest(&chunk),
            Job::EndRestore => self.in_forest.clear(),
            Job::DumpNext {
                after,
                with_blocks,
                generation,
                reply,
            } => {
                let _ = reply.send(self.dump_next(after, with_blocks, generation));
            }
            Job::Revisit {
                holder,
                before,
                generation,
                reply,
            } => {
                let _ = reply.send(self.revisit(&holder, &before, generation));
            }
            Job::Resync(resync) => self.resync(*resync),
            Job::Command(command) => self.command(command),
            Job::Tick { is_listening } => self.tick(is_listening),
            Job::Barrier(reply) => {
                let _ = reply.send(());
            }
        }
    }

    /// Decodes messages and applies their batches to the holders that they name.
    fn apply(&mut self, mut job: BatchesJob) {
        let limits = self.limits.now();
        let mut has_holder = true;
        for payload in job.payloads.iter() {
            has_holder = match EventBatch::decode(payload, &limits.wire) {
                Err(error) => {
                    if let Some(span) = &mut job.span {
                        span.fail(&error);
                    }
                    self.put_back();
                    let reason = self.note_undecodable(&job.sender.worker, &error, &job.sender.metrics);
                    self.note_unread(&job.sender.namespace, &job.sender.worker, reason);
                    false
                }
                Ok(batch) => {
                    let received = ReceivedBatch {
                        batch,
                        generation: job.generation,
                        bytes: payload.len(),
                    };
                    self.apply_batch(&job.sender, received, limits.epoch_ahead_max)
                }
            };
        }
        if !has_holder {
            self.finish_messages(job.sender);
        }
    }

    /// Ends messages of a worker. A worker that is left without a holder gives up its lane.
    pub(super) fn finish_messages(&mut self, sender: Arc<Sender>) {
        self.put_back();
        let worker = sender.worker.clone();
        // Messages that were sorted together share the sender. The last of them ends the worker's time in flight.
        drop(sender);
        self.release_if_empty(&worker);
    }

    /// Puts the holder of the last batch back into `holders`.
    pub(super) fn put_back(&mut self) {
        if let Some((key, holder)) = self.current.take() {
            self.holders.insert(key, holder);
        }
    }

    /// Applies a batch. Returns whether its holder exists afterwards.
    fn apply_batch(
        &mut self,
        sender: &Sender,
        received: ReceivedBatch,
        epoch_ahead_max: Option<Duration>,
    ) -> bool {
        let (worker, rank) = (&sender.worker, received.batch.rank);
        let (epoch, clocks) = (received.batch.epoch, self.clocks());
        if epoch > epoch_max_at(clocks.unix_us, epoch_ahead_max) {
            sender
                .metrics
                .batch_dropped(DropReason::EpochAhead, worker.worker.as_str(), &epoch);
            self.put_back();
            let Some(holder) = self.holders.get_mut(&(worker.clone(), rank)) else {
                self.note_refused(sender, &received.batch, DropReason::EpochAhead);
                return false;
            };
            holder.note_unbelieved(clocks);
            return true;
        }
        let settings = sender.namespace.indexer.settings();
        if !settings.takes(received.batch.block_size) {
            self.refuse_block_size(sender, &received.batch);
            return self.holders.contains_key(&(worker.clone(), rank));
        }
        let (key, mut holder) = match self.take_holder(sender, &received.batch) {
            Ok(taken) => taken,
            Err(refusal) => {
                self.refuse(sender, &received.batch, &refusal);
                return false;
            }
        };
        let context = Context {
            clocks,
            holding: &self.holding,
            clock: &self.clock,
            tally: &self.tally,
        };
        let waited = holder.is_waiting();
        let afterwards = holder.apply(received, context);
        if holder.is_waiting() && !waited {
            self.doubts.notify_one();
        }
        match afterwards {
            Afterwards::Stays => self.current = Some((key, holder)),
            Afterwards::Leaves => self.retire_left(key, holder),
        }
        afterwards == Afterwards::Stays
    }

    /// Takes the holder of a batch out of `holders`. Registers a new holder in the index.
    fn take_holder(
        &mut self,
        sender: &Sender,
        batch: &EventBatch,
    ) -> Result<(HolderKey, Box<Holder>), NoHolder> {
        let rank = batch.rank;
        let is_same = |(key, _): &(HolderKey, Box<Holder>)| key.0 == sender.worker && key.1 == rank;
        if let Some(current) = self.current.take_if(|current| is_same(current)) {
            return Ok(current);
        }
        self.put_back();
        let key = (sender.worker.clone(), rank);
        if let Some(holder) = self.holders.remove(&key) {
            return Ok((key, holder));
        }
        if let Some(reason) = self.absent.is_over(&key, batch) {
            return Err(NoHolder::Left(reason));
        }
        let holder = self.register(&sender.namespace, &sender.metrics, &key);
        Ok((key, holder.map_err(NoHolder::NoRoom)?))
    }

    /// Registers a holder in the index.
    fn register(
        &self,
        namespace: &Namespace,
        metrics: &Arc<EventMetrics>,
        key: &HolderKey,
    ) -> Result<Box<Holder>, RegisterError> {
        let writer = namespace.indexer.register(&HolderId {
            worker: key.0.worker.clone(),
            rank: key.1,
        })?;
        let flow = self.flows.of(&key.0.namespace);
        let mut holder = Holder::new(writer, Arc::clone(metrics), flow, self.clocks());
        if self.absent.is_in_doubt(&key.0) {
            holder.note_undecodable(self.clocks());
        }
        Ok(Box::new(holder))
    }

    /// Returns the holder of `key`. Registers it in the index if it is new.
    pub(super) fn holder(
        &mut self,
        namespace: &Namespace,
        metrics: &Arc<EventMetrics>,
        key: &HolderKey,
    ) -> Result<&mut Holder, RegisterError> {
        let holder = match self.holders.remove(key) {
            Some(holder) => holder,
            None => self.register(namespace, metrics, key)?,
        };
        Ok(self.holders.entry(key.clone()).or_insert(holder))
    }

    /// Removes a holder from the lane and from the index.
    pub(super) fn forget(&mut self, key: &HolderKey) {
        if let Some(holder) = self.holders.remove(key) {
            holder.retire();
        }
    }

    /// Removes a holder whose publisher has said goodbye.
    pub(super) fn take_leave(&mut self, key: &HolderKey) {
        if let Some(holder) = self.holders.remove(key) {
            self.retire_left(key.clone(), holder);
        }
    }

    fn retire_left(&self, key: HolderKey, holder: Box<Holder>) {
        self.absent.note_goodbye(key, holder.high_water);
        holder.retire();
    }

    /// Ends a job of a worker. A worker without a holder gives up its lane.
    pub(super) fn finish(&mut self, worker: &WorkerKey, in_flight: InFlight) {
        drop(in_flight);
        self.release_if_empty(worker);
    }

    fn release_if_empty(&mut self, worker: &WorkerKey) {
        if self.ranks(worker).next().is_none() {
            self.assignments.release(worker);
        }
    }

    /// The holders of one worker.
    fn ranks(&mut self, worker: &WorkerKey) -> impl Iterator<Item = &mut Holder> {
        self.holders
            .range_mut(ranks_of(worker))
            .map(|(_, holder)| &mut **holder)
    }

    /// Degrades all holders of a worker. A payload that cannot be decoded may have been for any rank, also for a rank that comes later.
    /// Returns the reason for the drop.
    pub(super) fn note_undecodable(
        &mut self,
        worker: &WorkerKey,
        error: &DecodeError,
        metrics: &EventMetrics,
    ) -> DropReason {
        let reason = match error {
            DecodeError::Oversized { .. } => DropReason::Oversized,
            _ => DropReason::Undecodable,
        };
        metrics.batch_dropped(reason, worker.worker.as_str(), error);
        let clocks = self.clocks();
        self.ranks(worker)
            .for_each(|holder| holder.note_undecodable(clocks));
        self.absent.note_undecodable(worker);
        reason
    }

    fn tick(&mut self, is_listening: bool) {
        self.listening.look(self.clocks().monotonic_us, is_listening);
        let context = Context {
            clocks: self.clocks(),
            holding: &self.holding,
            clock: &self.clock,
            tally: &self.tally,
        };
        let mut leaving = Vec::new();
        for (key, holder) in &mut self.holders {
            let afterwards = holder.tick(context);
            let silence = holder.check_liveness(self.liveness.of(&key.0.namespace), context);
            if silence == Silence::Gone || afterwards == Afterwards::Leaves {
                leaving.push((key.clone(), afterwards));
            }
        }
        for (key, afterwards) in leaving {
            match afterwards {
                Afterwards::Leaves => self.take_leave(&key),
                Afterwards::Stays => self.forget(&key),
            }
            self.release_if_empty(&key.0);
        }
    }

    pub(super) fn clocks(&self) -> Clocks {
        Clocks {
            monotonic_us: self.clock.monotonic_us(),
            unix_us: self.clock.unix_us(),
            listening_us: self.listening.now_us(),
        }
    }
}
