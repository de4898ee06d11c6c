//! The lanes together: a message comes in, and the pool puts it into the queue of its worker's lane.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dashmap::DashMap;
use tokio::sync::{Notify, oneshot};

use crate::traces::OpenSpan;
use crate::vital::run_vital;
use kvatlas_config::Live;
use kvatlas_core::index::{Namespace, Namespaces};
use kvatlas_core::stream::{RefusedHolders, StreamGeneration};
use kvatlas_core::wire::{EventBatch, NamespaceName, Shard, Subjects, WorkerName};
use kvatlas_telemetry::labels::{DropReason, LabelValue, LaneWork, namespace_label};
use kvatlas_telemetry::{EventMetrics, LaneMetrics, ShardMetrics, log_gated};

use super::clock::now_us;
use super::flow::Flows;
use super::freshness::{Freshness, MessageArrival};
use super::job::{BatchesJob, Job, LaneTimes};
use super::lane::Lane;
use super::line::{Assignments, LaneId, Line, Sender, WorkerKey};
use super::liveness::TICK_INTERVAL;
use super::payloads::Payloads;
use super::queue::{JobSender, LaneStopped, job_queue};
use super::settings::{LaneLimits, LaneSettings, LivenessSettings};
use super::unheld::Unheld;

/// Maximum number of small messages of one worker that a lane takes in one turn. Also the maximum number of messages in
/// one job.
const TURN_MESSAGES_MAX: usize = 32;
/// Maximum size of the payloads of one job, in bytes, unless the job is a single message. The bound is needed because a
/// turn takes a whole job.
const JOB_BYTES_MAX: usize = 16 * 1024;

/// Reason why the pool cannot do its work.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// Starting the thread of a lane failed.
    #[error("cannot start a lane: {0}")]
    Spawn(#[from] std::io::Error),
    /// Lane has stopped.
    #[error("a lane has stopped")]
    LaneStopped,
}

impl From<LaneStopped> for PoolError {
    fn from(_: LaneStopped) -> Self {
        Self::LaneStopped
    }
}

pub(super) struct LaneHandle {
    pub(super) jobs: JobSender<Job>,
    times: Arc<LaneTimes>,
    metrics: LaneMetrics,
}

impl LaneHandle {
    /// Has the lane do `task` after all jobs that were queued before, and returns the result.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        work: LaneWork,
        task: impl FnOnce(&mut Lane) -> T + Send + 'static,
    ) -> Result<T, PoolError> {
        let (reply, done) = oneshot::channel();
        // The caller may have gone.
        let task = move |lane: &mut Lane| drop(reply.send(task(lane)));
        self.jobs.send_control(Job::Run(work, Box::new(task)))?;
        done.await.map_err(|_| PoolError::LaneStopped)
    }
}

/// Messages that have been sorted by lane, and have not been put into the lanes' queues yet. The caller of
/// [`LanePool::sort`] bounds their number.
pub(crate) struct Inbox {
    by_lane: Box<[Vec<BatchesJob>]>,
    /// Sender of the last message, kept because the next message is usually of the same worker.
    last: Option<LastSender>,
}

/// Sender of the last message, with counts of the messages since the sender changed.
struct LastSender {
    subject: String,
    lane: LaneId,
    sender: Arc<Sender>,
    messages: u64,
    bytes: u64,
    /// Maximum length of a message that is taken, in bytes.
    message_bytes_max: usize,
}

impl Inbox {
    /// Adds a message of the last sender.
    ///
    /// The message joins the lane's last job if three conditions hold: the job has room, the job has the same sender
    /// and generation, and neither the job nor the message has a trace span. Otherwise the message begins a new job.
    fn add(&mut self, payload: &[u8], generation: StreamGeneration, span: Option<OpenSpan>) {
        let Some(last) = &self.last else { return };
        let Some(jobs) = self.by_lane.get_mut(last.lane.0) else {
            return;
        };
        let takes = |job: &BatchesJob| {
            let is_alike = Arc::ptr_eq(&job.sender, &last.sender) && job.generation == generation;
            let has_room = job.payloads.len() < TURN_MESSAGES_MAX
                && job.payloads.bytes() + payload.len() <= JOB_BYTES_MAX;
            is_alike && has_room && job.span.is_none() && span.is_none()
        };
        match jobs.last_mut().filter(|job| takes(job)) {
            Some(job) => job
                .payloads
                .push_within(payload, TURN_MESSAGES_MAX, JOB_BYTES_MAX),
            None => jobs.push(BatchesJob {
                sender: Arc::clone(&last.sender),
                payloads: Payloads::of(payload),
                generation,
                // Replaced when the job is handed over.
                arrival: MessageArrival::default(),
                span,
            }),
        }
    }
}

