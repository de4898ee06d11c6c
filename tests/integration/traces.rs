//! Spans of traced requests and batches, as sent to a collector by OTLP over HTTP.

use std::sync::Arc;

use async_nats::HeaderMap;
use axum::Json;
use axum::extract::State;
use axum::routing::post;
use kvatlas_core::wire::{BatchCursor, EventBatch, QueryRequest, Tier};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::support::process::Process;
use crate::support::way::Way;
use crate::support::{
    Client, broker, by_sequence, daemon, eventually, hashes, http_get, namespace, stored, subjects, worker,
};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

/// Spans that the collector has received.
type Received = Arc<Mutex<Vec<Value>>>;

/// Starts a collector, and returns its spans and its address.
async fn collector() -> (Received, String) {
    async fn take(State(received): State<Received>, Json(body): Json<Value>) -> Json<Value> {
        let spans = body["resourceSpans"][0]["scopeSpans"][0]["spans"].clone();
        received.lock().extend(spans.as_array().unwrap().iter().cloned());
        Json(json!({}))
    }
    let received = Received::default();
    let routes = axum::Router::new()
        .route("/v1/traces", post(take))
        .with_state(Arc::clone(&received));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, routes).await });
    (received, format!("http://{address}/v1/traces"))
}

fn traced(flags: &str) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("traceparent", format!("00-{TRACE}-{PARENT}-{flags}").as_str());
    headers
}

/// Waits for spans of this name, and returns them.
async fn spans(received: &Received, name: &str) -> Vec<Value> {
    eventually(&format!("a span {name}"), async || {
        let all = received.lock();
        let found: Vec<Value> = all.iter().filter(|span| span["name"] == name).cloned().collect();
        (!found.is_empty()).then_some(found)
    })
    .await
}

async fn publish(client: &Client, seq: u64, payload: Vec<u8>) {
    let subject = subjects().events(&namespace(), &worker("gpu-0"));
    let flags = if seq == 1 { "01" } else { "00" };
    let sent = client
        .nats
        .publish_with_headers(subject, traced(flags), payload.into())
        .await;
    sent.unwrap();
    client.nats.flush().await.unwrap();
}

async fn traced_on_its_way(way: Way) {
    let broker = broker_for(way).await;
    let (received, endpoint) = collector().await;
    let settings = [
        ("traces.endpoint", endpoint.as_str()),
        ("http.listen", "127.0.0.1:0"),
    ];
    let daemon = daemon(broker.url(), &way.settings(&settings)).await;
    let client = Client::connect(broker.url()).await;
    for seq in 1..=2 {
        let batch = EventBatch {
            epoch: 1,
            seq,
            rank: 0,
            time_us: None,
            tier: Tier::DEVICE,
            block_size: None,
            profile: None,
            events: vec![stored(hashes(1, 4))],
        };
        publish(&client, seq, batch.encode()).await;
    }
    client.applied("gpu-0", 0, BatchCursor { epoch: 1, seq: 2 }).await;
    // Only the sampled batch has a span.
    let found = spans(&received, "kvatlas batch").await;
    let [batch] = &found[..] else { panic!("{found:?}") };
    assert_eq!(
        (&batch["traceId"], &batch["parentSpanId"]),
        (&json!(TRACE), &json!(PARENT))
    );
    assert_eq!((&batch["kind"], &batch["status"]), (&json!(5), &json!({})));
    let subject = subjects().query(&namespace());
    let query = QueryRequest::Single(by_sequence(&hashes(1, 4))).encode();
    let answered = client
        .nats
        .request_with_headers(subject.clone(), traced("01"), query.into());
    answered.await.unwrap();
    let found = spans(&received, "kvatlas query").await;
    assert_eq!(
        (&found[0]["traceId"], &found[0]["kind"]),
        (&json!(TRACE), &json!(2))
    );
    assert!(found[0]["attributes"].to_string().contains(&subject), "{found:?}");
    // A request over HTTP has a span, too.
    let mut request = tokio::net::TcpStream::connect(daemon.http_address().unwrap())
        .await
        .unwrap();
    let head = format!("GET /health HTTP/1.1\r\nHost: a\r\ntraceparent: 00-{TRACE}-{PARENT}-01\r\n\r\n");
    tokio::io::AsyncWriteExt::write_all(&mut request, head.as_bytes())
        .await
        .unwrap();
    let found = spans(&received, "kvatlas http").await;
    assert!(
        found[0]["attributes"].to_string().contains("\"200\""),
        "{found:?}"
    );
    daemon.stop().await;
}

