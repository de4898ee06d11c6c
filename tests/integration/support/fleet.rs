//! Workers that publish and routers that query, while faults happen.
//!
//! The workers are [`HolderPublisher`]s, as engines have them, so daemons can ask them for batches that a fault has
//! lost. The workers send no heartbeats by themselves. The fleet sends the heartbeats, so that it knows the number of
//! every batch.

use std::time::{Duration, Instant};

use async_nats::ConnectOptions;
use futures_util::future::join_all;
use kvatlas_client::publish::{Beginning, HolderPublisher, PublisherOptions, Transport};
use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{BatchCursor, Event, StatusReply, Tier};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::truth::{Tally, Truth, Workload, settle, settle_below};
use super::{Client, PATIENCE, by_sequence, engine, is_long_form, subjects};

/// Pause between two batches.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(1);
/// Longest wait of a router for an answer, unless a test sets another.
const ROUTER_PATIENCE: Duration = Duration::from_secs(5);
/// Number of routers that query at the same time.
const ROUTERS: usize = 4;
/// Pause between two checks whether all holders are exact.
const HEAL_INTERVAL: Duration = Duration::from_millis(20);
/// Number of queries after which a router asks the daemons how much they have applied.
const QUERIES_PER_STATUS: u64 = 8;
/// Number of batches after which a worker begins a new epoch, as a restarted worker does.
const BATCHES_PER_EPOCH: u64 = 200;
/// Number of batches of the whole fleet after which one anchor begins a new epoch. The anchors do this in turn.
const BATCHES_PER_RENEWAL: u64 = 150;
/// Number of anchors: workers that have the blocks of every prompt. There are two, so that one keeps its blocks while
/// the other begins a new epoch. So every answer has to name a holder.
const ANCHORS: usize = 2;

/// Settings with which a daemon soon repeats a failed resync.
pub const QUICK_RESYNCS: [(&str, &str); 3] = [
    ("resync.retry_min_ms", "10"),
    ("resync.retry_max_ms", "200"),
    ("resync.timeout_ms", "500"),
];

/// Transport through a stream. A publisher tries each batch up to 20 times, 300 ms each, and so outlasts outages of
/// some seconds.
pub const THROUGH_STREAM: Transport = Transport::JetStream {
    acknowledgement_timeout: Duration::from_millis(300),
    attempts: 20,
};

/// Worker: its publisher, and the cursor of its last batch.
struct Worker {
    name: String,
    publisher: HolderPublisher,
    cursor: BatchCursor,
}

/// Connections and transport with which the workers of a fleet publish.
struct Engines {
    /// Connections, over which the workers are spread by their names.
    connections: Vec<async_nats::Client>,
    transport: Transport,
}

/// Workers, the truth about their blocks, and a router.
pub struct Fleet {
    pub client: Client,
    pub truth: Truth,
    engines: Engines,
    workers: Vec<Worker>,
    anchors: Vec<Worker>,
    workload: Workload,
    prompts: Vec<Vec<SequenceHash>>,
    /// Pause between two batches.
    pace: Duration,
}

/// Source of the floors: for each holder, the newest state that all running daemons are known to have applied. An exact
/// reply must not show an older state.
pub trait Floors {
    async fn raise(&self, client: &Client, truth: &Truth);
}

/// Floors from the status of the only daemon. A floor is the newest state of a holder that the daemon is known to have
/// applied.
pub struct OneDaemon;

impl Floors for OneDaemon {
    async fn raise(&self, client: &Client, truth: &Truth) {
        if let Ok(status) = client.status().await {
            truth.raise_floors(&status);
        }
    }
}

impl Fleet {
    /// Makes a fleet of `workers` workers that publish through `transport`, and a router, at the broker `url`. `seed`
    /// decides the load. A daemon must be there already.
    pub async fn through(url: &str, transport: Transport, workers: u64, seed: u64) -> Self {
        Self::across(url, &[url.to_owned()], transport, workers, seed).await
    }

