//! Looks for holders in doubt and asks their publishers, a few at a time.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{Client, StatusCode};
use futures_util::StreamExt;
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::index::{Hashing, HolderRecord, Namespaces};
use crate::telemetry::labels::ResyncFailure;
use crate::telemetry::{ResyncGauges, ResyncMetrics};
use crate::tracking::{DegradedReason, StreamGeneration, StreamTrust};
use crate::wire::{ERROR_CODE_HEADER, NamespaceName, ResyncRequest, Subjects, WireLimits};

use super::assignment::WorkerKey;
use super::holder_resync::{ResyncBegun, ResyncOutcome};
use super::job::HolderKey;
use super::pool::LanePool;
use super::resync::{AnswerLimits, Assembly, Attempts, ResyncAnswer, RetryPace, Taken};

/// How often the holders are looked at, at least.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// How long after a look the next may begin, at least, if a holder has begun to wait.
const LOOK_PAUSE: Duration = Duration::from_millis(2);
/// How many times as long as a look the pause after it is, at least: it takes long where there are many holders.
const LOOK_PAUSES: u32 = 20;

/// How publishers are asked.
#[derive(Debug, Clone)]
pub struct ResyncSettings {
    /// Most publishers that are asked at once; 0 asks none.
    pub concurrency: usize,
    /// How long an answer may take.
    pub timeout: Duration,
    /// Bounds on an answer.
    pub answer: AnswerLimits,
    /// Bounds on a chunk, and on the batches in it.
    pub wire: WireLimits,
    /// The pauses between attempts at one holder.
    pub pace: RetryPace,
}

/// What a [`Resyncer`] works with.
pub struct ResyncerParts {
    /// A connection of its own: a flood of chunks must not make events be dropped.
    pub client: Client,
    /// Where publishers are asked.
    pub subjects: Subjects,
    /// Whose holders are looked at.
    pub namespaces: Arc<Namespaces>,
    /// Where the answers are applied.
    pub pool: Arc<LanePool>,
    /// Whether the stream is followed: without it no answer proves anything.
    pub trust: Arc<StreamTrust>,
}

/// Asks the publishers of holders in doubt.
pub struct Resyncer {
    parts: Arc<ResyncerParts>,
    settings: Arc<ResyncSettings>,
    attempts: HashMap<HolderKey, Attempts>,
    queue: VecDeque<(HolderKey, Arc<HolderRecord>)>,
    running: usize,
    metrics: HashMap<NamespaceName, Arc<ResyncMetrics>>,
    gauges: ResyncGauges,
}

/// How an attempt at a holder ended.
struct Ended {
    holder: HolderKey,
    result: Result<(), ResyncFailure>,
}

impl Resyncer {
    /// A resyncer that has not begun.
    pub fn new(parts: ResyncerParts, settings: ResyncSettings) -> Self {
        Self {
            parts: Arc::new(parts),
            settings: Arc::new(settings),
            attempts: HashMap::new(),
            queue: VecDeque::new(),
            running: 0,
            metrics: HashMap::new(),
            gauges: ResyncGauges::new(),
        }
    }

