//! Resynchronisation: the time until a daemon without any state has thousands of holders exact, and its cost.
//!
//! ```sh
//! cargo bench --bench resync                                    # 10,000 holders of 200 blocks
//! cargo bench --bench resync -- --holders 1000 --blocks 1000 --concurrency 64
//! ```
//!
//! The publishers of all holders are in this process. Each stores its blocks while no daemon runs. Then `kvatlas serve`
//! is started, as a process of its own with a broker of its own. Every holder's next heartbeat shows the daemon that
//! batches are missing. The daemon asks `resync.concurrency` publishers at a time, and gets the full states. Meanwhile
//! a router queries one holder after another. The time is measured from the start of the process until every holder is
//! exact with all its blocks. Needs a `nats-server`.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a bench fails by panicking"
)]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{KilledOnDrop, mix, start_daemon};
use hdrhistogram::Histogram;
use kvatlas_client::QueryClient;
use kvatlas_client::publish::{HolderPublisher, PublishedHolder, PublisherOptions};
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{
    Event, NamespaceName, QueryKey, SingleQuery, StatusReply, StoredBlocks, Subjects, Tier, WorkerName,
};
use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};

/// Number of connections that the publishers share.
const CONNECTIONS: usize = 8;
/// Interval at which the status is asked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Longest time that the whole resynchronisation may take.
const PATIENCE: Duration = Duration::from_secs(600);

#[derive(Debug, Clone, Copy)]
struct Scale {
    holders: u64,
    blocks: u64,
    concurrency: u64,
}

impl Scale {
    fn from_arguments() -> Self {
        let mut scale = Self {
            holders: 10_000,
            blocks: 200,
            concurrency: 16,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(name) = arguments.next() {
            let field = match name.as_str() {
                "--holders" => &mut scale.holders,
                "--blocks" => &mut scale.blocks,
                "--concurrency" => &mut scale.concurrency,
                // Cargo adds this argument.
                "--bench" => continue,
                _ => panic!("{name}: give --holders, --blocks or --concurrency and a number"),
            };
            *field = arguments
                .next()
                .and_then(|text| text.parse().ok())
                .expect("a number");
        }
        scale
    }
}

fn start(url: &str, scale: Scale) -> KilledOnDrop {
    let workers_max = scale.holders.max(4096).to_string();
    let concurrency = scale.concurrency.to_string();
    let arguments = [
        ["--logging-level", "error"],
        ["--limits-max-workers-per-namespace", &workers_max],
        ["--resync-concurrency", &concurrency],
    ];
    start_daemon(url, arguments.as_flattened())
}

#[tokio::main]
async fn main() {
    let scale = Scale::from_arguments();
    let broker = EmbeddedBroker::start(&find_nats_server(None).unwrap())
        .await
        .unwrap();
    let publishers = publishers(broker.url(), scale).await;
    let answered = || -> u64 {
        let counters = publishers.iter().map(HolderPublisher::counters);
        counters
            .map(|counters| counters.answers_full + counters.answers_missing)
            .sum()
    };
    let before = memory_high_water(std::process::id());
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let client = QueryClient::new(nats, subjects()).with_patience(Duration::from_secs(5));

    let daemon = start(broker.url(), scale);
    let started = Instant::now();
    let is_over = Arc::new(AtomicBool::new(false));
    let routing = tokio::spawn(route(broker.url().to_owned(), scale, Arc::clone(&is_over)));
    let mut known = None;
    let exact = loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        let Ok(status) = client.status(&namespace()).await else {
            continue;
        };
        known = known.or((status.holders.len() as u64 == scale.holders).then(|| started.elapsed()));
        if is_complete(&status, scale) {
            break started.elapsed();
        }
        assert!(started.elapsed() < PATIENCE, "not exact after {PATIENCE:?}");
    };
    is_over.store(true, Ordering::Relaxed);
    let (query_us, unanswered) = routing.await.unwrap();
    println!("{scale:?}, {} blocks held", scale.holders * scale.blocks);
    println!(
        "all known after {:.2} s, all exact after {:.2} s: {:.0} holders/s, {} answers",
        known.unwrap_or_default().as_secs_f64(),
        exact.as_secs_f64(),
        scale.holders as f64 / exact.as_secs_f64(),
        answered()
    );
    println!(
        "queries meanwhile: {}, p50 {} µs, p99 {} µs; {unanswered} before the daemon answered",
        query_us.len(),
        query_us.value_at_quantile(0.5),
        query_us.value_at_quantile(0.99)
    );
    println!(
        "memory high water: daemon {}, all publishers in one process {before}",
        memory_high_water(daemon.0.id())
    );
}

fn is_complete(status: &StatusReply, scale: Scale) -> bool {
    let holders = &status.holders;
    holders.len() as u64 == scale.holders
        && holders
            .iter()
            .all(|holder| holder.exact && holder.blocks == scale.blocks)
}

/// Starts publishers, each of which has stored its blocks.
async fn publishers(url: &str, scale: Scale) -> Vec<HolderPublisher> {
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        connections.push(async_nats::connect(url).await.unwrap());
    }
    let mut publishers = Vec::new();
    for (number, nats) in (0..scale.holders).zip(connections.iter().cycle()) {
        let holder = PublishedHolder {
            namespace: namespace(),
            worker: WorkerName::new(&format!("worker-{number}")).unwrap(),
            rank: 0,
        };
        let options = PublisherOptions::default();
        let publisher = HolderPublisher::start(nats.clone(), &subjects(), holder, options)
            .await
            .unwrap();
        let event = Event::Stored(StoredBlocks::by_sequence(None, None, chain(number, scale)));
        publisher.publish(Tier::DEVICE, vec![event]).await.unwrap();
        publishers.push(publisher);
    }
    for publisher in &publishers {
        publisher.flush().await.unwrap();
    }
    publishers
}

/// Queries the blocks of one holder after another, until `is_over`. Returns the latencies, and the number of queries
/// without an answer.
async fn route(url: String, scale: Scale, is_over: Arc<AtomicBool>) -> (Histogram<u64>, u64) {
    let nats = async_nats::connect(url).await.unwrap();
    let client = QueryClient::new(nats, subjects()).with_patience(Duration::from_secs(5));
    let (mut query_us, mut unanswered, mut number) = (Histogram::new(3).unwrap(), 0, 0_u64);
    while !is_over.load(Ordering::Relaxed) {
        number += 1;
        let key = QueryKey::SequenceHashes(chain(mix(number) % scale.holders, scale));
        let started = Instant::now();
        match client.query(&namespace(), SingleQuery::new(key)).await {
            Ok(_) => query_us
                .record(u64::try_from(started.elapsed().as_micros()).unwrap())
                .unwrap(),
            Err(_) => {
                unanswered += 1;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
    (query_us, unanswered)
}

fn subjects() -> Subjects {
    Subjects::new("kvatlas").unwrap()
}

fn namespace() -> NamespaceName {
    NamespaceName::new("bench").unwrap()
}

/// Returns the blocks of one holder, as numbers that look like hashes.
fn chain(holder: u64, scale: Scale) -> Vec<SequenceHash> {
    (0..scale.blocks)
        .map(|position| SequenceHash(mix(holder * scale.blocks + position)))
        .collect()
}

/// Returns the peak memory of a process as text, from Linux's `/proc`.
fn memory_high_water(process: u32) -> String {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.map_or_else(|| "unknown".to_owned(), |text| text.trim().to_owned())
}
