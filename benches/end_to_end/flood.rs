//! Small queries during a flood of large queries: the cost of one client's flood for other clients.
//!
//! The flood comes from a process and a connection of its own. During each kind of flood, small queries are sent to the
//! daemon. As a control, they are also sent to the echo (a responder that looks up nothing), which then gets the same
//! flood.
//!
//! A flood comes from a client in one of two accounts of the NATS server. In the daemon's own account, messages may be
//! as large as the server accepts. The account for routers has the limit of `deploy/nats/accounts.conf`. There the
//! server reads only the first line of a larger message, refuses the message, and ends the connection. The client
//! library would not send such a message. So this flood uses plain TCP, with a new connection for each request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{ERROR_CODE_HEADER, QueryKey, QueryRequest, SingleQuery};

use crate::queries::{Round, Target, round};
use crate::{Scale, median};

/// Number of blocks in each query of a large request.
const BLOCKS: u64 = 16_000;

/// Configuration of the NATS server. A client without credentials is in the daemon's account, `KVATLAS`. A client with
/// the credentials `router` is in the account for routers.
pub(crate) const ACCOUNTS: &str = r#"
no_auth_user: core
accounts {
  KVATLAS: {
    users: [{ user: core, password: core }]
    exports: [{ service: "kvatlas.v1.query.>" }, { service: "bench.echo" }]
  }
  ROUTERS: {
    limits: { max_payload: 128KB }
    users: [{ user: router, password: router }]
    imports: [
      { service: { account: KVATLAS, subject: "kvatlas.v1.query.>" } }
      { service: { account: KVATLAS, subject: "bench.echo" } }
    ]
  }
}
"#;

/// Account from which a flood is sent, and whether its messages exceed the limit of this account.
#[derive(Clone, Copy, PartialEq)]
enum Door {
    /// The daemon's account, which sets no limit of its own.
    Open,
    /// The account for routers. The messages are within its limit.
    Limited,
    /// The account for routers. The messages exceed its limit, so the server refuses them.
    Shut,
}

/// Kind of flood: the rate and the payload of its requests, and the account from which they are sent.
#[derive(Clone, Copy)]
struct Form {
    name: &'static str,
    door: Door,
    /// Number of requests in a second.
    rate: u32,
    payload: fn() -> Bytes,
}

const FORMS: [Form; 7] = [
    form("500/s of 1 MB", Door::Open, 500, || batch(8)),
    form("200/s of 0.5 MB", Door::Open, 200, || batch(4)),
    form("500/s of 1 MB, too deep", Door::Open, 500, too_deep),
    form("500/s of 1 MB, garbage", Door::Open, 500, || {
        vec![0xc1; 1 << 20].into()
    }),
    form("500/s of 1 MB, limited", Door::Shut, 500, || batch(8)),
    form("500/s of 128 kB, limited", Door::Limited, 500, || batch(1)),
    form("4000/s of 128 kB, limited", Door::Limited, 4000, || batch(1)),
];

const fn form(name: &'static str, door: Door, rate: u32, payload: fn() -> Bytes) -> Form {
    Form {
        name,
        door,
        rate,
        payload,
    }
}

fn chain(blocks: u64) -> SingleQuery {
    SingleQuery::new(QueryKey::SequenceHashes((1..=blocks).map(SequenceHash).collect()))
}

/// Encodes a request with this number of queries, of 128 kB each.
fn batch(queries: usize) -> Bytes {
    QueryRequest::Batch(vec![chain(BLOCKS); queries]).encode().into()
}

/// Encodes a query for more blocks than the daemon allows.
fn too_deep() -> Bytes {
    QueryRequest::Single(chain(8 * BLOCKS)).encode().into()
}

/// Sends a flood to `subject` until the standard input ends. Then prints its duration in milliseconds, and the numbers
/// of requests that were sent, answered, and refused (by the daemon or the server).
pub(crate) async fn flood(url: &str, subject: &str, form: usize) {
    let form = FORMS[form];
    let stop = Arc::new(AtomicBool::new(false));
    let stopping = Arc::clone(&stop);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        stopping.store(true, Ordering::Relaxed);
    });
    let started = Instant::now();
    let [sent, answered, refused] = match form.door {
        Door::Shut => flood_without_library(url, subject, form, &stop),
        Door::Open | Door::Limited => flood_with_library(url, subject, form, &stop).await,
    };
    println!("{} {sent} {answered} {refused}", started.elapsed().as_millis());
}

async fn flood_with_library(url: &str, subject: &str, form: Form, stop: &AtomicBool) -> [u64; 3] {
    let payload = (form.payload)();
    let options = match form.door {
        Door::Limited => async_nats::ConnectOptions::with_user_and_password("router".into(), "router".into()),
        Door::Open | Door::Shut => async_nats::ConnectOptions::new(),
    };
    let client = options.connect(url).await.unwrap();
    let inbox = client.new_inbox();
    let mut replies = client.subscribe(inbox.clone()).await.unwrap();
    let mut due = tokio::time::interval(Duration::from_secs(1) / form.rate);
    let (mut sent, mut answered, mut refused) = (0_u64, 0_u64, 0_u64);
    while !stop.load(Ordering::Relaxed) {
        tokio::select! {
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
    [sent, answered, refused]
}

/// Sends each request over a TCP connection of its own, because the server ends the connection of a message that
/// exceeds the limit.
#[allow(clippy::disallowed_methods, reason = "the rate of the flood is by the clock")]
fn flood_without_library(url: &str, subject: &str, form: Form, stop: &AtomicBool) -> [u64; 3] {
    let payload = (form.payload)();
    let address = url.trim_start_matches("nats://");
    let (mut sent, mut refused) = (0_u64, 0_u64);
    let mut due = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        due += Duration::from_secs(1) / form.rate;
        let connection = TcpStream::connect(address).unwrap();
        let mut words = BufReader::new(connection.try_clone().unwrap());
        words.read_line(&mut String::new()).unwrap();
        let first = format!(
            "CONNECT {{\"user\":\"router\",\"pass\":\"router\",\"verbose\":false,\"protocol\":1}}\r\nPUB {subject} flood {}\r\n",
            payload.len()
        );
        // The server may have ended the connection meanwhile.
        let _ = (&connection)
            .write_all(first.as_bytes())
            .and_then(|()| (&connection).write_all(&payload));
        sent += 1;
        // The server sends an error or ends the connection.
        let mut said = String::new();
        let _ = words.read_line(&mut said);
        refused += u64::from(said.is_empty() || said.starts_with("-ERR"));
    }
    [sent, 0, refused]
}

/// Numbers of all repetitions of a flood together: the duration, and the requests that were sent, answered and refused.
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

/// Runs one round of small queries during a flood.
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
    // After this pause, the flood is running and has filled the queues that it can fill.
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
        "{:<27}{:>8}{:>9}{:>9}{:>9}{:>10}{:>10}{:>10}{:>10}",
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
        "{form:<27}{:>8}{p50:>9.0}{p99:>9.0}{p999:>9.0}{share:>10.1}",
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
