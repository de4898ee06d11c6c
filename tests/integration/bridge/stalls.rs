//! A bridge that stands still. Its clock moves only when a test moves it, so the tests do not depend on the speed of
//! the machine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_nats::Subscriber;
use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use bytes::Bytes;
use futures_util::StreamExt;
use kvatlas_bridge::{Bridge, BridgeClock, BridgeOptions, FollowOptions};
use kvatlas_core::wire::{Event, EventBatch, WireLimits};
use kvatlas_process::broker::embedded::EmbeddedBroker;
use kvatlas_process::registry::EngineRegistry;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::frames::{batch, subscriber};
use super::sources::{envelope, router_stored, trt_created, trt_stored};
use super::{follow_text, stored};
use crate::support::{PATIENCE, broker, eventually, subjects};

/// Interval so long that no tick comes during a test.
const NEVER: Duration = Duration::from_secs(3600);

/// A bridge, and the messages that it publishes to daemons.
struct Scene {
    bridge: Bridge,
    poll_interval: Duration,
    moved_ms: Arc<AtomicU64>,
    told: Subscriber,
    nats: async_nats::Client,
    broker: EmbeddedBroker,
}

impl Scene {
    async fn new(poll_interval: Duration) -> Self {
        Self::with_silence(poll_interval, NEVER).await
    }

    /// Makes a scene with a bridge that asks every `poll_interval`, and calls an engine silent after `silent_after`.
    async fn with_silence(poll_interval: Duration, silent_after: Duration) -> Self {
        let broker = broker().await;
        let nats = async_nats::connect(broker.url()).await.unwrap();
        let told = nats.subscribe(subjects().all_events()).await.unwrap();
        nats.flush().await.unwrap();
        let (moved_ms, begun) = (Arc::new(AtomicU64::new(0)), Instant::now());
        let clock = BridgeClock::new({
            let moved_ms = Arc::clone(&moved_ms);
            move || begun + Duration::from_millis(moved_ms.load(Ordering::SeqCst))
        });
        let options = BridgeOptions {
            follow: FollowOptions {
                patience: PATIENCE,
                poll_interval,
                silent_after,
                ..FollowOptions::default()
            },
            clock,
            ..BridgeOptions::default()
        };
        let bridge = Bridge::new(subjects(), options);
        bridge.start(&nats);
        Self {
            bridge,
            poll_interval,
            moved_ms,
            told,
            nats,
            broker,
        }
    }

    fn follow(&self, text: &str) {
        follow_text(&self.bridge, text);
    }

    /// Moves the clock, as if the bridge had stood still.
    fn stand_still(&self) {
        let paused = self.poll_interval + Duration::from_secs(2);
        let paused_ms = u64::try_from(paused.as_millis()).unwrap();
        self.moved_ms.fetch_add(paused_ms, Ordering::SeqCst);
    }

    /// Waits for the next batch that the bridge publishes to daemons. Returns a word for each stored block and for each
    /// change between exact and in doubt.
    async fn next(&mut self) -> Vec<&'static str> {
        let message = tokio::time::timeout(PATIENCE, self.told.next()).await;
        let message = message.expect("daemons are told more").unwrap();
        let batch = EventBatch::decode(&message.payload, &WireLimits::default()).unwrap();
        let describe = |event: &Event| match event {
            Event::Stored(stored) => vec!["stored"; stored.names.len()],
            Event::Doubted(doubts) if doubts.is_empty() => vec!["exact"],
            Event::Doubted(_) => vec!["in doubt"],
            other => panic!("{other:?}"),
        };
        batch.events.iter().flat_map(describe).collect()
    }

    /// Fails the test unless the bridge publishes exactly the changes in `expected`, in this order.
    async fn tells(&mut self, expected: &[&str]) {
        let mut told = Vec::new();
        while told.len() < expected.len() {
            told.extend(self.next().await);
            assert!(expected.starts_with(&told), "{told:?} instead of {expected:?}");
        }
    }
}

/// Simulated engine that answers a question only when the test lets it.
struct Engine {
    publisher: TcpStream,
    replay: RouterSocket,
    sent: Vec<Bytes>,
}

/// Question of the bridge that is not answered yet.
struct Question {
    client: Bytes,
    start: usize,
}

impl Engine {
    /// Starts an engine that the bridge of `scene` follows.
    async fn followed(scene: &Scene) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut replay = RouterSocket::new();
        let replay_endpoint = replay.bind("tcp://127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap();
        scene.follow(&format!("gpu-0=tcp://{endpoint},replay={replay_endpoint}"));
        Self {
            publisher: subscriber(&listener).await,
            replay,
            sent: Vec::new(),
        }
    }

