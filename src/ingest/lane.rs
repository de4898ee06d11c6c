//! A lane: one thread that applies the events of the workers assigned to it, in order.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tokio::sync::Notify;
use tokio::sync::mpsc::UnboundedReceiver;

use crate::index::{Namespace, RegisterError, WalkedHolder};
use crate::snapshot::forest::ForestChunk;
use crate::snapshot::{HolderFrame, InForest, SnapshotFormat};
use crate::telemetry::EventMetrics;
use crate::telemetry::labels::{DropReason, ResyncFailure};
use crate::tracking::{ListeningClock, Silence, StreamGeneration};
use crate::wire::{DecodeError, EventBatch, HolderId, Rank, Tier, WireLimits};

use super::assignment::{Assignments, InFlight, WorkerKey};
use super::dump::{HolderDump, Revisited};
use super::held::{HoldingLimits, ReceivedBatch};
use super::holder::{Afterwards, Clocks, Context, Holder};
use super::job::{BatchJob, HolderKey, Job, Queued, RestoreJob, RestorePart, ResyncJob, ResyncStep};
use super::metrics::MetricsByNamespace;
use super::settings::{IngestSettings, LivenessSettings};

/// Limits on what a snapshot's batches may carry. The checksums have been checked; these bound a hostile file.
pub fn snapshot_limits() -> WireLimits {
    WireLimits {
        message_bytes_max: crate::snapshot::FRAME_BYTES_MAX,
        ..WireLimits::default()
    }
}

/// The holders of one lane, and what it needs to apply jobs to them.
pub(crate) struct Lane {
    holders: BTreeMap<HolderKey, Holder>,
    /// While a snapshot is restored, the holders whose blocks come in its forests, by their numbers there.
    in_forest: HashMap<u32, (HolderKey, Tier)>,
    assignments: Arc<Assignments>,
    metrics: Arc<MetricsByNamespace>,
    limits: WireLimits,
    holding: HoldingLimits,
    liveness: Arc<LivenessSettings>,
    listening: ListeningClock,
    /// Told when a holder begins to wait for what it has missed.
    doubts: Arc<Notify>,
    started: Instant,
}

impl Lane {
    pub(crate) fn new(
        assignments: Arc<Assignments>,
        metrics: Arc<MetricsByNamespace>,
        settings: &IngestSettings,
        liveness: Arc<LivenessSettings>,
        doubts: Arc<Notify>,
    ) -> Self {
        Self {
            holders: BTreeMap::new(),
            in_forest: HashMap::new(),
            assignments,
            metrics,
            limits: settings.limits.clone(),
            holding: settings.holding_limits(),
            liveness,
            listening: ListeningClock::default(),
            doubts,
            started: Instant::now(),
        }
    }

    /// Works until all senders are gone and the queue is empty.
    pub(crate) fn run(mut self, mut jobs: UnboundedReceiver<Queued>) {
        while let Some(mut queued) = jobs.blocking_recv() {
            // The share of the budget goes back when `queued` is dropped, after the job.
            let is_listening = false;
            match std::mem::replace(&mut queued.job, Job::Tick { is_listening }) {
                Job::Batch(batch) => self.apply(batch),
                Job::Restore(restore) => self.restore(restore),
                Job::RestoreForest(chunk) => self.restore_forest(&chunk),
                Job::EndRestore => self.in_forest.clear(),
                Job::DumpNext {
                    after,
                    generation,
                    format,
                    reply,
                } => {
                    // Nobody waiting any more is no reason to stop.
                    let _ = reply.send(self.dump_next(after, generation, format));
                }
                Job::Revisit {
                    holder,
                    before,
                    generation,
                    reply,
                } => {
                    let _ = reply.send(self.revisit(&holder, &before, generation));
                }
                Job::Resync(resync) => self.resync(resync),
                Job::Tick { is_listening } => self.tick(is_listening),
                Job::Barrier(reply) => {
                    let _ = reply.send(());
                }
            }
        }
    }

