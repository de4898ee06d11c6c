//! Following the events through JetStream.

use std::sync::Arc;

use tokio::sync::watch;

use crate::admin::Latch;
use crate::config::NatsConfig;
use crate::connection::{ConnectError, ConnectPatience, ConnectionNotice, connect};
use crate::ingest::{Dispatcher, StreamSubscriber, StreamSubscriberParts};
use crate::telemetry::ConnectionMetrics;
use crate::telemetry::labels::Connection;

use super::Stage;
use super::start::{Shared, count};

/// Begins to read the events stream; the receiver becomes true when it has been read up to its end.
pub(super) async fn start_stream(
    shared: &Shared,
    nats: &NatsConfig,
    dispatcher: Dispatcher,
) -> Result<(Stage, watch::Receiver<bool>), ConnectError> {
    let (incidents, incidents_seen) = watch::channel(0_u64);
    let (attached, is_attached) = watch::channel(false);
    let (caught_up, is_caught_up) = watch::channel(false);
    let trust = Arc::clone(&shared.trust);
    let metrics = ConnectionMetrics::for_connection(Connection::Events);
    let notice = move |notice: ConnectionNotice| {
        count(&metrics, &notice);
        if matches!(
            notice,
            ConnectionNotice::Disconnected | ConnectionNotice::SlowConsumer
        ) {
            // Nothing is lost, but nobody knows what is published meanwhile.
            trust.stall();
            incidents.send_modify(|incidents| *incidents += 1);
        }
    };
    let config = &shared.config.events;
    let capacity = config.subscription_capacity;
    let client = connect(nats, "events", capacity, ConnectPatience::Forever, notice).await?;
    let parts = StreamSubscriberParts {
        dispatcher,
        config: config.stream.clone(),
        lag_max: capacity,
        trust: Arc::clone(&shared.trust),
        position: Arc::clone(&shared.position),
        incidents: incidents_seen,
        attached,
        caught_up,
    };
    let stage = Stage::default();
    stage
        .tasks
        .spawn(StreamSubscriber::new(client, parts).run(stage.stop.clone()));
    set_when_true(shared, &stage, is_attached, Latch::EventsSubscribed);
    set_when_true(shared, &stage, is_caught_up.clone(), Latch::CaughtUp);
    Ok((stage, is_caught_up))
}

fn set_when_true(shared: &Shared, stage: &Stage, mut is_met: watch::Receiver<bool>, latch: Latch) {
    let (readiness, stop) = (Arc::clone(&shared.readiness), stage.stop.clone());
    stage.tasks.spawn(async move {
        tokio::select! {
            met = is_met.wait_for(|met| *met) => {
                if met.is_ok() {
                    readiness.set(latch);
                }
            }
            () = stop.cancelled() => {}
        }
    });
}
