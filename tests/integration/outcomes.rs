//! Outcomes: reports in which a router says how many blocks a worker really had for a request. The daemon compares them
//! with its own answers, and names the holders that have fewer blocks than their events say.

use kvatlas_core::wire::{HolderMatch, Outcome, Tier};
use serde_json::{Value, json};

use crate::support::http::HttpClient;
use crate::support::{Client, broker, by_sequence, daemon, eventually, hashes, http_get, namespace, stored};

/// Number of tokens in a block.
const BLOCK_TOKENS: u32 = 16;

/// Waits until an answer says that two holders have all 200 blocks for certain. Returns these holders.
async fn promised(client: &Client) -> Vec<HolderMatch> {
    eventually("two holders promise 200 blocks", async || {
        let reply = client.ask_with(by_sequence(&hashes(1, 200))).await.ok()?;
        let are_whole = reply
            .holders
            .iter()
            .all(|holder| holder.exact && holder.usable() == 200);
        (are_whole && reply.holders.len() == 2).then_some(reply.holders)
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_less_than_was_promised_is_named() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("http.listen", "127.0.0.1:0")]).await;
    let (admin, http) = (daemon.admin_address().unwrap(), daemon.http_address().unwrap());
    let client = Client::connect(broker.url()).await;
    for name in ["gpu-0", "liar"] {
        let mut publisher = client.publisher(name, 0);
        let all = vec![stored(hashes(1, 200))];
        publisher.publish(Tier::DEVICE, all).await.unwrap();
    }
    let index = || -> Value { serde_json::from_str(&http_get(admin, "/index").1).unwrap() };
    let broken = || index()["namespaces"][0]["broken_promises"].clone();
    let holders = promised(&client).await;
    // Reported over NATS: all blocks were found except the last one, because an engine always computes the last token.
    let found = holders
        .iter()
        .map(|holder| Outcome::of(holder, 199 * BLOCK_TOKENS, 200 * BLOCK_TOKENS));
    client
        .queries
        .tell_outcomes(&namespace(), found.collect())
        .await
        .unwrap();
    let counted = |certainty: &str, what: &str| {
        let series = format!(
            "kvatlas_{what}_total{{namespace=\"{}\",state=\"{certainty}\"}} ",
            namespace()
        );
        let (_, page) = http_get(admin, "/metrics");
        let line = page
            .lines()
            .find_map(|line| line.strip_prefix(&series).map(str::to_owned));
        line.and_then(|number| number.parse::<u64>().ok())
    };
    eventually("two outcomes are counted", async || {
        (counted("exact", "outcomes") == Some(2)).then_some(())
    })
    .await;
    assert_eq!(counted("exact", "outcome_missing_blocks"), Some(0));
    assert_eq!(broken(), json!([]));
    // Reported over HTTP: one of the holders has dropped 30 blocks without an event.
    let outcome = |worker: &str, found_blocks: u32| json!({ "worker": worker, "promised_blocks": 200, "found_tokens": found_blocks * BLOCK_TOKENS, "exact": true });
    let report = json!({ "namespace": namespace().as_str(), "outcomes": [outcome("gpu-0", 200), outcome("liar", 170), outcome("stranger", 0)] });
    let answer = HttpClient::connect(http)
        .await
        .post("/v1/outcomes", &report)
        .await;
    assert_eq!((answer.status, answer.json()), (200, json!({ "counted": 2 })));
    let named = broken();
    assert_eq!(
        (&named[0]["worker"], &named[0]["missing_blocks"]),
        (&json!("liar"), &json!(30)),
        "{named}"
    );
    assert_eq!(named[1], Value::Null);
    let (_, workers) = http_get(admin, "/workers");
    assert!(workers.contains(r#""missing_blocks":30"#), "{workers}");
    // The daemon reports the broken promise, but does not change its answers.
    assert_eq!(promised(&client).await.len(), 2);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reports_that_are_none_are_counted_and_refused() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("http.listen", "127.0.0.1:0")]).await;
    let client = Client::connect(broker.url()).await;
    let subject = format!("kvatlas.v1.outcome.{}", namespace());
    client.nats.publish(subject, "garbage".into()).await.unwrap();
    let admin = daemon.admin_address().unwrap();
    eventually("the garbage is counted", async || {
        let (_, page) = http_get(admin, "/metrics");
        let line = "kvatlas_outcomes_refused_total{reason=\"undecodable\"} ";
        let count = page.lines().find_map(|each| each.strip_prefix(line))?;
        (count != "0").then_some(())
    })
    .await;
    let mut http = HttpClient::connect(daemon.http_address().unwrap()).await;
    let one = json!({ "worker": "a", "promised_blocks": 1, "found_tokens": 16 });
    for (body, status) in [
        (json!({ "namespace": "nowhere", "outcomes": [one] }), 404),
        (json!({ "outcomes": [one] }), 400),
        (
            json!({ "namespace": "nowhere", "outcomes": [{ "worker": "a" }] }),
            400,
        ),
    ] {
        assert_eq!(http.post("/v1/outcomes", &body).await.status, status, "{body}");
    }
    let many = vec![one; 257];
    let answer = http
        .post(
            "/v1/outcomes",
            &json!({ "namespace": "nowhere", "outcomes": many }),
        )
        .await;
    assert_eq!(answer.status, 413);
    daemon.stop().await;
}
