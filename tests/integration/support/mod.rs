//! Helpers for tests, each of which runs a real broker and a real daemon.

pub mod certificates;
pub mod cluster;
pub mod doctor;
pub mod faulty_disk;
pub mod fleet;
pub mod http;
pub mod jetstream;
pub mod metrics;
pub mod process;
pub mod proxy;
pub mod publisher;
pub mod relay;
pub mod truth;
pub mod way;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use kvatlas_client::publish::{HolderPublisher, PublishConnection, PublishedHolder, PublisherOptions};
use kvatlas_client::{ClientError, QueryClient};
use kvatlas_config::Config;
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{
    BatchCursor, ErrorCode, Event, HolderStatusReply, NamespaceName, QueryKey, QueryReply, RemovedBlocks,
    SingleQuery, StatusReply, StoredBlocks, Subjects, Tier, WorkerName,
};
use kvatlas_daemon::Daemon;
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker, find_nats_server};

use publisher::Publisher;

/// Longest wait of a test for something that must happen.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Longest wait for the status of a holder in one attempt. The request may have gone to a killed daemon, whose end the
/// broker has not noticed yet.
const LOOK_PATIENCE: Duration = Duration::from_secs(5);
/// First pause of [`eventually`] between two attempts. Later pauses are longer.
const INTERVAL: Duration = Duration::from_millis(2);
/// Longest pause of [`eventually`] between two attempts. Each attempt takes processor time from the daemon.
const INTERVAL_MAX: Duration = Duration::from_millis(50);

/// Returns how often a scenario runs, each time with another seed: 2 times, or as often as `KVATLAS_TEST_FAULT_RUNS`
/// says.
pub fn fault_runs() -> u64 {
    let given = std::env::var("KVATLAS_TEST_FAULT_RUNS").ok();
    given.map_or(2, |runs| {
        runs.parse().expect("KVATLAS_TEST_FAULT_RUNS is a number")
    })
}

/// Whether scenarios run in their long form, which `KVATLAS_TEST_FAULT_RUNS` selects.
pub fn is_long_form() -> bool {
    std::env::var_os("KVATLAS_TEST_FAULT_RUNS").is_some()
}

/// Calls `look` again and again until it returns a value. Fails the test if that takes too long.
pub async fn eventually<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let looking = async {
        let mut interval = INTERVAL;
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(interval).await;
            interval = INTERVAL_MAX.min(interval * 3 / 2);
        }
    };
    // The time limit also ends a look that never ends.
    tokio::time::timeout(PATIENCE, looking)
        .await
        .unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"))
}

/// Reports that a check is skipped, and why. The test passes all the same. `deploy/test.sh` counts the lines that this
/// function writes to the file that `KVATLAS_TEST_SKIPS` names.
pub fn skipped(why: &str) {
    use std::io::Write;
    let line = format!("SKIPPED: {why}\n");
    // `eprintln!` would write nothing in a test that passes.
    std::io::stderr().write_all(line.as_bytes()).unwrap();
    if let Some(path) = std::env::var_os("KVATLAS_TEST_SKIPS") {
        let mut file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .unwrap();
        file.write_all(line.as_bytes()).unwrap();
    }
}

