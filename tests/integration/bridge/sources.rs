//! Sources of events other than an engine's ZMQ publisher: TensorRT-LLM's server, Dynamo's event plane, Mooncake
//! Store's pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use kvatlas_core::hash::{BlockSize, HashSeed, block_hashes, sequence_hashes};
use kvatlas_process::registry::{EngineRegistry, EngineStatus};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::python::{Publishers, Spec, python};
use super::{BLOCK, Site, follow_text, tokens};
use crate::support::eventually;
use crate::support::http::HttpClient;

impl Site {
    /// Makes the bridge follow the engine that `text` describes in the form of `--engine`, and waits until the bridge
    /// is connected to it.
    async fn follow_source(&self, text: &str) {
        follow_text(&self.bridge, text);
        eventually("the source is connected", async || {
            let engines = self.bridge.engines();
            engines
                .iter()
                .all(|engine| engine.status != EngineStatus::Pending)
                .then_some(())
        })
        .await;
    }
}

/// Returns kvatlas's hashes of the first `count` blocks of sequence `which`: the block hashes, then the sequence
/// hashes.
pub(super) fn hashes(which: u32, count: u32) -> (Vec<u64>, Vec<u64>) {
    let size = BlockSize::new(BLOCK).unwrap();
    let blocks: Vec<_> = block_hashes(&tokens(which, 0, count), size, HashSeed::default()).collect();
    let sequences = sequence_hashes(blocks.iter().copied());
    let sequences = sequences.map(|hash| hash.as_u64()).collect();
    (blocks.iter().map(|hash| hash.as_u64()).collect(), sequences)
}

/// Returns Dynamo's event that stores the blocks `first` to `first + count` of sequence `which`.
pub(super) fn router_stored(worker: u64, which: u32, first: usize, count: usize) -> Value {
    let (blocks, sequences) = hashes(which, u32::try_from(first + count).unwrap());
    let stored: Vec<Value> = (first..first + count)
        .map(|place| json!({"block_hash": sequences[place], "tokens_hash": blocks[place], "mm_extra_info": null}))
        .collect();
    let parent = first.checked_sub(1).map(|before| sequences[before]);
    let data = json!({"stored": {"parent_hash": parent, "start_position": null, "blocks": stored}});
    router_event(worker, &data)
}

fn router_event(worker: u64, data: &Value) -> Value {
    let event = json!({"event_id": 1, "data": data, "dp_rank": 0});
    json!({"worker_id": worker, "storage_tier": "device", "residency_domain": "worker", "event": event})
}

fn removed(worker: u64, which: u32, place: usize) -> Value {
    let (_, sequences) = hashes(which, u32::try_from(place + 1).unwrap());
    router_event(worker, &json!({"removed": {"block_hashes": [sequences[place]]}}))
}

pub(super) fn envelope(publisher: u64, sequence: u64, events: &Value) -> Vec<u8> {
    let payload = rmp_serde::to_vec_named(events).unwrap();
    let envelope = json!({"publisher_id": publisher, "sequence": sequence, "published_at": 1, "topic": "kv-events", "payload": payload});
    rmp_serde::to_vec_named(&envelope).unwrap()
}

