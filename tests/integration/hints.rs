//! Hints: reports in which a router says to which worker it has sent a request. A query can ask for the blocks that the
//! worker should have because of hints. The answer lists them separately from the blocks that events have reported.

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{Event, Hint, QueryOptions, QueryReply, RemovedBlocks, SingleQuery, Tier};
use serde_json::{Value, json};

use crate::support::http::HttpClient;
use crate::support::{
    Client, broker, by_sequence, daemon, eventually, hashes, http_get, matches, namespace, stored, worker,
};

fn hint(name: &str, blocks: u64) -> Hint {
    Hint {
        worker: worker(name),
        rank: 0,
        prompt: by_sequence(&hashes(1, blocks)),
    }
}

fn asking(chain: &[SequenceHash]) -> SingleQuery {
    SingleQuery {
        options: QueryOptions {
            predicted: true,
            ..QueryOptions::default()
        },
        ..by_sequence(chain)
    }
}

fn predicted(reply: &QueryReply) -> Vec<(&str, u32)> {
    reply
        .predicted
        .iter()
        .map(|found| (found.worker.as_str(), found.blocks))
        .collect()
}

async fn asked(client: &Client, blocks: u64) -> QueryReply {
    client.ask_with(asking(&hashes(1, blocks))).await.unwrap()
}