    /// Works until `stop` is cancelled. Attempts that run then are given up.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut interval = tokio::time::interval(LOOK_INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (ended, mut endings) = mpsc::unbounded_channel();
        let pool = Arc::clone(&self.parts.pool);
        // From when on a holder that begins to wait is looked at without waiting for the interval.
        let mut rested_at = Instant::now();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                Some(ending) = endings.recv() => self.settle(ending),
                () = pool.doubted() => interval.reset_after(rested_at.saturating_duration_since(Instant::now())),
                _ = interval.tick() => {
                    let begun = Instant::now();
                    self.look();
                    rested_at = Instant::now() + LOOK_PAUSE.max(begun.elapsed() * LOOK_PAUSES);
                }
            }
            self.start_queued(&ended, &stop);
            self.gauges.set(self.running, self.queue.len());
        }
    }

    /// Queues the holders that are in doubt and may be asked for.
    fn look(&mut self) {
        let now = Instant::now();
        let mut doubted = 0;
        for namespace in self.parts.namespaces.all() {
            for record in namespace.indexer.holders() {
                if !is_in_doubt(&record, &self.parts.trust) {
                    continue;
                }
                doubted += 1;
                let worker = WorkerKey {
                    namespace: namespace.name.clone(),
                    worker: record.id.worker.clone(),
                };
                let key = (worker, record.id.rank);
                let attempts = self.attempts.entry(key.clone()).or_default();
                if attempts.is_due(now) {
                    attempts.is_busy = true;
                    self.queue.push_back((key, record));
                }
            }
        }
        if self.attempts.len() > doubted {
            self.forget_the_settled();
        }
    }

    /// Forgets the failures of holders that are exact by now, or gone.
    fn forget_the_settled(&mut self) {
        let mut in_doubt = std::collections::HashSet::new();
        for namespace in self.parts.namespaces.all() {
            for record in namespace.indexer.holders() {
                if is_in_doubt(&record, &self.parts.trust) {
                    in_doubt.insert((namespace.name.clone(), record.id.clone()));
                }
            }
        }
        self.attempts.retain(|(worker, rank), attempts| {
            let id = crate::wire::HolderId {
                worker: worker.worker.clone(),
                rank: *rank,
            };
            attempts.is_busy || in_doubt.contains(&(worker.namespace.clone(), id))
        });
    }

    /// Starts as many attempts as may run.
    fn start_queued(&mut self, ended: &mpsc::UnboundedSender<Ended>, stop: &CancellationToken) {
        while self.running < self.settings.concurrency {
            // Without the stream no answer would prove anything: the queue waits.
            let Some(generation) = self.parts.trust.followed() else {
                return;
            };
            let Some((holder, record)) = self.queue.pop_front() else {
                return;
            };
            if record.is_retired() || !is_in_doubt(&record, &self.parts.trust) {
                // Its next batch has settled it.
                self.attempts.remove(&holder);
                continue;
            }
            self.running += 1;
            let attempt = Attempt {
                parts: Arc::clone(&self.parts),
                settings: Arc::clone(&self.settings),
                metrics: self.metrics_of(&holder.0.namespace),
                holder,
                generation,
            };
            let (ended, stop) = (ended.clone(), stop.clone());
            tokio::spawn(async move {
                let holder = attempt.holder.clone();
                tokio::select! {
                    () = stop.cancelled() => {}
                    result = Box::pin(attempt.run()) => {
                        // The resyncer has stopped: nobody needs to know.
                        let _ = ended.send(Ended { holder, result });
                    }
                }
            });
        }
    }

    fn settle(&mut self, ended: Ended) {
        self.running -= 1;
        let Ended { holder, result } = ended;
        match result {
            Ok(()) => {
                self.attempts.remove(&holder);
            }
            Err(failure) => {
                let named = format!("{}/{}", holder.0.worker, holder.1);
                self.metrics_of(&holder.0.namespace).failed(failure, &named);
                let attempts = self.attempts.entry(holder).or_default();
                attempts.fail(Instant::now(), &self.settings.pace, jitter());
            }
        }
    }

    fn metrics_of(&mut self, namespace: &NamespaceName) -> Arc<ResyncMetrics> {
        // Only namespaces that were admitted have holders.
        let metrics = self
            .metrics
            .entry(namespace.clone())
            .or_insert_with(|| Arc::new(ResyncMetrics::for_namespace(namespace.as_str())));
        Arc::clone(metrics)
    }
}

fn is_in_doubt(record: &HolderRecord, trust: &StreamTrust) -> bool {
    let reasons = record.status.reasons(trust);
    reasons.iter().any(DegradedReason::is_worth_a_resync)
}

/// A number that differs from call to call.
fn jitter() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(Instant::now())
}

