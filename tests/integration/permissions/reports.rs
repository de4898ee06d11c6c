//! Rights to send outcomes and hints as a router, and rights to query as Dynamo's router does. The tests check who may
//! do this, and that the server refuses others.

use kvatlas_core::wire::{Hint, Outcome, QueryOptions, SingleQuery};
use serde_json::Value;

use super::{ACCOUNTS, InRole, USERS, broker, daemon, is_exact_with, of_three_blocks};
use crate::support::{by_sequence, eventually, hashes, http_get, namespace, worker};

/// Subject of the questions of Dynamo's routers about `dynamo.backend`, as in the configurations.
const DYNAMO: &str = "dynamo_backend.kv_indexer_query-719a0554d096ab3c";

#[tokio::test(flavor = "multi_thread")]
async fn routers_tell_outcomes_and_hints_with_either_configuration() {
    let llama = namespace();
    for configuration in [USERS, ACCOUNTS] {
        let broker = broker(configuration).await;
        let daemon = daemon(broker.url(), "daemon", &[("hints.ttl_ms", "60000")]).await;
        let admin = daemon.admin_address().unwrap();
        let _publisher = of_three_blocks(broker.url()).await;
        let queries = InRole::connect(broker.url(), "router").await.queries();
        is_exact_with(&queries, "gpu-0", 3).await;
        let outcome = Outcome {
            worker: worker("gpu-0"),
            rank: 0,
            promised_blocks: 1000,
            found_tokens: 0,
            prompt_tokens: None,
            exact: true,
        };
        eventually("the outcome is heard", async || {
            let told = queries.tell_outcomes(&llama, vec![outcome.clone()]);
            told.await.ok()?;
            let index: Value = serde_json::from_str(&http_get(admin, "/index").1).ok()?;
            (index["namespaces"][0]["broken_promises"][0]["worker"] == "gpu-0").then_some(())
        })
        .await;
        let prompt = by_sequence(&hashes(1, 6));
        let hint = Hint {
            worker: worker("gpu-0"),
            rank: 0,
            prompt: prompt.clone(),
        };
        let options = QueryOptions {
            predicted: true,
            ..QueryOptions::default()
        };
        let asked = SingleQuery { options, ..prompt };
        eventually("the hint is heard", async || {
            let told = queries.tell_hints(&llama, vec![hint.clone()]);
            told.await.ok()?;
            let reply = queries.query(&llama, asked.clone()).await.ok()?;
            (reply.predicted.first()?.blocks == 6).then_some(())
        })
        .await;
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_but_routers_and_gateways_reports_and_nobody_but_daemons_hears() {
    let broker = broker(USERS).await;
    for role in ["gpu-0", "rack-1", "gateway", "operator", "dynamo"] {
        let mut other = InRole::connect(broker.url(), role).await;
        for subject in ["kvatlas.v1.outcome.llama", "kvatlas.v1.hint.llama"] {
            if role != "gateway" {
                other.may_not_publish(subject).await;
            }
            other.may_not_listen(subject).await;
        }
    }
    let mut router = InRole::connect(broker.url(), "router").await;
    for kind in ["outcome", "hint"] {
        let other = format!("kvatlas.v1.{kind}.other");
        router.may_not_publish(&other).await;
        let own = format!("kvatlas.v1.{kind}.llama");
        router.may_not_listen(&own).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_of_dynamo_asks_with_either_configuration() {
    let (alone, before_shards) = (("daemon", "false"), ("gateway", "true"));
    for (configuration, (role, is_gateway)) in [
        (USERS, alone),
        (ACCOUNTS, alone),
        (USERS, before_shards),
        (ACCOUNTS, before_shards),
    ] {
        let broker = broker(configuration).await;
        let settings = [
            ("dynamo.components", "dynamo.backend"),
            ("gateway.enabled", is_gateway),
        ];
        let daemon = daemon(broker.url(), role, &settings).await;
        let mut router = InRole::connect(broker.url(), "dynamo").await;
        // The daemon acknowledges each request. It would send the answer over another connection.
        eventually("the daemon takes a request", async || {
            let asked = router.nats.request(DYNAMO, "x".into()).await.ok()?;
            asked.payload.is_empty().then_some(())
        })
        .await;
        router.may_not_publish("kvatlas.v1.query.llama").await;
        router.may_not_listen(DYNAMO).await;
        for role in ["gpu-0", "rack-1", "router", "operator"] {
            let mut other = InRole::connect(broker.url(), role).await;
            other.may_not_publish(DYNAMO).await;
            other.may_not_listen(DYNAMO).await;
        }
        daemon.stop().await;
    }
}