impl Drop for LastSender {
    fn drop(&mut self) {
        self.sender.metrics.messages_received(self.messages, self.bytes);
    }
}

/// Pool of all lanes. Dropping it lets the lanes finish the jobs in their queues.
pub struct LanePool {
    pub(super) lanes: Box<[LaneHandle]>,
    pub(super) assignments: Arc<Assignments>,
    flows: Arc<Flows>,
    pub(super) unheld: Arc<Unheld>,
    freshness: Arc<Freshness>,
    pub(super) namespaces: Arc<Namespaces>,
    /// Metrics of each namespace, made at the namespace's first message. The limit on namespaces also bounds this map.
    metrics: DashMap<NamespaceName, Arc<EventMetrics>>,
    pub(super) unattributed: EventMetrics,
    pub(super) subjects: Subjects,
    limits: Live<LaneLimits>,
    liveness: Arc<LivenessSettings>,
    doubts: Arc<Notify>,
    pub(super) shard: Option<(Shard, ShardMetrics)>,
}

/// Logs that a message for a stopped lane was lost. Called for each such message; the rate of log lines is bounded.
pub(crate) fn log_lane_stopped() {
    log_gated!(error "a lane has stopped; its workers' events are lost");
}

impl LanePool {
    /// Starts the pool, that is, the threads of all lanes.
    pub fn start(settings: &LaneSettings, namespaces: Arc<Namespaces>) -> Result<Self, PoolError> {
        let lane_count = settings.lanes.max(1);
        let flows = Arc::new(Flows::new(lane_count));
        let unheld = Arc::new(Unheld::default());
        let assignments = Arc::new(Assignments::new(lane_count, Arc::clone(&flows)));
        let liveness = Arc::new(settings.liveness.clone());
        let doubts = Arc::new(Notify::new());
        let limits = Live::new(LaneLimits::of(settings));
        let mut lanes = Vec::with_capacity(lane_count);
        for number in 0..lane_count {
            let (jobs, receiver) = job_queue(number, settings.lane_queue_bytes, TURN_MESSAGES_MAX);
            let lane = Lane::new(
                Arc::clone(&assignments),
                Arc::clone(&flows),
                Arc::clone(&unheld),
                settings,
                Arc::clone(&liveness),
                Arc::clone(&doubts),
                limits.clone(),
            );
            let thread = std::thread::Builder::new().name(format!("lane-{number}"));
            // The thread is detached. It ends when the pool is dropped and the lane's queue is empty.
            let times = Arc::new(LaneTimes::default());
            let spent = Arc::clone(&times);
            thread.spawn(move || run_vital(|| lane.run(&receiver, &spent)))?;
            lanes.push(LaneHandle {
                jobs,
                times,
                metrics: LaneMetrics::for_lane(number),
            });
        }
        let behind_after = settings.behind_after;
        Ok(Self {
            lanes: lanes.into(),
            freshness: Arc::new(Freshness::new(
                Arc::clone(&flows),
                Arc::clone(&assignments),
                behind_after,
            )),
            flows,
            unheld,
            assignments,
            namespaces,
            metrics: DashMap::new(),
            unattributed: EventMetrics::unattributed(),
            subjects: settings.subjects.clone(),
            limits,
            liveness,
            doubts,
            shard: settings.shard.map(|shard| (shard, ShardMetrics::new())),
        })
    }

    /// Returns the bounds on publishers' messages and epochs, which a reload may replace.
    pub(crate) fn limits(&self) -> &Live<LaneLimits> {
        &self.limits
    }

    /// Returns the record of the age of the state from which queries are answered.
    pub(crate) fn freshness(&self) -> Arc<Freshness> {
        Arc::clone(&self.freshness)
    }

    /// Waits until any holder begins to wait for missing batches.
    pub(crate) async fn doubted(&self) {
        self.doubts.notified().await;
    }

    /// Whether `worker` belongs to the shard of this daemon.
    pub(super) fn takes(&self, worker: &WorkerName) -> bool {
        self.shard.as_ref().is_none_or(|(shard, _)| shard.owns(worker))
    }

