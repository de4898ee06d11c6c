//! Block sizes. The first engine of a model sets the block size of its namespace, unless the configuration does.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;

use kvatlas_bridge::{Bridge, BridgeOptions};
use kvatlas_client::ClientError;
use kvatlas_config::Config;
use kvatlas_core::wire::{ErrorCode, QueryKey, SingleQuery};
use kvatlas_daemon::{Daemon, namespaces};
use serde_json::{Value, json};

use super::python::{Publishers, Spec, python};
use super::{Killed, Site, name_of, namespace, options, tokens};
use crate::support::http::{Answer, HttpClient};
use crate::support::process::{Process, kvatlas};
use crate::support::{Client, broker, config, daemon, eventually, metrics::counter, snapshots_in, subjects};

/// Daemon with a bridge in the same process, as in `kvatlas up`.
struct Up {
    daemon: Daemon,
    bridge: Bridge,
    client: Client,
    http: HttpClient,
}

impl Up {
    async fn start(url: &str, config: Config) -> Self {
        let namespaces = Arc::new(namespaces(&config).unwrap());
        let options = BridgeOptions {
            namespaces: Some(Arc::clone(&namespaces)),
            ..options()
        };
        let bridge = Bridge::new(subjects(), options);
        let daemon = Daemon::start_with_engines(config, namespaces, Arc::new(bridge.clone()))
            .await
            .unwrap();
        daemon.note_engines_followed();
        daemon.ready().await;
        let client = Client::connect(url).await;
        bridge.start(&client.nats);
        let http = HttpClient::connect(daemon.http_address().unwrap()).await;
        Self {
            daemon,
            bridge,
            client,
            http,
        }
    }

    async fn stop(self) {
        self.bridge.stop(false).await;
        self.daemon.stop().await;
    }

    /// Registers engine number `engine` of `publishers` over HTTP, as instance `instance` and with block size `size`.
    async fn register(&mut self, publishers: &Publishers, engine: usize, instance: u32, size: u32) -> Answer {
        let registration = registration(publishers, engine, instance, size);
        self.http.post("/register", &registration).await
    }

    async fn registers(&mut self, publishers: &Publishers, engine: usize, instance: u32, size: u32) {
        let answer = self.register(publishers, engine, instance, size).await;
        assert_eq!(answer.status, 201);
    }

    /// Returns the block size of the namespace.
    async fn block_size(&self) -> u32 {
        self.client.queries.status(&namespace()).await.unwrap().block_size
    }

    /// Waits until `/query` gives these exact scores.
    async fn finds(&mut self, expected: &Value) {
        let query = json!({"model_name": "m", "token_ids": tokens(1, 0, 64)});
        eventually("the tokens are found", async || {
            let answer = self.http.post("/query", &query).await;
            (answer.status == 200 && answer.is_exact() && answer.json()["scores"] == *expected).then_some(())
        })
        .await;
    }
}

const LISTEN: (&str, &str) = ("http.listen", "127.0.0.1:0");

/// Returns vLLM's event that stores the first blocks of sequence 1, with `size` tokens each.
fn stored(blocks: u32, size: u32) -> Value {
    let names: Vec<u64> = (0..blocks).map(|block| name_of(size, block)).collect();
    let tokens = &tokens(1, 0, 64)[..(blocks * size) as usize];
    json!(["BlockStored", names, null, tokens, size, null, "GPU"])
}

fn registration(publishers: &Publishers, engine: usize, instance: u32, size: u32) -> Value {
    json!({
        "instance_id": instance, "endpoint": publishers.endpoint(engine), "replay_endpoint": publishers.replay(engine),
        "model_name": "m", "block_size": size,
    })
}

