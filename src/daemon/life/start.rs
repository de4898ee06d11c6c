//! Start of a daemon, step by step. [`Daemon::start_on`] has the order of the steps.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;

use crate::costs::Costs;
use crate::hints::Hints;
use crate::history::History;
use crate::http::TokenFiles;
use crate::lanes::{LanePool, LaneSettings, StreamPosition};
use crate::outcomes::Outcomes;
use crate::page::{Looked, Page};
use crate::queries::{Answerer, query_limits, start_gateway, start_queries};
use crate::resync::start_resyncer;
use crate::shared::{Shared, Stage};
use crate::snapshots::start_snapshots;
use crate::sources::start_events;
use crate::start_error::StartError;
use kvatlas_config::{Config, Live, NatsConfig};
use kvatlas_core::index::Namespaces;
use kvatlas_core::wire::Subjects;
use kvatlas_process::admin::{AdminServer, AdminSource, Latch, Readiness};
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker, find_nats_server};
use kvatlas_process::registry::EngineRegistry;
use kvatlas_process::storage::{Disk, Storage};
use kvatlas_telemetry::{MetricsHandle, ProcessMetrics, install_shared};

use super::Daemon;
use super::broker::{OwnBroker, keep};
use super::commands::start_commands;
use super::doors::{check_built, open_doors};
use super::http::{http_limits, start_http};
use super::namespaces::namespaces;
use super::reload::DaemonLimits;
use super::upkeep::keep_up;
use super::view::DaemonView;

impl Daemon {
    /// Starts the daemon. While NATS cannot be reached, the daemon goes on trying in the background and is not ready.
    /// All other faults are errors.
    ///
    /// The future is boxed, so that its code is compiled in this crate only, and not in each program that starts a
    /// daemon.
    pub fn start(config: Config) -> BoxFuture<'static, Result<Self, StartError>> {
        Self::start_on(config, Arc::new(Disk))
    }

    /// Starts a daemon as [`Self::start`] does, and lets engines be registered over HTTP. `engines` follows the
    /// registered engines, and knows the daemon's `namespaces`. The daemon becomes ready only after
    /// [`Self::note_engines_followed`] is called.
    pub fn start_with_engines(
        config: Config,
        namespaces: Arc<Namespaces>,
        engines: Arc<dyn EngineRegistry>,
    ) -> BoxFuture<'static, Result<Self, StartError>> {
        Box::pin(Self::start_all(
            config,
            Arc::new(Disk),
            Some((namespaces, engines)),
        ))
    }

    /// Starts a daemon as [`Self::start`] does, with snapshots written to `storage`. Meant for tests with a disk that
    /// fails.
    pub fn start_on(
        config: Config,
        storage: Arc<dyn Storage>,
    ) -> BoxFuture<'static, Result<Self, StartError>> {
        Box::pin(Self::start_all(config, storage, None))
    }

    async fn start_all(
        config: Config,
        storage: Arc<dyn Storage>,
        engines: Option<(Arc<Namespaces>, Arc<dyn EngineRegistry>)>,
    ) -> Result<Self, StartError> {
        check_built(&config)?;
        let metrics = install_shared()?;
        let (namespaces, engines) = match engines {
            Some((namespaces, engines)) => (namespaces, Some(engines)),
            None => (Arc::new(namespaces(&config)?), None),
        };
        let (mut shared, broker) = share(config, namespaces).await?;
        let view = Arc::new(view(&shared, metrics, engines.clone()));
        let upkeep = Stage::default();
        let broker = broker.map(|server| Arc::new(OwnBroker::new(server)));
        if let Some(broker) = &broker {
            upkeep.spawn(keep(Arc::downgrade(broker)));
        }
        #[cfg(feature = "traces")]
        super::doors::spawn_traces(&mut shared, &upkeep);
        let source: Arc<dyn AdminSource> = Arc::clone(&view) as Arc<dyn AdminSource>;
        let listen = shared.config.admin.listen;
        let admin = listen
            .map(|listen| AdminServer::start(listen, Arc::clone(&source)))
            .transpose()?;
        shared.admin_address = admin.as_ref().map(AdminServer::local_addr);
        match engines.clone() {
            Some(engines) => shared
                .readiness
                .follow_refusals(Latch::EnginesFollowed, move || engines.refusals()),
            None => shared.readiness.set(Latch::EnginesFollowed),
        }
        let http = start_http(&shared, source, engines).await?;
        upkeep.spawn_to_end(keep_up(
            Arc::clone(&view),
            Arc::clone(&shared.pool),
            Arc::clone(&shared.trust),
            shared.empty_namespace.clone(),
            upkeep.stop.clone(),
        ));
        let snapshots = start_snapshots(&shared, storage, &upkeep).await?;
        view.snapshots.lock().clone_from(&snapshots);
        let drain = CancellationToken::new();
        start_commands(&shared, snapshots.clone(), &drain, &upkeep).await?;
        let (events, queries) = if shared.config.gateway.enabled {
            (Stage::default(), start_gateway(&shared).await?)
        } else {
            let (events, followed) = start_events(&shared).await?;
            start_resyncer(&shared, &events).await?;
            (events, start_queries(&shared, followed).await?)
        };
        let doors = open_doors(&shared, &queries).await?;
        Ok(Self {
            in_force: Mutex::new(shared.config.clone()),
            limits: DaemonLimits {
                queries: shared.query_limits,
                http: shared.http_limits,
                empty_namespace: shared.empty_namespace,
            },
            tokens: shared.tokens,
            config: shared.config,
            nats: shared.nats,
            broker,
            admin,
            http,
            redis_address: doors.redis,
            grpc_address: doors.grpc,
            readiness: shared.readiness,
            trust: shared.trust,
            pool: shared.pool,
            snapshots,
            queries,
            events,
            upkeep,
            drain,
        })
    }
}

