//! Resyncer: finds holders in doubt, and asks their publishers, a few at the same time.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::lanes::{HolderKey, WorkerKey};
use crate::shared::{Shared, Stage};
use kvatlas_core::index::{HolderRecord, Namespace};
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{DegradedReason, HolderId, NamespaceName};
use kvatlas_process::broker::{Buffer, ConnectError, ConnectionNotice, Refused, connect_counted};
use kvatlas_telemetry::labels::{Connection, NAMESPACE_LABELS_MAX, ResyncFailure, namespace_label};
use kvatlas_telemetry::{ResyncGauges, ResyncMetrics};

use super::answers::{Answers, AnswersSource};
use super::attempt::{Attempt, ResyncSettings, ResyncerParts};
use super::pace::Attempts;
use super::queue::FairQueue;
use super::slots::ResyncSlots;
use crate::vital::vital;

/// Maximum pause between two passes over all holders that look for holders in doubt.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// Minimum pause between two passes over all holders. A pass begins early when a holder has begun to wait for missing
/// batches, but never earlier than this pause allows.
const LOOK_PAUSE: Duration = Duration::from_millis(2);
/// Factor for the pause after a pass over all holders: the pause is at least this many times as long as the pass. It
/// is at least [`LOOK_PAUSE`] as well.
const LOOK_PAUSES: u32 = 20;

/// Starts the task that asks publishers for missing batches and full states. The task ends when `events` stops. Does
/// nothing if `resync.concurrency` is 0.
pub(crate) async fn start_resyncer(shared: &Shared, events: &Stage) -> Result<(), ConnectError> {
    let config = &shared.config;
    if config.resync.concurrency == 0 {
        return Ok(());
    }
    let settings = ResyncSettings::of(config);
    let bounds = &config.events;
    let (buffer, intake) = Buffer::of_bytes(bounds.subscription_capacity, bounds.subscription_bytes);
    let (refusals, refusals_seen) = watch::channel(0_u64);
    let (losses, losses_seen) = watch::channel(0_u64);
    let notice = move |notice: &ConnectionNotice| {
        if notice.loses_messages() {
            losses.send_modify(|losses| *losses += 1);
        }
        if let ConnectionNotice::Refused(refusal) = notice
            && matches!(refusal.refused, Refused::Subscription(_))
        {
            refusals.send_modify(|refusals| *refusals += 1);
        }
    };
    // Resyncs have a connection of their own, so that a flood of chunks does not cause events to be dropped.
    let client = connect_counted(&shared.nats, Connection::Resync, "resync", buffer, notice).await?;
    let answers = Answers::new(
        format!("{}.", client.new_inbox()),
        settings.concurrency,
        settings.answer,
    );
    let source = AnswersSource {
        client: client.clone(),
        answers: Arc::clone(&answers),
        intake: Arc::clone(&intake),
        refusals: refusals_seen,
        losses: losses_seen,
    };
    events.spawn(intake.watch(client.clone()));
    events.spawn(source.run());
    let parts = ResyncerParts {
        client,
        answers,
        subjects: shared.subjects.clone(),
        namespaces: Arc::clone(&shared.namespaces),
        pool: Arc::clone(&shared.pool),
        trust: Arc::clone(&shared.trust),
    };
    let resyncer = Resyncer::new(parts, settings);
    events.spawn_to_end(resyncer.run(events.stop.clone()));
    Ok(())
}

/// Task that asks the publishers of holders in doubt.
struct Resyncer {
    parts: Arc<ResyncerParts>,
    settings: Arc<ResyncSettings>,
    attempts: HashMap<HolderKey, Attempts>,
    queue: FairQueue<WorkerKey, (HolderKey, Arc<HolderRecord>)>,
    slots: ResyncSlots,
    metrics: HashMap<NamespaceName, Arc<ResyncMetrics>>,
    gauges: ResyncGauges,
}

/// Result of an attempt to resync a holder.
struct AttemptOutcome {
    holder: HolderKey,
    result: Result<(), ResyncFailure>,
}

impl Resyncer {
    fn new(parts: ResyncerParts, settings: ResyncSettings) -> Self {
        Self {
            parts: Arc::new(parts),
            slots: ResyncSlots::new(settings.concurrency),
            settings: Arc::new(settings),
            attempts: HashMap::new(),
            queue: FairQueue::new(),
            metrics: HashMap::new(),
            gauges: ResyncGauges::new(),
        }
    }

    /// Works until `stop` is cancelled. Gives up the attempts that are running at that moment.
    async fn run(mut self, stop: CancellationToken) {
        let mut interval = tokio::time::interval(LOOK_INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (ended, mut endings) = mpsc::unbounded_channel();
        let pool = Arc::clone(&self.parts.pool);
        // Earliest time of the next look, if a holder begins to wait for missing batches.
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
            self.gauges.running.set(self.slots.taken() as f64);
            self.gauges.waiting.set(self.queue.len() as f64);
        }
    }