fn is_refused(answer: &Answer, parts: &[&str]) {
    let text = answer.json()["error"].as_str().unwrap_or_default().to_owned();
    assert_eq!(answer.status, 409, "{text}");
    for part in parts {
        assert!(text.contains(part), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_engine_that_is_registered_gives_its_namespace_the_block_size() {
    let Some(python) = python() else { return };
    let broker = broker().await;
    let mut up = Up::start(broker.url(), config(broker.url(), &[LISTEN])).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    publishers.publish(0, &json!([stored(3, 64)]));
    publishers.publish(1, &json!([stored(5, 32)]));
    up.registers(&publishers, 0, 7, 64).await;
    up.finds(&json!({"7": {"0": 192}})).await;
    let key = QueryKey::Tokens {
        tokens: tokens(1, 0, 64),
        lora_name: None,
        cache_salt: None,
    };
    let reply = up
        .client
        .queries
        .query(&namespace(), SingleQuery::new(key))
        .await
        .unwrap();
    assert_eq!((reply.query_blocks, reply.holders[0].matched_blocks), (4, 3));
    assert_eq!(up.block_size().await, 64);
    // On Mooncake's route, each query gives the block size.
    let ask = |size| json!({"model": "m", "token_ids": [1], "block_size": size});
    assert_eq!(up.http.post("/query", &ask(64)).await.status, 200);
    assert_eq!(up.http.post("/query", &ask(16)).await.status, 400);
    // No further engine may have another block size, not even the default, until all engines have left.
    for size in [16, 32] {
        let refused = up.register(&publishers, 1, 8, size).await;
        is_refused(
            &refused,
            &[&format!("block_size is {size}, but"), "64 tokens", "7/0 of m"],
        );
    }
    let unregister = json!({"instance_id": 7, "model_name": "m"});
    assert_eq!(up.http.post("/unregister", &unregister).await.status, 200);
    up.registers(&publishers, 1, 8, 32).await;
    up.finds(&json!({"8": {"0": 160}})).await;
    assert_eq!(up.block_size().await, 32);
    up.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_registrations_at_once_one_gives_the_block_size() {
    let Some(python) = python() else { return };
    let broker = broker().await;
    let mut up = Up::start(broker.url(), config(broker.url(), &[LISTEN])).await;
    let mut other = HttpClient::connect(up.daemon.http_address().unwrap()).await;
    let publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    for _ in 0..20 {
        let [first, second] = [(0, 7, 32), (1, 8, 64)]
            .map(|(engine, instance, size)| registration(&publishers, engine, instance, size));
        let (first, second) = tokio::join!(
            up.http.post("/register", &first),
            other.post("/register", &second)
        );
        let mut statuses = [first.status, second.status];
        statuses.sort_unstable();
        assert_eq!(statuses, [201, 409]);
        let winner = if first.status == 201 { 7 } else { 8 };
        let unregister = json!({"instance_id": winner, "model_name": "m"});
        assert_eq!(up.http.post("/unregister", &unregister).await.status, 200);
    }
    up.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn holders_from_a_snapshot_have_the_block_size_that_they_had() {
    let Some(python) = python() else { return };
    let (broker, folder) = (broker().await, tempfile::tempdir().unwrap());
    let (key, directory) = snapshots_in(folder.path());
    let settings = [(key, directory.as_str()), LISTEN];
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    publishers.publish(0, &json!([stored(3, 64)]));
    let mut up = Up::start(broker.url(), config(broker.url(), &settings)).await;
    up.registers(&publishers, 0, 7, 64).await;
    up.finds(&json!({"7": {"0": 192}})).await;
    up.stop().await;
    // No engine has been registered yet.
    let mut up = Up::start(broker.url(), config(broker.url(), &settings)).await;
    let query = json!({"model_name": "m", "token_ids": tokens(1, 0, 64)});
    let answer = up.http.post("/query", &query).await;
    assert_eq!(answer.json()["scores"], json!({"7": {"0": 192}}));
    assert!(!answer.is_exact(), "its engine has not been seen yet");
    let refused = up.register(&publishers, 1, 8, 32).await;
    is_refused(&refused, &["64 tokens", "worker 7/0", "kvatlas admin forget"]);
    up.registers(&publishers, 0, 7, 64).await;
    up.finds(&json!({"7": {"0": 192}})).await;
    up.stop().await;
    // The same engine comes back with another block size. The old size does not prevent that.
    let mut up = Up::start(broker.url(), config(broker.url(), &settings)).await;
    publishers.publish(1, &json!([stored(5, 32)]));
    up.registers(&publishers, 1, 7, 32).await;
    up.finds(&json!({"7": {"0": 160}})).await;
    up.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namespace_of_the_configuration_keeps_its_block_size() {
    let Some(python) = python() else { return };
    let broker = broker().await;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"[namespaces.m]\nblock_size = 32\n").unwrap();
    let given = BTreeMap::from([
        ("nats.url".to_owned(), broker.url().to_owned()),
        ("admin.listen".to_owned(), "127.0.0.1:0".to_owned()),
        (LISTEN.0.to_owned(), LISTEN.1.to_owned()),
    ]);
    let config = Config::load(given, std::iter::empty(), Some(file.path())).unwrap();
    let mut up = Up::start(broker.url(), config).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(5, 32)]));
    let refused = up.register(&publishers, 0, 7, 64).await;
    is_refused(
        &refused,
        &["block_size is 64", "32 tokens", "namespaces.m.block_size"],
    );
    up.registers(&publishers, 0, 7, 32).await;
    up.finds(&json!({"7": {"0": 160}})).await;
    up.stop().await;
    // The start of `kvatlas up` refuses this, too.
    let config = format!("--config={}", file.path().display());
    let refused = kvatlas(&["up", "--model", "m", "--block-size", "64", &config])
        .arg("--engine=gpu-0=tcp://127.0.0.1:1")
        .output()
        .unwrap();
    let text = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(64), "{text}");
    assert!(text.contains("namespaces.m.block_size"), "{text}");
}

/// A daemon in another process learns the block size from the batches, and so do the replicas of that daemon.
#[tokio::test(flavor = "multi_thread")]
async fn daemons_elsewhere_take_the_block_size_from_the_bridge() {
    let Some(python) = python() else { return };
    let broker = broker().await;
    let one = daemon(broker.url(), &[LISTEN]).await;
    let other = daemon(broker.url(), &[LISTEN]).await;
    let client = Client::connect(broker.url()).await;
    let bridge = Bridge::new(subjects(), options());
    bridge.start(&client.nats);
    let site = Site {
        broker,
        daemon: one,
        client,
        bridge,
    };
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([super::stored(1, 0, 3)]));
    site.follow(&publishers, 0, "gpu-0");
    for address in [site.daemon.http_address(), other.http_address()] {
        let mut http = HttpClient::connect(address.unwrap()).await;
        let query = json!({"model_name": "m", "token_ids": tokens(1, 0, 3)});
        eventually("the tokens are found", async || {
            let answer = http.post("/query", &query).await;
            (answer.status == 200 && answer.json()["scores"] == json!({"gpu-0": {"0": 12}})).then_some(())
        })
        .await;
        assert_eq!(http.get("/workers").await.json()[0]["block_size"], 4);
    }
}