    /// Takes a message on an events subject, and puts it into its lane's queue. Waits while the queue is full. Counts
    /// a message that cannot be taken, with the reason.
    ///
    /// - `generation` is the generation of the stream in which the message came.
    /// - `kept_for` is the time for which the stream has kept the message; 0 if the message has just come.
    /// - `span` is the trace span that ends with the message.
    pub(crate) async fn receive(
        &self,
        subject: &str,
        payload: &[u8],
        generation: StreamGeneration,
        kept_for: Duration,
        span: Option<OpenSpan>,
    ) {
        if let Some((lane, sender)) = self.sender(subject, payload)
            && self
                .send(lane, sender, payload, generation, kept_for, span)
                .await
                .is_err()
        {
            log_lane_stopped();
        }
    }

    /// Sorts a message into `inbox`, and never waits. [`Self::hand_over`] then puts the sorted messages into the
    /// queues. Meant for many messages; for a single one there is [`Self::receive`].
    pub(crate) fn sort(
        &self,
        inbox: &mut Inbox,
        subject: &str,
        payload: &[u8],
        generation: StreamGeneration,
        span: Option<OpenSpan>,
    ) {
        if inbox.last.as_ref().is_none_or(|last| last.subject != subject) {
            // Dropping the last sender counts its messages.
            inbox.last = None;
            inbox.last = self.sender(subject, payload).map(|(lane, sender)| LastSender {
                subject: subject.to_owned(),
                lane,
                sender,
                messages: 0,
                bytes: 0,
                message_bytes_max: self.limits.now().wire.message_bytes_max,
            });
        }
        if let Some(last) = &mut inbox.last {
            (last.messages, last.bytes) = (last.messages + 1, last.bytes + payload.len() as u64);
            let payload = trim(payload, last.message_bytes_max);
            inbox.add(payload, generation, span);
        }
    }

    /// Puts sorted messages into the queues of their lanes. If a queue is full, messages are dropped and counted, and
    /// the holders of their workers are put in doubt.
    pub(crate) fn hand_over(&self, inbox: &mut Inbox) {
        // The last sender keeps its worker assigned to the lane, so it is dropped first.
        inbox.last = None;
        let arrival = self.freshness.arrival(Duration::ZERO);
        for (lane, jobs) in self.lanes.iter().zip(&mut inbox.by_lane) {
            if jobs.is_empty() {
                continue;
            }
            let jobs = jobs.drain(..).map(|mut job| {
                job.payloads.trim();
                job.arrival = arrival;
                let line = Arc::clone(job.sender.in_flight.line());
                let bytes = job.payloads.bytes();
                (line, Job::Batches(job), bytes)
            });
            if lane.jobs.send_or_drop(jobs, arrival.came_us).is_err() {
                log_lane_stopped();
            }
        }
    }

    /// Returns an empty inbox for messages to this pool.
    pub(crate) fn inbox(&self) -> Inbox {
        Inbox {
            by_lane: self.lanes.iter().map(|_| Vec::new()).collect(),
            last: None,
        }
    }

    /// Puts the message of a worker into its lane's queue. Waits while the queue is full. A message of another shard's
    /// worker is counted but not read.
    pub async fn dispatch(
        &self,
        namespace: &NamespaceName,
        worker: WorkerName,
        payload: &[u8],
        generation: StreamGeneration,
    ) -> Result<(), PoolError> {
        match self.admit(namespace, worker, payload) {
            Some((lane, sender)) => {
                self.send(lane, sender, payload, generation, Duration::ZERO, None)
                    .await
            }
            None => Ok(()),
        }
    }

    async fn send(
        &self,
        lane: LaneId,
        sender: Arc<Sender>,
        payload: &[u8],
        generation: StreamGeneration,
        kept_for: Duration,
        span: Option<OpenSpan>,
    ) -> Result<(), PoolError> {
        let (metrics, line) = (Arc::clone(&sender.metrics), Arc::clone(sender.in_flight.line()));
        metrics.messages_received(1, payload.len() as u64);
        let payload = trim(payload, self.limits.now().wire.message_bytes_max);
        let arrival = self.freshness.arrival(kept_for);
        let job = Job::Batches(BatchesJob {
            sender,
            payloads: Payloads::of(payload),
            generation,
            arrival,
            span,
        });
        let jobs = &self.lane(lane).jobs;
        let sent = jobs.send(&line, job, payload.len(), arrival.came_us).await;
        if sent.is_err() {
            metrics.batch_dropped(DropReason::LaneStopped, "", &"the daemon is stopping");
        }
        Ok(sent?)
    }