/// Publishes batches of two workers. One has the first four blocks, and the other has none.
async fn two_workers(client: &Client) {
    for (name, blocks) in [("gpu-0", 4), ("gpu-1", 0)] {
        let mut publisher = client.publisher(name, 0);
        let events = match blocks {
            0 => vec![Event::Cleared],
            blocks => vec![stored(hashes(1, blocks))],
        };
        publisher.publish(Tier::DEVICE, events).await.unwrap();
    }
    eventually("the two are known", async || {
        let status = client.status().await.ok()?;
        (status.holders.len() == 2 && status.holders.iter().all(|holder| holder.exact)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_routers_hint_is_predicted_apart_until_events_tell_of_it() {
    let broker = broker().await;
    let settings = [("hints.ttl_ms", "60000"), ("http.listen", "127.0.0.1:0")];
    let daemon = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    two_workers(&client).await;
    let known = [("gpu-0".to_owned(), 0, 4, true)];
    let hints = vec![hint("gpu-1", 6), hint("gpu-0", 3), hint("stranger", 9)];
    client.queries.tell_hints(&namespace(), hints).await.unwrap();
    let reply = eventually("a hint is heard", async || {
        let reply = asked(&client, 8).await;
        (!reply.predicted.is_empty()).then_some(reply)
    })
    .await;
    // The answer predicts blocks neither for workers that already have as many blocks, nor for unknown workers. The
    // known holders do not change.
    assert_eq!(predicted(&reply), [("gpu-1", 6)]);
    assert_eq!(matches(&reply), known);
    eventually("the answer is exact beside a prediction", async || {
        let reply = asked(&client, 8).await;
        (reply.is_exact() && reply.predicted.len() == 1).then_some(())
    })
    .await;
    // A query that does not ask for predictions gets none. Neither does a query about another prompt.
    assert!(client.ask(hashes(1, 8)).await.predicted.is_empty());
    assert!(
        client
            .ask_with(asking(&hashes(2, 8)))
            .await
            .unwrap()
            .predicted
            .is_empty()
    );
    // A hint can also be sent over HTTP.
    let mut http = HttpClient::connect(daemon.http_address().unwrap()).await;
    let prompt = json!({ "sequence_hashes": (1..=8).collect::<Vec<u64>>() });
    let told =
        json!({ "namespace": namespace().as_str(), "hints": [{ "worker": "gpu-0", "prompt": prompt }] });
    let answer = http.post("/v1/hints", &told).await;
    assert_eq!((answer.status, answer.json()), (200, json!({ "taken": 1 })));
    let question = json!({ "namespace": namespace().as_str(), "sequence_hashes": prompt["sequence_hashes"], "predicted": true });
    let answer = http.post("/v1/query", &question).await;
    assert!(answer.is_exact());
    assert_eq!(
        answer.json()["predicted"],
        json!([{ "worker": "gpu-0", "rank": 0, "blocks": 8 }, { "worker": "gpu-1", "rank": 0, "blocks": 6 }])
    );
    // An event now stores the predicted blocks.
    let mut publisher = client.publisher("gpu-2", 0);
    publisher
        .publish(Tier::DEVICE, vec![stored(hashes(1, 8))])
        .await
        .unwrap();
    client
        .queries
        .tell_hints(&namespace(), vec![hint("gpu-2", 8), hint("gpu-1", 7)])
        .await
        .unwrap();
    eventually("the last hint is heard", async || {
        let reply = asked(&client, 8).await;
        (predicted(&reply) == [("gpu-0", 8), ("gpu-1", 7)]).then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hint_that_has_come_true_predicts_nothing_more() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("hints.ttl_ms", "60000")]).await;
    let client = Client::connect(broker.url()).await;
    two_workers(&client).await;
    let hints = vec![hint("gpu-1", 6)];
    client.queries.tell_hints(&namespace(), hints).await.unwrap();
    eventually("the hint is heard", async || {
        (predicted(&asked(&client, 8).await) == [("gpu-1", 6)]).then_some(())
    })
    .await;
    let mut publisher = client.publisher("gpu-1", 0);
    let events = vec![Event::Cleared, stored(hashes(1, 6))];
    publisher.publish(Tier::DEVICE, events).await.unwrap();
    let fulfilled = || {
        let (_, page) = http_get(daemon.admin_address().unwrap(), "/metrics");
        page.lines().any(|line| line == "kvatlas_hints_fulfilled_total 1")
    };
    eventually("it has come true", async || fulfilled().then_some(())).await;
    // The engine evicts some of the blocks.
    let evicted = Event::Removed(RemovedBlocks::by_sequence(hashes(1, 6)[2..].to_vec()));
    publisher.publish(Tier::DEVICE, vec![evicted]).await.unwrap();
    let reply = eventually("the eviction is known", async || {
        let reply = asked(&client, 8).await;
        let known = matches(&reply);
        known
            .iter()
            .any(|(name, _, blocks, _)| name == "gpu-1" && *blocks == 2)
            .then_some(reply)
    })
    .await;
    assert_eq!(predicted(&reply), []);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hints_end_with_their_time() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("hints.ttl_ms", "300")]).await;
    let client = Client::connect(broker.url()).await;
    two_workers(&client).await;
    eventually("a hint is heard", async || {
        client
            .queries
            .tell_hints(&namespace(), vec![hint("gpu-1", 6)])
            .await
            .unwrap();
        (!asked(&client, 8).await.predicted.is_empty()).then_some(())
    })
    .await;
    eventually("it ends", async || {
        asked(&client, 8).await.predicted.is_empty().then_some(())
    })
    .await;
    let (_, page) = http_get(daemon.admin_address().unwrap(), "/metrics");
    let expired = page
        .lines()
        .find_map(|line| line.strip_prefix("kvatlas_hints_expired_total "));
    assert!(expired.unwrap().parse::<u64>().unwrap() >= 1, "{page}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn hints_are_off_unless_the_settings_take_them_and_bad_ones_are_refused() {
    let broker = broker().await;
    let off = daemon(broker.url(), &[("http.listen", "127.0.0.1:0")]).await;
    let client = Client::connect(broker.url()).await;
    two_workers(&client).await;
    let namespace_text = namespace().as_str().to_owned();
    let told = |prompt: Value| json!({ "namespace": namespace_text, "hints": [{ "worker": "gpu-1", "prompt": prompt }] });
    let good = told(json!({ "sequence_hashes": [1, 2] }));
    let mut http = HttpClient::connect(off.http_address().unwrap()).await;
    let answer = http.post("/v1/hints", &good).await;
    assert_eq!(answer.status, 400);
    assert!(
        answer.json()["error"]["text"]
            .as_str()
            .unwrap()
            .contains("hints.ttl_ms")
    );
    assert!(asked(&client, 8).await.predicted.is_empty());
    off.stop().await;

    let settings = [("hints.ttl_ms", "60000"), ("http.listen", "127.0.0.1:0")];
    let on = daemon(broker.url(), &settings).await;
    two_workers(&client).await;
    let mut http = HttpClient::connect(on.http_address().unwrap()).await;
    for (wrong, status) in [
        (told(json!({})), 400),
        (told(json!({ "sequence_hashes": [1], "positions": [3] })), 400),
        (
            json!({ "namespace": namespace_text, "hints": [{ "worker": "gpu-1" }] }),
            400,
        ),
        (json!({ "namespace": "nobody", "hints": [] }), 404),
    ] {
        let answer = eventually("the daemon knows everybody", async || {
            let answer = http.post("/v1/hints", &wrong).await;
            (answer.status != 503).then_some(answer)
        })
        .await;
        assert_eq!(answer.status, status, "{wrong}: {}", answer.json());
    }
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let subject = format!("kvatlas.v1.hint.{namespace_text}");
    let counted = eventually("what is no report is counted", async || {
        nats.publish(subject.clone(), "noise".into()).await.unwrap();
        nats.flush().await.unwrap();
        let (_, page) = http_get(on.admin_address().unwrap(), "/metrics");
        let series = "kvatlas_hints_dropped_total{reason=\"undecodable\"} ";
        let found = page.lines().find_map(|line| line.strip_prefix(series));
        let count: u64 = found?.parse().ok()?;
        // A prompt in a hint over HTTP was not valid.
        (count >= 2).then_some(count)
    })
    .await;
    assert!(counted >= 2);
    on.stop().await;
}
