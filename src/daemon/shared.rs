//! State that the rooms (folders of the daemon) share, and the tasks that they start.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use kvatlas_core::index::Namespaces;
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{Subjects, WireLimits};

use super::hints::Hints;
use super::history::History;
use super::http::TokenFiles;
use super::lanes::{LanePool, StreamPosition};
use super::outcomes::Outcomes;
use super::queries::{Answerer, HeavyTurns, MissingShards, QuerySample, Source};
use super::snapshots::SnapshotFailing;
use super::traces::Tracer;
use super::vital::vital;
use kvatlas_config::{Config, Live, NatsConfig};
use kvatlas_process::admin::Readiness;

/// State that the rooms (folders) of the daemon share from its start on.
pub(crate) struct Shared {
    pub(crate) config: Config,
    /// Configuration of the connection to NATS. Has the address of the embedded broker, if the broker is embedded.
    pub(crate) nats: NatsConfig,
    pub(crate) subjects: Subjects,
    pub(crate) namespaces: Arc<Namespaces>,
    pub(crate) trust: Arc<StreamTrust>,
    pub(crate) position: Arc<StreamPosition>,
    pub(crate) readiness: Arc<Readiness>,
    pub(crate) pool: Arc<LanePool>,
    /// Address of the admin listener. `None` until the listener is open.
    pub(crate) admin_address: Option<SocketAddr>,
    /// Sample of recent queries, for people who look at the admin listener's page.
    pub(crate) sample: Arc<QuerySample>,
    /// Shards whose blocks are missing from answers. Used by gateways only.
    pub(crate) missing_shards: Arc<MissingShards>,
    /// Error of the newest snapshot, as long as snapshots cannot be written.
    pub(crate) snapshot_failing: Arc<SnapshotFailing>,
    /// Queues in which requests that take long wait for their turns, shared by NATS and all listeners.
    pub(crate) heavy_turns: Arc<HeavyTurns>,
    /// Record of the times at which each holder was exact, and at which it was not.
    pub(crate) history: Arc<History>,
    /// Record of outcomes: how many cached blocks requests really found, and how many the answers had promised.
    pub(crate) outcomes: Arc<Outcomes>,
    /// Hints of routers (reports of where they have sent requests). `None` if hints are not taken.
    pub(crate) hints: Option<Arc<Hints>>,
    /// Tracer that opens trace spans. `None` if no collector is configured.
    pub(crate) tracer: Option<Tracer>,
    /// Bounds on queries over NATS.
    pub(crate) query_limits: Live<WireLimits>,
    /// Bounds on queries over HTTP.
    pub(crate) http_limits: Live<WireLimits>,
    /// Time without any holder after which a namespace is forgotten.
    pub(crate) empty_namespace: Live<Duration>,
    /// Files with the tokens of all listeners.
    pub(crate) tokens: TokenFiles,
    /// Source of the answers of all listeners: the index, or the shards that a gateway asks. Empty until the first
    /// listener asks for the source.
    pub(crate) source: OnceCell<Arc<Source>>,
}

impl Shared {
    /// Returns an answerer for requests over NATS on `subjects`. A shard (a daemon with a part of the workers) has
    /// subjects of its own.
    pub(crate) fn query_answerer(&self, subjects: &Subjects) -> Answerer {
        self.answerer(subjects, &self.query_limits)
    }

    /// Returns an answerer for listeners (HTTP and others), with the bounds on HTTP queries.
    pub(crate) fn listener_answerer(&self) -> Answerer {
        self.answerer(&self.subjects, &self.http_limits)
    }

    /// Returns an answerer that keeps a sample of its queries, lets large requests take turns, and adds routers' hints
    /// to answers.
    fn answerer(&self, subjects: &Subjects, limits: &Live<WireLimits>) -> Answerer {
        let (namespaces, trust) = (Arc::clone(&self.namespaces), Arc::clone(&self.trust));
        let (freshness, strays) = (self.pool.freshness(), self.pool.stray_names());
        Answerer {
            sample: Some(Arc::clone(&self.sample)),
            heavy_turns: Arc::clone(&self.heavy_turns),
            hints: self.hints.clone(),
            ..Answerer::new(
                namespaces,
                trust,
                freshness,
                strays,
                subjects.clone(),
                limits.clone(),
            )
        }
    }
}

/// Set of tasks that are stopped together at a step of the daemon's stop. Those that its
/// methods start are vital: if one panics, the process ends.
#[derive(Default)]
pub(crate) struct Stage {
    pub(crate) stop: CancellationToken,
    pub(crate) tasks: TaskTracker,
}

impl Stage {
    /// Runs `work` as a task of this set, until the set is stopped.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let work = self.stop.clone().run_until_cancelled_owned(work);
        self.spawn_to_end(work.map(drop));
    }

    /// Runs `work` as a task of this set, to its end. It notices by itself that the set is stopped.
    pub(crate) fn spawn_to_end(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(vital(work));
    }

    /// Tells the tasks of this set to stop, and waits until all have ended.
    pub(crate) async fn end(&self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Makes an empty index of `namespaces_max` namespaces at most, without further bounds.
#[cfg(test)]
pub(crate) fn unbounded(namespaces_max: usize) -> Namespaces {
    use kvatlas_core::index::{Capacity, IndexLimits, NamespaceSettings};

    Namespaces::new(
        Capacity::UNBOUNDED,
        NamespaceSettings::default(),
        Vec::new(),
        IndexLimits::default(),
        namespaces_max,
    )
}
