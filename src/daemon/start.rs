//! Starting, step by step.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::admin::{AdminError, AdminServer, AdminSource, Latch, Readiness};
use crate::client::ClientError;
use crate::config::{Config, NatsConfig, Transport};
use crate::connection::embedded::{BrokerError, BrokerOptions, EmbeddedBroker, find_nats_server};
use crate::connection::{ConnectError, ConnectPatience, ConnectionNotice, connect};
use crate::index::Namespaces;
use crate::ingest::{Dispatcher, LanePool, PoolError, Resyncer, ResyncerParts, StreamPosition, Subscriber};
use crate::snapshotter::{DirectoryError, Disk, RestoreError, Storage};
use crate::telemetry::labels::{Connection, ConnectionEvent};
use crate::telemetry::{ConnectionMetrics, MetricsError, ProcessMetrics, install_shared};
use crate::tracking::StreamTrust;
use crate::wire::{SubjectError, Subjects};

use super::admin_source::DaemonView;
use super::parts::{self, NamespaceError};
use super::queries::{start_gateway, start_queries};
use super::snapshots::start_snapshots;
use super::stream::start_stream;
use super::upkeep::keep_up;
use super::{Daemon, Stage};

/// Why the daemon cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The embedded broker.
    #[error("the embedded NATS server: {0}")]
    Broker(#[from] BrokerError),
    /// The embedded broker's address.
    #[error("the embedded NATS server's address {url}: {source}")]
    BrokerAddress {
        /// The address.
        url: String,
        /// What is wrong with it.
        source: std::io::Error,
    },
    /// The admin listener.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// The metrics recorder.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// The lanes.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The connection to NATS.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The connection of a gateway.
    #[error("the gateway: {0}")]
    Gateway(#[from] ClientError),
    /// The subject prefix.
    #[error(transparent)]
    Subjects(#[from] SubjectError),
    /// A namespace of the configuration.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// The snapshot directory.
    #[error(transparent)]
    SnapshotDirectory(#[from] DirectoryError),
    /// The snapshot to start from.
    #[error(transparent)]
    Restore(#[from] RestoreError),
    /// Reading the snapshot was interrupted.
    #[error("reading the snapshot was interrupted: {0}")]
    Interrupted(#[from] tokio::task::JoinError),
}

/// What the parts of a starting daemon share.
pub(super) struct Shared {
    pub(super) config: Config,
    pub(super) subjects: Subjects,
    pub(super) namespaces: Arc<Namespaces>,
    pub(super) trust: Arc<StreamTrust>,
    pub(super) position: Arc<StreamPosition>,
    pub(super) readiness: Arc<Readiness>,
    pub(super) pool: Arc<LanePool>,
}

impl Daemon {
    /// Starts everything. Where NATS cannot be reached it goes on trying in the background, and is not ready until then; all
    /// other faults are errors.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        Self::start_on(config, Arc::new(Disk)).await
    }

    /// As [`Self::start`]; snapshots are written to `storage`. For tests of what becomes of them on a disk that fails.
    pub async fn start_on(config: Config, storage: Arc<dyn Storage>) -> Result<Self, StartError> {
        let metrics = install_shared()?;
        let subjects = Subjects::new(&config.subjects.prefix)?;
        let namespaces = Arc::new(parts::namespaces(&config)?);
        let (nats, broker) = broker(&config).await?;
        let pool = Arc::new(LanePool::start(
            &parts::ingest_settings(&config),
            Arc::clone(&namespaces),
        )?);
        let shared = Shared {
            config,
            subjects,
            namespaces,
            trust: Arc::default(),
            position: Arc::default(),
            readiness: Arc::new(Readiness::new()),
            pool,
        };
        if shared.config.events.transport == Transport::JetStream {
            // Until the stream has been read up to its end, nothing is certain.
            shared.trust.stall();
        }
        let view = Arc::new(DaemonView {
            namespaces: Arc::clone(&shared.namespaces),
            trust: Arc::clone(&shared.trust),
            readiness: Arc::clone(&shared.readiness),
            pool: Arc::clone(&shared.pool),
            metrics,
            process: ProcessMetrics::new(),
            gauges: Mutex::new(HashMap::new()),
            snapshots: Mutex::new(None),
        });
        let source: Arc<dyn AdminSource> = Arc::clone(&view) as Arc<dyn AdminSource>;
        let admin = shared
            .config
            .admin
            .listen
            .map(|listen| AdminServer::start(listen, source))
            .transpose()?;
        let upkeep = Stage::default();
        upkeep.tasks.spawn(keep_up(
            Arc::clone(&view),
            Arc::clone(&shared.pool),
            Arc::clone(&shared.trust),
            upkeep.stop.clone(),
        ));
        let snapshots = start_snapshots(&shared, storage, &nats, &upkeep).await?;
        view.snapshots.lock().clone_from(&snapshots);
        let (events, queries) = if shared.config.gateway.enabled {
            (Stage::default(), start_gateway(&shared, &nats).await?)
        } else {
            let (events, subscribed) = start_events(&shared, &nats).await?;
            start_resyncer(&shared, &nats, &events).await?;
            (events, start_queries(&shared, &nats, subscribed).await?)
        };
        let Shared {
            config,
            readiness,
            pool,
            ..
        } = shared;
        Ok(Self {
            config,
            nats,
            broker,
            admin,
            readiness,
            pool,
            snapshots,
            queries,
            events,
            upkeep,
        })
    }
}

/// The configured servers, or a broker of our own and its address.
async fn broker(config: &Config) -> Result<(NatsConfig, Option<EmbeddedBroker>), StartError> {
    let needs_jetstream =
        config.events.transport == Transport::JetStream || config.snapshots.object_store.is_some();
    let config = &config.nats;
    if !config.embedded {
        return Ok((config.clone(), None));
    }
    let binary = find_nats_server(config.server_binary.as_deref())?;
    let options = BrokerOptions {
        with_jetstream: needs_jetstream,
        ..BrokerOptions::default()
    };
    let broker = EmbeddedBroker::start_with(&binary, options).await?;
    let url = broker.url().to_owned();
    tracing::warn!(
        url, binary = %binary.display(), pid = broker.pid(),
        "started an embedded nats-server for DEVELOPMENT: it has no persistence, no access control and ends with this process"
    );
    let address = url
        .parse()
        .map_err(|source| StartError::BrokerAddress { url, source })?;
    Ok((
        NatsConfig {
            urls: vec![address],
            ..config.clone()
        },
        Some(broker),
    ))
}

/// Begins to follow events; the receiver becomes true when the server has the subscription.
async fn start_events(
    shared: &Shared,
    nats: &NatsConfig,
) -> Result<(Stage, watch::Receiver<bool>), StartError> {
    let dispatcher = Dispatcher::new(
        shared.subjects.clone(),
        shared.config.limits.max_name_bytes,
        Arc::clone(&shared.pool),
    );
    if shared.config.events.transport == Transport::JetStream {
        return Ok(start_stream(shared, nats, dispatcher).await?);
    }
    let (incidents, incidents_seen) = watch::channel(0_u64);
    let (subscribed, is_subscribed) = watch::channel(false);
    let trust = Arc::clone(&shared.trust);
    let metrics = ConnectionMetrics::for_connection(Connection::Events);
    let readiness = Arc::clone(&shared.readiness);
    let notice = move |notice: ConnectionNotice| {
        count(&metrics, &notice);
        match &notice {
            ConnectionNotice::Connected => readiness.set_trouble(None),
            ConnectionNotice::Error(text) => readiness.set_trouble(Some(text.clone())),
            ConnectionNotice::Disconnected | ConnectionNotice::SlowConsumer => {}
        }
        if matches!(
            notice,
            ConnectionNotice::Disconnected | ConnectionNotice::SlowConsumer
        ) {
            trust.doubt();
            incidents.send_modify(|incidents| *incidents += 1);
        }
    };
    let capacity = shared.config.events.subscription_capacity;
    let client = connect(nats, "events", capacity, ConnectPatience::Forever, notice).await?;
    let subscriber = Subscriber::new(
        client,
        dispatcher,
        Arc::clone(&shared.trust),
        incidents_seen,
        subscribed,
    );
    let stage = Stage::default();
    let stop = stage.stop.clone();
    let trust = Arc::clone(&shared.trust);
    stage.tasks.spawn(async move {
        let ended = subscriber.run(stop.clone()).await;
        if stop.is_cancelled() {
            return;
        }
        // No holder can be confirmed any more, so none is called exact.
        trust.doubt();
        match ended {
            Ok(()) => tracing::error!("events are no longer followed: the connection is closed"),
            Err(error) => tracing::error!(%error, "events are no longer followed"),
        }
    });
    let (readiness, mut latch) = (Arc::clone(&shared.readiness), is_subscribed.clone());
    let stop = stage.stop.clone();
    stage.tasks.spawn(async move {
        tokio::select! {
            subscribed = latch.wait_for(|subscribed| *subscribed) => {
                if subscribed.is_ok() {
                    readiness.set(Latch::EventsSubscribed);
                    // Core NATS keeps nothing that could be caught up on.
                    readiness.set(Latch::CaughtUp);
                }
            }
            () = stop.cancelled() => {}
        }
    });
    Ok((stage, is_subscribed))
}

/// Asks publishers for what is missing, as long as events are followed.
async fn start_resyncer(shared: &Shared, nats: &NatsConfig, events: &Stage) -> Result<(), ConnectError> {
    if shared.config.resync.concurrency == 0 {
        return Ok(());
    }
    let metrics = ConnectionMetrics::for_connection(Connection::Resync);
    let notice = move |notice: ConnectionNotice| count(&metrics, &notice);
    let capacity = shared.config.events.subscription_capacity;
    let client = connect(nats, "resync", capacity, ConnectPatience::Forever, notice).await?;
    let parts = ResyncerParts {
        client,
        subjects: shared.subjects.clone(),
        namespaces: Arc::clone(&shared.namespaces),
        pool: Arc::clone(&shared.pool),
        trust: Arc::clone(&shared.trust),
    };
    let resyncer = Resyncer::new(parts, parts::resync_settings(&shared.config));
    events.tasks.spawn(resyncer.run(events.stop.clone()));
    Ok(())
}

pub(super) fn count(metrics: &ConnectionMetrics, notice: &ConnectionNotice) {
    let event = match notice {
        ConnectionNotice::Connected => ConnectionEvent::Connected,
        ConnectionNotice::Disconnected => ConnectionEvent::Disconnected,
        ConnectionNotice::SlowConsumer => ConnectionEvent::SlowConsumer,
        ConnectionNotice::Error(_) => ConnectionEvent::Error,
    };
    metrics.happened(event, notice);
}
