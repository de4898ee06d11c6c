//! End to end over a real broker: what does the daemon cost beside NATS itself?
//!
//! ```sh
//! cargo bench --bench end_to_end            # about two minutes
//! cargo bench --bench end_to_end -- --quick
//! ```
//!
//! Queries: client → broker → responder → broker → client, 64 blocks by sequence hash, against a responder that answers every
//! request with an empty payload, written with the same client. Events: published to applied (the daemon's own cursor says
//! when), against a subscriber that only counts. The daemon, the echo and the counter are each a process of their own with the
//! same runtime; their rounds alternate within one run.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a bench fails by panicking"
)]

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use hdrhistogram::Histogram;
use kvatlas::client::{Publisher, QueryClient};
use kvatlas::connection::embedded::{EmbeddedBroker, find_nats_server};
use kvatlas::hash::SequenceHash;
use kvatlas::tracking::BatchCursor;
use kvatlas::wire::{
    Event, NamespaceName, QueryKey, QueryRequest, RemovedBlocks, SingleQuery, StoredBlocks, Subjects, Tier,
    WorkerName,
};

/// Blocks of every query.
const QUERY_BLOCKS: u64 = 64;
/// Workers that hold the queried prefix to different depths.
const WORKERS: u64 = 8;
/// Different prompts asked for.
const PROMPTS: u64 = 512;
/// Blocks in every batch of the events bench.
const BATCH_BLOCKS: u64 = 64;

#[derive(Clone, Copy)]
struct Scale {
    repetitions: usize,
    requests: u64,
    batches: u64,
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["child-echo", url] => echo(url).await,
        ["child-count", url, count] => count_messages(url, count.parse().unwrap()).await,
        _ if words.contains(&"--quick") => {
            bench(Scale {
                repetitions: 3,
                requests: 10_000,
                batches: 5_000,
            })
            .await;
        }
        _ => {
            bench(Scale {
                repetitions: 5,
                requests: 60_000,
                batches: 40_000,
            })
            .await
        }
    }
}

async fn bench(scale: Scale) {
    let broker = EmbeddedBroker::start(&find_nats_server(None).unwrap())
        .await
        .unwrap();
    let _daemon = start_daemon(broker.url());
    let _echo = start_child(&["child-echo", broker.url()]);
    let client = async_nats::connect(broker.url()).await.unwrap();
    let queries = QueryClient::new(client.clone(), subjects()).with_patience(Duration::from_secs(10));
    load_prompts(&client, &queries).await;
    wait_for_echo(&client).await;
    let drained = bench_events(&broker, &client, &queries, scale).await;
    bench_queries("idle", &client, scale).await;
    let pace = Arc::new(Pace::default());
    let publishing = tokio::spawn(publish_at(
        broker.url().to_owned(),
        drained / 2.0,
        Arc::clone(&pace),
    ));
    bench_queries("events at half the drained maximum", &client, scale).await;
    pace.stop.store(true, Ordering::Relaxed);
    let rate = publishing.await.unwrap();
    println!("events published meanwhile: {rate:.0} batches a second");
}

// ---------------------------------------------------------------------------------------------- children

/// A child process that ends with the bench.
struct KilledOnDrop(Child);

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start_daemon(url: &str) -> KilledOnDrop {
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_kvatlas"));
    daemon.args([
        "serve",
        "--nats-url",
        url,
        "--admin-listen",
        "off",
        "--logging-level",
        "warn",
    ]);
    KilledOnDrop(daemon.stdin(Stdio::null()).spawn().unwrap())
}

fn start_child(arguments: &[&str]) -> KilledOnDrop {
    KilledOnDrop(
        Command::new(std::env::current_exe().unwrap())
            .args(arguments)
            .spawn()
            .unwrap(),
    )
}

