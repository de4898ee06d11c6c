//! Queries, and the rates and latencies of their answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use hdrhistogram::Histogram;
use kvatlas_client::QueryClient;
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{Event, QueryKey, QueryRequest, SingleQuery, StoredBlocks, Tier, WorkerName};

use crate::{Scale, median, namespace, subjects, wait_for_cursor, wait_until};

use crate::common::publisher::Publisher;
use crate::common::{KilledOnDrop, processor_time};

/// Number of blocks of every query.
const QUERY_BLOCKS: u64 = 64;
/// Number of workers that hold a mixed prompt. Each of them holds a different number of its leading blocks.
const MIXED_HOLDERS: u64 = 8;
/// Number of different prompts of each kind.
const PROMPTS: u64 = 256;

fn prompt(number: u64) -> Vec<SequenceHash> {
    // The hashes are spread like real ones.
    (0..QUERY_BLOCKS)
        .map(|block| SequenceHash(((number << 8) | block).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
        .collect()
}

/// Target of queries: prompts of one kind, or the bare responder (echo).
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Target {
    /// Prompts that one worker holds as a whole.
    Whole,
    /// Prompts that eight workers hold to eight different depths.
    Mixed,
    /// The bare responder, which looks up nothing.
    Echo,
}

impl Target {
    const ALL: [Self; 3] = [Self::Whole, Self::Mixed, Self::Echo];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Mixed => "mixed",
            Self::Echo => "echo",
        }
    }

    pub(crate) fn subject(self) -> String {
        match self {
            Self::Whole | Self::Mixed => subjects().query(&namespace()),
            Self::Echo => "bench.echo".to_owned(),
        }
    }

    /// Returns the encoded requests. Requests to the echo are the same as those for whole prompts.
    fn payloads(self) -> Vec<bytes::Bytes> {
        let first = if self == Self::Mixed { PROMPTS } else { 0 };
        let encode = |number| {
            QueryRequest::Single(SingleQuery::new(QueryKey::SequenceHashes(prompt(number)))).encode()
        };
        (first..first + PROMPTS)
            .map(|number| encode(number).into())
            .collect()
    }
}

pub(crate) async fn load_prompts(client: &async_nats::Client, queries: &QueryClient) {
    let is_answered = async || {
        queries
            .status(&namespace())
            .await
            .is_err_and(|error| error.to_string().contains("404"))
    };
    wait_until(is_answered).await;
    for holder in 0..MIXED_HOLDERS {
        let worker = WorkerName::new(&format!("holder-{holder}")).unwrap();
        let mut publisher = Publisher::new(client.clone(), &subjects(), &namespace(), &worker, 0);
        let whole = (0..PROMPTS)
            .filter(|number| number % MIXED_HOLDERS == holder)
            .map(|number| (number, QUERY_BLOCKS));
        let depth = QUERY_BLOCKS - holder * QUERY_BLOCKS / MIXED_HOLDERS;
        let mixed = (PROMPTS..2 * PROMPTS).map(|number| (number, depth));
        for (number, depth) in whole.chain(mixed) {
            let mut blocks = prompt(number);
            blocks.truncate(usize::try_from(depth).unwrap());
            let event = Event::Stored(StoredBlocks::by_sequence(None, None, blocks));
            publisher.publish(Tier::DEVICE, vec![event]).await.unwrap();
        }
        wait_for_cursor(queries, &worker, publisher.cursor()).await;
    }
}

pub(crate) async fn wait_for_echo(client: &async_nats::Client) {
    wait_until(async || client.request("bench.echo", bytes::Bytes::new()).await.is_ok()).await;
}

/// Figures of one round: requests a second, and latencies in nanoseconds.
pub(crate) struct Round {
    rate: f64,
    /// Processor time that the answering process takes for each request, in microseconds; 0 if it is not known. The
    /// output calls it "of a core".
    of_a_core: f64,
    pub(crate) latency: Histogram<u64>,
}

/// Sends a number of queries, `requests`, to `target`. At most `in_flight` of them wait for an answer at the same time.
pub(crate) async fn round(
    client: &async_nats::Client,
    target: Target,
    in_flight: usize,
    requests: u64,
) -> Round {
    let payloads = Arc::new(target.payloads());
    let subject = target.subject();
    let next = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let mut tasks = Vec::new();
    for _ in 0..in_flight {
        let (client, subject, payloads, next) = (
            client.clone(),
            subject.clone(),
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
        of_a_core: 0.0,
        latency,
    }
}

/// Processes that answer, and the connection to them.
pub(crate) struct Asked<'a> {
    pub(crate) client: &'a async_nats::Client,
    pub(crate) daemon: &'a KilledOnDrop,
    pub(crate) echo: &'a KilledOnDrop,
}

impl Asked<'_> {
    async fn round(&self, target: Target, in_flight: usize, requests: u64) -> Round {
        let process = if target == Target::Echo {
            self.echo
        } else {
            self.daemon
        };
        let before = processor_time(process);
        let round = round(self.client, target, in_flight, requests).await;
        let spent = processor_time(process) - before;
        Round {
            of_a_core: spent.as_secs_f64() * 1e6 / requests as f64,
            ..round
        }
    }
}

pub(crate) async fn bench_queries(load: &str, asked: &Asked<'_>, scale: Scale) {
    println!("\nqueries, {load} ({QUERY_BLOCKS} blocks by sequence hash); of a core in µs a request");
    println!(
        "{:<10}{:>8}{:>26}{:>9}{:>9}{:>9}{:>9}{:>11}",
        "in flight", "target", "requests/s (min–max)", "of echo", "p50 µs", "p99 µs", "p999 µs", "of a core"
    );
    for in_flight in [1, 8, 64] {
        let requests = if in_flight == 1 {
            scale.requests / 4
        } else {
            scale.requests
        };
        let mut rounds: [Vec<Round>; 3] = Default::default();
        for repetition in 0..scale.repetitions {
            for turn in 0..3 {
                // The order changes from round to round.
                let number = (repetition + turn) % 3;
                rounds[number].push(asked.round(Target::ALL[number], in_flight, requests).await);
            }
        }
        let [_, _, echo] = &rounds;
        let echo_rate = median(echo.iter().map(|round| round.rate));
        for (target, rounds) in Target::ALL.into_iter().zip(&rounds) {
            print_rounds(in_flight, target.name(), rounds, echo_rate);
        }
    }
}

fn print_rounds(in_flight: usize, target: &str, rounds: &[Round], echo_rate: f64) {
    let rates = || rounds.iter().map(|round| round.rate);
    let (least, most) = (rates().fold(f64::MAX, f64::min), rates().fold(0.0, f64::max));
    let rate = median(rates());
    let spread = format!("{rate:.0} ({least:.0}–{most:.0})");
    let quantile_us = |quantile: f64| {
        median(
            rounds
                .iter()
                .map(|round| round.latency.value_at_quantile(quantile) as f64 / 1000.0),
        )
    };
    println!(
        "{in_flight:<10}{target:>8}{spread:>26}{:>7.0} %{:>9.0}{:>9.0}{:>9.0}{:>11.2}",
        rate / echo_rate * 100.0,
        quantile_us(0.5),
        quantile_us(0.99),
        quantile_us(0.999),
        median(rounds.iter().map(|round| round.of_a_core))
    );
}