    /// Queues the holders that are in doubt and whose next attempt is due.
    fn look(&mut self) {
        let now = Instant::now();
        let mut doubted = 0;
        for namespace in self.parts.namespaces.all() {
            for record in namespace.indexer.holders() {
                if !is_to_be_asked_for(&namespace, &record, &self.parts.trust) {
                    continue;
                }
                doubted += 1;
                let worker = WorkerKey {
                    namespace: namespace.name.clone(),
                    worker: record.id.worker.clone(),
                };
                let key = (worker.clone(), record.id.rank);
                let attempts = self.attempts.entry(key.clone()).or_default();
                let epoch = record.status.cursor.load().epoch;
                attempts.end_if_overtaken(epoch);
                if attempts.is_due(now, epoch) {
                    attempts.begin(epoch);
                    self.queue.push(worker, attempts.prospect(), (key, record));
                }
            }
        }
        if self.attempts.len() > doubted {
            self.forget_the_settled();
        }
    }

    /// Forgets the failed attempts for holders that are exact again or have been removed.
    fn forget_the_settled(&mut self) {
        let mut in_doubt = std::collections::HashSet::new();
        for namespace in self.parts.namespaces.all() {
            for record in namespace.indexer.holders() {
                if is_to_be_asked_for(&namespace, &record, &self.parts.trust) {
                    in_doubt.insert((namespace.name.clone(), record.id.clone()));
                }
            }
        }
        self.attempts.retain(|(worker, rank), attempts| {
            let id = HolderId {
                worker: worker.worker.clone(),
                rank: *rank,
            };
            attempts.is_busy || in_doubt.contains(&(worker.namespace.clone(), id))
        });
    }

    /// Starts queued attempts, as many as may run at the same time.
    fn start_queued(&mut self, ended: &mpsc::UnboundedSender<AttemptOutcome>, stop: &CancellationToken) {
        while let Some(slot) = self.slots.take() {
            // While the stream is not followed, no answer would prove anything. So the queue waits.
            let Some(generation) = self.parts.trust.followed() else {
                return;
            };
            let Some((holder, record)) = self.queue.pop() else {
                return;
            };
            let namespace = self.parts.namespaces.get(&holder.0.namespace);
            let is_wanted =
                namespace.is_some_and(|namespace| is_to_be_asked_for(&namespace, &record, &self.parts.trust));
            if record.is_retired() || !is_wanted {
                // The holder has been removed, or no longer needs an answer.
                self.attempts.remove(&holder);
                continue;
            }
            let attempts = self.attempts.entry(holder.clone()).or_default();
            // The holder's epoch may have changed while the attempt was queued.
            attempts.begin(record.status.cursor.load().epoch);
            let attempt = Attempt {
                overtaken: attempts.overtaken.clone(),
                parts: Arc::clone(&self.parts),
                settings: Arc::clone(&self.settings),
                metrics: self.metrics_of(&holder.0.namespace),
                holder,
                generation,
            };
            let (ended, stop) = (ended.clone(), stop.clone());
            tokio::spawn(vital(async move {
                let holder = attempt.holder.clone();
                tokio::select! {
                    () = stop.cancelled() => {}
                    result = Box::pin(attempt.run(slot)) => {
                        // An error means that the resyncer has stopped.
                        let _ = ended.send(AttemptOutcome { holder, result });
                    }
                }
            }));
        }
    }

    fn settle(&mut self, ended: AttemptOutcome) {
        let AttemptOutcome { holder, result } = ended;
        match result {
            Ok(()) => {
                self.attempts.remove(&holder);
            }
            Err(failure) => {
                let named = format!("{}/{}", holder.0.worker, holder.1);
                let metrics = self.metrics_of(&holder.0.namespace);
                let attempts = self.attempts.entry(holder).or_default();
                let is_unanswered = failure == ResyncFailure::NoResponder;
                if is_unanswered && !std::mem::replace(&mut attempts.is_unanswered_told, true) {
                    metrics.unanswered(&named);
                }
                metrics.failed(failure, &named);
                attempts.fail(Instant::now(), failure, &self.settings.backoff);
            }
        }
    }

    fn metrics_of(&mut self, namespace: &NamespaceName) -> Arc<ResyncMetrics> {
        // Some of these namespaces may no longer exist, so all metric handles are dropped. A handle that is still
        // needed is made again.
        if self.metrics.len() >= NAMESPACE_LABELS_MAX {
            self.metrics.clear();
        }
        let metrics = self
            .metrics
            .entry(namespace.clone())
            .or_insert_with(|| Arc::new(ResyncMetrics::for_namespace(namespace_label(namespace.as_str()))));
        Arc::clone(metrics)
    }
}

/// Whether the holder's publisher should be asked, because its answer can make the holder's state certain. If the
/// holder lacks blocks because there was no room, an answer helps only once there is room.
fn is_to_be_asked_for(namespace: &Namespace, record: &HolderRecord, trust: &StreamTrust) -> bool {
    let is_short = record.status.own_reasons().contains(DegradedReason::Capacity);
    record.status.is_worth_a_resync(trust) || is_short && namespace.indexer.has_room_for(record)
}