/// Returns the path of the current server.
pub fn server() -> PathBuf {
    find_nats_server(None).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns the path of Debian's older server, if the environment names it.
pub fn old_server() -> Option<PathBuf> {
    let named = std::env::var_os("KVATLAS_TEST_OLD_NATS_SERVER").map(PathBuf::from);
    if named.is_none() {
        skipped("KVATLAS_TEST_OLD_NATS_SERVER names no older nats-server to test against");
    }
    named
}

/// Starts a broker on a port of its own.
pub async fn broker() -> EmbeddedBroker {
    broker_on(lasting_port()).await
}

/// Returns broker options with a port that no other test gets. So a client that outlives its broker cannot connect to
/// another test's broker.
pub fn own_port() -> BrokerOptions {
    BrokerOptions {
        port: Some(lasting_port()),
        ..BrokerOptions::default()
    }
}

/// Starts a broker on `port`, for example where another broker was.
pub async fn broker_on(port: u16) -> EmbeddedBroker {
    let options = BrokerOptions {
        port: Some(port),
        ..BrokerOptions::default()
    };
    EmbeddedBroker::start_with(&server(), options).await.unwrap()
}

/// Returns a free port that no other call returns. The port is below the range from which the system takes ports for
/// connections. So no connection takes the port while its broker is down.
pub fn lasting_port() -> u16 {
    static NEXT: LazyLock<AtomicU16> = LazyLock::new(|| AtomicU16::new(fastrand::u16(..)));
    loop {
        // The ports above belong to `tests/engines`, which may run at the same time.
        let port = 10_000 + NEXT.fetch_add(1, Ordering::Relaxed) % 12_000;
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Returns a configuration for tests: the defaults, a free admin port, and `settings`.
pub fn config(url: &str, settings: &[(&str, &str)]) -> Config {
    let mut given = BTreeMap::from([
        ("nats.url".to_owned(), url.to_owned()),
        ("admin.listen".to_owned(), "127.0.0.1:0".to_owned()),
        // A busy machine is slow. Tests of slowness set another time.
        ("events.behind_after_ms".to_owned(), "30000".to_owned()),
        // Publishers in tests send no heartbeats. Tests of silence set another time.
        ("namespace_defaults.stale_after_ms".to_owned(), "30000".to_owned()),
    ]);
    for (key, value) in settings {
        given.insert((*key).to_owned(), (*value).to_owned());
    }
    Config::load(given, std::iter::empty(), None).unwrap()
}

/// Starts a daemon, and waits until it is ready.
pub async fn daemon(url: &str, settings: &[(&str, &str)]) -> Daemon {
    started(config(url, settings)).await
}

/// Starts a daemon with a NATS server of its own, and waits until it is ready.
pub async fn embedded_daemon(settings: &[(&str, &str)]) -> Daemon {
    let own = [("nats.embedded", "true"), ("admin.listen", "off")];
    let given = own.iter().chain(settings);
    let given = given.map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    started(Config::load(given.collect(), std::iter::empty(), None).unwrap()).await
}

async fn started(config: Config) -> Daemon {
    let daemon = Daemon::start(config).await.unwrap();
    tokio::time::timeout(PATIENCE, daemon.ready())
        .await
        .expect("the daemon becomes ready");
    daemon
}

/// Returns the setting for a snapshot directory.
pub fn snapshots_in(directory: &Path) -> (&'static str, String) {
    ("snapshots.directory", directory.display().to_string())
}

pub fn namespace() -> NamespaceName {
    NamespaceName::new("llama").unwrap()
}

pub fn worker(name: &str) -> WorkerName {
    WorkerName::new(name).unwrap()
}

pub fn subjects() -> Subjects {
    Subjects::new("kvatlas").unwrap()
}

/// Returns the sequence hashes `first`, `first` + 1, …
pub fn hashes(first: u64, count: u64) -> Vec<SequenceHash> {
    (first..first + count).map(SequenceHash).collect()
}

/// Returns an event that stores blocks from position 0 on.
pub fn stored(hashes: Vec<SequenceHash>) -> Event {
    Event::Stored(StoredBlocks::by_sequence(None, None, hashes))
}

/// Returns an event that stores blocks after `parent`.
pub fn stored_after(parent: u64, hashes: Vec<SequenceHash>) -> Event {
    Event::Stored(StoredBlocks::by_sequence(
        Some(SequenceHash(parent)),
        None,
        hashes,
    ))
}

pub fn removed(hashes: Vec<SequenceHash>) -> Event {
    Event::Removed(RemovedBlocks::by_sequence(hashes))
}

/// Returns a query by sequence hashes.
pub fn by_sequence(chain: &[SequenceHash]) -> SingleQuery {
    SingleQuery::new(QueryKey::SequenceHashes(chain.to_vec()))
}

/// Client for tests: a connection, a query client, and publishers.
pub struct Client {
    pub nats: async_nats::Client,
    pub queries: QueryClient,
}

impl Client {
    pub async fn connect(url: &str) -> Self {
        let nats = async_nats::ConnectOptions::new()
            .max_reconnects(None)
            .connect(url)
            .await
            .unwrap();
        Self {
            queries: QueryClient::new(nats.clone(), subjects()).with_patience(PATIENCE),
            nats,
        }
    }

    /// Makes a publisher for a rank of a worker, in epoch 1.
    pub fn publisher(&self, name: &str, rank: u32) -> Publisher {
        let cursor = BatchCursor { epoch: 1, seq: 0 };
        Publisher::new(self.nats.clone(), &subjects(), &namespace(), &worker(name), rank).resuming(cursor)
    }

    pub async fn ask(&self, hashes: Vec<SequenceHash>) -> QueryReply {
        self.ask_with(SingleQuery::new(QueryKey::SequenceHashes(hashes)))
            .await
            .unwrap()
    }

    pub async fn ask_with(&self, query: SingleQuery) -> Result<QueryReply, ClientError> {
        self.queries.query(&namespace(), query).await
    }

    pub async fn status(&self) -> Result<StatusReply, ClientError> {
        self.queries.status(&namespace()).await
    }

    /// Returns the status of one holder; `None` if the daemon does not know it or does not answer.
    pub async fn holder(&self, name: &str, rank: u32) -> Option<HolderStatusReply> {
        let queries = self.queries.clone().with_patience(LOOK_PATIENCE);
        let status = queries.status(&namespace()).await.ok()?;
        status
            .holders
            .into_iter()
            .find(|holder| holder.worker.as_str() == name && holder.rank == rank)
    }

    /// Waits until the daemons have heard of all publishers on the broker.
    pub async fn listed(&self) {
        let nobody = NamespaceName::new("nobody-publishes-for-it").unwrap();
        eventually("everybody who publishes is known", async || {
            match self.queries.status(&nobody).await {
                Err(ClientError::Refused(error)) => (error.code == ErrorCode::UnknownNamespace).then_some(()),
                _ => None,
            }
        })
        .await;
    }

    /// Waits until a holder is exact.
    pub async fn exact(&self, name: &str, rank: u32) {
        eventually("the holder is exact", async || {
            self.holder(name, rank).await?.exact.then_some(())
        })
        .await;
    }

    /// Waits until the daemon has applied the batch at `cursor` and has no open question to the publisher. Returns the
    /// holder's status.
    pub async fn applied(&self, name: &str, rank: u32, cursor: BatchCursor) -> HolderStatusReply {
        let what = format!(
            "{name}/{rank} reaches epoch {} batch {}",
            cursor.epoch, cursor.seq
        );
        eventually(&what, async || {
            let holder = self.holder(name, rank).await?;
            let applied = BatchCursor {
                epoch: holder.epoch,
                seq: holder.seq,
            };
            let is_asking = holder
                .degraded
                .contains(kvatlas_core::wire::DegradedReason::Resyncing);
            (applied >= cursor && !is_asking).then_some(holder)
        })
        .await
    }

    /// Publishes one batch, and waits until it is applied.
    pub async fn tell(
        &self,
        publisher: &mut Publisher,
        name: &str,
        rank: u32,
        events: Vec<Event>,
    ) -> HolderStatusReply {
        self.tell_in(Tier::DEVICE, publisher, name, rank, events).await
    }

    /// Publishes a batch as [`Self::tell`] does, in the tier `tier`.
    pub async fn tell_in(
        &self,
        tier: Tier,
        publisher: &mut Publisher,
        name: &str,
        rank: u32,
        events: Vec<Event>,
    ) -> HolderStatusReply {
        let cursor = publisher.publish(tier, events).await.unwrap();
        self.applied(name, rank, cursor).await
    }
}

/// Starts the library's publisher, as engines use it, for rank 0 of a worker.
pub async fn engine(
    nats: impl Into<PublishConnection>,
    subjects: &Subjects,
    name: &str,
    options: PublisherOptions,
) -> HolderPublisher {
    let holder = PublishedHolder {
        namespace: namespace(),
        worker: worker(name),
        rank: 0,
    };
    HolderPublisher::start(nats, subjects, holder, options)
        .await
        .unwrap()
}

/// Returns the worker, rank, matched blocks and exactness of every holder, in the order of the reply.
pub fn matches(reply: &QueryReply) -> Vec<(String, u32, u32, bool)> {
    let holder = |holder: &kvatlas_core::wire::HolderMatch| {
        (
            holder.worker.to_string(),
            holder.rank,
            holder.matched_blocks,
            holder.exact,
        )
    };
    reply.holders.iter().map(holder).collect()
}

/// Whether batches of the holder are known to be missing.
pub fn has_gap(status: &HolderStatusReply) -> bool {
    status.degraded.contains(kvatlas_core::wire::DegradedReason::Gap)
}

/// Returns the words for the reasons why a holder is degraded. `resyncing` (the daemon is asking the publisher) is left
/// out, because it comes and goes.
pub fn reasons(status: &HolderStatusReply) -> Vec<&'static str> {
    status
        .degraded
        .without(kvatlas_core::wire::DegradedReason::Resyncing)
        .iter()
        .map(kvatlas_core::wire::DegradedReason::as_str)
        .collect()
}

/// Sends a GET request to the admin listener. Returns the status code and the body.
pub fn http_get(address: std::net::SocketAddr, path: &str) -> (u16, String) {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    let code = head.split(' ').nth(1).unwrap().parse().unwrap();
    (code, dechunk(head, body))
}

fn dechunk(head: &str, body: &str) -> String {
    if !head.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        return body.to_owned();
    }
    let (mut rest, mut whole) = (body, String::new());
    while let Some((size, tail)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        if size == 0 {
            break;
        }
        whole.push_str(&tail[..size]);
        rest = &tail[size + 2..];
    }
    whole
}
