//! Starting to answer: from the index, or as a gateway.

use std::sync::Arc;

use async_nats::Client;
use tokio::sync::watch;

use crate::admin::Latch;
use crate::config::NatsConfig;
use crate::connection::{ConnectError, ConnectPatience, ConnectionNotice, connect};
use crate::query_service::{Answerer, Gateway, GatewaySettings, QueryService, ServedRequests};
use crate::telemetry::ConnectionMetrics;
use crate::telemetry::labels::Connection;

use super::settle::Settling;
use super::start::{Shared, StartError, count};
use super::{Stage, parts};

/// Serves queries once events are followed and the index knows what another replica knows.
pub(super) async fn start_queries(
    shared: &Shared,
    nats: &NatsConfig,
    subscribed: watch::Receiver<bool>,
) -> Result<Stage, StartError> {
    let config = &shared.config;
    let served = ServedRequests::new(
        &shared.subjects,
        &config.queries.queue_group,
        config.sharding.shard,
    );
    let stage = Stage::default();
    let (settled, is_settled) = watch::channel(false);
    for number in 0..config.queries.connections {
        let client = connect_queries(shared, nats, number).await?;
        if number == 0 {
            let settling = Settling {
                client: client.clone(),
                roster_subject: served.roster_subject(),
                namespaces: Arc::clone(&shared.namespaces),
                trust: Arc::clone(&shared.trust),
                patience: config.ready.settle,
            };
            spawn_settling(&stage, settling, subscribed.clone(), settled.clone(), shared);
        }
        let answerer = Answerer::new(
            Arc::clone(&shared.namespaces),
            Arc::clone(&shared.trust),
            served.subjects().clone(),
            parts::query_limits(config),
        );
        let service = QueryService::new(client, served.clone(), answerer, Arc::clone(&shared.pool));
        let (stop, mut is_settled) = (stage.stop.clone(), is_settled.clone());
        let readiness = Arc::clone(&shared.readiness);
        stage.tasks.spawn(async move {
            tokio::select! {
                _ = is_settled.wait_for(|settled| *settled) => {}
                () = stop.cancelled() => return,
            }
            let served = service
                .run(stop, || readiness.set(Latch::QueriesSubscribed))
                .await;
            if let Err(error) = served {
                tracing::error!(%error, "queries are no longer answered");
            }
        });
    }
    Ok(stage)
}

/// Compares with another replica once events are followed; then `settled` becomes true.
fn spawn_settling(
    stage: &Stage,
    settling: Settling,
    mut subscribed: watch::Receiver<bool>,
    settled: watch::Sender<bool>,
    shared: &Shared,
) {
    let (stop, readiness) = (stage.stop.clone(), Arc::clone(&shared.readiness));
    stage.tasks.spawn(async move {
        let settle = async {
            let _ = subscribed.wait_for(|subscribed| *subscribed).await;
            settling.settle().await;
        };
        tokio::select! {
            () = settle => {
                readiness.set(Latch::Settled);
                settled.send_replace(true);
            }
            () = stop.cancelled() => {}
        }
    });
}

/// Answers by asking the shards. A gateway has nothing to load, to follow or to compare.
pub(super) async fn start_gateway(shared: &Shared, nats: &NatsConfig) -> Result<Stage, StartError> {
    for latch in [Latch::EventsSubscribed, Latch::CaughtUp, Latch::Settled] {
        shared.readiness.set(latch);
    }
    let config = &shared.config;
    let connections = config.queries.connections;
    let settings = GatewaySettings {
        deadline: config.gateway.deadline,
        gathers_max: config.gateway.max_gathers.div_ceil(connections),
        limits: parts::query_limits(config),
    };
    let stage = Stage::default();
    for number in 0..connections {
        let client = connect_queries(shared, nats, number).await?;
        let group = &config.queries.queue_group;
        let gateway = Gateway::new(client, &shared.subjects, group, settings.clone()).await?;
        let (stop, readiness) = (stage.stop.clone(), Arc::clone(&shared.readiness));
        stage.tasks.spawn(async move {
            let served = gateway
                .run(stop, || readiness.set(Latch::QueriesSubscribed))
                .await;
            if let Err(error) = served {
                tracing::error!(%error, "queries are no longer answered");
            }
        });
    }
    Ok(stage)
}

async fn connect_queries(shared: &Shared, nats: &NatsConfig, number: usize) -> Result<Client, ConnectError> {
    let metrics = ConnectionMetrics::for_connection(Connection::Queries);
    // A gateway has no connection for events that would tell of its troubles.
    let readiness = shared
        .config
        .gateway
        .enabled
        .then(|| Arc::clone(&shared.readiness));
    let notice = move |notice: ConnectionNotice| {
        count(&metrics, &notice);
        match (&readiness, &notice) {
            (Some(readiness), ConnectionNotice::Connected) => readiness.set_trouble(None),
            (Some(readiness), ConnectionNotice::Error(text)) => readiness.set_trouble(Some(text.clone())),
            _ => {}
        }
    };
    let capacity = shared.config.events.subscription_capacity;
    connect(
        nats,
        &format!("queries-{number}"),
        capacity,
        ConnectPatience::Forever,
        notice,
    )
    .await
}
