//! End to end over a real broker: the cost of the daemon in comparison with NATS itself.
//!
//! ```sh
//! cargo bench --profile dist --bench end_to_end            # about two minutes, after a build of some minutes
//! cargo bench --profile dist --bench end_to_end -- --quick
//! cargo bench --profile dist --bench end_to_end -- --events # the events alone
//! cargo bench --profile dist --bench end_to_end -- --queries # the queries alone, with nothing else going on
//! cargo bench --profile dist --bench end_to_end -- --flood # the flood alone
//! ```
//!
//! The profile `dist` is that of the released binaries. The daemon, the echo and the counter are all built with it.
//!
//! Queries: client → broker → responder → broker → client, with 64 blocks by sequence hash. The daemon is compared with
//! an echo: a responder that uses the same client library and answers every request with an empty payload. Half of the
//! prompts are *whole*: one worker holds the whole prompt. The others are *mixed*: eight workers hold the prompt to
//! eight different depths. That is the worst case for the search and for the reply's size.
//!
//! Flood: small queries one after another, alone and during large requests on another connection.
//!
//! Events: the time from publishing until the daemon's cursor shows that the events are applied. The daemon is compared
//! with a subscriber that only counts messages. The daemon, the echo and the counter each have a process of their own,
//! with the same runtime. Their rounds alternate within one run.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a bench fails by panicking"
)]

#[path = "../common/mod.rs"]
mod common;
mod events;
mod flood;
mod queries;

use std::convert::Infallible;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use common::{KilledOnDrop, start_daemon};
use events::{Pace, bench_events, publish_at};
use flood::{bench_flood, flood};
use futures_util::StreamExt;
use kvatlas_client::QueryClient;
use kvatlas_core::wire::{BatchCursor, NamespaceName, Subjects, WorkerName};
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker, find_nats_server};
use queries::{Asked, bench_queries, load_prompts, wait_for_echo};

/// Settings for a publisher that sends as fast as it can: the daemon loses none of its events. With these settings, a
/// holder also stays exact without heartbeats, like the holder of a real engine.
const PATIENT: [&str; 8] = [
    "--logging-level",
    "warn",
    "--events-subscription-capacity",
    "1000000",
    "--events-lane-queue-bytes",
    "1000000000",
    "--namespace-defaults-stale-after-ms",
    "0",
];

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
        ["child-count", url, count] => {
            count_messages(url, count.parse().unwrap()).await;
        }
        ["child-flood", url, subject, form] => flood(url, subject, form.parse().unwrap()).await,
        _ => {
            let scale = match words.contains(&"--quick") {
                true => Scale {
                    repetitions: 3,
                    requests: 10_000,
                    batches: 5_000,
                },
                false => Scale {
                    repetitions: 5,
                    requests: 60_000,
                    batches: 40_000,
                },
            };
            let parts = [
                ("--events", Part::Events),
                ("--queries", Part::Queries),
                ("--flood", Part::Flood),
            ];
            let part = parts.into_iter().find(|(word, _)| words.contains(word));
            let part = part.map_or(Part::All, |(_, part)| part);
            bench(scale, part).await;
        }
    }
}

/// Part of the bench that is run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    All,
    Events,
    Queries,
    Flood,
}

/// A broker, and the processes that are measured.
struct Scene {
    client: async_nats::Client,
    queries: QueryClient,
    daemon: KilledOnDrop,
    echo: KilledOnDrop,
    broker: EmbeddedBroker,
}

impl Scene {
    /// Starts a broker with these lines in its configuration, and the processes.
    async fn start(config_lines: &[&str]) -> Self {
        let options = BrokerOptions {
            config_lines: config_lines.iter().map(|line| (*line).to_owned()).collect(),
            ..BrokerOptions::default()
        };
        let broker = EmbeddedBroker::start_with(&find_nats_server(None).unwrap(), options)
            .await
            .unwrap();
        let daemon = start_daemon(broker.url(), &PATIENT);
        let echo = start_child(&["child-echo", broker.url()]);
        let client = async_nats::connect(broker.url()).await.unwrap();
        let queries = QueryClient::new(client.clone(), subjects()).with_patience(Duration::from_secs(10));
        load_prompts(&client, &queries).await;
        wait_for_echo(&client).await;
        Self {
            client,
            queries,
            daemon,
            echo,
            broker,
        }
    }
}

async fn bench(scale: Scale, part: Part) {
    if part != Part::Flood {
        bench_undisturbed(scale, part).await;
    }
    if matches!(part, Part::All | Part::Flood) {
        let scene = Scene::start(&[flood::ACCOUNTS]).await;
        bench_flood(scene.broker.url(), &scene.client, scale).await;
    }
}

async fn bench_undisturbed(scale: Scale, part: Part) {
    let Scene {
        broker,
        client,
        queries,
        daemon,
        echo,
    } = Scene::start(&[]).await;
    let asked = Asked {
        client: &client,
        daemon: &daemon,
        echo: &echo,
    };
    if part == Part::Queries {
        return bench_queries("idle", &asked, scale).await;
    }
    let drained = bench_events(&broker, &client, &queries, &daemon, scale).await;
    if part == Part::Events {
        return;
    }
    bench_queries("idle", &asked, scale).await;
    let pace = Arc::new(Pace::default());
    let publishing = tokio::spawn(publish_at(
        broker.url().to_owned(),
        drained / 2.0,
        Arc::clone(&pace),
    ));
    bench_queries("events at half the drained maximum", &asked, scale).await;
    pace.stop.store(true, Ordering::Relaxed);
    let rate = publishing.await.unwrap();
    println!("events published meanwhile: {rate:.0} batches a second");
}

// ---------------------------------------------------------------------------------------------- children

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

/// Counts messages on the events subjects, and publishes a message when all have come.
async fn count_messages(url: &str, count: u64) -> Infallible {
    let options = async_nats::ConnectOptions::new().subscription_capacity(1 << 20);
    let client = options.connect(url).await.unwrap();
    let mut messages = client.subscribe(counted_subjects().all_events()).await.unwrap();
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
    // The bench reads the processor time of this process before it kills the process.
    std::future::pending().await
}

// ------------------------------------------------------------------------------------------- shared parts

fn subjects() -> Subjects {
    Subjects::new("kvatlas").unwrap()
}

/// Returns the subjects of messages that are only counted. These subjects are as long as the daemon's subjects.
fn counted_subjects() -> Subjects {
    Subjects::new("counter").unwrap()
}

fn namespace() -> NamespaceName {
    NamespaceName::new("bench").unwrap()
}

async fn wait_until(mut look: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !look().await {
        assert!(
            Instant::now() < deadline,
            "the bench is not ready within a minute"
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn wait_for_cursor(queries: &QueryClient, worker: &WorkerName, cursor: BatchCursor) {
    wait_until(async || {
        // The namespace exists only after its first event has been applied.
        let Ok(status) = queries.status(&namespace()).await else {
            return false;
        };
        let holder = status.holders.into_iter().find(|holder| holder.worker == *worker);
        holder.is_some_and(|holder| holder.seq >= cursor.seq && holder.epoch == cursor.epoch)
    })
    .await;
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