async fn echo(url: &str) {
    let client = async_nats::connect(url).await.unwrap();
    let mut requests = client
        .queue_subscribe("bench.echo", "bench".to_owned())
        .await
        .unwrap();
    while let Some(request) = requests.next().await {
        if let Some(reply) = request.reply {
            client.publish(reply, bytes::Bytes::new()).await.unwrap();
        }
    }
}

/// Counts messages on the events subjects, and says when it has them all.
async fn count_messages(url: &str, count: u64) {
    let options = async_nats::ConnectOptions::new().subscription_capacity(1 << 20);
    let client = options.connect(url).await.unwrap();
    let mut messages = client.subscribe("bench.events.>").await.unwrap();
    client.flush().await.unwrap();
    client
        .publish("bench.counter.ready", bytes::Bytes::new())
        .await
        .unwrap();
    for _ in 0..count {
        messages.next().await.unwrap();
    }
    client
        .publish("bench.counter.done", bytes::Bytes::new())
        .await
        .unwrap();
    client.flush().await.unwrap();
}

// ----------------------------------------------------------------------------------------------- queries

fn subjects() -> Subjects {
    Subjects::new("kvatlas").unwrap()
}

fn namespace() -> NamespaceName {
    NamespaceName::new("bench").unwrap()
}

fn prompt(number: u64) -> Vec<SequenceHash> {
    // Spread like real hashes.
    (0..QUERY_BLOCKS)
        .map(|block| SequenceHash(((number << 8) | block).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
        .collect()
}

/// Every worker holds every prompt, each to another depth.
async fn load_prompts(client: &async_nats::Client, queries: &QueryClient) {
    wait_until(async || {
        queries
            .status(&namespace())
            .await
            .is_err_and(|error| error.to_string().contains("404"))
    })
    .await;
    for number in 0..WORKERS {
        let worker = WorkerName::new(&format!("holder-{number}")).unwrap();
        let mut publisher = Publisher::new(client.clone(), &subjects(), &namespace(), &worker, 0);
        for prompt_number in 0..PROMPTS {
            let mut blocks = prompt(prompt_number);
            let depth = QUERY_BLOCKS - number * (prompt_number % 7);
            blocks.truncate(usize::try_from(depth).unwrap());
            let event = Event::Stored(StoredBlocks::by_sequence(None, None, blocks));
            publisher.publish(Tier::DEVICE, vec![event]).await.unwrap();
        }
        wait_for_cursor(queries, &worker, publisher.cursor()).await;
    }
}

async fn wait_for_echo(client: &async_nats::Client) {
    wait_until(async || client.request("bench.echo", bytes::Bytes::new()).await.is_ok()).await;
}

async fn wait_until(mut look: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !look().await {
        assert!(
            Instant::now() < deadline,
            "the bench is not ready within a minute"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn wait_for_cursor(queries: &QueryClient, worker: &WorkerName, cursor: BatchCursor) {
    wait_until(async || {
        // The namespace exists only once its first event has been applied.
        let Ok(status) = queries.status(&namespace()).await else { return false };
        let holder = status.holders.into_iter().find(|holder| holder.worker == *worker);
        holder.is_some_and(|holder| holder.seq >= cursor.seq && holder.epoch == cursor.epoch)
    })
    .await;
}

/// Requests a second, and the latencies in nanoseconds.
struct Round {
    rate: f64,
    latency: Histogram<u64>,
}

/// Sends `requests` to `subject`, `in_flight` at a time.
async fn round(client: &async_nats::Client, subject: &str, in_flight: usize, requests: u64) -> Round {
    let payloads: Arc<Vec<bytes::Bytes>> = Arc::new(
        (0..PROMPTS)
            .map(|number| {
                QueryRequest::Single(SingleQuery::new(QueryKey::SequenceHashes(prompt(number))))
                    .encode()
                    .into()
            })
            .collect(),
    );
    let next = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let mut tasks = Vec::new();
    for _ in 0..in_flight {
        let (client, subject, payloads, next) = (
            client.clone(),
            subject.to_owned(),
            Arc::clone(&payloads),
            Arc::clone(&next),
        );
        tasks.push(tokio::spawn(async move {
            let mut latency = Histogram::<u64>::new(3).unwrap();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= requests {
                    return latency;
                }
                let payload = payloads[usize::try_from(number % PROMPTS).unwrap()].clone();
                let asked = Instant::now();
                let reply = client.request(subject.clone(), payload).await.unwrap();
                latency
                    .record(u64::try_from(asked.elapsed().as_nanos()).unwrap())
                    .unwrap();
                assert!(reply.headers.is_none(), "an error reply: {reply:?}");
            }
        }));
    }
    let mut latency = Histogram::<u64>::new(3).unwrap();
    for task in tasks {
        latency.add(task.await.unwrap()).unwrap();
    }
    Round {
        rate: requests as f64 / started.elapsed().as_secs_f64(),
        latency,
    }
}

async fn bench_queries(load: &str, client: &async_nats::Client, scale: Scale) {
    println!("\nqueries, {load} ({QUERY_BLOCKS} blocks by sequence hash, {WORKERS} holders each)");
    println!(
        "{:<10}{:>10}{:>22}{:>10}{:>10}{:>10}",
        "in flight", "responder", "requests/s (min–max)", "p50 µs", "p99 µs", "p999 µs"
    );
    for in_flight in [1, 8, 64] {
        let requests = if in_flight == 1 {
            scale.requests / 4
        } else {
            scale.requests
        };
        let (mut daemon, mut echo) = (Vec::new(), Vec::new());
        for repetition in 0..scale.repetitions {
            // Whoever goes first changes from round to round.
            for turn in 0..2 {
                if (repetition + turn) % 2 == 0 {
                    daemon.push(round(client, &subjects().query(&namespace()), in_flight, requests).await);
                } else {
                    echo.push(round(client, "bench.echo", in_flight, requests).await);
                }
            }
        }
        let ratio =
            median(daemon.iter().map(|round| round.rate)) / median(echo.iter().map(|round| round.rate));
        print_rounds(in_flight, "kvatlas", &daemon);
        print_rounds(in_flight, "echo", &echo);
        println!("{:<10}kvatlas / echo: {:.0} %", "", ratio * 100.0);
    }
}

fn print_rounds(in_flight: usize, responder: &str, rounds: &[Round]) {
    let rates = || rounds.iter().map(|round| round.rate);
    let spread = format!(
        "{:.0} ({:.0}–{:.0})",
        median(rates()),
        rates().fold(f64::MAX, f64::min),
        rates().fold(0.0, f64::max)
    );
    let quantile = |quantile: f64| {
        median(
            rounds
                .iter()
                .map(|round| round.latency.value_at_quantile(quantile) as f64),
        )
    };
    println!(
        "{in_flight:<10}{responder:>10}{spread:>22}{:>10.0}{:>10.0}{:>10.0}",
        quantile(0.5) / 1000.0,
        quantile(0.99) / 1000.0,
        quantile(0.999) / 1000.0
    );
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

// ------------------------------------------------------------------------------------------------ events

/// Batches of one worker: stores of a chain, each followed later by its removal, so that the index does not grow for ever.
fn events_of(number: u64) -> Vec<Event> {
    let chain = |number: u64| -> Vec<SequenceHash> {
        let first = (1 << 40) | (number * BATCH_BLOCKS);
        (first..first + BATCH_BLOCKS)
            .map(|block| SequenceHash(block.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
            .collect()
    };
    let pair = number / 2;
    if number.is_multiple_of(2) {
        vec![Event::Stored(StoredBlocks::by_sequence(None, None, chain(pair)))]
    } else {
        vec![Event::Removed(RemovedBlocks::by_sequence(chain(pair)))]
    }
}

/// Batches a second, from the first publish to the last one applied; and the same for a bare counter.
async fn bench_events(
    broker: &EmbeddedBroker,
    client: &async_nats::Client,
    queries: &QueryClient,
    scale: Scale,
) -> f64 {
    println!(
        "events, drained ({BATCH_BLOCKS} blocks a batch, alternately stored and removed, one publisher)"
    );
    let (mut applied, mut counted) = (Vec::new(), Vec::new());
    for repetition in 0..scale.repetitions {
        for turn in 0..2 {
            if (repetition + turn) % 2 == 0 {
                applied.push(events_applied(client, queries, scale.batches, repetition).await);
            } else {
                counted.push(events_counted(broker, client, scale.batches).await);
            }
        }
    }
    for (name, rates) in [("kvatlas", &applied), ("counter", &counted)] {
        let middle = median(rates.iter().copied());
        println!(
            "{name:<10}{:>12.0} batches/s ({:.0}–{:.0}) {:>12.0} blocks/s",
            middle,
            rates.iter().copied().fold(f64::MAX, f64::min),
            rates.iter().copied().fold(0.0, f64::max),
            middle * BATCH_BLOCKS as f64
        );
    }
    let (applied, counted) = (median(applied.into_iter()), median(counted.into_iter()));
    println!("kvatlas / counter: {:.0} %", applied / counted * 100.0);
    applied
}

async fn events_applied(
    client: &async_nats::Client,
    queries: &QueryClient,
    batches: u64,
    repetition: usize,
) -> f64 {
    let worker = WorkerName::new(&format!("drained-{repetition}")).unwrap();
    let mut publisher = Publisher::new(client.clone(), &subjects(), &namespace(), &worker, 0);
    let started = Instant::now();
    for number in 0..batches {
        publisher.publish(Tier::DEVICE, events_of(number)).await.unwrap();
    }
    publisher.flush().await.unwrap();
    wait_for_cursor(queries, &worker, publisher.cursor()).await;
    let rate = batches as f64 / started.elapsed().as_secs_f64();
    publisher
        .publish(Tier::DEVICE, vec![Event::Goodbye])
        .await
        .unwrap();
    rate
}

async fn events_counted(broker: &EmbeddedBroker, client: &async_nats::Client, batches: u64) -> f64 {
    let mut ready = client.subscribe("bench.counter.ready").await.unwrap();
    let mut done = client.subscribe("bench.counter.done").await.unwrap();
    client.flush().await.unwrap();
    let _counter = start_child(&["child-count", broker.url(), &batches.to_string()]);
    ready.next().await.unwrap();
    let started = Instant::now();
    for number in 0..batches {
        let batch = kvatlas::wire::EventBatch {
            epoch: 1,
            seq: number + 1,
            rank: 0,
            time_us: Some(number),
            tier: Tier::DEVICE,
            events: events_of(number),
        };
        client
            .publish("bench.events.bench.counted", batch.encode().into())
            .await
            .unwrap();
    }
    client.flush().await.unwrap();
    done.next().await.unwrap();
    batches as f64 / started.elapsed().as_secs_f64()
}

#[derive(Default)]
struct Pace {
    stop: AtomicBool,
}

/// Publishes `rate` batches a second on a connection of its own until told to stop; returns the rate reached.
async fn publish_at(url: String, rate: f64, pace: Arc<Pace>) -> f64 {
    let client = async_nats::connect(url).await.unwrap();
    let worker = WorkerName::new("paced").unwrap();
    let mut publisher = Publisher::new(client, &subjects(), &namespace(), &worker, 0);
    let started = Instant::now();
    let mut interval = tokio::time::interval(Duration::from_millis(2));
    let mut published = 0_u64;
    while !pace.stop.load(Ordering::Relaxed) {
        interval.tick().await;
        while (published as f64) < started.elapsed().as_secs_f64() * rate {
            publisher
                .publish(Tier::DEVICE, events_of(published))
                .await
                .unwrap();
            published += 1;
        }
    }
    published as f64 / started.elapsed().as_secs_f64()
}