    /// Returns the lane and the sender of a message on an events subject. If the message is not taken, counts it and
    /// returns `None`.
    fn sender(&self, subject: &str, payload: &[u8]) -> Option<(LaneId, Arc<Sender>)> {
        let name_bytes_max = self.limits.now().wire.name_bytes_max;
        match self.subjects.parse_events(subject, name_bytes_max) {
            Ok((namespace, worker)) => self.admit(&namespace, worker, payload),
            Err(error) => {
                self.refuse_subject(subject, payload, &error);
                None
            }
        }
    }

    /// Returns the lane and the sender for a message of `worker`. If the message is not taken, counts it and returns
    /// `None`.
    fn admit(
        &self,
        namespace: &NamespaceName,
        worker: WorkerName,
        payload: &[u8],
    ) -> Option<(LaneId, Arc<Sender>)> {
        if let Some((shard, metrics)) = &self.shard
            && !shard.owns(&worker)
        {
            metrics.other_shard_messages.increment(1);
            return None;
        }
        let key = WorkerKey {
            namespace: namespace.clone(),
            worker,
        };
        let namespace = self.admit_namespace(&key, payload)?;
        let metrics = self.metrics_of(&namespace.name);
        let (lane, in_flight) = self.assignments.assign(&key);
        let sender = Sender {
            namespace,
            metrics,
            worker: key,
            in_flight,
        };
        Some((lane, Arc::new(sender)))
    }

    /// Returns the metrics of a namespace.
    pub(super) fn metrics_of(&self, namespace: &NamespaceName) -> Arc<EventMetrics> {
        if let Some(found) = self.metrics.get(namespace) {
            return Arc::clone(&found);
        }
        let made = self
            .metrics
            .entry(namespace.clone())
            .or_insert_with(|| Arc::new(EventMetrics::for_namespace(namespace_label(namespace.as_str()))));
        Arc::clone(&made)
    }

    /// Returns the namespace of a message. A new namespace is made only if the payload is a batch that can be
    /// decoded. Otherwise garbage on invented subjects would use up the namespaces.
    ///
    /// If the namespace has no holders, and no configuration names it, a batch with another block size replaces it by
    /// a new one.
    fn admit_namespace(&self, worker: &WorkerKey, payload: &[u8]) -> Option<Arc<Namespace>> {
        let name = &worker.namespace;
        let known = self.namespaces.get(name);
        if known.as_ref().is_some_and(|known| !known.is_free()) {
            return known;
        }
        let told = match EventBatch::decode(payload, &self.limits.now().wire) {
            Ok(batch) => batch.block_size,
            // The lane counts the message that cannot be decoded.
            Err(_) if known.is_some() => return known,
            Err(error) => {
                self.note_stray(name, &(&worker.worker).into(), error);
                self.unheld.unreadable.note(worker, now_us());
                return None;
            }
        };
        // A namespace that is replaced had its doubts already.
        let is_new = known.is_none();
        let former = is_new.then(|| self.former_stray(name)).flatten();
        // Dropped first: `known` counts as a use, and a namespace in use is not replaced.
        drop(known);
        let prepare = |refused: &RefusedHolders| {
            if let Some(reason) = former {
                self.unheld.note_anybody(refused, reason);
            }
        };
        match self.namespaces.get_or_create_with(name, told, prepare) {
            Ok(created) => Some(created),
            Err(error) => {
                self.note_stray(name, &(&worker.worker).into(), error);
                None
            }
        }
    }

    /// Drops the metrics of a namespace that has been forgotten.
    pub(crate) fn forget_namespace(&self, name: &NamespaceName) {
        self.metrics.remove(name);
    }

    pub(super) fn lane(&self, lane: LaneId) -> &LaneHandle {
        &self.lanes[lane.0]
    }

    /// Has the lane of `worker` do `task` after all messages that the worker sent earlier. Waits while the lane's
    /// queue is full. Returns the receiver of the result. `bytes` is the approximate size of the task in memory.
    pub(super) async fn on_worker<T: Send + 'static>(
        &self,
        worker: WorkerKey,
        work: LaneWork,
        bytes: usize,
        task: impl FnOnce(&mut Lane, &WorkerKey) -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, PoolError> {
        let (lane, line, job, done) = self.worker_job(worker, work, task);
        self.lane(lane).jobs.send(&line, job, bytes, now_us()).await?;
        Ok(done)
    }

    /// Has the lane of `worker` do `task` as [`Self::on_worker`] does, but does not wait for room in the lane's queue.
    /// The task takes no room of messages there, so the caller bounds the memory of such tasks.
    pub(super) fn on_worker_now<T: Send + 'static>(
        &self,
        worker: WorkerKey,
        work: LaneWork,
        task: impl FnOnce(&mut Lane, &WorkerKey) -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, PoolError> {
        let (lane, line, job, done) = self.worker_job(worker, work, task);
        self.lane(lane).jobs.send_now(&line, job, now_us())?;
        Ok(done)
    }

