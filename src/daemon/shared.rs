//! The parts that the rooms of a starting daemon share, and the tasks that they start.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use kvatlas_core::index::Namespaces;
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{Subjects, WireLimits};

use super::hints::Hints;
use super::history::History;
use super::lanes::{LanePool, StreamPosition};
use super::outcomes::Outcomes;
use super::queries::{Answerer, HeavyTurns, MissingShards, QuerySample};
use super::traces::Tracer;
use kvatlas_config::{Config, Live, NatsConfig};
use kvatlas_process::admin::Readiness;

/// The parts that the rooms of a starting daemon share.
pub(crate) struct Shared {
    pub(crate) config: Config,
    /// How NATS is reached: the configuration, with the embedded broker's address in place.
    pub(crate) nats: NatsConfig,
    pub(crate) subjects: Subjects,
    pub(crate) namespaces: Arc<Namespaces>,
    pub(crate) trust: Arc<StreamTrust>,
    pub(crate) position: Arc<StreamPosition>,
    pub(crate) readiness: Arc<Readiness>,
    pub(crate) pool: Arc<LanePool>,
    /// The address of the admin listener, once it is there.
    pub(crate) admin_address: Option<SocketAddr>,
    /// The sample of what queries ask about, for people who look.
    pub(crate) sample: Arc<QuerySample>,
    /// The shards that answers of a gateway lack.
    pub(crate) missing_shards: Arc<MissingShards>,
    /// The turns of requests that take long, over NATS and HTTP.
    pub(crate) heavy_turns: Arc<HeavyTurns>,
    /// When holders were exact, and when they were not.
    pub(crate) history: Arc<History>,
    /// The blocks that requests found of what answers promised.
    pub(crate) outcomes: Arc<Outcomes>,
    /// Hints of routers; none where they are not taken.
    pub(crate) hints: Option<Arc<Hints>>,
    /// Opens spans, where there is a collector.
    pub(crate) tracer: Option<Tracer>,
    /// Bounds on queries over NATS.
    pub(crate) query_limits: Live<WireLimits>,
    /// Bounds on queries over HTTP.
    pub(crate) http_limits: Live<WireLimits>,
    /// Time without a holder after which a namespace is forgotten.
    pub(crate) empty_namespace: Live<Duration>,
}

impl Shared {
    /// An answerer for requests over NATS on these subjects: a shard's are others than a daemon's with all workers.
    pub(crate) fn query_answerer(&self, subjects: &Subjects) -> Answerer {
        self.answerer(subjects, &self.query_limits)
    }

    /// An answerer for listeners: with HTTP's bounds.
    pub(crate) fn listener_answerer(&self) -> Answerer {
        self.answerer(&self.subjects, &self.http_limits)
            .deep_as(self.config.queries.dialect_depth)
    }

    /// An answerer whose answers are sampled.
    fn answerer(&self, subjects: &Subjects, limits: &Live<WireLimits>) -> Answerer {
        Answerer::new(
            Arc::clone(&self.namespaces),
            Arc::clone(&self.trust),
            self.pool.freshness(),
            subjects.clone(),
            limits.clone(),
        )
        .sampled_by(&self.sample)
        .taking_turns(&self.heavy_turns)
        .hinted_by(self.hints.as_ref())
    }
}

/// Tasks that are stopped together.
#[derive(Default)]
pub(crate) struct Stage {
    pub(crate) stop: CancellationToken,
    pub(crate) tasks: TaskTracker,
}

impl Stage {
    /// Tells the tasks to stop, and waits until all have ended.
    pub(crate) async fn end(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
