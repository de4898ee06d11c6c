//! The daemon: everything put together, started in order and stopped in order.
//!
//! Start: embedded broker (where asked for), admin listener, lanes, newest snapshot (from the Object Store, where it has a newer one),
//! events subscription or stream, comparison with a replica that serves, queries subscription. Each step sets a readiness latch;
//! queries are served only when the events before them are followed, and when the index knows what another replica knows, or has
//! had the time to learn it.
//!
//! A gateway starts the admin listener and the queries subscription only.
//!
//! Stop: no new queries, no new events, lanes drained, a last snapshot, admin listener, broker; all within one time limit.

mod admin_source;
mod parts;
mod queries;
mod settle;
mod snapshots;
mod start;
mod stop;
mod stream;
mod upkeep;

use std::net::SocketAddr;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::{AdminServer, Readiness};
use crate::config::{Config, NatsConfig};
use crate::connection::embedded::EmbeddedBroker;
use crate::ingest::LanePool;

use self::snapshots::Snapshots;

pub use start::StartError;
pub use stop::StopReport;

/// A running daemon, within the current tokio runtime and threads of its own.
pub struct Daemon {
    config: Config,
    nats: NatsConfig,
    broker: Option<EmbeddedBroker>,
    admin: Option<AdminServer>,
    readiness: Arc<Readiness>,
    pool: Arc<LanePool>,
    snapshots: Option<Arc<Snapshots>>,
    queries: Stage,
    events: Stage,
    upkeep: Stage,
}

/// Tasks that are stopped together.
#[derive(Default)]
struct Stage {
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Daemon {
    /// How NATS is reached: the configuration, with the embedded broker's address in place.
    pub fn nats(&self) -> &NatsConfig {
        &self.nats
    }

    /// Where metrics and probes are served, if anywhere.
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin.as_ref().map(AdminServer::local_addr)
    }

    /// Waits until queries are served.
    pub async fn ready(&self) {
        const INTERVAL: std::time::Duration = std::time::Duration::from_millis(5);
        while !self.readiness.report().is_ready() {
            tokio::time::sleep(INTERVAL).await;
        }
    }
}