    /// Makes a fleet as [`Self::through`] does, but connects the router to the broker `router`, and spreads the workers
    /// over `brokers` by their names.
    pub async fn across(
        router: &str,
        brokers: &[String],
        transport: Transport,
        workers: u64,
        seed: u64,
    ) -> Self {
        let mut client = Client::connect(router).await;
        client.queries = client.queries.with_patience(ROUTER_PATIENCE);
        let connect = async |url: &String| {
            let options = ConnectOptions::new().max_reconnects(None);
            options.connect(url).await.unwrap()
        };
        let engines = Engines {
            connections: join_all(brokers.iter().map(connect)).await,
            transport,
        };
        let workload = Workload::new(seed, 16);
        let workers = (0..workers).map(|number| engines.worker(format!("gpu-{number}")));
        let anchors = (0..ANCHORS).map(|number| engines.worker(format!("anchor-{number}")));
        let mut fleet = Self {
            workers: join_all(workers).await,
            anchors: join_all(anchors).await,
            engines,
            client,
            truth: Truth::default(),
            prompts: workload.prompts().to_vec(),
            workload,
            pace: PUBLISH_INTERVAL,
        };
        fleet.place_anchors().await;
        fleet
    }

    /// Makes each anchor publish all prompts, and waits until the daemon has applied them. From here on, each query
    /// asks for blocks that some holder has.
    async fn place_anchors(&mut self) {
        for anchor in &mut self.anchors {
            anchor.publish(&self.truth, everything(&self.prompts)).await;
            let cursor = anchor.cursor;
            self.client.applied(&anchor.name, 0, cursor).await;
            // The other replicas get as much time again to apply the batch.
            tokio::time::sleep(HEAL_INTERVAL).await;
            self.truth.raise_floor(&anchor.name, 0, cursor);
        }
    }

