//! Snapshots: the time of a start from a snapshot, the size of a snapshot, and the effect of writing one on queries.
//!
//! ```sh
//! cargo bench --bench snapshots                                        # 5M blocks on 128 holders
//! cargo bench --bench snapshots -- --blocks 200000 --holders 16
//! cargo bench --bench snapshots -- --sharing 8 --tail 50000
//! ```
//!
//! - *save*: writing a snapshot of all holders while nothing else runs. Also the snapshot's bytes for each held block.
//! - *warm start*: a daemon with JetStream and that snapshot, from its start until it is ready. It reads the snapshot
//!   twice (to check it, then to apply it), reads the later `--tail` batches of the stream, and answers queries. For
//!   comparison, the bench also measures how long it takes only to read the file, which is then in the same cache.
//! - *query*: searches of 64 blocks by sequence hashes in the index itself, one after another on one thread. They run
//!   once while no snapshot is written, and once while snapshots are written without a pause. *lane* is the time that a
//!   message waits for its lane (the thread that applies it) during these searches.
//!
//! Blocks lie in chains of 1024; every chain is held by `--sharing` holders. Needs a `nats-server`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a bench fails by panicking"
)]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_nats::jetstream;
use common::mix;
use common::publisher::Publisher;
use hdrhistogram::Histogram;
use kvatlas_client::{QueryClient, unix_time_us};
use kvatlas_config::Config;
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::index::{Capacity, IndexLimits, NamespaceSettings, Namespaces, Search};
use kvatlas_core::snapshot::StreamCursor;
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{
    BatchCursor, Event, EventBatch, NamespaceName, QueryKey, StoredBlocks, Subjects, Tier, WireLimits,
    WorkerName,
};
use kvatlas_daemon::Daemon;
use kvatlas_daemon::lanes::{LanePool, LaneSettings, LivenessSettings, StreamPosition};
use kvatlas_daemon::snapshots::{Saved, SnapshotDirectory, Snapshotter};
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker, find_nats_server};
use tokio::runtime::Handle;

const DEPTH: u64 = 1024;
const QUERY_BLOCKS: u64 = 64;
const STREAM: &str = "KVATLAS_EVENTS";
/// Duration of each measurement of queries.
const QUERY_DURATION: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy)]
struct Scale {
    blocks: u64,
    holders: u64,
    sharing: u64,
    tail: u64,
}

