//! Start of following the events, from core NATS or from a JetStream stream.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::shared::{Shared, Stage};
use kvatlas_core::stream::StreamTrust;
use kvatlas_process::admin::{Latch, Readiness};
use kvatlas_process::broker::{
    Buffer, ConnectError, ConnectionNotice, Refusal, SubscribeError, connect_counted, follow_connection,
};
use kvatlas_telemetry::StreamMetrics;
use kvatlas_telemetry::labels::Connection;

use super::core_nats::CoreNatsSource;
use super::jetstream::JetStreamSource;

/// Time that JetStream may take to answer a request.
const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

pub(super) async fn start_core_nats(shared: &Shared) -> Result<(Stage, watch::Receiver<bool>), ConnectError> {
    let (incidents, incidents_seen) = watch::channel(0_u64);
    let (refusals, refusals_seen) = watch::channel(0_u64);
    let (subscribed, is_subscribed) = watch::channel(false);
    let (trust, subject) = (Arc::clone(&shared.trust), shared.subjects.all_events());
    let (readiness, subscription) = (Arc::clone(&shared.readiness), subscribed.clone());
    let notice = move |notice: &ConnectionNotice| {
        note_trouble(&readiness, notice);
        let is_refusal = is_refused(notice, |refusal| {
            refusal.is_subscription_to(std::slice::from_ref(&subject))
        });
        if is_refusal {
            subscription.send_replace(false);
            refusals.send_modify(|refusals| *refusals += 1);
        }
        if is_refusal || notice.loses_messages() {
            trust.doubt();
            incidents.send_modify(|incidents| *incidents += 1);
        }
    };
    let config = &shared.config.events;
    let (buffer, intake) = Buffer::of_bytes(config.subscription_capacity, config.subscription_bytes);
    let client = connect_counted(&shared.nats, Connection::Events, "events", buffer, notice).await?;
    follow_connection(&shared.readiness, "events", &client);
    let stage = Stage::default();
    stage.spawn(Arc::clone(&intake).watch(client.clone()));
    let source = CoreNatsSource {
        client,
        subject: shared.subjects.all_events(),
        pool: Arc::clone(&shared.pool),
        trust: Arc::clone(&shared.trust),
        incidents: incidents_seen,
        refusals: refusals_seen,
        subscribed,
        buffered_max: config.subscription_capacity,
        intake,
        tracer: shared.tracer.clone(),
    };
    let (stop, trust) = (stage.stop.clone(), Arc::clone(&shared.trust));
    stage.spawn_to_end(async move {
        let ended = source.run(stop.clone()).await;
        note_ended(ended, &stop, &trust);
    });
    follow_subscription(shared, &stage, is_subscribed.clone());
    // Core NATS keeps no message from before the subscription: there is nothing to catch up with.
    set_when_true(shared, &stage, is_subscribed.clone(), Latch::CaughtUp);
    Ok((stage, is_subscribed))
}

