//! Batches that are lost, repeated, reordered or damaged on the way to the daemon, and the questions and answers by
//! which the daemon gets such batches again. Answers can be damaged, late or false, too. In every scenario, no reply
//! that is marked exact may be wrong, and in the end every reply must equal the truth.

use std::sync::Arc;
use std::time::Duration;

use crate::support::jetstream::Restartable;
use crate::support::metrics::counter;
use crate::support::process::Process;
use crate::support::relay::{AnswerFault, Faults, Relay, origin};
use crate::support::truth::{Tally, Truth, Workload, ask_all, settle};
use crate::support::way::Way;
use crate::support::{
    Client, broker, by_sequence, daemon, engine, eventually, fault_runs, hashes, reasons, server, stored,
    subjects,
};
use kvatlas_client::publish::{Beginning, HolderPublisher, PublisherOptions};
use kvatlas_core::wire::{
    BatchCursor, DegradedReason, Event, EventBatch, ResyncAnswerKind, ResyncChunk, Tier, WireLimits,
};
use kvatlas_telemetry::labels::ResyncFailure;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Setting for a single lane (thread that applies events). Then a batch that the daemon has applied shows that all
/// earlier batches have reached the lane.
const ONE_LANE: (&str, &str) = ("events.lanes", "1");
/// Ways in which events travel in the scenarios. In [`Way::Stream`], the relay lies between the publishers and the
/// stream.
const WAYS: [Way; 2] = [Way::Core, Way::Stream];

fn options() -> PublisherOptions {
    PublisherOptions {
        batch_delay: Duration::ZERO,
        heartbeat_interval: Duration::from_millis(50),
        // The ring and the chunks are small, so that the ring does not have all batches, and answers have many chunks.
        ring_batches_max: 16,
        chunk_bytes_max: 700,
        ..PublisherOptions::default()
    }
}

/// Publishers behind a relay, and a router that queries all the time.
struct Scene {
    _broker: Restartable,
    daemon: Process,
    relay: Relay,
    client: Arc<Client>,
    truth: Arc<Truth>,
    workload: Workload,
    publishers: Vec<HolderPublisher>,
    router: JoinHandle<Tally>,
    stop_router: CancellationToken,
}

/// Limit on the size of an answer, and so on the number of its chunks. An endless answer reaches it at once.
const SMALL_ANSWERS: (&str, &str) = ("resync.max_answer_bytes", "4 MiB");

impl Scene {
    async fn begin(seed: u64, workers: usize) -> Self {
        Self::through(Way::Core, seed, workers).await
    }

    async fn through(way: Way, seed: u64, workers: usize) -> Self {
        Self::with(&[ONE_LANE, SMALL_ANSWERS], way, seed, workers).await
    }

    async fn with(settings: &[(&str, &str)], way: Way, seed: u64, workers: usize) -> Self {
        let broker = Restartable::start(&server()).await;
        let daemon = Process::serve(broker.url(), &way.settings(settings));
        let client = Arc::new(Client::connect(broker.url()).await);
        let truth = Arc::new(Truth::default());
        let relay = Relay::start(broker.url(), Arc::clone(&truth), seed).await;
        let workload = Workload::new(seed, 12);
        let mut publishers = Vec::new();
        for number in 0..workers {
            let name = format!("gpu-{number}");
            publishers.push(engine(relay.publishers(), &origin(), &name, options()).await);
        }
        let stop_router = CancellationToken::new();
        let router = tokio::spawn(route(
            Arc::clone(&client),
            Arc::clone(&truth),
            workload.prompts().to_vec(),
            stop_router.clone(),
        ));
        Self {
            _broker: broker,
            daemon,
            relay,
            client,
            truth,
            workload,
            publishers,
            router,
            stop_router,
        }
    }

    /// Publishes `batches` batches. After every 20 batches and at the end, waits until the daemon has applied all
    /// batches that the relay has passed on.
    async fn publish(&mut self, batches: usize) {
        for number in 0..batches {
            let events = self.workload.events();
            let which = usize::try_from(self.workload.below(self.publishers.len() as u64)).unwrap();
            self.publishers[which]
                .publish(Tier::DEVICE, events)
                .await
                .unwrap();
            if number % 20 == 0 {
                self.relay.barrier(&self.client).await;
            }
        }
        for publisher in &self.publishers {
            publisher.flush().await.unwrap();
        }
        self.relay.barrier(&self.client).await;
    }