    /// Publishes one more block.
    async fn publish(&mut self) {
        let number = u32::try_from(self.sent.len()).unwrap();
        let event = stored(1, number, 1);
        let payload = rmp_serde::to_vec(&json!([1.5, [event], 0])).unwrap();
        self.sent.push(payload.into());
        let bytes = batch(number.into(), &event);
        self.publisher.write_all(&bytes).await.unwrap();
    }

    /// Returns the next question of the bridge.
    async fn asked(&mut self) -> Question {
        let asked = tokio::time::timeout(PATIENCE, self.replay.recv()).await;
        let frames = asked.expect("the bridge asks").unwrap().into_vec();
        let [client, _, start] = <[Bytes; 3]>::try_from(frames).unwrap();
        let start = u64::from_be_bytes(start[..].try_into().unwrap());
        Question {
            client,
            start: usize::try_from(start).unwrap(),
        }
    }

    async fn reply(&mut self, client: &Bytes, number: &[u8], payload: Bytes) {
        let mut message = ZmqMessage::from(client.clone());
        for frame in [Bytes::new(), Bytes::copy_from_slice(number), payload] {
            message.push_back(frame);
        }
        self.replay.send(message).await.unwrap();
    }

    /// Answers a question of the bridge with all batches from the requested number on.
    async fn answer(&mut self, Question { client, start }: Question) {
        for number in start..self.sent.len() {
            let payload = self.sent[number].clone();
            self.reply(&client, &(number as u64).to_be_bytes(), payload).await;
        }
        self.reply(&client, &[0xff; 8], Bytes::new()).await;
    }

    /// Answers a question with an unreadable message.
    async fn fail(&mut self, question: Question) {
        self.reply(&question.client, b"?", Bytes::new()).await;
    }
}

/// Makes a scene with an engine that is exact and has one block. The bridge has just asked the engine a question, which
/// is not yet answered.
async fn asked() -> (Scene, Engine, Question) {
    let mut scene = Scene::new(Duration::from_millis(20)).await;
    let mut engine = Engine::followed(&scene).await;
    engine.publish().await;
    let first = engine.asked().await;
    engine.answer(first).await;
    scene.tells(&["in doubt", "stored", "exact"]).await;
    let question = engine.asked().await;
    (scene, engine, question)
}

#[tokio::test]
async fn a_question_that_failed_after_a_stall_is_no_ordinary_one() {
    let (mut scene, mut engine, question) = asked().await;
    scene.stand_still();
    engine.publish().await;
    engine.fail(question).await;
    let next = engine.asked().await;
    engine.answer(next).await;
    scene.tells(&["in doubt", "stored", "exact"]).await;
}

/// An engine answers a question only in part, and publishes a batch meanwhile. The holder must be in doubt until the
/// answer is complete.
#[tokio::test]
async fn an_answer_that_drips_leaves_no_engine_exact() {
    let mut scene = Scene::with_silence(Duration::from_millis(20), Duration::from_millis(200)).await;
    let mut engine = Engine::followed(&scene).await;
    engine.publish().await;
    let first = engine.asked().await;
    engine.answer(first).await;
    scene.tells(&["in doubt", "stored", "exact"]).await;
    let Question { client, start } = engine.asked().await;
    let payload = engine.sent[start].clone();
    engine
        .reply(&client, &(start as u64).to_be_bytes(), payload)
        .await;
    // Neither the rest of the answer nor the published batch arrives.
    engine.publish().await;
    scene.tells(&["in doubt"]).await;
    engine.reply(&client, &[0xff; 8], Bytes::new()).await;
    while scene.next().await != ["exact"] {
        let next = engine.asked().await;
        engine.answer(next).await;
    }
}

#[tokio::test]
async fn an_answer_from_before_a_stall_is_no_news() {
    let (mut scene, mut engine, question) = asked().await;
    scene.stand_still();
    engine.publish().await;
    engine.answer(question).await;
    let next = engine.asked().await;
    engine.publish().await;
    engine.answer(next).await;
    scene.tells(&["in doubt", "stored", "stored", "exact"]).await;
}

