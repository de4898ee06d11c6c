//! Life of a daemon: its start and its stop, each in a fixed order.

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

use crate::http::{HttpServer, TokenFiles};
use crate::lanes::LanePool;
use crate::shared::Stage;
use crate::snapshots::SnapshotKeeper;
use kvatlas_config::{Config, NatsConfig};
use kvatlas_core::stream::StreamTrust;
use kvatlas_process::admin::{AdminServer, Latch, Readiness};

mod broker;
mod commands;
mod doors;
mod http;
mod memory;
mod namespaces;
mod reload;
mod start;
mod stop;
mod upkeep;
mod view;
mod watch;

use broker::OwnBroker;
pub use namespaces::{NamespaceError, namespaces};
use reload::DaemonLimits;
pub use reload::{ReloadError, ReloadReport};
pub use stop::StopReport;

/// Running daemon. It uses the current tokio runtime, and threads of its own for the lanes and the admin listener.
pub struct Daemon {
    config: Config,
    /// Configuration from the start, or from the last reload.
    in_force: Mutex<Config>,
    limits: DaemonLimits,
    tokens: TokenFiles,
    nats: NatsConfig,
    broker: Option<Arc<OwnBroker>>,
    admin: Option<AdminServer>,
    http: Option<HttpServer>,
    redis_address: Option<SocketAddr>,
    grpc_address: Option<SocketAddr>,
    readiness: Arc<Readiness>,
    trust: Arc<StreamTrust>,
    pool: Arc<LanePool>,
    snapshots: Option<Arc<SnapshotKeeper>>,
    queries: Stage,
    events: Stage,
    upkeep: Stage,
    drain: CancellationToken,
}

impl Daemon {
    /// Returns the process id of the embedded broker. `None` if the configuration names NATS servers.
    pub fn broker_pid(&self) -> Option<u32> {
        self.broker.as_ref().map(|broker| broker.pid())
    }

    /// Returns the configuration of NATS, with the address of the embedded broker if there is one.
    pub fn nats(&self) -> &NatsConfig {
        &self.nats
    }

    /// Returns the address of the admin listener, which serves metrics and probes. `None` if there is no such listener.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(AdminServer::local_addr)
    }

    /// Returns the address at which queries are answered over HTTP. `None` if there is no such listener.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.http.as_ref().map(HttpServer::local_addr)
    }

    /// Returns the address of the listener for llm-d's routers. `None` if there is no such listener.
    pub fn redis_address(&self) -> Option<SocketAddr> {
        self.redis_address
    }

    /// Returns the address of the listener for SGLang's routers. `None` if there is no such listener.
    pub fn grpc_address(&self) -> Option<SocketAddr> {
        self.grpc_address
    }

    /// Waits until an operator's command tells the daemon to stop.
    pub async fn told_to_stop(&self) {
        self.drain.cancelled().await;
    }

    /// Tells the daemon that the bridge in this process knows the blocks of all engines that it follows, or has had
    /// enough time to learn them.
    pub fn note_engines_followed(&self) {
        self.readiness.set(Latch::EnginesFollowed);
    }

    /// Waits until every publisher has had enough time to send a message. From then on the daemon knows all publishers,
    /// so that answers lack no worker.
    pub async fn listed(&self) {
        const INTERVAL: std::time::Duration = std::time::Duration::from_millis(20);
        while !self.trust.is_listed() {
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Waits until the daemon serves queries.
    pub async fn ready(&self) {
        const INTERVAL: std::time::Duration = std::time::Duration::from_millis(5);
        while !self.readiness.report().is_ready() {
            tokio::time::sleep(INTERVAL).await;
        }
    }
}
