//! Gateways with rights that are not those of a gateway.

use serde_json::json;

use super::{USERS, broker, daemon, of_three_blocks, started};
use crate::support::http::HttpClient;
use crate::support::{eventually, namespace};

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_may_not_ask_the_shards_is_not_ready_and_says_so() {
    let broker = broker(USERS).await;
    let url = broker.url();
    let shard = daemon(url, "daemon", &[("sharding.shard", "0/1")]).await;
    let _publisher = of_three_blocks(url).await;
    let settings = [
        ("gateway.enabled", "true"),
        ("gateway.deadline_ms", "200"),
        ("admin.listen", "127.0.0.1:0"),
        ("http.listen", "127.0.0.1:0"),
    ];
    let gateway = started(url, "daemon", &settings).await;
    let mut admin = HttpClient::connect(gateway.admin_address().unwrap()).await;
    eventually("the gateway is not ready, and says why", async || {
        let ready = admin.get("/readyz").await;
        let reasons = ready.json()["reasons"].to_string();
        (ready.status == 503 && reasons.contains("kvatlas.v1.shards.status.~all")).then_some(())
    })
    .await;
    let mut http = HttpClient::connect(gateway.http_address().unwrap()).await;
    let question = json!({"namespace": namespace().as_str(), "sequence_hashes": [1]});
    let answer = http.post("/v1/query", &question).await;
    let words = answer.json().to_string();
    assert_eq!(answer.status, 503, "{words}");
    assert!(
        words.contains("does not let the gateway ask the shards") && words.contains("kvatlas.v1.shards."),
        "{words}"
    );
    for daemon in [shard, gateway] {
        daemon.stop().await;
    }
}