/// The time in which the bridge stood still counts as silence of the engine: daemons have removed the holder meanwhile,
/// and another engine may have the address.
#[tokio::test]
async fn another_process_after_a_long_stall_is_in_doubt() {
    let mut scene = Scene::new(NEVER).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    scene.follow(&format!("gpu-0=tcp://{}", listener.local_addr().unwrap()));
    let mut engine = subscriber(&listener).await;
    scene.tells(&["in doubt"]).await;
    engine.write_all(&batch(0, &stored(1, 0, 1))).await.unwrap();
    scene.tells(&["stored", "exact"]).await;
    scene.moved_ms.fetch_add(3_600_000, Ordering::SeqCst);
    drop(engine);
    let mut other = subscriber(&listener).await;
    other.write_all(&batch(0, &stored(2, 0, 1))).await.unwrap();
    eventually("the bridge doubts it", async || {
        let error = scene.bridge.engines()[0].last_error.clone()?;
        error.contains("another process by now").then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_engine_that_cannot_be_asked_is_read_to_its_end_first() {
    let mut scene = Scene::new(NEVER).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    scene.follow(&format!("gpu-0=tcp://{}", listener.local_addr().unwrap()));
    let mut engine = subscriber(&listener).await;
    scene.tells(&["in doubt"]).await;
    scene.stand_still();
    for number in 0..3 {
        let bytes = batch(number.into(), &stored(1, number, 1));
        engine.write_all(&bytes).await.unwrap();
    }
    scene.tells(&["stored", "stored", "stored"]).await;
}

/// Channel with the requests to a simulated server of TensorRT-LLM. For each request, it has a sender through which the
/// test gives the answer.
type Questions = mpsc::Receiver<oneshot::Sender<Value>>;

/// Starts a simulated server of TensorRT-LLM, which sends an answer only when the test gives it.
async fn server() -> (Questions, std::net::SocketAddr) {
    let (ask, questions) = mpsc::channel::<oneshot::Sender<Value>>(1);
    let handler = async |State(ask): State<mpsc::Sender<oneshot::Sender<Value>>>| {
        let (reply, answer) = oneshot::channel();
        ask.send(reply).await.unwrap();
        Json(answer.await.unwrap())
    };
    let router = Router::new()
        .route("/kv_cache_events", post(handler))
        .with_state(ask);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (questions, address)
}

#[tokio::test]
async fn a_servers_answer_from_before_a_stall_is_no_news() {
    let mut scene = Scene::new(NEVER).await;
    let (mut questions, address) = server().await;
    scene.follow(&format!("gpu-0=http://{address},format=tensorrt-llm"));
    let question = questions.recv().await.unwrap();
    question
        .send(json!([trt_created(0), trt_stored(1, 1, 0, 1)]))
        .unwrap();
    scene.tells(&["in doubt", "stored", "exact"]).await;
    let question = questions.recv().await.unwrap();
    scene.stand_still();
    question.send(json!([trt_stored(2, 1, 1, 1)])).unwrap();
    scene.tells(&["in doubt", "stored"]).await;
    let question = questions.recv().await.unwrap();
    question.send(json!([trt_stored(3, 1, 2, 1)])).unwrap();
    scene.tells(&["stored", "exact"]).await;
}

#[tokio::test]
async fn an_event_plane_is_read_to_its_end_after_a_stall() {
    const SUBJECT: &str = "namespace.n.component.c.kv-events";
    for poll_interval in [NEVER, Duration::from_millis(20)] {
        let mut scene = Scene::new(poll_interval).await;
        scene.follow(&format!(
            "plane={},format=dynamo,topic={SUBJECT}",
            scene.broker.url()
        ));
        let nats = scene.nats.clone();
        let publish = async |number: u64| {
            let place = usize::try_from(number).unwrap();
            let payload = envelope(1, number, &router_stored(7, 1, place, 1));
            nats.publish(SUBJECT, payload.into()).await.unwrap();
        };
        // Messages before the subscription are not received, so the bridge does not know their numbers.
        while scene.nats.statistics().in_messages.load(Ordering::SeqCst) == 0 {
            publish(0).await;
            tokio::task::yield_now().await;
        }
        scene.tells(&["in doubt", "stored", "exact"]).await;
        scene.stand_still();
        publish(1).await;
        scene.tells(&["in doubt", "stored"]).await;
        publish(2).await;
        if poll_interval == NEVER {
            scene.tells(&["stored"]).await;
            continue;
        }
        // At some point, no old message waits any more. The next message is then a new one, and makes the engine exact.
        for number in 3.. {
            if scene.next().await.contains(&"exact") {
                break;
            }
            publish(number).await;
        }
    }
}