async fn broker_for(way: Way) -> kvatlas_process::broker::embedded::EmbeddedBroker {
    match way {
        Way::Core => broker().await,
        _ => {
            let store = tempfile::tempdir().unwrap().keep();
            crate::support::jetstream::broker_on_store(&crate::support::server(), &store).await
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_traced_gets_a_span() {
    traced_on_its_way(Way::Core).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_traced_through_a_stream_gets_a_span() {
    traced_on_its_way(Way::Stream).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_are_in_spans_and_a_lost_collector_is_counted() {
    let broker = broker().await;
    let (received, endpoint) = collector().await;
    let settings = [("traces.endpoint", endpoint.as_str())];
    let daemon = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let subject = subjects().query(&namespace());
    let refused = client
        .nats
        .request_with_headers(subject.clone(), traced("01"), "x".into());
    refused.await.unwrap();
    let found = spans(&received, "kvatlas query").await;
    assert_eq!(found[0]["status"]["code"], 2, "{found:?}");
    publish(&client, 1, b"garbage".to_vec()).await;
    // The batch names no namespace that may exist, so no lane gets it. A second batch reaches a lane.
    let batch = EventBatch {
        epoch: 1,
        seq: 1,
        rank: 0,
        time_us: None,
        tier: Tier::DEVICE,
        block_size: None,
        profile: None,
        events: vec![stored(hashes(1, 1))],
    };
    publish(&client, 2, batch.encode()).await;
    client.applied("gpu-0", 0, BatchCursor { epoch: 1, seq: 1 }).await;
    publish(&client, 1, b"garbage".to_vec()).await;
    eventually("the batch that cannot be read is a failed span", async || {
        let all = spans(&received, "kvatlas batch").await;
        all.iter().any(|span| span["status"]["code"] == 2).then_some(())
    })
    .await;
    daemon.stop().await;

    // No collector listens at this address. Requests are answered all the same.
    let settings = [("traces.endpoint", "http://127.0.0.1:1/v1/traces")];
    let daemon = crate::support::daemon(broker.url(), &settings).await;
    let refused = client
        .nats
        .request_with_headers(subject, traced("01"), "x".into());
    refused.await.unwrap();
    let address = daemon.admin_address().unwrap();
    eventually("the span is counted as dropped", async || {
        let asked = tokio::task::spawn_blocking(move || http_get(address, "/metrics"));
        let (_, metrics) = asked.await.unwrap();
        let line = "kvatlas_spans_dropped_total{reason=\"export_failed\"} ";
        let count = metrics.lines().find_map(|found| found.strip_prefix(line))?;
        (count != "0").then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_spans_of_a_gateway_and_of_its_shards_are_of_one_trace() {
    let broker = broker().await;
    let (received, endpoint) = collector().await;
    // A gateway and its shards run in processes of their own.
    let traces = ("traces.endpoint", endpoint.as_str());
    let shards: [_; 2] = ["0/2", "1/2"].map(|shard| {
        let settings = [traces, ("sharding.shard", shard)];
        Process::serve(broker.url(), &settings)
    });
    let gateway = Process::serve(broker.url(), &[traces, ("gateway.enabled", "true")]);
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 4))])
        .await;
    let query = QueryRequest::Single(by_sequence(&hashes(1, 4))).encode();
    for (name, subject, payload) in [
        ("kvatlas query", subjects().query(&namespace()), query),
        ("kvatlas status", subjects().status(&namespace()), Vec::new()),
    ] {
        let asked = client
            .nats
            .request_with_headers(subject, traced("01"), payload.into());
        asked.await.unwrap();
        let found = eventually("spans of the gateway and of both shards", async || {
            let found = spans(&received, name).await;
            (found.len() == 3).then_some(found)
        })
        .await;
        assert!(found.iter().all(|span| span["traceId"] == TRACE), "{found:?}");
        let of_parent = |parent: &Value| {
            let of_parent = found.iter().filter(|span| span["parentSpanId"] == *parent);
            of_parent.collect::<Vec<_>>()
        };
        let top = of_parent(&json!(PARENT));
        let [top] = &top[..] else { panic!("{found:?}") };
        assert_eq!(of_parent(&top["spanId"]).len(), 2, "{found:?}");
    }
    for process in shards.into_iter().chain([gateway]) {
        process.stop();
    }
}
