//! Start of answering, from the index or, in a gateway, from the shards.

use std::pin::pin;
use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::outcomes::start_outcomes;
use crate::shared::{Shared, Stage};
use kvatlas_client::unix_time_us;
use kvatlas_config::Config;
use kvatlas_core::wire::WireLimits;
use kvatlas_process::admin::Latch;
use kvatlas_process::broker::{
    Buffer, ConnectError, ConnectionNotice, RefusedSubscriptions, SubscribeError, connect_counted,
};
use kvatlas_telemetry::labels::Connection;

use super::gateway::{Gateway, GatewaySettings};
use super::hinting::start_hints;
use super::observed::Observers;
use super::requests::ServedRequests;
use super::service::QueryService;
use super::settle::Settling;
use super::shards::gathers_max;
use super::turns::{Connected, Connector, Subscribed, serve_in_turns};
use kvatlas_process::instance_name;
use kvatlas_process::presence::{About, Presence, Served, advertised};

/// Maximum number of messages that wait on the connection on which replicas compare the holders that they know. A small
/// number suffices, because the client library passes each reply to its request immediately.
const ROSTERS_WAITING_MAX: usize = 16;

/// Returns the bounds on messages on query subjects.
pub(crate) fn query_limits(config: &Config) -> WireLimits {
    WireLimits {
        message_bytes_max: config.queries.max_message_bytes,
        query_depth_max: config.queries.max_depth_blocks,
        queries_max: config.queries.max_batch,
        filter_workers_max: config.limits.max_workers_per_namespace,
        name_bytes_max: config.limits.max_name_bytes,
        ..WireLimits::default()
    }
}

/// Starts the connections on which queries come. They take queries once two conditions hold: `followed` is true, that
/// is, events are followed, and the index knows as much as that of another replica.
pub(crate) async fn start_queries(
    shared: &Shared,
    followed: watch::Receiver<bool>,
) -> Result<Stage, ConnectError> {
    let config = &shared.config;
    let group = &config.queries.queue_group;
    let served = ServedRequests::new(&shared.subjects, group, config.sharding.shard);
    let stage = Stage::default();
    let (settled, is_settled) = watch::channel(false);
    let observers = Observers::new(shared.tracer.clone());
    for number in 0..config.queries.connections {
        let connector = Connector::new(shared, served.subscriptions(), number);
        let first = connector.connect().await?;
        if number == 0 {
            // Rosters come on a connection of their own, for two reasons. The intake of a connection for requests would
            // not learn that a page was taken. And anybody who has seen a request for a page could send to its inbox
            // for ever.
            let buffer = Buffer::of_messages(ROSTERS_WAITING_MAX);
            let settling = Settling {
                client: connect_counted(&shared.nats, Connection::Queries, "roster", buffer, |_| {}).await?,
                roster_subject: served.roster_subject(),
                namespaces: Arc::clone(&shared.namespaces),
                trust: Arc::clone(&shared.trust),
                patience: config.ready.settle,
            };
            spawn_settling(shared, &stage, settling, followed.clone(), settled.clone());
            spawn_presence(shared, &stage, &served, &observers, is_settled.clone()).await?;
            start_outcomes(shared, &stage, served.queue_group()).await?;
            start_hints(shared, &stage, shared.query_answerer(&shared.subjects)).await?;
        }
        let answerer = shared.query_answerer(served.subjects());
        let (served, is_settled, observers) = (served.clone(), is_settled.clone(), observers.clone());
        let (pool, waiting_bytes_max) = (Arc::clone(&shared.pool), config.queries.max_waiting_bytes);
        let serve = move |connected: Connected, stop: CancellationToken, subscribed: Subscribed| {
            let watching = connected.watch(stop.clone());
            let service = QueryService::new(
                connected,
                served.clone(),
                answerer.clone(),
                Arc::clone(&pool),
                waiting_bytes_max,
                observers.clone(),
            );
            let mut is_settled = is_settled.clone();
            async move {
                tokio::select! {
                    _ = is_settled.wait_for(|settled| *settled) => {}
                    () = stop.cancelled() => return Ok(()),
                }
                Box::pin(beside(watching, service.run(stop, subscribed))).await
            }
        };
        let current = serve_in_turns(&stage, connector, first, serve);
        shared
            .readiness
            .follow_connection("queries", move || current.stands());
    }
    Ok(stage)
}

/// Serves until `serving` ends, and runs `watching` beside it.
async fn beside<T>(watching: impl Future<Output = ()>, serving: impl Future<Output = T>) -> T {
    let mut serving = pin!(serving);
    tokio::select! {
        served = &mut serving => served,
        () = watching => serving.await,
    }
}

