//! Small queries beside many large ones: what does one client's flood cost the others?

use std::time::Duration;

use futures_util::StreamExt;
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{ERROR_CODE_HEADER, QueryKey, QueryRequest, SingleQuery};
use tokio_util::sync::CancellationToken;

use crate::queries::{Round, Target, round};
use crate::{Scale, median, namespace, subjects};

/// Large requests a second.
const RATE: u32 = 200;
/// Queries in a large request.
const QUERIES: usize = 4;
/// Blocks in each of them.
const BLOCKS: u64 = 16_000;

/// What came of a flood.
#[derive(Default)]
struct Flooded {
    answered: u64,
    refused: u64,
}

/// Sends large requests until it is stopped, and counts what came back meanwhile.
async fn flood(url: String, stop: CancellationToken) -> Flooded {
    let client = async_nats::connect(url).await.unwrap();
    let inbox = client.new_inbox();
    let mut replies = client.subscribe(inbox.clone()).await.unwrap();
    let chain: Vec<SequenceHash> = (1..=BLOCKS).map(SequenceHash).collect();
    let query = SingleQuery::new(QueryKey::SequenceHashes(chain));
    let payload: bytes::Bytes = QueryRequest::Batch(vec![query; QUERIES]).encode().into();
    let mut due = tokio::time::interval(Duration::from_secs(1) / RATE);
    let mut flooded = Flooded::default();
    loop {
        tokio::select! {
            () = stop.cancelled() => return flooded,
            _ = due.tick() => {
                let sent = client.publish_with_reply(subjects().query(&namespace()), inbox.clone(), payload.clone());
                sent.await.unwrap();
            }
            Some(reply) = replies.next() => {
                let is_error = reply.headers.is_some_and(|headers| headers.get(ERROR_CODE_HEADER).is_some());
                *(if is_error { &mut flooded.refused } else { &mut flooded.answered }) += 1;
            }
        }
    }
}

pub(crate) async fn bench_flood(url: &str, client: &async_nats::Client, scale: Scale) {
    println!("\nsmall queries, one after the other, beside {RATE} requests of half a megabyte a second");
    println!("{:<10}{:>9}{:>9}{:>9}", "large", "p50 µs", "p99 µs", "p999 µs");
    let requests = scale.requests / 4;
    let (mut quiet, mut beside) = (Vec::new(), Vec::new());
    let mut all = Flooded::default();
    for _ in 0..scale.repetitions {
        quiet.push(round(client, Target::Whole, 1, requests).await);
        let stop = CancellationToken::new();
        let flooding = tokio::spawn(flood(url.to_owned(), stop.clone()));
        beside.push(round(client, Target::Whole, 1, requests).await);
        stop.cancel();
        let flooded = flooding.await.unwrap();
        all.answered += flooded.answered;
        all.refused += flooded.refused;
    }
    let quantile_us = |rounds: &[Round], quantile| {
        let of = |round: &Round| round.latency.value_at_quantile(quantile) as f64 / 1000.0;
        median(rounds.iter().map(of))
    };
    for (name, rounds) in [("none", &quiet), ("many", &beside)] {
        let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|quantile| quantile_us(rounds, quantile));
        println!("{name:<10}{p50:>9.0}{p99:>9.0}{p999:>9.0}");
    }
    println!(
        "p99 beside large ones: {:.1} times the quiet one; of the large ones {} were answered, {} refused",
        quantile_us(&beside, 0.99) / quantile_us(&quiet, 0.99),
        all.answered,
        all.refused
    );
}
