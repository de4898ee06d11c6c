//! Events: the rate at which a daemon applies them, and a load of events during queries.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use kvatlas_client::QueryClient;
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{Event, RemovedBlocks, StoredBlocks, Subjects, Tier, WorkerName};
use kvatlas_process::broker::embedded::EmbeddedBroker;

use crate::{Scale, counted_subjects, median, namespace, start_child, subjects, wait_for_cursor};

use crate::common::publisher::Publisher;
use crate::common::{KilledOnDrop, processor_time};

/// Number of blocks in each batch of the load that runs during queries.
const LOAD_BLOCKS: u64 = 64;

/// Returns the events of batch `number` of a worker. A batch stores a chain, and a later batch removes it, so that the
/// index does not grow without end.
fn events_of(number: u64, blocks: u64) -> Vec<Event> {
    let chain = |number: u64| -> Vec<SequenceHash> {
        let first = (1 << 40) | (number * blocks);
        (first..first + blocks)
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

/// Measurements of the daemon, or of the counter (the subscriber that only counts messages).
#[derive(Default)]
struct Rounds {
    rates: Vec<f64>,
    /// Processor time that the receiving process takes for each message, in microseconds. The output calls it "of a
    /// core".
    of_a_core: Vec<f64>,
}

impl Rounds {
    fn add(&mut self, rate: f64, spent: Duration, messages: u64) {
        self.rates.push(rate);
        self.of_a_core.push(spent.as_secs_f64() * 1e6 / messages as f64);
    }

    fn rate(&self) -> f64 {
        median(self.rates.iter().copied())
    }
}

impl fmt::Display for Rounds {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let least = self.rates.iter().copied().fold(f64::MAX, f64::min);
        let most = self.rates.iter().copied().fold(0.0, f64::max);
        let rates = format!("{:.0} ({least:.0}–{most:.0})", self.rate());
        let of_a_core = median(self.of_a_core.iter().copied());
        write!(formatter, "{rates:<32} {of_a_core:>9.2}")
    }
}

/// Measures two rates in turns. One is the daemon's rate of batches, from the first publish until the last batch is
/// applied. The other is the rate of messages of the counter, a subscriber that only counts messages. Prints both, and
/// returns the daemon's rate for the largest batches.
pub(crate) async fn bench_events(
    broker: &EmbeddedBroker,
    client: &async_nats::Client,
    queries: &QueryClient,
    daemon: &KilledOnDrop,
    scale: Scale,
) -> f64 {
    println!("events, drained (alternately stored and removed, one publisher); of a core in µs a message");
    println!(
        "blocks  kvatlas, batches/s               of a core  counter, messages/s              of a core  kvatlas / counter"
    );
    let mut applied_of_last = 0.0;
    for blocks in [1, 4, 64] {
        let batches = scale.batches * if blocks == LOAD_BLOCKS { 1 } else { 3 };
        let (mut applied, mut counted) = (Rounds::default(), Rounds::default());
        for repetition in 0..scale.repetitions {
            let worker = WorkerName::new(&format!("drained-{blocks}-{repetition}")).unwrap();
            for turn in 0..2 {
                if (repetition + turn) % 2 == 0 {
                    let before = processor_time(daemon);
                    let rate = events_applied(client, queries, batches, blocks, &worker).await;
                    applied.add(rate, processor_time(daemon) - before, batches);
                } else {
                    let (rate, spent) = events_counted(broker, client, batches, blocks, &worker).await;
                    counted.add(rate, spent, batches);
                }
            }
        }
        let share = applied.rate() / counted.rate();
        println!("{blocks:>6}  {applied} {counted} {:.0} %", share * 100.0);
        applied_of_last = applied.rate();
    }
    applied_of_last
}

/// Publishes the batches of one worker. `subjects` decides who receives them: the daemon, or the counter that only
/// counts messages.
async fn publish_all(
    client: &async_nats::Client,
    subjects: &Subjects,
    worker: &WorkerName,
    batches: u64,
    blocks: u64,
) -> Publisher {
    let mut publisher = Publisher::new(client.clone(), subjects, &namespace(), worker, 0);
    for number in 0..batches {
        let events = events_of(number, blocks);
        publisher.publish(Tier::DEVICE, events).await.unwrap();
    }
    publisher.flush().await.unwrap();
    publisher
}

async fn events_applied(
    client: &async_nats::Client,
    queries: &QueryClient,
    batches: u64,
    blocks: u64,
    worker: &WorkerName,
) -> f64 {
    let started = Instant::now();
    let mut publisher = publish_all(client, &subjects(), worker, batches, blocks).await;
    wait_for_cursor(queries, worker, publisher.cursor()).await;
    let rate = batches as f64 / started.elapsed().as_secs_f64();
    publisher
        .publish(Tier::DEVICE, vec![Event::Goodbye])
        .await
        .unwrap();
    rate
}

async fn events_counted(
    broker: &EmbeddedBroker,
    client: &async_nats::Client,
    batches: u64,
    blocks: u64,
    worker: &WorkerName,
) -> (f64, Duration) {
    let mut ready = client.subscribe("bench.counter.ready").await.unwrap();
    let mut done = client.subscribe("bench.counter.done").await.unwrap();
    client.flush().await.unwrap();
    let counter = start_child(&["child-count", broker.url(), &batches.to_string()]);
    ready.next().await.unwrap();
    let started = Instant::now();
    publish_all(client, &counted_subjects(), worker, batches, blocks).await;
    done.next().await.unwrap();
    let rate = batches as f64 / started.elapsed().as_secs_f64();
    (rate, processor_time(&counter))
}

/// Switch that ends a load of events.
#[derive(Default)]
pub(crate) struct Pace {
    pub(crate) stop: AtomicBool,
}

/// Publishes `rate` batches a second on a connection of its own, until `pace` is switched to stop. Returns the rate
/// that was reached.
pub(crate) async fn publish_at(url: String, rate: f64, pace: Arc<Pace>) -> f64 {
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
                .publish(Tier::DEVICE, events_of(published, LOAD_BLOCKS))
                .await
                .unwrap();
            published += 1;
        }
    }
    published as f64 / started.elapsed().as_secs_f64()
}
