//! Service on successive NATS connections.
//!
//! A NATS server that is about to shut down says so: it is a *lame duck*. It takes no new connections, and some time
//! later ends the old ones. Messages that are on the way then are lost. So the next connection is made immediately, to
//! another server. When the new connection takes requests, the daemon leaves the queue group on the old one. It still
//! answers all requests that the server has sent on the old connection.

use std::sync::Arc;

use async_nats::Client;
use async_nats::connection::State;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::member::MEMBER_MESSAGES_MIN;
use crate::shared::{Shared, Stage};
use crate::vital::vital;
use kvatlas_client::unix_time_us;
use kvatlas_config::NatsConfig;
use kvatlas_core::wire::Subjects;
use kvatlas_process::admin::{Latch, Readiness};
use kvatlas_process::broker::{
    Buffer, ConnectError, ConnectionNotice, Intake, RefusedSubscriptions, SubscribeError, connect_counted,
};
use kvatlas_telemetry::labels::Connection;

use super::missing::MissingShards;

/// Connection that serves requests.
pub(super) struct Connected {
    pub(super) client: Client,
    /// Number that changes with every refusal of a subscription to requests. After a refusal the daemon is not ready.
    pub(super) refusals: watch::Receiver<u64>,
    /// Count of the refusals of all subscriptions.
    pub(super) refused: RefusedSubscriptions,
    /// Count of the bytes that have been received and not been taken yet.
    pub(super) intake: Arc<Intake>,
    /// Flag that becomes true when the server is about to shut down.
    is_lame: watch::Receiver<bool>,
}

impl Connected {
    /// Returns a future that ends the connection whenever too many of its received bytes wait to be taken. The future
    /// lasts until `stop` is cancelled.
    pub(super) fn watch(&self, stop: CancellationToken) -> impl Future<Output = ()> + Send + use<> {
        let watching = Arc::clone(&self.intake).watch(self.client.clone());
        async move {
            stop.run_until_cancelled(watching).await;
        }
    }
}

/// Connector that makes the connections on which requests come.
#[derive(Clone)]
pub(super) struct Connector {
    nats: NatsConfig,
    readiness: Arc<Readiness>,
    subscriptions: [String; 2],
    role: String,
    messages_max: usize,
    bytes_max: usize,
    /// Subjects on which a gateway asks the shards.
    shards: Subjects,
    /// Record for requests to the shards that the server refuses.
    missing: Arc<MissingShards>,
}

impl Connector {
    /// Makes the connector for one of the daemon's query connections. `number` is the number of that connection.
    /// `subscriptions` are the subjects of the requests that come on it.
    pub(super) fn new(shared: &Shared, subscriptions: [String; 2], number: usize) -> Self {
        Self {
            nats: shared.nats.clone(),
            readiness: Arc::clone(&shared.readiness),
            subscriptions,
            role: format!("queries-{number}"),
            messages_max: shared
                .config
                .events
                .subscription_capacity
                .max(MEMBER_MESSAGES_MIN),
            bytes_max: shared.config.events.subscription_bytes,
            shards: shared.subjects.of_shards(),
            missing: Arc::clone(&shared.missing_shards),
        }
    }

    /// Makes the first connection on which requests come.
    pub(super) async fn connect(&self) -> Result<Connected, ConnectError> {
        self.connect_to(&self.nats).await
    }

    /// Makes another connection, to any server that `client` knows. These include the servers that its present server
    /// has announced.
    async fn connect_beside(&self, client: &Client) -> Result<Connected, ConnectError> {
        let mut nats = self.nats.clone();
        if let Ok(pool) = client.server_pool().await {
            nats.urls = pool.into_iter().map(|server| server.addr).collect();
        }
        self.connect_to(&nats).await
    }

    async fn connect_to(&self, nats: &NatsConfig) -> Result<Connected, ConnectError> {
        let (readiness, subscriptions) = (Arc::clone(&self.readiness), self.subscriptions.clone());
        let (refusals, refusals_seen) = watch::channel(0_u64);
        let (lame, is_lame) = watch::channel(false);
        let latch = Latch::QueriesSubscribed;
        let refused = RefusedSubscriptions::default();
        let counted = refused.clone();
        let (shards, missing) = (self.shards.clone(), Arc::clone(&self.missing));
        let notice = move |notice: &ConnectionNotice| match notice {
            ConnectionNotice::Connected => {
                lame.send_replace(false);
                readiness.set_trouble(latch, None);
            }
            ConnectionNotice::Error(text) => readiness.set_trouble(latch, Some(text.clone())),
            ConnectionNotice::Refused(refusal) => {
                counted.note(notice);
                missing.note_refused(&shards, refusal, unix_time_us());
                readiness.set_trouble(latch, Some(refusal.to_string()));
                if refusal.is_subscription_to(&subscriptions) {
                    readiness.clear(latch);
                    refusals.send_modify(|refusals| *refusals += 1);
                }
            }
            ConnectionNotice::LameDuck => {
                lame.send_replace(true);
            }
            ConnectionNotice::Disconnected | ConnectionNotice::SlowConsumer => {}
        };
        let (buffer, intake) = Buffer::of_bytes(self.messages_max, self.bytes_max);
        let connected = connect_counted(nats, Connection::Queries, &self.role, buffer, notice);
        Ok(Connected {
            client: connected.await?,
            refusals: refusals_seen,
            refused,
            intake,
            is_lame,
        })
    }
}