    /// Sets how long routers wait for an answer. A query whose request or answer is lost to a fault fails after this
    /// time.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.client.queries = self.client.queries.with_patience(patience);
        self
    }

    /// Sets the pause between two batches.
    #[must_use]
    pub fn with_pace(mut self, pace: Duration) -> Self {
        self.pace = pace;
        self
    }

    /// Returns a random number below `bound`, from the seed of the load.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.workload.below(bound)
    }

    /// Publishes and queries until `faults` has ended. Returns the counts of the replies.
    ///
    /// In the short form of a scenario, the routers send one query for each batch. In the long form, they query without
    /// a pause.
    pub async fn under_load(&mut self, floors: &impl Floors, faults: impl Future<Output = ()>) -> Tally {
        let stop = CancellationToken::new();
        // There is a permit for each query. Queries that a fault delays are made when the fault is over.
        let due = Semaphore::new(0);
        let Self {
            client,
            truth,
            engines,
            workers,
            anchors,
            workload,
            prompts,
            pace,
        } = self;
        let faults = async {
            faults.await;
            stop.cancel();
            due.close();
        };
        let publish = async {
            let (mut batches, everything) = (0_u64, everything(prompts));
            let (mut numbers, mut turns) = ((0..workers.len()).cycle(), (0..ANCHORS).cycle());
            while let Some(number) = numbers.next().filter(|_| !stop.is_cancelled()) {
                let worker = &mut workers[number];
                if worker.cursor.seq >= BATCHES_PER_EPOCH {
                    worker.begin_again(engines).await;
                }
                worker.publish(truth, workload.events()).await;
                due.add_permits(1);
                batches += 1;
                if batches.is_multiple_of(BATCHES_PER_RENEWAL)
                    && let Some(turn) = turns.next()
                {
                    anchors[turn].begin_again(engines).await;
                    anchors[turn].publish(truth, everything.clone()).await;
                }
                tokio::time::sleep(*pace).await;
            }
        };
        let ask = async |first: usize| {
            let mut tally = Tally::default();
            let mut chains = prompts.iter().cycle().skip(first);
            while let Some(chain) = chains.next().filter(|_| !stop.is_cancelled()) {
                if !is_long_form() {
                    let Ok(query) = due.acquire().await else { break };
                    query.forget();
                }
                let window = truth.window();
                let reply = client.ask_with(by_sequence(chain)).await;
                tally.count(truth.judge(&window, chain, reply.as_ref()));
                if tally.asked.is_multiple_of(QUERIES_PER_STATUS) {
                    floors.raise(client, truth).await;
                }
                if reply.is_err() {
                    // If no daemon answers, the router waits between two queries.
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

    /// Waits, after the faults, until every reply equals the truth with all holders exact. During this time, workers
    /// send only heartbeats.
    pub async fn settle(&mut self, tally: &mut Tally) {
        let started = Instant::now();
        self.beat_until(started, "exact", |holder| holder.exact).await;
        settle(&self.client, &self.truth, &self.prompts, tally).await;
        tally.time_to_exactness = Some(started.elapsed());
    }

    /// Waits as [`Self::settle`] does, but for a daemon whose index has too little room. Here a holder may also be
    /// inexact, if lack of room is the only reason. No reply may then claim more blocks than the holder has.
    pub async fn settle_below(&mut self, tally: &mut Tally) {
        use kvatlas_core::wire::{DegradedReason, DegradedReasons};
        let started = Instant::now();
        let full = DegradedReasons::of(DegradedReason::Capacity);
        let is_settled =
            |holder: &kvatlas_core::wire::HolderStatusReply| holder.exact || holder.degraded == full;
        self.beat_until(started, "as exact as there is room for", is_settled)
            .await;
        settle_below(&self.client, &self.truth, &self.prompts, tally).await;
        tally.time_to_exactness = Some(started.elapsed());
    }

    /// Sends heartbeats until the daemon has applied the last batch of every worker, and until `is_settled` is true for
    /// every worker's holder. `what` describes this state for the failure message.
    async fn beat_until(
        &mut self,
        started: Instant,
        what: &str,
        is_settled: impl Fn(&kvatlas_core::wire::HolderStatusReply) -> bool,
    ) {
        loop {
            let before: Vec<(String, BatchCursor)> =
                self.members().map(|it| (it.name.clone(), it.cursor)).collect();
            self.beat().await;
            let status = self.client.status().await.ok();
            let is_there = |(name, cursor): &(String, BatchCursor)| {
                status.as_ref().is_some_and(|status| {
                    find(status, name)
                        .is_some_and(|holder| is_settled(holder) && cursor_of(holder) >= *cursor)
                })
            };
            if before.iter().all(is_there) {
                return;
            }
            assert!(
                started.elapsed() < PATIENCE,
                "not {what} after {PATIENCE:?}; published {before:?}: {status:#?}"
            );
        }
    }

    /// Sends a heartbeat for every worker.
    pub async fn beat(&mut self) {
        for worker in self.workers.iter_mut().chain(&mut self.anchors) {
            worker.publish(&self.truth, Vec::new()).await;
        }
        tokio::time::sleep(HEAL_INTERVAL).await;
    }

    fn members(&self) -> impl Iterator<Item = &Worker> {
        self.workers.iter().chain(&self.anchors)
    }
}

/// Returns events that store all prompts.
fn everything(prompts: &[Vec<SequenceHash>]) -> Vec<Event> {
    prompts.iter().map(|chain| super::stored(chain.clone())).collect()
}

fn find<'a>(status: &'a StatusReply, worker: &str) -> Option<&'a kvatlas_core::wire::HolderStatusReply> {
    status
        .holders
        .iter()
        .find(|holder| holder.worker.as_str() == worker)
}

fn cursor_of(holder: &kvatlas_core::wire::HolderStatusReply) -> BatchCursor {
    BatchCursor {
        epoch: holder.epoch,
        seq: holder.seq,
    }
}

impl Engines {
    async fn worker(&self, name: String) -> Worker {
        let publisher = self.publisher(&name, 1).await;
        let cursor = BatchCursor { epoch: 1, seq: 0 };
        Worker {
            name,
            publisher,
            cursor,
        }
    }

    async fn publisher(&self, name: &str, epoch: u64) -> HolderPublisher {
        let options = PublisherOptions {
            beginning: Beginning::Epoch(epoch),
            transport: self.transport,
            // Each call makes one batch.
            batch_delay: Duration::ZERO,
            heartbeat_interval: Duration::from_secs(24 * 3600),
            // The ring is small, so that it does not always have the missing batches.
            ring_batches_max: 32,
            chunk_bytes_max: 4096,
            ..PublisherOptions::default()
        };
        let number = name.bytes().map(usize::from).sum::<usize>() % self.connections.len();
        engine(self.connections[number].clone(), &subjects(), name, options).await
    }
}

impl Worker {
    /// Begins a new epoch with a new publisher, as a restarted worker does. Batches that the old publisher still has in
    /// its queue may arrive later; the daemon must ignore them.
    async fn begin_again(&mut self, engines: &Engines) {
        let epoch = self.cursor.epoch + 1;
        self.publisher = engines.publisher(&self.name, epoch).await;
        self.cursor = BatchCursor { epoch, seq: 0 };
    }

    async fn publish(&mut self, truth: &Truth, events: Vec<Event>) {
        self.cursor.seq += 1;
        truth.apply(&self.name, 0, self.cursor, &events);
        self.publisher.publish(Tier::DEVICE, events).await.unwrap();
    }
}