    fn clocks(&self) -> Clocks {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Clocks {
            monotonic_us: u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX),
            unix_us: u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX),
            listening_us: self.listening.now_us(),
        }
    }

    fn apply(&mut self, job: BatchJob) {
        let BatchJob {
            namespace,
            worker,
            payload,
            generation,
            in_flight,
        } = job;
        let metrics = self.metrics.of(&namespace.name);
        match EventBatch::decode(&payload, &self.limits) {
            Err(error) => self.note_undecodable(&worker, &error, &metrics),
            Ok(batch) => {
                let key = (worker.clone(), batch.rank);
                let bytes = payload.len();
                let received = ReceivedBatch {
                    batch,
                    generation,
                    bytes,
                };
                self.apply_batch(&namespace, &key, received, &metrics);
            }
        }
        self.finish(&worker, in_flight);
    }

    fn apply_batch(
        &mut self,
        namespace: &Namespace,
        key: &HolderKey,
        received: ReceivedBatch,
        metrics: &EventMetrics,
    ) {
        let (clocks, holding) = (self.clocks(), self.holding.clone());
        let context = Context {
            clocks,
            metrics,
            holding: &holding,
        };
        let (afterwards, has_begun_to_wait) = match self.holder(namespace, key) {
            Ok(holder) => {
                let waited = holder.is_waiting();
                let afterwards = holder.apply(received, context);
                (afterwards, holder.is_waiting() && !waited)
            }
            Err(error) => {
                metrics.batch_dropped(drop_reason(&error), key.0.worker.as_str(), &error);
                return;
            }
        };
        if afterwards == Afterwards::Leaves {
            self.forget(key);
        }
        if has_begun_to_wait {
            self.doubts.notify_one();
        }
    }

    fn forget(&mut self, key: &HolderKey) {
        if let Some(holder) = self.holders.remove(key) {
            holder.retire();
        }
    }

    /// A worker without a holder needs no lane.
    fn finish(&self, worker: &WorkerKey, in_flight: InFlight) {
        drop(in_flight);
        if self.ranks(worker).next().is_none() {
            self.assignments.release(worker);
        }
    }

    /// The holder, registered in the index if it is new.
    fn holder(&mut self, namespace: &Namespace, key: &HolderKey) -> Result<&mut Holder, RegisterError> {
        if !self.holders.contains_key(key) {
            let id = HolderId {
                worker: key.0.worker.clone(),
                rank: key.1,
            };
            let writer = namespace.indexer.register(&id)?;
            let holder = Holder::new(writer, self.clocks());
            self.holders.insert(key.clone(), holder);
        }
        // Inserted above where it was missing.
        self.holders.get_mut(key).ok_or_else(|| {
            RegisterError::Registered(HolderId {
                worker: key.0.worker.clone(),
                rank: key.1,
            })
        })
    }

    /// The holders of one worker.
    fn ranks(&self, worker: &WorkerKey) -> impl Iterator<Item = &Holder> {
        self.holders
            .range((worker.clone(), Rank::MIN)..=(worker.clone(), Rank::MAX))
            .map(|(_, holder)| holder)
    }

    /// A payload that cannot be read may have been for any rank of the worker that its subject names.
    fn note_undecodable(&self, worker: &WorkerKey, error: &DecodeError, metrics: &EventMetrics) {
        let reason = match error {
            DecodeError::Oversized { .. } => DropReason::Oversized,
            _ => DropReason::Undecodable,
        };
        metrics.batch_dropped(reason, worker.worker.as_str(), error);
        for holder in self.ranks(worker) {
            holder.note_undecodable(metrics);
        }
    }

    fn restore(&mut self, job: RestoreJob) {
        let RestoreJob {
            namespace,
            worker,
            part,
            in_flight,
        } = job;
        self.restore_part(&namespace, &worker, part);
        self.finish(&worker, in_flight);
    }

    fn restore_part(&mut self, namespace: &Namespace, worker: &WorkerKey, part: RestorePart) {
        let metrics = self.metrics.of(&namespace.name);
        let clocks = self.clocks();
        let rank = match &part {
            RestorePart::Holder(frame, _) => frame.rank,
            RestorePart::Batch(rank, _) => *rank,
            RestorePart::Abandon(rank) => {
                if let Some(holder) = self.holders.remove(&(worker.clone(), *rank)) {
                    holder.retire();
                }
                return;
            }
        };
        let key = (worker.clone(), rank);
        if matches!(part, RestorePart::Holder(..)) && self.holders.contains_key(&key) {
            // Of a holder that comes twice, the blocks of the first time are not wanted any more.
            self.in_forest.retain(|_, (other, _)| *other != key);
        }
        let holder = match self.holder(namespace, &key) {
            Ok(holder) => holder,
            Err(error) => return metrics.batch_dropped(drop_reason(&error), worker.worker.as_str(), &error),
        };
        match part {
            RestorePart::Holder(frame, generation) => {
                holder.restore_cursor(&frame, generation);
                if let Some(InForest { number, tier }) = frame.forest {
                    self.in_forest.insert(number, (key, tier));
                }
            }
            RestorePart::Batch(_, payload) => match EventBatch::decode(&payload, &snapshot_limits()) {
                Ok(batch) => holder.restore_blocks(batch, clocks, &metrics),
                Err(error) => self.note_undecodable(worker, &error, &metrics),
            },
            // Done above.
            RestorePart::Abandon(_) => {}
        }
    }

    fn restore_forest(&mut self, chunk: &ForestChunk) {
        for (number, runs) in chunk.holders() {
            let Some((key, tier)) = self.in_forest.get(&number) else {
                continue;
            };
            if let Some(holder) = self.holders.get_mut(key) {
                holder.restore_runs(*tier, runs, &self.metrics.of(&key.0.namespace));
            }
        }
    }

    fn revisit(
        &mut self,
        key: &HolderKey,
        before: &(WalkedHolder, HolderFrame),
        generation: StreamGeneration,
    ) -> Revisited {
        let (walked, frame) = before;
        let holder = self.holders.get_mut(key);
        holder.map_or(Revisited::Gone, |holder| {
            holder.revisit(walked, frame, generation)
        })
    }

    fn dump_next(
        &mut self,
        after: Option<HolderKey>,
        generation: StreamGeneration,
        format: SnapshotFormat,
    ) -> Option<(HolderKey, HolderDump)> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let (key, holder) = self.holders.range_mut((start, Bound::Unbounded)).next()?;
        Some((key.clone(), holder.dump(&key.0.namespace, generation, format)))
    }

    fn resync(&mut self, job: ResyncJob) {
        let ResyncJob {
            holder: key,
            step,
            in_flight,
        } = job;
        let metrics = self.metrics.of(&key.0.namespace);
        let clocks = self.clocks();
        let context = Context {
            clocks,
            metrics: &metrics,
            holding: &self.holding,
        };
        let afterwards = self
            .holders
            .get_mut(&key)
            .map_or(Afterwards::Stays, |holder| step_of(holder, step, context));
        if afterwards == Afterwards::Leaves {
            self.forget(&key);
        }
        self.finish(&key.0, in_flight);
    }

    fn tick(&mut self, is_listening: bool) {
        self.listening.look(self.clocks().monotonic_us, is_listening);
        let clocks = self.clocks();
        let mut leaving = Vec::new();
        for (key, holder) in &mut self.holders {
            let metrics = self.metrics.of(&key.0.namespace);
            let context = Context {
                clocks,
                metrics: &metrics,
                holding: &self.holding,
            };
            let limits = self.liveness.of(&key.0.namespace);
            let afterwards = holder.tick(context);
            let silence = holder.check_liveness(limits, context);
            if silence == Silence::Gone {
                metrics.holder_removed(key.0.worker.as_str(), key.1);
            }
            if silence == Silence::Gone || afterwards == Afterwards::Leaves {
                leaving.push(key.clone());
            }
        }
        for key in leaving {
            self.forget(&key);
            if self.ranks(&key.0).next().is_none() {
                self.assignments.release(&key.0);
            }
        }
    }
}

fn step_of(holder: &mut Holder, step: ResyncStep, context: Context<'_>) -> Afterwards {
    match step {
        ResyncStep::Begin(reply) => {
            // Who asked may be gone: what is held back times out then.
            let _ = reply.send(holder.begin_resync(context));
            Afterwards::Stays
        }
        ResyncStep::Finish {
            number,
            answer,
            generation,
            reply,
        } => {
            let (outcome, afterwards) = holder.finish_resync(number, answer, generation, context);
            let _ = reply.send(outcome);
            afterwards
        }
        ResyncStep::Abandon { number, failure } => {
            if failure == ResyncFailure::CursorBehind {
                holder.note_cursor_behind(context);
            }
            holder.abandon_resync(number, failure != ResyncFailure::NoResponder, context)
        }
    }
}

fn drop_reason(error: &RegisterError) -> DropReason {
    match error {
        RegisterError::TooManyRanks { .. } => DropReason::TooManyRanks,
        RegisterError::TooManyWorkers { .. }
        | RegisterError::NoSlot { .. }
        | RegisterError::Registered(_) => DropReason::TooManyWorkers,
    }
}