/// Callback that is called each time that the server has confirmed the subscriptions.
pub(super) type Subscribed = Box<dyn Fn() + Send + Sync>;

/// Serves until `serving` ends. If it was not told to `stop`, the daemon is not ready from then on.
async fn serve_to_end(
    serving: impl Future<Output = Result<(), SubscribeError>>,
    stop: &CancellationToken,
    readiness: &Readiness,
) {
    let trouble = match serving.await {
        Ok(()) => "the connection for queries has ended".to_owned(),
        Err(error) => error.to_string(),
    };
    if !stop.is_cancelled() {
        tracing::error!(error = %trouble, "queries are no longer answered");
        readiness.set_trouble(Latch::QueriesSubscribed, Some(trouble));
        readiness.clear(Latch::QueriesSubscribed);
    }
}

/// Services on successive connections. Each new connection replaces the previous one.
struct ServiceSuccession<Serve> {
    connector: Connector,
    stop: CancellationToken,
    tasks: TaskTracker,
    current: Current,
    serve: Serve,
}

/// Newest connection that takes requests. Until a connection takes requests for the first time, this is the first
/// connection.
#[derive(Clone)]
pub(super) struct Current(Arc<Mutex<Client>>);

impl Current {
    /// Whether the connection is up.
    pub(super) fn stands(&self) -> bool {
        self.0.lock().connection_state() == State::Connected
    }
}

/// Runs `serve` on the connection `first`, and on each connection that replaces it, until the tasks of `stage` are told
/// to stop. Returns the current connection.
pub(super) fn serve_in_turns<Serve, Serving>(
    stage: &Stage,
    connector: Connector,
    first: Connected,
    serve: Serve,
) -> Current
where
    Serve: Fn(Connected, CancellationToken, Subscribed) -> Serving + Send + Sync + 'static,
    Serving: Future<Output = Result<(), SubscribeError>> + Send + 'static,
{
    let turns = ServiceSuccession {
        connector,
        stop: stage.stop.clone(),
        tasks: stage.tasks.clone(),
        current: Current(Arc::new(Mutex::new(first.client.clone()))),
        serve,
    };
    let current = turns.current.clone();
    Arc::new(turns).begin(first, None);
    current
}

impl<Serve, Serving> ServiceSuccession<Serve>
where
    Serve: Fn(Connected, CancellationToken, Subscribed) -> Serving + Send + Sync + 'static,
    Serving: Future<Output = Result<(), SubscribeError>> + Send + 'static,
{
    /// Serves on `connected`. Once `connected` takes requests, cancels `before`, which lets the service on the
    /// previous connection leave its queue group.
    fn begin(self: Arc<Self>, connected: Connected, before: Option<CancellationToken>) {
        let own = self.stop.child_token();
        let (mut is_lame, client) = (connected.is_lame.clone(), connected.client.clone());
        let readiness = Arc::clone(&self.connector.readiness);
        let (current, taking) = (self.current.clone(), client.clone());
        let subscribed: Subscribed = Box::new(move || {
            *current.0.lock() = taking.clone();
            if let Some(before) = &before {
                before.cancel();
            }
            readiness.set_trouble(Latch::QueriesSubscribed, None);
            readiness.set(Latch::QueriesSubscribed);
        });
        let serving = (self.serve)(connected, own.clone(), subscribed);
        let (used, stop, readiness) = (client.clone(), own.clone(), Arc::clone(&self.connector.readiness));
        self.tasks.spawn(async move {
            // A daemon that answers no queries any more would be of no use until it is started again.
            vital(serve_to_end(serving, &stop, &readiness)).await;
            // When a client connects again, the server counts a subscription's messages anew. So it could go on sending
            // messages that nobody takes here. An error means that the connection is closed.
            let _ = used.drain().await;
        });
        let tasks = self.tasks.clone();
        tasks.spawn(own.clone().run_until_cancelled_owned(async move {
            // An error means that the connection has ended.
            if is_lame.wait_for(|is_lame| *is_lame).await.is_err() {
                return;
            }
            tracing::info!("the NATS server is about to shut down; another connection takes over");
            match self.connector.connect_beside(&client).await {
                Ok(next) => self.begin(next, Some(own)),
                Err(error) => tracing::error!(%error, "no other connection takes over"),
            }
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns whether the latch is set, and the trouble, after `serving` has ended.
    async fn after(
        serving: impl Future<Output = Result<(), SubscribeError>>,
        is_told: bool,
    ) -> (bool, Vec<String>) {
        let (stop, readiness) = (CancellationToken::new(), Readiness::new());
        readiness.set(Latch::QueriesSubscribed);
        if is_told {
            stop.cancel();
        }
        serve_to_end(serving, &stop, &readiness).await;
        let report = readiness.report();
        (report.is_set(Latch::QueriesSubscribed), report.reasons())
    }

    #[tokio::test]
    async fn a_daemon_whose_queries_are_no_longer_served_is_not_ready() {
        let refused = || async { Err(SubscribeError::new("a", &"no right")) };
        assert!(after(async { Ok(()) }, true).await.0);
        assert!(after(refused(), true).await.0);
        let (is_set, reasons) = after(refused(), false).await;
        assert!(!is_set);
        assert!(
            reasons.iter().any(|reason| reason.contains("no right")),
            "{reasons:?}"
        );
        assert!(!after(async { Ok(()) }, false).await.0);
    }
}