    /// Returns the lane and the queue of `worker`, a job that does `task` there, and the receiver of the result.
    fn worker_job<T: Send + 'static>(
        &self,
        worker: WorkerKey,
        work: LaneWork,
        task: impl FnOnce(&mut Lane, &WorkerKey) -> T + Send + 'static,
    ) -> (LaneId, Arc<Line>, Job, oneshot::Receiver<T>) {
        let (lane, in_flight) = self.assignments.assign(&worker);
        let line = Arc::clone(in_flight.line());
        let (reply, done) = oneshot::channel();
        let task = move |lane: &mut Lane| {
            // The caller may have gone.
            let _ = reply.send(task(lane, &worker));
            lane.finish(&worker, in_flight);
        };
        (lane, line, Job::Run(work, Box::new(task)), done)
    }

    /// Waits until every message that came before this call has been applied.
    pub async fn drain(&self) -> Result<(), PoolError> {
        for lane in &self.lanes {
            lane.run(LaneWork::Upkeep, |_| ()).await?;
        }
        Ok(())
    }

    /// Lets every lane look for events and held batches that have waited for too long, and for silent holders. Must be
    /// called every `TICK_INTERVAL`.
    ///
    /// While events cannot be received (`is_listening` is false), no holder becomes stale or gone.
    pub fn tick(&self, is_listening: bool) {
        self.flows.prune();
        self.unheld.look(is_listening);
        self.expire_refused();
        for lane in &self.lanes {
            // A stopped lane has nothing to time out.
            let freshness = self.freshness();
            let tick = move |lane: &mut Lane| lane.tick(is_listening, &freshness.stream_clock);
            let _ = lane.jobs.send_control(Job::Run(LaneWork::Upkeep, Box::new(tick)));
        }
    }

    /// Notes that the lanes have received all events that the broker had sent by `at_us`. If the broker had been
    /// silent for longer than is allowed, first lets the lanes look for silent holders. From then on, new messages
    /// count as signs of life again.
    pub(crate) fn note_heard(&self, at_us: u64) {
        if self.freshness.is_unheard() {
            self.tick(true);
        }
        self.freshness.heard(at_us);
    }

    /// Forgets refused publishers (their batches were dropped) that have been silent for long. The limit is the
    /// namespace's limit for silent holders, `remove_after`. It is shorter for messages that cannot be read, of workers
    /// with holders.
    fn expire_refused(&self) {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let (now_us, step_us) = (self.unheld.listened_us(), micros(TICK_INTERVAL));
        for namespace in self.namespaces.all() {
            let kept_us = self.liveness.of(&namespace.name).remove_after.map(micros);
            namespace.indexer.refused().expire(now_us, step_us, kept_us);
        }
    }

    /// Updates the metrics of the lanes' backlogs, and of the time spent on each kind of work.
    pub fn publish_backlogs(&self) {
        for lane in &self.lanes {
            let backlog = lane.jobs.backlog();
            let (messages, bytes) = (&backlog.messages, &backlog.bytes);
            lane.metrics
                .queue_messages
                .set(messages.load(Ordering::Relaxed) as f64);
            lane.metrics.queue_bytes.set(bytes.load(Ordering::Relaxed) as f64);
            for work in LaneWork::ALL {
                lane.metrics
                    .busy
                    .get(*work)
                    .absolute(lane.times.spent(*work).as_secs());
            }
        }
    }

    /// Returns the number of messages that wait for a lane, over all lanes.
    pub fn messages_waiting(&self) -> u64 {
        self.lanes
            .iter()
            .map(|lane| lane.jobs.backlog().messages.load(Ordering::Relaxed) as u64)
            .sum()
    }

    /// Returns the number of workers that have a lane.
    pub fn assigned_workers(&self) -> usize {
        self.assignments.len()
    }

    /// Returns the number of lanes.
    pub fn lane_count(&self) -> usize {
        self.lanes.len()
    }
}

/// Returns the payload. An oversized payload is cut to one byte over the limit; the lane then refuses it and degrades
/// the worker's holders.
///
/// The caller must copy the payload. The payload is a part of the client library's read buffer, which can be up to a
/// MiB larger. Without a copy, the whole buffer would stay in memory, but only the payload would be counted.
fn trim(payload: &[u8], bytes_max: usize) -> &[u8] {
    &payload[..payload.len().min(bytes_max + 1)]
}