/// One attempt at one holder.
struct Attempt {
    parts: Arc<ResyncerParts>,
    settings: Arc<ResyncSettings>,
    metrics: Arc<ResyncMetrics>,
    holder: HolderKey,
    /// What the publisher says from now on is about messages of this generation.
    generation: StreamGeneration,
}

impl Attempt {
    async fn run(self) -> Result<(), ResyncFailure> {
        let started = Instant::now();
        let pool = &self.parts.pool;
        let begun = pool.begin_resync(&self.holder).await;
        let Some(begun) = begun.map_err(|_| ResyncFailure::Disconnected)? else {
            return Err(ResyncFailure::Superseded);
        };
        self.metrics.started();
        let mut assembly = self.assembly(&begun);
        let asked = tokio::time::timeout(self.settings.timeout, self.ask(&begun, &mut assembly)).await;
        let answer = match asked {
            Ok(answer) => answer,
            Err(_) if assembly.has_seen_outdated() => Err(ResyncFailure::StaleEpoch),
            Err(_) => Err(ResyncFailure::TimedOut),
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err(failure) => {
                // A stopped lane needs no news.
                let _ = pool.abandon_resync(&self.holder, begun.number, failure).await;
                return Err(failure);
            }
        };
        let (batches, bytes) = (answer.batches.len(), assembly.bytes());
        let outcome = pool
            .finish_resync(&self.holder, begun.number, answer, self.generation, bytes)
            .await;
        match outcome.map_err(|_| ResyncFailure::Disconnected)? {
            ResyncOutcome::Exact => {
                let named = format!("{}/{}", self.holder.0.worker, self.holder.1);
                self.metrics.succeeded(&named, batches, started.elapsed());
                Ok(())
            }
            ResyncOutcome::Incomplete => Err(ResyncFailure::Incomplete),
            ResyncOutcome::Superseded => Err(ResyncFailure::Superseded),
        }
    }

    fn request(&self, begun: &ResyncBegun) -> ResyncRequest {
        ResyncRequest {
            rank: self.holder.1,
            cursor: begun.cursor,
            full: begun.full,
        }
    }

    fn assembly(&self, begun: &ResyncBegun) -> Assembly {
        let namespace = self.parts.namespaces.get(&self.holder.0.namespace);
        let recomputed_block_size = namespace.and_then(|namespace| {
            let settings = namespace.indexer.settings();
            (settings.hashing == Hashing::Recompute).then(|| settings.block_size.as_u32())
        });
        Assembly::new(
            self.request(begun),
            recomputed_block_size,
            self.settings.answer,
            self.settings.wire.clone(),
        )
    }

    /// Asks, and puts the answer together.
    async fn ask(&self, begun: &ResyncBegun, assembly: &mut Assembly) -> Result<ResyncAnswer, ResyncFailure> {
        let client = &self.parts.client;
        let (worker, rank) = &self.holder;
        let subject = self
            .parts
            .subjects
            .resync(&worker.namespace, &worker.worker, *rank);
        let inbox = client.new_inbox();
        let disconnected = |_| ResyncFailure::Disconnected;
        let subscribed = client.subscribe(inbox.clone()).await;
        let mut chunks = subscribed.map_err(|_| ResyncFailure::Disconnected)?;
        let payload = self.request(begun).encode();
        client
            .publish_with_reply(subject, inbox, payload.into())
            .await
            .map_err(disconnected)?;
        while let Some(message) = chunks.next().await {
            if message.status == Some(StatusCode::NO_RESPONDERS) {
                return Err(ResyncFailure::NoResponder);
            }
            let headers = message.headers.as_ref();
            if headers.is_some_and(|headers| headers.get(ERROR_CODE_HEADER).is_some()) {
                return Err(ResyncFailure::Refused);
            }
            match assembly.take(&message.payload)? {
                Taken::More | Taken::Outdated => {}
                Taken::Whole(answer) => return Ok(answer),
            }
        }
        Err(ResyncFailure::Disconnected)
    }
}
