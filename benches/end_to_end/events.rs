//! Events: how fast they are taken in, and a load of them beside queries.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use kvatlas::daemon::broker::embedded::EmbeddedBroker;
use kvatlas_client::QueryClient;
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{Event, RemovedBlocks, StoredBlocks, Tier, WorkerName};

use crate::{Scale, median, namespace, start_child, subjects, wait_for_cursor};

use crate::common::publisher::Publisher;

/// Blocks in every batch.
const BATCH_BLOCKS: u64 = 64;

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
pub(crate) async fn bench_events(
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
        let batch = kvatlas_core::wire::EventBatch {
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

/// Tells a load when to end.
#[derive(Default)]
pub(crate) struct Pace {
    pub(crate) stop: AtomicBool,
}

/// Publishes `rate` batches a second on a connection of its own until told to stop; returns the rate reached.
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
                .publish(Tier::DEVICE, events_of(published))
                .await
                .unwrap();
            published += 1;
        }
    }
    published as f64 / started.elapsed().as_secs_f64()
}