/// Starts a task that waits until events are followed, and then until this daemon knows as much as another replica.
/// After that, the task sets `settled` to true.
fn spawn_settling(
    shared: &Shared,
    stage: &Stage,
    settling: Settling,
    mut followed: watch::Receiver<bool>,
    settled: watch::Sender<bool>,
) {
    let (stop, readiness) = (stage.stop.clone(), Arc::clone(&shared.readiness));
    stage.spawn_to_end(async move {
        let settle = async {
            let _ = followed.wait_for(|followed| *followed).await;
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

/// Starts to answer by asking the shards. A gateway loads no snapshot, follows no events and compares no holders with a
/// replica.
pub(crate) async fn start_gateway(shared: &Shared) -> Result<Stage, ConnectError> {
    for latch in [Latch::EventsSubscribed, Latch::CaughtUp, Latch::Settled] {
        shared.readiness.set(latch);
    }
    let missing = Arc::clone(&shared.missing_shards);
    let refused = move || missing.refused(unix_time_us()).into_iter().collect();
    shared
        .readiness
        .follow_refusals(Latch::QueriesSubscribed, refused);
    let config = &shared.config;
    let settings = GatewaySettings {
        deadline: config.gateway.deadline,
        gathers_max: gathers_max(config),
        waiting_bytes_max: config.queries.max_waiting_bytes,
        limits: shared.query_limits.clone(),
        observers: Observers::new(shared.tracer.clone()),
        missing: Arc::clone(&shared.missing_shards),
    };
    let stage = Stage::default();
    let (_at_once, is_settled) = watch::channel(true);
    for number in 0..config.queries.connections {
        let served = ServedRequests::new(&shared.subjects, &config.queries.queue_group, None);
        let connector = Connector::new(shared, served.subscriptions(), number);
        let first = connector.connect().await?;
        if number == 0 {
            spawn_presence(shared, &stage, &served, &settings.observers, is_settled.clone()).await?;
        }
        let settings = settings.clone();
        let serve = move |connected: Connected, stop: CancellationToken, subscribed: Subscribed| {
            let (served, settings) = (served.clone(), settings.clone());
            let watching = connected.watch(stop.clone());
            let serving = async move {
                match Gateway::new(connected, served, settings).await {
                    Ok(gateway) => gateway.run(stop, subscribed).await,
                    Err(error) => Err(SubscribeError::new("its own inbox", &error)),
                }
            };
            beside(watching, serving)
        };
        let current = serve_in_turns(&stage, connector, first, serve);
        shared
            .readiness
            .follow_connection("queries", move || current.stands());
    }
    Ok(stage)
}

/// Lists the daemon among the NATS services, once it takes queries and until `stage` stops.
///
/// Uses a connection of its own, because the connections that serve requests are replaced now and then. Without the
/// right to be listed, the daemon still answers queries, but tools do not find it.
async fn spawn_presence(
    shared: &Shared,
    stage: &Stage,
    served: &ServedRequests,
    observers: &Observers,
    mut is_settled: watch::Receiver<bool>,
) -> Result<(), ConnectError> {
    const CAPACITY: usize = 256;
    if !shared.config.queries.discovery {
        return Ok(());
    }
    let buffer = Buffer::of_messages(CAPACITY);
    let refused = RefusedSubscriptions::default();
    let counted = refused.clone();
    let notice = move |notice: &ConnectionNotice| counted.note(notice);
    let client = connect_counted(&shared.nats, Connection::Queries, "services", buffer, notice).await?;
    let about = About {
        instance: instance_name(&shared.nats.connection_name),
        role: shared.config.gateway.role(),
        prefix: &shared.config.subjects.prefix,
        shard: served.shard().map(|shard| shard.to_string()),
        admin: shared.admin_address.map(|listens| {
            let host = shared.config.admin.advertise.as_deref();
            advertised(host, listens)
        }),
    };
    let [queries, statuses] = served.subscriptions();
    let taken = Served {
        queries,
        statuses,
        queue_group: served.queue_group().to_owned(),
        counts: observers.counts(),
    };
    let presence = Presence::new(client, about, Some(taken), served.subjects().clone());
    let stop = stage.stop.clone();
    stage.spawn_to_end(async move {
        let settling = async { is_settled.wait_for(|settled| *settled).await.is_ok() };
        if stop.run_until_cancelled(settling).await != Some(true) {
            return;
        }
        if let Err(error) = presence.run(stop, &refused).await {
            tracing::debug!(%error, "nobody finds the daemon among the services any more");
        }
    });
    Ok(())
}