/// Follows an event plane of Dynamo over NATS. Returns a function that publishes on it.
async fn plane(site: &Site) -> impl AsyncFn(Vec<u8>) {
    let subject = "namespace.n.component.c.kv-events";
    let text = format!("plane={},format=dynamo,topic={subject}", site.broker.url());
    site.follow_source(&text).await;
    async move |payload: Vec<u8>| {
        site.client.nats.publish(subject, payload.into()).await.unwrap();
        site.client.nats.flush().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dynamos_event_plane_over_nats_is_followed() {
    // Silence alone makes no holder stale here.
    let site = Site::new(&[("namespace_defaults.stale_after_ms", "0")]).await;
    let publish = plane(&site).await;
    publish(envelope(1, 0, &router_stored(7, 1, 0, 3))).await;
    site.settles("7", 3, &[]).await;
    assert_eq!(site.depth(1, "7").await, 3);
    // One message has events of two workers.
    publish(envelope(
        1,
        1,
        &json!([removed(7, 1, 2), router_stored(8, 1, 0, 1)]),
    ))
    .await;
    site.settles("7", 2, &[]).await;
    site.settles("8", 1, &[]).await;
    // The first message is a repetition, and the second comes after a gap.
    publish(envelope(1, 1, &router_stored(7, 2, 0, 2))).await;
    publish(envelope(1, 3, &router_stored(7, 1, 2, 1))).await;
    site.settles("7", 3, &["upstream_gap"]).await;
    site.settles("8", 1, &["upstream_gap"]).await;
    publish(envelope(1, 4, &router_event(7, &json!("cleared")))).await;
    site.settles("7", 0, &[]).await;
    // Events of the same worker from another publisher come from another process.
    publish(envelope(2, 0, &router_stored(8, 3, 0, 2))).await;
    site.settles("8", 2, &[]).await;
    assert_eq!((site.depth(1, "8").await, site.depth(3, "8").await), (0, 2));
    // JSON without an envelope has no message number, so events may be missing.
    let event = serde_json::to_vec(&json!([router_stored(9, 1, 0, 2)])).unwrap();
    publish(event).await;
    site.settles("9", 2, &["upstream_gap"]).await;
    // The unreadable message may have been about any worker.
    publish(b"\xc1".to_vec()).await;
    site.settles("8", 2, &["upstream_gap"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_of_dynamo_that_counts_anew_is_another_process() {
    // Silence alone makes no holder stale here.
    let site = Site::new(&[("namespace_defaults.stale_after_ms", "0")]).await;
    let publish_bytes = plane(&site).await;
    let publish = async |sequence: u64, events: Value| publish_bytes(envelope(1, sequence, &events)).await;
    publish(0, router_stored(7, 1, 0, 1)).await;
    publish(1, router_stored(7, 1, 1, 2)).await;
    publish(1, router_stored(7, 1, 1, 2)).await;
    site.settles("7", 3, &[]).await;
    // The publisher has restarted, and its message numbers begin again.
    publish(0, router_stored(7, 2, 0, 2)).await;
    site.settles("7", 2, &["upstream_gap"]).await;
    assert_eq!((site.depth(1, "7").await, site.depth(2, "7").await), (0, 2));
    publish(1, router_event(7, &json!("cleared"))).await;
    site.settles("7", 0, &[]).await;
    publish(2, router_stored(7, 2, 0, 1)).await;
    publish(3, router_stored(7, 2, 1, 1)).await;
    site.settles("7", 2, &[]).await;
    // The publisher has restarted once more, and its first message was lost.
    publish(1, router_stored(7, 3, 1, 1)).await;
    site.settles("7", 2, &["upstream_gap"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn dynamos_event_plane_over_zeromq_is_followed() {
    let Some(python) = python() else { return };
    // Silence alone makes no holder stale here.
    let site = Site::new(&[("namespace_defaults.stale_after_ms", "0")]).await;
    let spec = Spec::without_replay();
    let mut publishers = Publishers::start(&python, &[spec]);
    site.follow_source(&format!("{},format=dynamo", publishers.flag(0, "plane")))
        .await;
    publishers.wait_for_subscriber(0);
    publishers.publish_plane(0, &envelope(5, 0, &router_stored(7, 1, 0, 3)));
    site.settles("7", 3, &[]).await;
    publishers.publish_plane(0, &envelope(5, 2, &removed(7, 1, 2)));
    site.settles("7", 2, &["upstream_gap"]).await;
    publishers.kill();
    site.settles("7", 2, &["unverified", "upstream_gap", "upstream_lost"])
        .await;
}

/// Returns an event of Mooncake Store's pool, as in RFC #1527.
fn pool_event(kind: &str, hashes: &[u64], first: usize) -> Value {
    json!({"event_type": kind, "seq_hashes": hashes, "base_block_idx": first, "backend_id": "node-1", "medium": "cpu"})
}

#[tokio::test(flavor = "multi_thread")]
async fn what_mooncake_store_owns_is_a_pools() {
    let Some(python) = python() else { return };
    let site = Site::new(&[("http.listen", "127.0.0.1:0")]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    let batch = |event: Value| {
        let payload = rmp_serde::to_vec_named(&json!([1.5, [event], 0])).unwrap();
        payload
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let (_, sequences) = hashes(1, 4);
    publishers.publish_raw(0, &batch(pool_event("stored", &sequences, 0)));
    publishers.publish(1, &json!([super::stored(1, 0, 2)]));
    site.follow_source(&format!("{},format=mooncake", publishers.flag(0, "store")))
        .await;
    site.follow(&publishers, 1, "gpu-0");
    site.settles("_pstore", 4, &[]).await;
    site.settles("gpu-0", 2, &[]).await;
    let mut http = HttpClient::connect(site.daemon.http_address().unwrap()).await;
    let answer = http
        .post("/v1/query", &json!({"model": "m", "tokens": tokens(1, 0, 8)}))
        .await
        .json();
    let listed: Vec<_> = answer["holders"]
        .as_array()
        .unwrap()
        .iter()
        .map(|holder| (&holder["worker"], &holder["kind"], &holder["matched_blocks"]))
        .collect();
    assert_eq!(
        listed,
        [
            (&json!("_pstore"), &json!("pool"), &json!(4)),
            (&json!("gpu-0"), &Value::Null, &json!(2))
        ]
    );
    // The pool does not report evictions.
    assert_eq!(answer["holders"][0]["degraded"], json!(["host_gap"]));
    // On this route, the answer leaves pools out, because a gateway sends no request to a pool.
    let dialect = http
        .post(
            "/query",
            &json!({"model_name": "m", "token_ids": tokens(1, 0, 8)}),
        )
        .await
        .json();
    assert_eq!(dialect["scores"], json!({"gpu-0": {"0": 8}}));
    publishers.publish_raw(0, &batch(pool_event("removed", &sequences[3..], 3)));
    site.settles("_pstore", 3, &[]).await;
}

/// Events that a simulated server of TensorRT-LLM has not yet reported. An answer takes all of them.
type Said = Arc<Mutex<Vec<Value>>>;

/// Starts a simulated server of TensorRT-LLM, whose only route returns the waiting events.
async fn server(address: &str) -> (Said, std::net::SocketAddr, tokio::task::JoinHandle<()>) {
    let said = Said::default();
    let answer = async |State(said): State<Said>| Json(std::mem::take(&mut *said.lock()));
    let router = Router::new()
        .route("/kv_cache_events", post(answer))
        .with_state(Arc::clone(&said));
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (said, address, serving)
}

pub(super) fn trt_created(id: u64) -> Value {
    json!({"event_id": id, "data": {"type": "created", "num_blocks_per_cache_level": [100, 50]}, "window_size": null})
}

pub(super) fn trt_stored(id: u64, which: u32, first: u32, count: u32) -> Value {
    let block = |place: u32| {
        let tokens: Vec<Value> = tokens(which, place, 1)
            .into_iter()
            .map(|token| json!({"type": "unique_token", "token_id": token, "token_extra_id": 0}))
            .collect();
        json!({"type": "stored_block", "block_hash": super::name_of(which, place), "tokens": tokens, "cache_level": 0, "priority": 35, "lora_id": null, "cache_salt": null})
    };
    let blocks: Vec<Value> = (first..first + count).map(block).collect();
    let parent = first.checked_sub(1).map(|before| super::name_of(which, before));
    json!({"event_id": id, "data": {"type": "stored", "parent_hash": parent, "blocks": blocks}, "window_size": null})
}

/// Returns the event as the engine reports it for the rank `rank` of attention data parallelism.
fn of_rank(rank: u32, mut event: Value) -> Value {
    event["attention_dp_rank"] = json!(rank);
    event
}

fn trt_removed(id: u64, which: u32, place: u32) -> Value {
    json!({"event_id": id, "data": {"type": "removed", "block_hashes": [super::name_of(which, place)]}, "window_size": null})
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_tensorrt_llm_is_asked_for_its_events() {
    let site = Site::new(&[]).await;
    let (said, address, serving) = server("127.0.0.1:0").await;
    said.lock().extend([trt_created(0), trt_stored(1, 1, 0, 3)]);
    site.follow_source(&format!("gpu-0=http://{address},format=tensorrt-llm"))
        .await;
    site.settles("gpu-0", 3, &[]).await;
    said.lock().extend([trt_removed(2, 1, 2), trt_stored(3, 2, 0, 1)]);
    site.settles("gpu-0", 3, &[]).await;
    eventually("the removal is applied", async || {
        (site.depth(1, "gpu-0").await == 2).then_some(())
    })
    .await;
    // Another client has taken event 4.
    said.lock().push(trt_removed(5, 1, 1));
    site.settles("gpu-0", 2, &["upstream_gap"]).await;
    let engine = site.bridge.engines().remove(0);
    assert_eq!(engine.last_error.as_deref(), Some("lost_batches"));
    serving.abort();
    site.settles("gpu-0", 2, &["unverified", "upstream_gap", "upstream_lost"])
        .await;
    // Another process begins its event numbers again.
    let (said, _, _serving) = server(&address.to_string()).await;
    said.lock().extend([trt_created(0), trt_stored(1, 3, 0, 1)]);
    site.settles("gpu-0", 1, &[]).await;
    assert_eq!(
        (site.depth(1, "gpu-0").await, site.depth(3, "gpu-0").await),
        (0, 1)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_tensorrt_llm_that_answers_after_seconds_is_in_sight_meanwhile() {
    /// Time for which the simulated server waits before it answers. It is a little longer than the real server waits
    /// for a silent engine.
    const SILENCE: std::time::Duration = std::time::Duration::from_millis(2500);
    let site = Site::new(&[]).await;
    let (said, asked) = (Said::default(), Arc::new(AtomicUsize::new(0)));
    let answer = {
        let asked = Arc::clone(&asked);
        async move |State(said): State<Said>| {
            asked.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(SILENCE).await;
            Json(std::mem::take(&mut *said.lock()))
        }
    };
    said.lock().extend([trt_created(0), trt_stored(1, 1, 0, 3)]);
    let router = Router::new()
        .route("/kv_cache_events", post(answer))
        .with_state(Arc::clone(&said));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    site.follow_source(&format!("gpu-0=http://{address},format=tensorrt-llm"))
        .await;
    site.settles("gpu-0", 3, &[]).await;
    let asked_before = asked.load(Ordering::SeqCst);
    eventually("the server is asked twice more", async || {
        let holder = site.holder("gpu-0").await.unwrap();
        assert_eq!(super::reasons(&holder), [""; 0]);
        (asked.load(Ordering::SeqCst) >= asked_before + 2).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_tensorrt_llm_that_comes_back_silent_may_be_another_process() {
    let site = Site::new(&[]).await;
    let (said, address, serving) = server("127.0.0.1:0").await;
    said.lock().extend([trt_created(0), trt_stored(1, 1, 0, 3)]);
    site.follow_source(&format!("gpu-0=http://{address},format=tensorrt-llm"))
        .await;
    site.settles("gpu-0", 3, &[]).await;
    let lost = ["unverified", "upstream_lost"];
    serving.abort();
    site.settles("gpu-0", 3, &lost).await;
    // The new process tells nothing before its first request.
    let (said, _, _serving) = server(&address.to_string()).await;
    eventually("the engine is followed again", async || {
        (site.bridge.engines()[0].status == EngineStatus::Degraded).then_some(())
    })
    .await;
    site.settles("gpu-0", 3, &lost).await;
    said.lock().extend([trt_created(0), trt_stored(1, 3, 0, 1)]);
    site.settles("gpu-0", 1, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_of_tensorrt_llm_share_a_process_and_its_buffer() {
    let site = Site::new(&[]).await;
    let (said, address, _serving) = server("127.0.0.1:0").await;
    let both = |id: u64, event: fn(u64) -> Value| [of_rank(0, event(id)), of_rank(1, event(id))];
    said.lock().extend(both(0, trt_created));
    said.lock().extend(both(1, |id| trt_stored(id, 1, 0, 3)));
    site.follow_source(&format!("gpu-0=http://{address},format=tensorrt-llm"))
        .await;
    let settled = async |blocks: u64, doubts: [&[&str]; 2]| {
        eventually("both ranks have settled", async || {
            let mut holders = site.holders("gpu-0").await;
            holders.sort_by_key(|holder| holder.rank);
            let found: Vec<_> = holders
                .iter()
                .map(|holder| (holder.blocks, super::reasons(holder)))
                .collect();
            let due = [(3, doubts[0].to_vec()), (blocks, doubts[1].to_vec())];
            (found == due).then_some(())
        })
        .await;
    };
    settled(3, [&[], &[]]).await;
    // An event of rank 0 is missing, so one of rank 1 may be missing, too.
    said.lock().push(of_rank(0, trt_stored(3, 1, 0, 3)));
    settled(3, [&["upstream_gap"], &["unverified", "upstream_lost"]]).await;
    said.lock().push(of_rank(1, trt_removed(2, 1, 2)));
    settled(2, [&["upstream_gap"], &[]]).await;
    // Another process behind the same connection has no rank 1 yet.
    let begun = [trt_created(0), trt_stored(1, 1, 0, 3)].map(|event| of_rank(0, event));
    said.lock().extend(begun);
    settled(0, [&[], &[]]).await;
    said.lock()
        .extend([trt_created(0), trt_stored(1, 1, 0, 1)].map(|event| of_rank(1, event)));
    settled(1, [&[], &[]]).await;
}

/// Next answer of the simulated server. After each answer, the test's choice ends, and the server answers without
/// events again.
#[derive(Default)]
enum Answer {
    #[default]
    Nothing,
    Events(Vec<Value>),
    /// The server forgets the events as if it had sent them, but the bridge gets an error.
    Lost,
    Garbage,
}

/// Starts a simulated server of TensorRT-LLM whose answers can be lost or damaged.
async fn broken_server() -> (Arc<Mutex<Answer>>, std::net::SocketAddr) {
    let said: Arc<Mutex<Answer>> = Arc::default();
    let answer = async |State(said): State<Arc<Mutex<Answer>>>| match std::mem::take(&mut *said.lock()) {
        Answer::Nothing => (StatusCode::OK, "[]".to_owned()),
        Answer::Events(events) => (StatusCode::OK, Value::from(events).to_string()),
        Answer::Lost => (StatusCode::BAD_GATEWAY, String::new()),
        Answer::Garbage => (StatusCode::OK, "[{".to_owned()),
    };
    let router = Router::new()
        .route("/kv_cache_events", post(answer))
        .with_state(Arc::clone(&said));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    (said, address)
}

/// Waits until the server has been asked two more times.
async fn asked_again(said: &Mutex<Answer>) {
    for _ in 0..2 {
        *said.lock() = Answer::Events(Vec::new());
        eventually("the server is asked", async || {
            matches!(*said.lock(), Answer::Nothing).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_tensorrt_llm_that_was_lost_is_in_doubt_until_the_numbers_go_on() {
    let site = Site::new(&[]).await;
    let (said, address) = broken_server().await;
    *said.lock() = Answer::Events(vec![trt_created(0), trt_stored(1, 1, 0, 3)]);
    site.follow_source(&format!("gpu-0=http://{address},format=tensorrt-llm"))
        .await;
    site.settles("gpu-0", 3, &[]).await;
    let lost = ["unverified", "upstream_lost"];
    *said.lock() = Answer::Lost;
    site.settles("gpu-0", 3, &lost).await;
    // An empty answer does not show which events the lost answer had.
    asked_again(&said).await;
    assert_eq!(site.bridge.engines()[0].status, EngineStatus::Degraded);
    site.settles("gpu-0", 3, &lost).await;
    // The number of the next event shows that no event was lost.
    *said.lock() = Answer::Events(vec![trt_removed(2, 1, 2)]);
    site.settles("gpu-0", 2, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_tensorrt_llm_that_has_said_nothing_yet_is_no_empty_one() {
    let site = Site::new(&[]).await;
    let (said, address) = broken_server().await;
    // An earlier bridge has taken the first events.
    let text = format!("gpu-0=http://{address},format=tensorrt-llm");
    site.follow_source(&text).await;
    asked_again(&said).await;
    site.settles("gpu-0", 0, &["unverified", "upstream_lost"]).await;
    *said.lock() = Answer::Events(vec![trt_stored(7, 1, 0, 3)]);
    site.settles("gpu-0", 3, &["upstream_gap"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_answer_of_tensorrt_llm_that_cannot_be_decoded_leaves_a_doubt() {
    let site = Site::new(&[]).await;
    let (said, address) = broken_server().await;
    *said.lock() = Answer::Garbage;
    site.follow_source(&format!("gpu-0=http://{address},format=tensorrt-llm"))
        .await;
    asked_again(&said).await;
    site.settles("gpu-0", 0, &["upstream_gap"]).await;
}