/// A shard must not take the block size of a new namespace from a bridge, and must refuse its batches. It sees only its
/// own workers, so another shard could take a different block size.
#[tokio::test(flavor = "multi_thread")]
async fn a_shard_takes_no_block_size_from_a_bridge() {
    let Some(python) = python() else { return };
    let broker = broker().await;
    let shard = Process::serve(broker.url(), &[("sharding.shard", "0/1")]);
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(3, 64)]));
    let bridge = kvatlas(&["bridge", "--nats-url", broker.url(), "--admin-listen", "off"])
        .args(["--logging-level", "error", "--model", "m", "--block-size", "64"])
        .args(["--engine", &publishers.flag(0, "gpu-0")])
        .spawn()
        .unwrap();
    let _bridge = Killed(bridge);
    let dropped = "kvatlas_batches_dropped_total{namespace=\"(none)\",reason=\"other_settings\"}";
    eventually("its batches are refused", async || {
        (counter(&shard, dropped) > 0).then_some(())
    })
    .await;
    let client = Client::connect(broker.url()).await;
    let queries = client.queries.clone().gathering().await.unwrap();
    let known = queries.status(&namespace()).await;
    // Merged answers of shards ignore shards that do not know the namespace.
    let is_missing =
        matches!(&known, Err(ClientError::Refused(error)) if error.code == ErrorCode::Unavailable);
    assert!(
        is_missing,
        "an answer without it would be called exact: {known:?}"
    );
}
