//! Small queries beside a flood of large ones: what does one client's flood cost the others?
//!
//! The flood comes from a process and a connection of its own. Beside each form of it, small queries go to the daemon and, as a control, to
//! the bare responder while that gets the same flood.

use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{ERROR_CODE_HEADER, QueryKey, QueryRequest, SingleQuery};

use crate::queries::{Round, Target, round};
use crate::{Scale, median};

/// Blocks in each query of a large request.
const BLOCKS: u64 = 16_000;

/// What a flood is made of.
#[derive(Clone, Copy)]
struct Form {
    name: &'static str,
    /// Requests a second.
    rate: u32,
    payload: fn() -> Bytes,
}

const FORMS: [Form; 4] = [
    Form {
        name: "500/s of 1 MB",
        rate: 500,
        payload: || batch(8),
    },
    Form {
        name: "200/s of 0.5 MB",
        rate: 200,
        payload: || batch(4),
    },
    Form {
        name: "500/s of 1 MB, too deep",
        rate: 500,
        payload: too_deep,
    },
    Form {
        name: "500/s of 1 MB, garbage",
        rate: 500,
        payload: || vec![0xc1; 1 << 20].into(),
    },
];

fn chain(blocks: u64) -> SingleQuery {
    SingleQuery::new(QueryKey::SequenceHashes((1..=blocks).map(SequenceHash).collect()))
}

/// A request of so many queries, 128 kB each.
fn batch(queries: usize) -> Bytes {
    QueryRequest::Batch(vec![chain(BLOCKS); queries]).encode().into()
}

/// A query for more blocks than the daemon takes.
fn too_deep() -> Bytes {
    QueryRequest::Single(chain(8 * BLOCKS)).encode().into()
}

/// Sends a flood to `subject` until the standard input ends. Then says how long it lasted in milliseconds, and how many requests were
/// sent, answered and refused.
pub(crate) async fn flood(url: &str, subject: &str, form: usize) {
    let Form { rate, payload, .. } = FORMS[form];
    let payload = payload();
    let client = async_nats::connect(url).await.unwrap();
    let inbox = client.new_inbox();
    let mut replies = client.subscribe(inbox.clone()).await.unwrap();
    let mut due = tokio::time::interval(Duration::from_secs(1) / rate);
    let (mut sent, mut answered, mut refused) = (0_u64, 0_u64, 0_u64);
    let (stop, stopped) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        let _ = stop.send(());
    });
    let mut stopped = std::pin::pin!(stopped);
    let started = Instant::now();
    loop {
        tokio::select! {
            _ = &mut stopped => break,
            _ = due.tick() => {
                let publishing = client.publish_with_reply(subject.to_owned(), inbox.clone(), payload.clone());
                publishing.await.unwrap();
                sent += 1;
            }
            Some(reply) = replies.next() => {
                let is_error = reply.headers.is_some_and(|headers| headers.get(ERROR_CODE_HEADER).is_some());
                *(if is_error { &mut refused } else { &mut answered }) += 1;
            }
        }
    }
    println!("{} {sent} {answered} {refused}", started.elapsed().as_millis());
}

/// What came of floods, summed up.
#[derive(Default)]
struct Flooded {
    milliseconds: u64,
    sent: u64,
    answered: u64,
    refused: u64,
}

impl Flooded {
    fn add(&mut self, said: &str) {
        let mut numbers = said
            .split_whitespace()
            .map(|number| number.parse::<u64>().unwrap());
        let sums = [
            &mut self.milliseconds,
            &mut self.sent,
            &mut self.answered,
            &mut self.refused,
        ];
        sums.into_iter().for_each(|sum| *sum += numbers.next().unwrap());
    }
}

/// One round of small queries beside a flood.
async fn beside(
    url: &str,
    client: &async_nats::Client,
    target: Target,
    form: usize,
    requests: u64,
    flooded: &mut Flooded,
) -> Round {
    let mut flooding = Command::new(std::env::current_exe().unwrap())
        .args(["child-flood", url, &target.subject(), &form.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The flood is there, and those queues are full that will be.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let beside = round(client, target, 1, requests).await;
    drop(flooding.stdin.take());
    let mut said = String::new();
    flooding.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    flooding.wait().unwrap();
    flooded.add(&said);
    beside
}

pub(crate) async fn bench_flood(url: &str, client: &async_nats::Client, scale: Scale) {
    println!("\nsmall queries, one after the other, beside a flood of large requests");
    println!(
        "{:<26}{:>8}{:>9}{:>9}{:>9}{:>10}{:>10}{:>10}{:>10}",
        "flood", "target", "p50 µs", "p99 µs", "p999 µs", "of quiet", "sent/s", "answered", "refused"
    );
    let requests = (scale.requests / 8).max(3_000);
    let targets = [Target::Whole, Target::Echo];
    let mut quiet: [Vec<Round>; 2] = Default::default();
    for _ in 0..scale.repetitions {
        for (target, quiet) in targets.into_iter().zip(&mut quiet) {
            quiet.push(round(client, target, 1, requests).await);
        }
    }
    for (target, quiet) in targets.into_iter().zip(&quiet) {
        print_row("none", target, quiet, quiet, None);
    }
    for (number, form) in FORMS.iter().enumerate() {
        for (target, quiet) in targets.into_iter().zip(&quiet) {
            let (mut rounds, mut flooded) = (Vec::new(), Flooded::default());
            for _ in 0..scale.repetitions {
                rounds.push(beside(url, client, target, number, requests, &mut flooded).await);
            }
            print_row(form.name, target, &rounds, quiet, Some(&flooded));
        }
    }
}

fn print_row(form: &str, target: Target, rounds: &[Round], quiet: &[Round], flooded: Option<&Flooded>) {
    let quantile_us = |rounds: &[Round], quantile| {
        let of = |round: &Round| round.latency.value_at_quantile(quantile) as f64 / 1000.0;
        median(rounds.iter().map(of))
    };
    let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|quantile| quantile_us(rounds, quantile));
    let share = p99 / quantile_us(quiet, 0.99);
    print!(
        "{form:<26}{:>8}{p50:>9.0}{p99:>9.0}{p999:>9.0}{share:>10.1}",
        target.name()
    );
    match flooded {
        Some(flooded) => println!(
            "{:>10.0}{:>10}{:>10}",
            flooded.sent as f64 * 1000.0 / flooded.milliseconds as f64,
            flooded.answered,
            flooded.refused
        ),
        None => println!(),
    }
}