impl Scale {
    fn from_arguments() -> Self {
        let mut scale = Self {
            blocks: 5_000_000,
            holders: 128,
            sharing: 1,
            tail: 10_000,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(name) = arguments.next() {
            let field = match name.as_str() {
                "--blocks" => &mut scale.blocks,
                "--holders" => &mut scale.holders,
                "--sharing" => &mut scale.sharing,
                "--tail" => &mut scale.tail,
                // Cargo adds this argument.
                "--bench" => continue,
                _ => panic!("{name}: give --blocks, --holders, --sharing or --tail and a number"),
            };
            *field = arguments
                .next()
                .and_then(|text| text.parse().ok())
                .expect("a number");
        }
        assert!(
            (1..=scale.holders).contains(&scale.sharing),
            "--sharing is 1 to --holders"
        );
        scale
    }

    /// Returns the number of different chains.
    fn chains(self) -> u64 {
        (self.blocks / DEPTH / self.sharing).max(1)
    }
}

#[tokio::main]
async fn main() {
    let scale = Scale::from_arguments();
    let broker = broker().await;
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let position = Arc::new(StreamPosition::default());
    position.set(create_stream(&nats).await);

    let namespaces = Arc::new(namespaces());
    let pool = Arc::new(pool(&namespaces));
    let batches = fill(&pool, scale).await;
    let held = scale.chains() * scale.sharing * DEPTH;
    println!("{held} held blocks, {} holders, {scale:?}", scale.holders);

    let directory = SnapshotDirectory::open(folder.path(), 1).unwrap();
    let snapshotter = Arc::new(Snapshotter::new(
        Arc::clone(&pool),
        directory,
        position,
        Arc::default(),
    ));
    let saved = save(&snapshotter).await;
    println!(
        "save            {:8.3} s   {} bytes, {:.2} bytes a block",
        saved.elapsed.as_secs_f64(),
        saved.bytes,
        saved.bytes as f64 / held as f64
    );
    let query = move |number: u64| {
        let chain = hashes(mix(number) % scale.chains(), QUERY_BLOCKS);
        let holders = usize::try_from(scale.sharing).unwrap();
        (QueryKey::SequenceHashes(chain), holders)
    };
    let quiet = measure(&pool, &namespaces, query, None).await;
    let during = measure(&pool, &namespaces, query, Some(&snapshotter)).await;
    quiet.print("no snapshot");
    during.print("while saving");
    drop((snapshotter, pool, namespaces));
    warm_start(&broker, &nats, folder.path(), scale, &batches).await;
    println!(
        "memory high water (all of the above in one process): {}",
        memory_high_water()
    );
}

async fn broker() -> EmbeddedBroker {
    let options = BrokerOptions {
        with_jetstream: true,
        ..BrokerOptions::default()
    };
    EmbeddedBroker::start_with(&find_nats_server(None).unwrap(), options)
        .await
        .unwrap()
}

/// Makes the events stream. Returns the position before its first message.
async fn create_stream(nats: &async_nats::Client) -> StreamCursor {
    let config = jetstream::stream::Config {
        name: STREAM.to_owned(),
        subjects: vec![subjects().all_events()],
        ..jetstream::stream::Config::default()
    };
    let jetstream = jetstream::new(nats.clone());
    jetstream.create_stream(config).await.unwrap();
    let stream = jetstream.get_stream(STREAM).await.unwrap();
    let created_us = stream.cached_info().created.unix_timestamp_nanos() / 1000;
    StreamCursor {
        stream: STREAM.to_owned(),
        created_us: u64::try_from(created_us).unwrap(),
        sequence: 0,
        digest: None,
        intake: None,
        has_all: true,
        server: None,
    }
}

fn subjects() -> Subjects {
    Subjects::new("kvatlas").unwrap()
}

fn namespace() -> NamespaceName {
    NamespaceName::new("bench").unwrap()
}

fn worker(number: u64) -> WorkerName {
    WorkerName::new(&format!("worker-{number}")).unwrap()
}

fn namespaces() -> Namespaces {
    Namespaces::new(
        Capacity::UNBOUNDED,
        NamespaceSettings::default(),
        Vec::new(),
        IndexLimits::default(),
        4,
    )
}

fn pool(namespaces: &Arc<Namespaces>) -> LanePool {
    let settings = LaneSettings {
        subjects: subjects(),
        lanes: 1,
        lane_queue_bytes: 64 << 20,
        behind_after: None,
        limits: WireLimits::default(),
        shard: None,
        holding: None,
        liveness: LivenessSettings::default(),
        epoch_ahead_max: None,
    };
    LanePool::start(&settings, Arc::clone(namespaces)).unwrap()
}

/// Returns numbers that look like hashes, as the blocks of a chain.
fn hashes(chain: u64, depth: u64) -> Vec<SequenceHash> {
    (0..depth)
        .map(|position| SequenceHash(mix(chain * DEPTH + position)))
        .collect()
}

/// Stores every holder's chains. Returns the number of batches of each holder.
async fn fill(pool: &LanePool, scale: Scale) -> Vec<u64> {
    let generation = StreamTrust::default().generation();
    let mut batches = vec![0_u64; usize::try_from(scale.holders).unwrap()];
    for chain in 0..scale.chains() {
        for copy in 0..scale.sharing {
            let number = (chain + copy) % scale.holders;
            let seq = &mut batches[usize::try_from(number).unwrap()];
            *seq += 1;
            let batch = batch(*seq, hashes(chain, DEPTH));
            pool.dispatch(&namespace(), worker(number), &batch.encode(), generation)
                .await
                .unwrap();
        }
    }
    pool.drain().await.unwrap();
    batches
}

fn batch(seq: u64, hashes: Vec<SequenceHash>) -> EventBatch {
    EventBatch {
        epoch: 1,
        seq,
        rank: 0,
        time_us: None,
        tier: Tier::DEVICE,
        block_size: None,
        profile: None,
        events: vec![Event::Stored(StoredBlocks::by_sequence(None, None, hashes))],
    }
}

async fn save(snapshotter: &Arc<Snapshotter>) -> Saved {
    let (snapshotter, runtime) = (Arc::clone(snapshotter), Handle::current());
    tokio::task::spawn_blocking(move || snapshotter.save(unix_time_us(), &runtime).unwrap())
        .await
        .unwrap()
}

/// Measurements of one period.
struct Measured {
    query_ns: Histogram<u64>,
    lane_us: Histogram<u64>,
    snapshots: u32,
}

impl Measured {
    fn print(&self, name: &str) {
        println!(
            "query, {name:<13} p50 {} ns, p99 {} ns, {} searches; lane p50 {} µs, p99 {} µs, max {} µs; {} snapshots",
            self.query_ns.value_at_quantile(0.5),
            self.query_ns.value_at_quantile(0.99),
            self.query_ns.len(),
            self.lane_us.value_at_quantile(0.5),
            self.lane_us.value_at_quantile(0.99),
            self.lane_us.max(),
            self.snapshots
        );
    }
}

/// Measures searches, and the time until all lanes have done their waiting work, for [`QUERY_DURATION`]. If there is a
/// `snapshotter`, it writes snapshots during this time. `query` returns a query for each number, and how many holders
/// the query must find.
async fn measure(
    pool: &Arc<LanePool>,
    namespaces: &Arc<Namespaces>,
    query: impl Fn(u64) -> (QueryKey, usize) + Send + 'static,
    snapshotter: Option<&Arc<Snapshotter>>,
) -> Measured {
    let is_over = Arc::new(AtomicBool::new(false));
    let (namespaces, over) = (Arc::clone(namespaces), Arc::clone(&is_over));
    let searching = std::thread::spawn(move || search(&namespaces, query, &over));
    let (lanes, over) = (Arc::clone(pool), Arc::clone(&is_over));
    let waiting = tokio::spawn(async move {
        let mut lane_us = Histogram::new(3).unwrap();
        while !over.load(Ordering::Relaxed) {
            let started = Instant::now();
            lanes.drain().await.unwrap();
            lane_us
                .record(u64::try_from(started.elapsed().as_micros()).unwrap())
                .unwrap();
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        lane_us
    });
    let started = Instant::now();
    let mut snapshots = 0;
    while started.elapsed() < QUERY_DURATION {
        match snapshotter {
            None => tokio::time::sleep(QUERY_DURATION).await,
            Some(snapshotter) => {
                save(snapshotter).await;
                snapshots += 1;
            }
        }
    }
    is_over.store(true, Ordering::Relaxed);
    Measured {
        query_ns: searching.join().unwrap(),
        lane_us: waiting.await.unwrap(),
        snapshots,
    }
}

fn search(
    namespaces: &Namespaces,
    query: impl Fn(u64) -> (QueryKey, usize),
    is_over: &AtomicBool,
) -> Histogram<u64> {
    let found = namespaces.get(&namespace()).unwrap();
    let mut query_ns = Histogram::new(3).unwrap();
    let mut number = 0;
    while !is_over.load(Ordering::Relaxed) {
        number += 1;
        let (query, holders) = query(number);
        let started = Instant::now();
        let matches = found.indexer.find_matches(&query, Search::default()).unwrap();
        let elapsed = started.elapsed();
        assert_eq!(matches.holders().count(), holders);
        query_ns
            .record(u64::try_from(elapsed.as_nanos()).unwrap())
            .unwrap();
    }
    query_ns
}

/// Starts a daemon with the snapshot and the later batches in the stream, and waits until it is ready.
async fn warm_start(
    broker: &EmbeddedBroker,
    nats: &async_nats::Client,
    folder: &Path,
    scale: Scale,
    batches: &[u64],
) {
    publish_tail(nats, scale, batches).await;
    let file = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .max()
        .unwrap();
    let started = Instant::now();
    let bytes = std::fs::read(&file).unwrap().len();
    let reading = started.elapsed();

    let given = [
        ("nats.url", broker.url()),
        ("admin.listen", "off"),
        ("events.transport", "jetstream"),
        ("snapshots.directory", folder.to_str().unwrap()),
    ];
    let given: BTreeMap<String, String> = given
        .into_iter()
        .map(|(key, value)| (key.to_owned(), value.to_owned()))
        .collect();
    let config = Config::load(given, std::iter::empty(), None).unwrap();
    let started = Instant::now();
    let daemon = Daemon::start(config).await.unwrap();
    let loaded = started.elapsed();
    daemon.ready().await;
    let ready = started.elapsed();
    println!(
        "warm start      {:8.3} s   load {:.3} s, then catch up {} batches and be ready {:.3} s; {:.0} times reading the {bytes} bytes ({:.4} s)",
        ready.as_secs_f64(),
        loaded.as_secs_f64(),
        scale.tail,
        (ready - loaded).as_secs_f64(),
        ready.as_secs_f64() / reading.as_secs_f64(),
        reading.as_secs_f64()
    );
    check(nats, scale).await;
    daemon.stop().await;
}

async fn publish_tail(nats: &async_nats::Client, scale: Scale, batches: &[u64]) {
    let mut publishers: Vec<Publisher> = (0..scale.holders)
        .zip(batches)
        .map(|(number, seq)| {
            let cursor = BatchCursor { epoch: 1, seq: *seq };
            Publisher::new(nats.clone(), &subjects(), &namespace(), &worker(number), 0).resuming(cursor)
        })
        .collect();
    let count = publishers.len();
    for number in 0..scale.tail {
        let event = Event::Stored(StoredBlocks::by_sequence(
            None,
            None,
            hashes(scale.chains() + number, 8),
        ));
        let publisher = &mut publishers[usize::try_from(number).unwrap() % count];
        publisher.publish(Tier::DEVICE, vec![event]).await.unwrap();
    }
    nats.flush().await.unwrap();
    let jetstream = jetstream::new(nats.clone());
    loop {
        let stream = jetstream.get_stream(STREAM).await.unwrap();
        if stream.cached_info().state.last_sequence >= scale.tail {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Checks that all holders are there, with all blocks, and exact.
async fn check(nats: &async_nats::Client, scale: Scale) {
    let client = QueryClient::new(nats.clone(), subjects()).with_patience(Duration::from_secs(30));
    let status = client.status(&namespace()).await.unwrap();
    let blocks: u64 = status.holders.iter().map(|holder| holder.blocks).sum();
    assert_eq!(blocks, scale.chains() * scale.sharing * DEPTH + scale.tail * 8);
    assert!(
        status.holders.iter().all(|holder| holder.exact),
        "a holder is not exact"
    );
}

/// Returns the peak memory of this process as text, from Linux's `/proc`.
fn memory_high_water() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.map_or_else(|| "unknown".to_owned(), |text| text.trim().to_owned())
}
