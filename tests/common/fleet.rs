//! Workers that publish and routers that ask while something goes wrong.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of it")]

use std::time::{Duration, Instant};

use kvatlas::client::Publisher;
use kvatlas::hash::SequenceHash;
use kvatlas::tracking::BatchCursor;
use kvatlas::wire::{Event, StatusReply, Tier};
use tokio_util::sync::CancellationToken;

use super::truth::{Tally, Truth, Workload, settle};
use super::{Client, PATIENCE, by_sequence};

/// Pause between two batches.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(1);
/// How long a router waits for an answer. Longer than any fault that holds answers back without breaking a connection.
const ROUTER_PATIENCE: Duration = Duration::from_secs(2);
/// Pause between two looks at whether all holders are exact.
const HEAL_INTERVAL: Duration = Duration::from_millis(20);
/// After so many queries, what the daemon has applied is asked for.
const QUERIES_PER_STATUS: u64 = 16;
/// A worker begins a new epoch after so many batches, like one that is restarted.
const BATCHES_PER_EPOCH: u64 = 200;

struct Worker {
    name: String,
    publisher: Publisher,
}

/// Workers, the truth about them, and a router.
pub struct Fleet {
    pub client: Client,
    pub truth: Truth,
    workers: Vec<Worker>,
    workload: Workload,
    prompts: Vec<Vec<SequenceHash>>,
}

/// Tells which states the daemons that answer have certainly seen.
pub trait Floors {
    async fn raise(&self, client: &Client, truth: &Truth);
}

/// One daemon answers: its status says it.
pub struct OneDaemon;

impl Floors for OneDaemon {
    async fn raise(&self, client: &Client, truth: &Truth) {
        if let Ok(status) = client.status().await {
            truth.raise_floors(&status);
        }
    }
}

impl Fleet {
    /// `workers` workers and a router, on the broker at `url`, with a seeded load.
    pub async fn new(url: &str, workers: u64, seed: u64) -> Self {
        let mut client = Client::connect(url).await;
        client.queries = client.queries.with_patience(ROUTER_PATIENCE);
        let worker = |number| {
            let name = format!("gpu-{number}");
            let publisher = client.publisher(&name, 0);
            Worker { name, publisher }
        };
        let workers = (0..workers).map(worker).collect();
        let workload = Workload::new(seed, 16);
        let prompts = workload.prompts().to_vec();
        Self {
            client,
            truth: Truth::default(),
            workers,
            workload,
            prompts,
        }
    }

    /// A number below `bound`, of the same seed as the load.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.workload.below(bound)
    }

    /// Publishes and asks while `faults` happen; returns what the replies were worth.
    pub async fn under_load(&mut self, floors: &impl Floors, faults: impl Future<Output = ()>) -> Tally {
        let stop = CancellationToken::new();
        let Self {
            client,
            truth,
            workers,
            workload,
            prompts,
        } = self;
        let faults = async {
            faults.await;
            stop.cancel();
        };
        let publish = async {
            let mut number = 0;
            while !stop.is_cancelled() {
                let worker = &mut workers[number % workers.len()];
                number += 1;
                if worker.publisher.cursor().seq >= BATCHES_PER_EPOCH {
                    worker.begin_again(client);
                }
                worker.publish(truth, workload.events()).await;
                tokio::time::sleep(PUBLISH_INTERVAL).await;
            }
        };
        let ask = async {
            let mut tally = Tally::default();
            while !stop.is_cancelled() {
                for chain in prompts.iter() {
                    let window = truth.window();
                    let reply = client.ask_with(by_sequence(chain)).await;
                    tally.count(truth.judge(&window, chain, reply.as_ref()));
                    if tally.asked.is_multiple_of(QUERIES_PER_STATUS) {
                        floors.raise(client, truth).await;
                    }
                    if reply.is_err() || stop.is_cancelled() {
                        // Nobody there: not as often as the machine can.
                        tokio::time::sleep(PUBLISH_INTERVAL).await;
                        break;
                    }
                }
            }
            tally
        };
        let ((), tally, ()) = tokio::join!(publish, ask, faults);
        tally
    }

    /// After the faults: what no batch can make good, the workers do by a new epoch; then every reply must be the truth.
    pub async fn settle(&mut self, tally: &mut Tally) {
        let started = Instant::now();
        loop {
            for worker in &mut self.workers {
                worker.publish(&self.truth, Vec::new()).await;
            }
            tokio::time::sleep(HEAL_INTERVAL).await;
            let status = self.client.status().await.ok();
            let mut are_exact = status.is_some();
            for worker in &mut self.workers {
                if status
                    .as_ref()
                    .is_some_and(|status| !is_exact(status, &worker.name))
                {
                    are_exact = false;
                    worker.begin_again(&self.client);
                    let events = self.workload.events();
                    worker.publish(&self.truth, events).await;
                }
            }
            if are_exact {
                break;
            }
            assert!(
                started.elapsed() < PATIENCE,
                "not exact after {PATIENCE:?}: {status:#?}"
            );
        }
        settle(&self.client, &self.truth, &self.prompts, tally).await;
        tally.time_to_exactness = Some(started.elapsed());
    }
}

fn is_exact(status: &StatusReply, worker: &str) -> bool {
    let mut holders = status.holders.iter();
    holders.any(|holder| holder.worker.as_str() == worker && holder.exact)
}

impl Worker {
    /// A new epoch, as after a restart.
    fn begin_again(&mut self, client: &Client) {
        let epoch = self.publisher.cursor().epoch + 1;
        self.publisher = client
            .publisher(&self.name, 0)
            .resuming(BatchCursor { epoch, seq: 0 });
    }

    async fn publish(&mut self, truth: &Truth, events: Vec<Event>) {
        let before = self.publisher.cursor();
        let cursor = BatchCursor {
            seq: before.seq + 1,
            ..before
        };
        truth.apply(&self.name, 0, cursor, &events);
        self.publisher.publish(Tier::DEVICE, events).await.unwrap();
    }
}