    /// Ends the faults, waits until every reply equals the truth, and prints the results of the scenario.
    async fn end(self, scenario: &str) -> Tally {
        self.relay.set_faults(Faults::default());
        self.relay.set_answer_fault(None);
        self.relay.set_deaf(false);
        self.relay.hold_answers(false);
        let mut settled = Tally::default();
        settle(&self.client, &self.truth, self.workload.prompts(), &mut settled).await;
        self.stop_router.cancel();
        let mut tally = self.router.await.unwrap();
        tally.time_to_exactness = settled.time_to_exactness;
        tally.add(settled);
        tally.report(scenario);
        drop(self.publishers);
        self.daemon.stop();
        tally
    }
}

async fn route(
    client: Arc<Client>,
    truth: Arc<Truth>,
    prompts: Vec<Vec<kvatlas_core::hash::SequenceHash>>,
    stop: CancellationToken,
) -> Tally {
    let mut tally = Tally::default();
    while !stop.is_cancelled() {
        ask_all(&client, &truth, &prompts, &mut tally).await;
        // The pause leaves processor time to the daemon.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    tally
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_dropped_duplicated_reordered_and_corrupted() {
    let faults = [
        (
            "dropped",
            Faults {
                drop: 100,
                ..Faults::default()
            },
        ),
        (
            "duplicated",
            Faults {
                duplicate: 200,
                ..Faults::default()
            },
        ),
        (
            "reordered",
            Faults {
                reorder: 150,
                ..Faults::default()
            },
        ),
        (
            "corrupted",
            Faults {
                corrupt: 100,
                ..Faults::default()
            },
        ),
        (
            "all at once",
            Faults {
                drop: 60,
                duplicate: 60,
                reorder: 60,
                corrupt: 60,
            },
        ),
    ];
    for way in WAYS {
        for (name, faults) in faults {
            let mut all = Tally::default();
            for seed in 1..=fault_runs().div_ceil(5) {
                let mut scene = Box::pin(Scene::through(way, seed, 4)).await;
                scene.relay.set_faults(faults);
                scene.publish(300).await;
                // No reply can have blocks that only a lost batch stores. Until the batch is sent again, such a reply
                // is blind.
                all.add(scene.end(&format!("batches {name} ({way}), seed {seed}")).await);
            }
            all.report(&format!("batches {name} ({way}), all seeds"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_restarts_with_a_new_epoch_or_lower_numbers() {
    for (name, beginning) in [
        ("a new epoch", Beginning::Epoch(6)),
        ("a lower sequence in the same epoch", Beginning::Epoch(5)),
    ] {
        for (way, drop) in [
            (Way::Core, 0),
            (Way::Core, 1000),
            (Way::Stream, 0),
            (Way::Stream, 1000),
        ] {
            let mut scene = Scene::through(way, 20 + drop, 1).await;
            let start = |beginning| PublisherOptions {
                beginning,
                ..options()
            };
            let nats = scene.relay.publishers();
            scene.publishers =
                vec![engine(nats.clone(), &origin(), "gpu-9", start(Beginning::Epoch(5))).await];
            scene.publish(60).await;
            // The engine restarts with an empty cache. The daemon may or may not receive its first batches.
            scene.publishers.clear();
            scene.relay.set_faults(Faults {
                drop,
                ..Faults::default()
            });
            scene.publishers = vec![engine(nats, &origin(), "gpu-9", start(beginning)).await];
            scene.publish(3).await;
            scene.relay.set_faults(Faults::default());
            scene.publish(10).await;
            let lost = if drop == 0 { "nothing" } else { "its first batches" };
            scene
                .end(&format!("a publisher restarts with {name}, {lost} lost ({way})"))
                .await;
        }
    }
}

async fn two_claim_one_worker(way: Way) {
    let mut scene = Scene::through(way, 3, 1).await;
    let start = |epoch| PublisherOptions {
        beginning: Beginning::Epoch(epoch),
        ..options()
    };
    let nats = scene.relay.publishers();
    // The publisher with the lower epoch continues, and answers questions, too.
    let replaced = engine(nats.clone(), &origin(), "gpu-9", start(5)).await;
    for number in 0..20 {
        replaced
            .publish(Tier::DEVICE, vec![stored(hashes(900 + number, 3))])
            .await
            .unwrap();
    }
    replaced.flush().await.unwrap();
    scene.publishers = vec![engine(nats, &origin(), "gpu-9", start(6)).await];
    scene.relay.set_faults(Faults {
        drop: 150,
        ..Faults::default()
    });
    for _ in 0..20 {
        replaced
            .publish(Tier::DEVICE, vec![stored(hashes(900, 3))])
            .await
            .unwrap();
        scene.publish(10).await;
    }
    // While both publishers continue, the worker is contested. The state of the higher epoch stays.
    eventually("the worker is contested", async || {
        let holder = scene.client.holder("gpu-9", 0).await?;
        let is_contested = holder.degraded.contains(DegradedReason::Contested);
        (is_contested && holder.epoch == 6).then_some(())
    })
    .await;
    replaced.set_heartbeats(false).await.unwrap();
    scene
        .end(&format!("two publishers claim one worker ({way})"))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_publishers_claim_one_worker() {
    for way in WAYS {
        Box::pin(two_claim_one_worker(way)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_is_cleared_while_its_resync_runs() {
    for (way, round) in WAYS
        .into_iter()
        .flat_map(|way| (0..3).map(move |round| (way, round)))
    {
        // The daemon waits for the answer, even on a busy machine.
        let settings = [ONE_LANE, SMALL_ANSWERS, ("resync.timeout_ms", "60000")];
        let mut scene = Box::pin(Scene::with(&settings, way, 40 + round, 1)).await;
        scene.publish(40).await;
        scene.relay.hold_answers(true);
        // The batch is lost, and the next batch shows the gap.
        scene.relay.set_faults(Faults {
            drop: 1000,
            ..Faults::default()
        });
        scene.publish(2).await;
        scene.relay.set_faults(Faults::default());
        scene.publish(1).await;
        eventually("an answer is on its way", async || {
            (scene.relay.answers_held() > 0).then_some(())
        })
        .await;
        // The answer was made before this batch, and arrives after it.
        let chain = scene.workload.prompts()[0].clone();
        let events = match round {
            0 => vec![Event::Cleared],
            1 => vec![Event::Cleared, stored(chain[..5].to_vec())],
            _ => vec![
                stored(chain[..5].to_vec()),
                Event::Cleared,
                stored(chain[..2].to_vec()),
            ],
        };
        scene.publishers[0].publish(Tier::DEVICE, events).await.unwrap();
        scene.publishers[0].flush().await.unwrap();
        scene.relay.barrier(&scene.client).await;
        let reply = scene.client.ask_with(by_sequence(&chain)).await.unwrap();
        assert!(
            reply.holders.iter().all(|holder| !holder.exact),
            "the resync is not over: {reply:?}"
        );
        scene
            .end(&format!("a worker is cleared while its resync runs ({way})"))
            .await;
    }
}

/// Returns all kinds of wrong answers, each with the failure that the daemon counts.
fn lies() -> Vec<(&'static str, ResyncFailure, AnswerFault)> {
    fn each(change: impl Fn(&mut ResyncChunk) + Send + Sync + 'static) -> AnswerFault {
        Arc::new(move |mut chunks| {
            chunks.iter_mut().for_each(&change);
            chunks.iter().map(ResyncChunk::encode).collect()
        })
    }
    fn whole(change: impl Fn(Vec<ResyncChunk>) -> Vec<ResyncChunk> + Send + Sync + 'static) -> AnswerFault {
        Arc::new(move |chunks| change(chunks).iter().map(ResyncChunk::encode).collect())
    }
    fn padded(mut chunks: Vec<ResyncChunk>, length: usize) -> Vec<ResyncChunk> {
        while chunks.len() < length {
            let last = chunks.last().unwrap().clone();
            let batches = Vec::new();
            chunks.push(ResyncChunk { batches, ..last });
        }
        for (number, chunk) in chunks.iter_mut().enumerate() {
            chunk.number = u32::try_from(number).unwrap();
            chunk.is_last = number + 1 == length;
        }
        chunks
    }
    vec![
        (
            "another rank",
            ResyncFailure::WrongRank,
            each(|chunk| chunk.rank += 1),
        ),
        (
            "an epoch that was replaced",
            ResyncFailure::StaleEpoch,
            each(|chunk| chunk.cursor.epoch = 1),
        ),
        (
            "a cursor that is behind",
            ResyncFailure::CursorBehind,
            each(|chunk| chunk.cursor.seq = 1),
        ),
        (
            "a chunk missing",
            ResyncFailure::OutOfOrder,
            whole(|chunks| {
                let mut chunks = padded(chunks, 3);
                chunks.remove(1);
                chunks
            }),
        ),
        (
            "chunks out of order",
            ResyncFailure::OutOfOrder,
            whole(|chunks| {
                let mut chunks = padded(chunks, 3);
                chunks.swap(0, 1);
                chunks
            }),
        ),
        (
            "chunks that contradict each other",
            ResyncFailure::Contradiction,
            whole(|chunks| {
                let mut chunks = padded(chunks, 3);
                chunks[1].cursor.seq += 1;
                chunks
            }),
        ),
        (
            "no end",
            ResyncFailure::TooLarge,
            whole(|chunks| {
                let mut chunks = padded(chunks, 5_000);
                chunks.last_mut().unwrap().is_last = false;
                chunks
            }),
        ),
        (
            "silence after the first chunk",
            ResyncFailure::TimedOut,
            each(|chunk| chunk.is_last = false),
        ),
        (
            "garbage",
            ResyncFailure::Undecodable,
            Arc::new(|_| vec![b"garbage".to_vec()]),
        ),
        (
            "a chunk that is too large",
            ResyncFailure::Undecodable,
            whole(|chunks| {
                let mut chunks = padded(chunks, 1);
                chunks[0].batches.push(vec![0; (1 << 20) - 300]);
                chunks
            }),
        ),
        (
            "batches that are damaged",
            ResyncFailure::Undecodable,
            whole(|chunks| {
                let mut chunks = padded(chunks, 2);
                chunks[0].batches.push(b"garbage".to_vec());
                chunks
            }),
        ),
        (
            "other events than stored blocks",
            ResyncFailure::WrongBatches,
            whole(|chunks| {
                let cursor = chunks[0].cursor;
                let batch = EventBatch {
                    epoch: cursor.epoch,
                    seq: cursor.seq,
                    rank: 0,
                    time_us: None,
                    tier: Tier::DEVICE,
                    block_size: None,
                    profile: None,
                    events: vec![Event::Cleared],
                };
                let mut chunks = padded(chunks, 2);
                for chunk in &mut chunks {
                    chunk.kind = ResyncAnswerKind::Full;
                    chunk.batches = vec![batch.encode()];
                }
                chunks
            }),
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_that_lie_are_rejected_and_counted() {
    for (seed, (name, failure, fault)) in (60..).zip(lies()) {
        let mut scene = Scene::begin(seed, 1).await;
        scene.publish(30).await;
        let series = format!("kvatlas_resyncs_failed_total{{namespace=\"llama\",reason=\"{failure}\"}}");
        let before = counter(&scene.daemon, &series);
        scene.relay.set_answer_fault(Some(fault));
        scene.relay.set_faults(Faults {
            drop: 1000,
            ..Faults::default()
        });
        scene.publish(2).await;
        scene.relay.set_faults(Faults::default());
        scene.publish(1).await;
        eventually(&format!("{name} is counted as {failure}"), async || {
            (counter(&scene.daemon, &series) > before).then_some(())
        })
        .await;
        assert!(scene.relay.answers_faulted() > 0);
        let status = scene.client.holder("gpu-0", 0).await.unwrap();
        assert!(!status.exact, "{name} was believed: {status:?}");
        let tally = scene.end(&format!("an answer with {name}")).await;
        tally.require_sight();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_workers_join_at_once_and_a_daemon_that_knows_none_of_them_learns_them() {
    const WORKERS: u64 = 1000;
    let broker = broker().await;
    let client = Client::connect(broker.url()).await;
    let truth = Truth::default();
    let workload = Workload::new(5, 16);
    let prompts = workload.prompts().to_vec();
    let first = daemon(broker.url(), &Way::Core.settings(&[ONE_LANE])).await;
    let engines = async_nats::connect(broker.url()).await.unwrap();
    let mut publishers = Vec::new();
    for number in 0..WORKERS {
        let name = format!("gpu-{number}");
        let options = PublisherOptions {
            beginning: Beginning::Epoch(1),
            batch_delay: Duration::ZERO,
            heartbeat_interval: Duration::from_millis(500),
            ..PublisherOptions::default()
        };
        publishers.push((
            name.clone(),
            engine(engines.clone(), &subjects(), &name, options).await,
        ));
    }
    let mut tally = Tally::default();
    for (number, (name, publisher)) in (0..).zip(&publishers) {
        let chain = &prompts[number % prompts.len()];
        let events = vec![stored(chain[..1 + number % chain.len()].to_vec())];
        // The heartbeats before this batch change nothing.
        let cursor = BatchCursor {
            epoch: 1,
            seq: u64::MAX,
        };
        truth.apply(name, 0, cursor, &events);
        publisher.publish(Tier::DEVICE, events).await.unwrap();
    }
    settle(&client, &truth, &prompts, &mut tally).await;
    tally.report("1,000 workers join at once");
    first.stop().await;

    // The second daemon has no state of the first one.
    let second = daemon(broker.url(), &Way::Core.settings(&[ONE_LANE])).await;
    let mut tally = Tally::default();
    settle(&client, &truth, &prompts, &mut tally).await;
    tally.report("1,000 workers are learned from their heartbeats");
    second.stop().await;
}

async fn full_buffer(way: Way) {
    const BATCHES: u64 = 20_000;
    let broker = Restartable::start(&server()).await;
    let tiny = [
        ("events.subscription_capacity", "16"),
        ("events.lane_queue_bytes", "1 MiB"),
        ONE_LANE,
    ];
    let daemon = daemon(broker.url(), &way.settings(&tiny)).await;
    let client = Client::connect(broker.url()).await;
    let (truth, workload) = (Truth::default(), Workload::new(7, 8));
    let prompts = workload.prompts().to_vec();
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let options = PublisherOptions {
        beginning: Beginning::Epoch(1),
        heartbeat_interval: Duration::from_millis(100),
        ..options()
    };
    let flood = engine(nats, &subjects(), "gpu-0", options).await;
    let mut tally = Tally::default();
    for number in 0..BATCHES {
        let chain = &prompts[usize::try_from(number % 8).unwrap()];
        let depth = usize::try_from(1 + number / 8 % 24).unwrap();
        let events = vec![stored(chain[..depth].to_vec())];
        let cursor = BatchCursor {
            epoch: 1,
            seq: number + 1,
        };
        truth.apply("gpu-0", 0, cursor, &events);
        flood.publish(Tier::DEVICE, events).await.unwrap();
    }
    ask_all(&client, &truth, &prompts, &mut tally).await;
    flood.flush().await.unwrap();
    settle(&client, &truth, &prompts, &mut tally).await;
    tally.report(&format!("a slow consumer with tiny buffers ({way})"));
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_full_buffer_swallows_is_asked_for() {
    for way in WAYS {
        Box::pin(full_buffer(way)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_answers_nothing_leaves_its_holder_degraded() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &Way::Core.settings(&[ONE_LANE])).await;
    let client = Client::connect(broker.url()).await;
    let mut plain = client.publisher("gpu-0", 0);
    client
        .tell(&mut plain, "gpu-0", 0, vec![stored(hashes(1, 4))])
        .await;
    let mut plain = plain.resuming(BatchCursor { epoch: 1, seq: 5 });
    let status = client
        .tell(&mut plain, "gpu-0", 0, vec![stored(hashes(1, 5))])
        .await;
    assert!(reasons(&status).contains(&"gap"), "{status:?}");
    assert_eq!(status.blocks, 5, "what came is applied all the same");
    daemon.stop().await;
}

#[test]
fn a_chunk_is_decoded_within_limits() {
    // The wrong answers above are made from chunks that are right.
    let chunk = ResyncChunk {
        rank: 0,
        cursor: BatchCursor { epoch: 1, seq: 1 },
        kind: ResyncAnswerKind::Missing,
        number: 0,
        is_last: true,
        time_us: None,
        recomputed_block_size: None,
        batches: Vec::new(),
    };
    assert_eq!(
        ResyncChunk::decode(&chunk.encode(), &WireLimits::default()),
        Ok(chunk)
    );
}