/// Starts the embedded broker, if the configuration asks for one, and the lanes. Returns the state that the daemon's
/// rooms (folders) share.
async fn share(
    config: Config,
    namespaces: Arc<Namespaces>,
) -> Result<(Shared, Option<EmbeddedBroker>), StartError> {
    let subjects = Subjects::new(&config.subjects.prefix)?;
    let (nats, broker) = broker(&config).await?;
    let settings = LaneSettings::of(&config, &subjects);
    let (query_limits, http_limits) = (query_limits(&config), http_limits(&config));
    let empty_namespace = config.limits.empty_namespace;
    let hints = config.hints.time_to_live.map(|time_to_live| {
        let bytes_max = config.hints.max_bytes;
        Arc::new(Hints::new(config.sharding.shard, time_to_live, bytes_max))
    });
    let outcomes = Arc::new(Outcomes::new(Arc::clone(&namespaces), config.sharding.shard));
    let shared = Shared {
        pool: Arc::new(LanePool::start(&settings, Arc::clone(&namespaces))?),
        position: Arc::new(StreamPosition::under(&config)),
        config,
        nats,
        subjects,
        namespaces,
        trust: Arc::default(),
        readiness: Arc::new(Readiness::new()),
        admin_address: None,
        tracer: None,
        sample: Arc::default(),
        missing_shards: Arc::default(),
        snapshot_failing: Arc::default(),
        heavy_turns: Arc::default(),
        history: History::new(),
        outcomes,
        hints,
        query_limits: Live::new(query_limits),
        http_limits: Live::new(http_limits),
        empty_namespace: Live::new(empty_namespace),
        tokens: TokenFiles::default(),
        source: OnceCell::new(),
    };
    if shared.config.events.transport.keeps_events() {
        // Until the stream has been read up to its end, nothing is certain.
        shared.trust.stall();
    }
    if !shared.config.gateway.enabled {
        // The publishers are not known before the events are followed.
        shared.trust.doubt();
    }
    Ok((shared, broker))
}

fn view(shared: &Shared, metrics: MetricsHandle, engines: Option<Arc<dyn EngineRegistry>>) -> DaemonView {
    // Queries that people make on the page are not part of the sample.
    let answerer = Answerer::new(
        Arc::clone(&shared.namespaces),
        Arc::clone(&shared.trust),
        shared.pool.freshness(),
        shared.pool.stray_names(),
        shared.subjects.clone(),
        shared.query_limits.clone(),
    );
    let (costs, pool) = (Arc::new(Costs::default()), Arc::clone(&shared.pool));
    let page = Page::new(
        answerer,
        Arc::clone(&shared.readiness),
        Looked {
            sample: Arc::clone(&shared.sample),
            outcomes: Arc::clone(&shared.outcomes),
            costs: Arc::clone(&costs),
            missing_shards: Arc::clone(&shared.missing_shards),
            snapshot_failing: Arc::clone(&shared.snapshot_failing),
            strays: Box::new(move || pool.strays()),
        },
        metrics.clone(),
    );
    DaemonView {
        role: shared.config.gateway.role(),
        config: shared.config.clone(),
        query_limits: shared.query_limits.clone(),
        engines,
        namespaces: Arc::clone(&shared.namespaces),
        history: Arc::clone(&shared.history),
        outcomes: Arc::clone(&shared.outcomes),
        costs,
        missing_shards: Arc::clone(&shared.missing_shards),
        snapshot_failing: Arc::clone(&shared.snapshot_failing),
        trust: Arc::clone(&shared.trust),
        readiness: Arc::clone(&shared.readiness),
        pool: Arc::clone(&shared.pool),
        metrics,
        process: ProcessMetrics::new(),
        gauges: Mutex::new(HashMap::new()),
        snapshots: Mutex::new(None),
        page: Arc::new(page),
        shrinks: Mutex::default(),
    }
}

/// Returns the configuration of NATS. With `nats.embedded`, starts a broker and puts the broker's address into the
/// configuration.
async fn broker(config: &Config) -> Result<(NatsConfig, Option<EmbeddedBroker>), StartError> {
    let needs_jetstream = config.events.transport.keeps_events() || config.snapshots.object_store.is_some();
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