pub(super) async fn start_jetstream(shared: &Shared) -> Result<(Stage, watch::Receiver<bool>), ConnectError> {
    let (incidents, incidents_seen) = watch::channel(0_u64);
    let (attached, is_attached) = watch::channel(false);
    let (caught_up, is_caught_up) = watch::channel(false);
    let (trust, readiness) = (Arc::clone(&shared.trust), Arc::clone(&shared.readiness));
    let subscription = attached.clone();
    let notice = move |notice: &ConnectionNotice| {
        note_trouble(&readiness, notice);
        // Any refusal on this connection counts, because reading the stream needs all its requests and reply inboxes.
        let is_refusal = is_refused(notice, |_| true);
        if is_refusal {
            subscription.send_replace(false);
        }
        if is_refusal || notice.loses_messages() {
            // The stream keeps the messages. Until they have been read, no holder is certain.
            trust.stall();
            incidents.send_modify(|incidents| *incidents += 1);
        }
    };
    let config = &shared.config.events;
    let capacity = config.subscription_capacity;
    // The size of a pull bounds the bytes.
    let buffer = Buffer::of_messages(capacity);
    let client = connect_counted(&shared.nats, Connection::Events, "events", buffer, notice).await?;
    follow_connection(&shared.readiness, "events", &client);
    let mut jetstream = jetstream::new(client.clone());
    // A request that is lost, because its server has gone, is made again soon: meanwhile no holder is certain.
    jetstream.set_timeout(ANSWER_PATIENCE);
    let source = JetStreamSource {
        jetstream,
        client,
        subject: shared.subjects.all_events(),
        pool: Arc::clone(&shared.pool),
        config: config.stream.clone(),
        lag_max: capacity as u64,
        trust: Arc::clone(&shared.trust),
        position: Arc::clone(&shared.position),
        incidents: incidents_seen,
        attached,
        caught_up,
        not_come: None,
        readiness: Arc::clone(&shared.readiness),
        metrics: StreamMetrics::new(),
        tracer: shared.tracer.clone(),
    };
    let stage = Stage::default();
    let (stop, trust) = (stage.stop.clone(), Arc::clone(&shared.trust));
    stage.spawn_to_end(async move {
        source.run(stop.clone()).await;
        note_ended(Ok(()), &stop, &trust);
    });
    follow_subscription(shared, &stage, is_attached);
    set_when_true(shared, &stage, is_caught_up.clone(), Latch::CaughtUp);
    Ok((stage, is_caught_up))
}

/// Notes that events are no longer followed. Unless the daemon is stopping, no holder counts as exact from now on.
fn note_ended(ended: Result<(), SubscribeError>, stop: &CancellationToken, trust: &StreamTrust) {
    if stop.is_cancelled() {
        return;
    }
    trust.doubt();
    match ended {
        Ok(()) => tracing::error!("events are no longer followed: the connection is closed"),
        Err(error) => tracing::error!(%error, "events are no longer followed"),
    }
}

/// Records trouble of the connection, for people who ask why the daemon is not ready.
fn note_trouble(readiness: &Readiness, notice: &ConnectionNotice) {
    let latch = Latch::EventsSubscribed;
    match notice {
        ConnectionNotice::Connected => readiness.set_trouble(latch, None),
        ConnectionNotice::Error(text) => readiness.set_trouble(latch, Some(text.clone())),
        ConnectionNotice::Refused(refusal) => readiness.set_trouble(latch, Some(refusal.to_string())),
        ConnectionNotice::Disconnected | ConnectionNotice::LameDuck | ConnectionNotice::SlowConsumer => {}
    }
}

fn is_refused(notice: &ConnectionNotice, concerns_us: impl Fn(&Refusal) -> bool) -> bool {
    matches!(notice, ConnectionNotice::Refused(refusal) if concerns_us(refusal))
}

/// Keeps the readiness condition "subscribed to events" equal to `is_subscribed`. The value changes, because the server
/// may withdraw the right to subscribe and restore it.
fn follow_subscription(shared: &Shared, stage: &Stage, mut is_subscribed: watch::Receiver<bool>) {
    let readiness = Arc::clone(&shared.readiness);
    let latch = Latch::EventsSubscribed;
    stage.spawn(async move {
        loop {
            if *is_subscribed.borrow_and_update() {
                readiness.set_trouble(latch, None);
                readiness.set(latch);
            } else {
                readiness.clear(latch);
            }
            if is_subscribed.changed().await.is_err() {
                return;
            }
        }
    });
}

fn set_when_true(shared: &Shared, stage: &Stage, mut is_met: watch::Receiver<bool>, latch: Latch) {
    let readiness = Arc::clone(&shared.readiness);
    stage.spawn(async move {
        if is_met.wait_for(|met| *met).await.is_ok() {
            readiness.set(latch);
        }
    });
}
