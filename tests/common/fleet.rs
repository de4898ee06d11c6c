//! Workers that publish and routers that ask while something goes wrong.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of it")]

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use kvatlas::client::Publisher;
use kvatlas::hash::SequenceHash;
use kvatlas::tracking::BatchCursor;
use kvatlas::wire::{Event, StatusReply, Tier};
use tokio_util::sync::CancellationToken;

use super::truth::{Tally, Truth, Workload, settle};
use super::{Client, PATIENCE, by_sequence};

/// Pause between two batches.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(1);
/// How long a router waits for an answer unless told otherwise.
const ROUTER_PATIENCE: Duration = Duration::from_secs(5);
/// Routers that ask side by side.
const ROUTERS: usize = 4;
/// Pause between two looks at whether all holders are exact.
const HEAL_INTERVAL: Duration = Duration::from_millis(20);
/// After so many queries, what the daemon has applied is asked for.
const QUERIES_PER_STATUS: u64 = 16;
/// A worker begins a new epoch after so many batches, like one that is restarted.
const BATCHES_PER_EPOCH: u64 = 200;

/// After so many batches one of the anchors begins a new epoch.
const BATCHES_PER_RENEWAL: u64 = 150;
/// Workers that have every prompt, whatever happens: whoever names nobody is blind. Two, which begin new epochs in turn.
const ANCHORS: usize = 2;

struct Worker {
    name: String,
    publisher: Publisher,
}

/// Workers, the truth about them, and a router.
pub struct Fleet {
    pub client: Client,
    pub truth: Truth,
    workers: Vec<Worker>,
    anchors: Vec<Worker>,
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
    /// `workers` workers and a router, on the broker at `url`, with a seeded load. A daemon must be there already.
    pub async fn new(url: &str, workers: u64, seed: u64) -> Self {
        let mut client = Client::connect(url).await;
        client.queries = client.queries.with_patience(ROUTER_PATIENCE);
        let worker = |name: String| {
            let publisher = client.publisher(&name, 0);
            Worker { name, publisher }
        };
        let workload = Workload::new(seed, 16);
        let mut fleet = Self {
            workers: (0..workers)
                .map(|number| worker(format!("gpu-{number}")))
                .collect(),
            anchors: (0..ANCHORS)
                .map(|number| worker(format!("anchor-{number}")))
                .collect(),
            client,
            truth: Truth::default(),
            prompts: workload.prompts().to_vec(),
            workload,
        };
        fleet.place_anchors().await;
        fleet
    }

    /// From here on there is always somebody who has what is asked for.
    async fn place_anchors(&mut self) {
        for anchor in &mut self.anchors {
            anchor.publish(&self.truth, everything(&self.prompts)).await;
            let cursor = anchor.publisher.cursor();
            self.client.applied(&anchor.name, 0, cursor).await;
            // Other replicas are given the same time again.
            tokio::time::sleep(HEAL_INTERVAL).await;
            self.truth.raise_floor(&anchor.name, 0, cursor);
        }
    }

    /// Lets routers wait for `patience`: a request that a fault has swallowed is given up after that.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.client.queries = self.client.queries.with_patience(patience);
        self
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
            anchors,
            workload,
            prompts,
        } = self;
        let faults = async {
            faults.await;
            stop.cancel();
        };
        let publish = async {
            let (mut batches, everything) = (0_u64, everything(prompts));
            let (mut numbers, mut turns) = ((0..workers.len()).cycle(), (0..ANCHORS).cycle());
            while let Some(number) = numbers.next().filter(|_| !stop.is_cancelled()) {
                let worker = &mut workers[number];
                if worker.publisher.cursor().seq >= BATCHES_PER_EPOCH {
                    worker.begin_again(client);
                }
                worker.publish(truth, workload.events()).await;
                batches += 1;
                if batches.is_multiple_of(BATCHES_PER_RENEWAL)
                    && let Some(turn) = turns.next()
                {
                    anchors[turn].begin_again(client);
                    anchors[turn].publish(truth, everything.clone()).await;
                }
                tokio::time::sleep(PUBLISH_INTERVAL).await;
            }
        };
        let ask = async |first: usize| {
            let mut tally = Tally::default();
            let mut chains = prompts.iter().cycle().skip(first);
            while let Some(chain) = chains.next().filter(|_| !stop.is_cancelled()) {
                let window = truth.window();
                let reply = client.ask_with(by_sequence(chain)).await;
                tally.count(truth.judge(&window, chain, reply.as_ref()));
                if tally.asked.is_multiple_of(QUERIES_PER_STATUS) {
                    floors.raise(client, truth).await;
                }
                if reply.is_err() {
                    // Nobody there: not as often as the machine can.
                    tokio::time::sleep(PUBLISH_INTERVAL).await;
                }
            }
            tally
        };
        let routers = join_all((0..ROUTERS).map(|number| ask(number * prompts.len() / ROUTERS)));
        let ((), tallies, ()) = tokio::join!(publish, routers, faults);
        let mut tally = Tally::default();
        tallies.into_iter().for_each(|asked| tally.add(asked));
        tally
    }

    /// After the faults: what no batch can make good, the workers do by a new epoch; then every reply must be the truth.
    pub async fn settle(&mut self, tally: &mut Tally) {
        let started = Instant::now();
        loop {
            for worker in self.workers.iter_mut().chain(&mut self.anchors) {
                worker.publish(&self.truth, Vec::new()).await;
            }
            tokio::time::sleep(HEAL_INTERVAL).await;
            let status = self.client.status().await.ok();
            let is_behind = |worker: &Worker| {
                status
                    .as_ref()
                    .is_none_or(|status| !is_exact(status, &worker.name))
            };
            let mut are_exact = true;
            for worker in self.workers.iter_mut().filter(|worker| is_behind(worker)) {
                are_exact = false;
                worker.begin_again(&self.client);
                worker.publish(&self.truth, self.workload.events()).await;
            }
            for anchor in self.anchors.iter_mut().filter(|anchor| is_behind(anchor)) {
                are_exact = false;
                anchor.begin_again(&self.client);
                anchor.publish(&self.truth, everything(&self.prompts)).await;
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

/// All prompts, as one holder has them.
fn everything(prompts: &[Vec<SequenceHash>]) -> Vec<Event> {
    prompts.iter().map(|chain| super::stored(chain.clone())).collect()
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
