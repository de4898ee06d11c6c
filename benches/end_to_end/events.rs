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

/// Blocks in every batch of the load beside queries.
const LOAD_BLOCKS: u64 = 64;

/// Batches of one worker: stores of a chain, each followed later by its removal, so that the index does not grow for ever.
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

/// Batches a second, from the first publish to the last one applied; and the same for a bare counter. Returns the rate of the largest
/// batches.
pub(crate) async fn bench_events(
    broker: &EmbeddedBroker,
    client: &async_nats::Client,
    queries: &QueryClient,
    scale: Scale,
) -> f64 {
    println!("events, drained (alternately stored and removed, one publisher)");
    println!("blocks  kvatlas, batches/s               counter, messages/s              kvatlas / counter");
    let mut applied_of_last = 0.0;
    for blocks in [1, 4, 64] {
        let batches = scale.batches * if blocks == LOAD_BLOCKS { 1 } else { 3 };
        let (mut applied, mut counted) = (Vec::new(), Vec::new());
        for repetition in 0..scale.repetitions {
            for turn in 0..2 {
                if (repetition + turn) % 2 == 0 {
                    let name = format!("drained-{blocks}-{repetition}");
                    applied.push(events_applied(client, queries, batches, blocks, &name).await);
                } else {
                    counted.push(events_counted(broker, client, batches, blocks).await);
                }
            }
        }
        let shown = |rates: &[f64]| {
            let least = rates.iter().copied().fold(f64::MAX, f64::min);
            let most = rates.iter().copied().fold(0.0, f64::max);
            format!("{:.0} ({least:.0}–{most:.0})", median(rates.iter().copied()))
        };
        let share = median(applied.iter().copied()) / median(counted.iter().copied());
        println!(
            "{blocks:>6}  {:<32} {:<32} {:.0} %",
            shown(&applied),
            shown(&counted),
            share * 100.0
        );
        applied_of_last = median(applied.into_iter());
    }
    applied_of_last
}

async fn events_applied(
    client: &async_nats::Client,
    queries: &QueryClient,
    batches: u64,
    blocks: u64,
    worker: &str,
) -> f64 {
    let worker = WorkerName::new(worker).unwrap();
    let mut publisher = Publisher::new(client.clone(), &subjects(), &namespace(), &worker, 0);
    let started = Instant::now();
    for number in 0..batches {
        let events = events_of(number, blocks);
        publisher.publish(Tier::DEVICE, events).await.unwrap();
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

async fn events_counted(
    broker: &EmbeddedBroker,
    client: &async_nats::Client,
    batches: u64,
    blocks: u64,
) -> f64 {
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
            events: events_of(number, blocks),
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
                .publish(Tier::DEVICE, events_of(published, LOAD_BLOCKS))
                .await
                .unwrap();
            published += 1;
        }
    }
    published as f64 / started.elapsed().as_secs_f64()
}
