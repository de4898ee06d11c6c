//! The bridge between a real daemon and publishers that use the ZeroMQ library of real engines.

mod discovery;
mod forms;
mod frames;
mod front_ends;
mod idle;
mod kept;
mod lasting;
mod life;
mod pods;
mod python;
mod recovery;
mod replays;
mod republish;
mod republish_lease;
mod republish_range;
mod resets;
mod schemes;
mod secure;
mod servers;
mod sizes;
mod sources;
mod stalls;
mod strangers;
mod subscribed;
mod together;

use std::time::Duration;

use kvatlas_bridge::{Bridge, BridgeOptions, EngineDefaults, FollowOptions, parse_engine};
use kvatlas_client::{Backoff, ClientError};
use kvatlas_core::wire::{ErrorCode, HolderMatch, HolderStatusReply, NamespaceName, QueryKey, SingleQuery};
use kvatlas_daemon::{Daemon, namespaces};
use kvatlas_process::broker::embedded::EmbeddedBroker;
use kvatlas_process::registry::EngineRegistry;
use serde_json::{Value, json};

use crate::support::http::HttpClient;
use crate::support::process::kvatlas;
use crate::support::{Client, PATIENCE, broker, config, daemon, eventually, reasons, subjects};
use python::{Publishers, Spec, python};

const BLOCK: u32 = 4;

/// A daemon, and a bridge that publishes engines' events to it.
struct Site {
    broker: EmbeddedBroker,
    daemon: Daemon,
    client: Client,
    bridge: Bridge,
}

/// Returns bridge options with short times, so that a test need not wait long until the bridge calls an engine silent.
fn options() -> BridgeOptions {
    BridgeOptions {
        follow: FollowOptions {
            patience: Duration::from_millis(500),
            poll_interval: Duration::from_millis(100),
            silent_after: Duration::from_millis(300),
            backoff: Backoff {
                pause_min: Duration::from_millis(20),
                pause_max: Duration::from_millis(100),
            },
            ..FollowOptions::default()
        },
        ..BridgeOptions::default()
    }
}

fn namespace() -> NamespaceName {
    NamespaceName::new("m").unwrap()
}

impl Site {
    async fn new(settings: &[(&str, &str)]) -> Self {
        Self::at(broker().await, settings).await
    }

    async fn at(broker: EmbeddedBroker, settings: &[(&str, &str)]) -> Self {
        let mut all = vec![("namespace_defaults.block_size", "4")];
        all.extend_from_slice(settings);
        let daemon = daemon(broker.url(), &all).await;
        let client = Client::connect(broker.url()).await;
        let bridge = Bridge::new(subjects(), options());
        bridge.start(&client.nats);
        Self {
            broker,
            daemon,
            client,
            bridge,
        }
    }

    fn follow(&self, publishers: &Publishers, engine: usize, name: &str) {
        follow(&self.bridge, publishers, engine, name);
    }

    async fn holder(&self, name: &str) -> Option<HolderStatusReply> {
        self.holders(name).await.into_iter().next()
    }

    /// Returns the holders of all ranks of a worker.
    async fn holders(&self, name: &str) -> Vec<HolderStatusReply> {
        let status = self.client.queries.status(&namespace()).await;
        let holders = status.map(|status| status.holders).unwrap_or_default();
        let is_it = |holder: &HolderStatusReply| holder.worker.as_str() == name;
        holders.into_iter().filter(is_it).collect()
    }

    /// Waits until the holder has exactly `blocks` blocks and exactly these `doubts`.
    async fn settles(&self, name: &str, blocks: u64, doubts: &[&str]) {
        let last = std::cell::RefCell::new(None);
        let what = || {
            format!(
                "{name} has {blocks} blocks and doubts {doubts:?}; last {:?}",
                last.borrow()
            )
        };
        let looked = eventually("settled", async || {
            let holder = self.holder(name).await;
            let is_it = holder
                .as_ref()
                .is_some_and(|holder| holder.blocks == blocks && reasons(holder) == doubts);
            last.replace(holder);
            is_it.then_some(())
        });
        // This time limit is shorter than that of the look-up itself, so that the failure can show the last state.
        if tokio::time::timeout(PATIENCE * 9 / 10, looked).await.is_err() {
            panic!(
                "not in time: {}; servers {:?}; sources {:?}",
                what(),
                self.bridge.servers(),
                self.bridge.sources()
            );
        }
    }

    /// Queries the first `blocks` blocks of sequence `which`. Returns the holders, with the number of blocks that each
    /// holds.
    async fn ask(&self, which: u32, blocks: u32) -> Vec<HolderMatch> {
        let key = QueryKey::Tokens {
            tokens: tokens(which, 0, blocks),
            lora_name: None,
            cache_salt: None,
        };
        let answered = self
            .client
            .queries
            .query(&namespace(), SingleQuery::new(key))
            .await;
        match answered {
            Ok(reply) => reply.holders,
            // The first event has not come yet.
            Err(ClientError::Refused(error))
                if matches!(error.code, ErrorCode::UnknownNamespace | ErrorCode::Unavailable) =>
            {
                Vec::new()
            }
            Err(error) => panic!("{error}"),
        }
    }

    async fn depth(&self, which: u32, name: &str) -> u32 {
        let holders = self.ask(which, 64).await;
        let found = holders.iter().find(|holder| holder.worker.as_str() == name);
        found.map_or(0, |holder| holder.matched_blocks)
    }
}

fn follow(bridge: &Bridge, publishers: &Publishers, engine: usize, name: &str) {
    follow_text(bridge, &publishers.flag(engine, name));
}

/// Makes the bridge follow the engine that `text` describes in the form of `--engine`.
fn follow_text(bridge: &Bridge, text: &str) {
    let defaults = EngineDefaults {
        model: Some("m".to_owned()),
        block_size: Some(BLOCK),
        ..EngineDefaults::default()
    };
    for engine in parse_engine(text, &defaults).unwrap() {
        bridge.register_given(engine).unwrap();
    }
}

/// Returns the tokens of `count` blocks of sequence `which`, from block `first` on.
fn tokens(which: u32, first: u32, count: u32) -> Vec<u32> {
    (first * BLOCK..(first + count) * BLOCK)
        .map(|token| which * 100_000 + token)
        .collect()
}

/// Returns the name that the engine gives a block. It is not a hash of the contract.
fn name_of(which: u32, block: u32) -> u64 {
    0x1000_0000_0000 + u64::from(which) * 1000 + u64::from(block)
}

/// Returns vLLM's stored event for blocks of sequence `which`, with fields for adapters and salts.
fn stored(which: u32, first: u32, count: u32) -> Value {
    let names: Vec<u64> = (first..first + count)
        .map(|block| name_of(which, block))
        .collect();
    let parent = first.checked_sub(1).map(|block| name_of(which, block));
    json!([
        "BlockStored",
        names,
        parent,
        tokens(which, first, count),
        BLOCK,
        null,
        "GPU",
        null,
        null
    ])
}

fn removed(which: u32, first: u32, count: u32) -> Value {
    let names: Vec<u64> = (first..first + count)
        .map(|block| name_of(which, block))
        .collect();
    json!(["BlockRemoved", names, "GPU"])
}

#[tokio::test(flavor = "multi_thread")]
async fn what_engines_publish_is_answered() {
    let Some(python) = python() else { return };
    for framing in [3, 4] {
        let site = Site::new(&[]).await;
        let mut publishers = Publishers::start(
            &python,
            &[Spec {
                framing,
                ..Spec::default()
            }],
        );
        // These blocks are published before any bridge follows. The replay socket has them.
        publishers.publish(0, &json!([stored(1, 0, 8)]));
        site.follow(&publishers, 0, "gpu-0");
        site.settles("gpu-0", 8, &[]).await;
        publishers.publish(0, &json!([stored(1, 8, 2), stored(2, 0, 3)]));
        publishers.publish(0, &json!([removed(1, 9, 1)]));
        site.settles("gpu-0", 12, &[]).await;
        assert_eq!(
            (site.depth(1, "gpu-0").await, site.depth(2, "gpu-0").await),
            (9, 3)
        );
        assert!(site.ask(1, 64).await.iter().all(|holder| holder.exact));
        // No part of a payload that is not a batch is applied.
        publishers.publish_raw(0, "c1");
        site.settles("gpu-0", 12, &["upstream_gap"]).await;
        publishers.publish(0, &json!([["AllBlocksCleared"], stored(2, 0, 1)]));
        site.settles("gpu-0", 1, &[]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_lost_on_the_way_is_asked_for() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    site.follow(&publishers, 0, "gpu-0");
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    site.settles("gpu-0", 2, &[]).await;
    publishers.publish_lost(0, &json!([stored(1, 2, 2)]));
    publishers.publish_lost(0, &json!([stored(1, 4, 2)]));
    publishers.publish(0, &json!([stored(1, 6, 2)]));
    site.settles("gpu-0", 8, &[]).await;
    // No batch follows the lost one. The bridge finds it by asking the replay socket at intervals.
    publishers.publish_lost(0, &json!([removed(1, 4, 4)]));
    site.settles("gpu-0", 4, &[]).await;
    assert_eq!(site.depth(1, "gpu-0").await, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replay_with_holes_is_asked_for_again() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let torn = Spec {
        torn: 3,
        ..Spec::default()
    };
    let mut publishers = Publishers::start(&python, &[torn]);
    for part in 0..20 {
        publishers.publish_lost(0, &json!([stored(1, part, 1)]));
    }
    site.follow(&publishers, 0, "gpu-0");
    // An engine of which only the replay socket tells is not believed for long, and a busy machine asks slowly.
    publishers.wait_for_subscriber(0);
    publishers.publish(0, &json!([stored(1, 20, 1)]));
    site.settles("gpu-0", 21, &[]).await;
    assert_eq!(site.depth(1, "gpu-0").await, 21);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_can_replay_nothing_is_no_restarted_one() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::with_buffer(0)]);
    site.follow(&publishers, 0, "gpu-0");
    publishers.wait_for_subscriber(0);
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    site.settles("gpu-0", 2, &["unverified", "upstream_lost"]).await;
    publishers.publish(0, &json!([stored(1, 2, 2)]));
    site.settles("gpu-0", 4, &["unverified", "upstream_lost"]).await;
}

/// The engine becomes another process, but the connection stays open, as it does with a proxy between engine and
/// bridge. The new process is silent. Then the engine must not be reported as empty and exact.
#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_engine_that_says_nothing_is_not_empty() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    site.follow(&publishers, 0, "gpu-0");
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    site.settles("gpu-0", 2, &[]).await;
    publishers.count_anew(0, 1);
    for part in 0..3 {
        publishers.publish_lost(0, &json!([stored(2, part, 1)]));
    }
    eventually("its new epoch has no blocks and is in doubt", async || {
        let holder = site.holder("gpu-0").await?;
        let doubts = reasons(&holder);
        assert!(
            holder.blocks > 0 || doubts.contains(&"upstream_lost"),
            "{holder:?}"
        );
        (holder.blocks == 0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_that_stood_still_is_believed_when_it_has_looked_again() {
    let Some(python) = python() else { return };
    let broker = broker().await;
    let settings = [
        ("namespace_defaults.block_size", "4"),
        ("namespace_defaults.stale_after_ms", "3000"),
    ];
    let _daemon = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    let flag = publishers.flag(0, "gpu-0");
    let bridge = kvatlas(&["bridge", "--nats-url", broker.url(), "--admin-listen", "off"])
        .args(["--logging-level", "error", "--model", "m", "--block-size", "4"])
        .args(["--engine", &flag])
        .spawn()
        .unwrap();
    let bridge = Killed(bridge);
    let holder = async || {
        let status = client.queries.status(&namespace()).await.ok()?;
        status.holders.into_iter().next()
    };
    publishers.publish(0, &json!([stored(1, 0, 1)]));
    eventually("the bridge follows", async || {
        holder().await.filter(|holder| holder.exact && holder.blocks == 1)
    })
    .await;
    let pid = rustix::process::Pid::from_child(&bridge.0);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    for part in 1..500 {
        publishers.publish(0, &json!([stored(1, part, 1)]));
    }
    eventually("the holder is stale", async || {
        holder().await.filter(|holder| !holder.exact)
    })
    .await;
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    let seen = eventually("the holder is exact again", async || {
        holder().await.filter(|holder| holder.exact)
    })
    .await;
    assert_eq!(seen.blocks, 500, "exact before everything was read: {seen:?}");
}

/// Child process that is killed when the value is dropped.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_given_back_stays_in_doubt_until_a_clear() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    // The replay socket keeps only two batches.
    let mut publishers = Publishers::start(&python, &[Spec::with_buffer(2)]);
    for which in 0..5 {
        publishers.publish(0, &json!([stored(which, 0, 1)]));
    }
    site.follow(&publishers, 0, "gpu-0");
    site.settles("gpu-0", 2, &["upstream_gap"]).await;
    assert!(site.ask(4, 1).await.iter().all(|holder| !holder.exact));
    publishers.publish(0, &json!([stored(7, 0, 1)]));
    site.settles("gpu-0", 3, &["upstream_gap"]).await;
    // A second daemon learns of the doubt from the publisher's answer.
    let second = daemon(
        site.broker.url(),
        &[
            ("namespace_defaults.block_size", "4"),
            ("queries.queue_group", "second"),
            ("http.listen", "127.0.0.1:0"),
        ],
    )
    .await;
    let mut http = HttpClient::connect(second.http_address().unwrap()).await;
    eventually("the second daemon knows of the doubt", async || {
        let status = http.get("/v1/status?namespace=m").await;
        let holder = (status.status == 200).then(|| status.json()["holders"][0].clone())?;
        (holder["blocks"] == 3 && holder["degraded"] == json!(["upstream_gap"])).then_some(())
    })
    .await;
    publishers.publish(0, &json!([["AllBlocksCleared"]]));
    publishers.publish(0, &json!([stored(8, 0, 2)]));
    site.settles("gpu-0", 2, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_has_nothing_of_the_old_one() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    site.follow(&publishers, 0, "gpu-0");
    // The engine restarts, and publishes fewer, as many, or more batches than the bridge had seen.
    for (round, batches) in [(1, 0), (2, 1), (3, 3), (4, 9)] {
        for part in 0..3 {
            publishers.publish(0, &json!([stored(100 + round, part, 1)]));
        }
        eventually("the old blocks are known", async || {
            (site.depth(100 + round, "gpu-0").await == 3).then_some(())
        })
        .await;
        publishers.kill();
        eventually("nobody says that the old blocks are exact", async || {
            let holders = site.ask(100 + round, 3).await;
            holders.iter().all(|holder| !holder.exact).then_some(())
        })
        .await;
        publishers = publishers.restart(&python);
        for batch in 0..batches {
            publishers.publish(0, &json!([stored(200 + round, batch, 1)]));
        }
        site.settles("gpu-0", u64::from(batches), &[]).await;
        assert_eq!(site.depth(100 + round, "gpu-0").await, 0);
        assert_eq!(site.depth(200 + round, "gpu-0").await, batches);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_replay_socket_only_a_count_from_its_start_is_certain() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let spec = Spec::without_replay();
    let mut publishers = Publishers::start(&python, &[spec, spec]);
    publishers.publish(1, &json!([stored(1, 0, 1)]));
    site.follow(&publishers, 0, "early");
    site.follow(&publishers, 1, "late");
    // Nothing is known of the engine until it publishes.
    site.settles("early", 0, &["unverified", "upstream_lost"]).await;
    // A batch from before the subscription is lost, and the engine cannot send it again.
    (0..2).for_each(|engine| publishers.wait_for_subscriber(engine));
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    publishers.publish(1, &json!([stored(2, 0, 2)]));
    site.settles("early", 2, &[]).await;
    site.settles("late", 2, &["upstream_gap"]).await;
    publishers.publish_lost(0, &json!([stored(1, 2, 1)]));
    publishers.publish(0, &json!([stored(3, 0, 1)]));
    site.settles("early", 3, &["upstream_gap"]).await;
    let engines = site.bridge.engines();
    let early = engines.iter().find(|state| state.engine.key.instance == "early");
    assert_eq!(early.unwrap().last_error.as_deref(), Some("lost_batches"));
    // A new process begins its batch numbers again.
    publishers = publishers.restart(&python);
    site.settles("early", 3, &["unverified", "upstream_gap", "upstream_lost"])
        .await;
    publishers.wait_for_subscriber(0);
    publishers.publish(0, &json!([stored(4, 0, 1)]));
    site.settles("early", 1, &[]).await;
}

/// The engine's replay socket does not answer. The bridge must apply the published batches nevertheless, and name the
/// replay socket in the engine's last error.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_whose_replay_socket_is_dead_is_followed_all_the_same() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let spec = Spec::without_replay();
    let mut publishers = Publishers::start(&python, &[spec]);
    let flag = publishers.flag(0, "gpu-0");
    // No process listens at this address.
    follow_text(&site.bridge, &format!("{flag},replay=tcp://127.0.0.1:1"));
    let mut sequences = 0..;
    let followed = eventually("its batches are applied", async || {
        publishers.publish(0, &json!([stored(sequences.next()?, 0, 1)]));
        site.holder("gpu-0").await.filter(|holder| holder.blocks > 0)
    })
    .await;
    // Batches that came before the replay socket was given up may be lost.
    assert!(
        [&[][..], &["upstream_gap"]].contains(&&reasons(&followed)[..]),
        "{followed:?}"
    );
    let engine = site.bridge.engines().remove(0);
    let error = engine.last_error.unwrap();
    assert!(error.starts_with("replay socket tcp://127.0.0.1:1: "), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_out_of_sight_is_unverified_and_then_stale() {
    let Some(python) = python() else { return };
    let site = Site::new(&[("namespace_defaults.stale_after_ms", "1500")]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    site.follow(&publishers, 0, "gpu-0");
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    site.settles("gpu-0", 2, &[]).await;
    // The engine hangs: its connection stays open, but nothing arrives.
    let pid = rustix::process::Pid::from_raw(publishers.pid()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    site.settles("gpu-0", 2, &["unverified", "upstream_lost"]).await;
    site.settles("gpu-0", 2, &["unverified", "stale", "upstream_lost"])
        .await;
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).unwrap();
    site.settles("gpu-0", 2, &[]).await;
    publishers.publish(0, &json!([stored(1, 2, 1)]));
    site.settles("gpu-0", 3, &[]).await;
    publishers.kill();
    site.settles("gpu-0", 3, &["unverified", "upstream_lost"]).await;
    // At its end, the bridge reports that it no longer sees the engine.
    site.bridge.stop(false).await;
    site.settles("gpu-0", 3, &["unverified", "stale", "upstream_lost"])
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_engines_at_once() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let specs: Vec<Spec> = (0..50)
        .map(|number| Spec {
            framing: 3 + number % 2,
            ..Spec::default()
        })
        .collect();
    let mut publishers = Publishers::start(&python, &specs);
    for engine in 0..50 {
        site.follow(&publishers, engine, &format!("gpu-{engine}"));
    }
    for round in 0..10 {
        for engine in 0..50 {
            let which = u32::try_from(engine).unwrap();
            let event = json!([stored(which, round, 1)]);
            // One batch in five is lost.
            match (round + which) % 5 {
                0 => publishers.publish_lost(engine, &event),
                _ => publishers.publish(engine, &event),
            };
        }
    }
    for engine in 0..50_u32 {
        let name = format!("gpu-{engine}");
        site.settles(&name, 10, &[]).await;
        assert_eq!(site.depth(engine, &name).await, 10);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn engines_come_and_go_over_http() {
    let Some(python) = python() else { return };
    let broker = broker().await;
    let settings = [
        ("namespace_defaults.block_size", "4"),
        ("http.listen", "127.0.0.1:0"),
    ];
    let config = config(broker.url(), &settings);
    let namespaces = std::sync::Arc::new(namespaces(&config).unwrap());
    let options = BridgeOptions {
        namespaces: Some(namespaces.clone()),
        ..options()
    };
    let bridge = Bridge::new(subjects(), options);
    let daemon = Daemon::start_with_engines(config, namespaces, std::sync::Arc::new(bridge.clone()))
        .await
        .unwrap();
    daemon.note_engines_followed();
    daemon.ready().await;
    let client = Client::connect(broker.url()).await;
    bridge.start(&client.nats);
    let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    publishers.publish(1, &json!([stored(1, 0, 3)]));
    let mut http = HttpClient::connect(daemon.http_address().unwrap()).await;
    let dynamo = json!({"instance_id": 7, "endpoint": publishers.endpoint(0), "replay_endpoint": publishers.replay(0), "model_name": "m", "block_size": 4});
    let registered = http.post("/register", &dynamo).await;
    assert_eq!(
        (registered.status, registered.json()),
        (201, json!({"status": "ok"}))
    );
    // The engine may have blocks from now on. The model is known, and the engine's blocks are not.
    let asked = http
        .post("/query", &json!({"model_name": "m", "token_ids": [1]}))
        .await;
    assert_eq!((asked.status, asked.json()["scores"].clone()), (200, json!({})));
    // Registering the same endpoint again is no conflict. Another endpoint is.
    assert_eq!(http.post("/register", &dynamo).await.status, 201);
    let mut other = dynamo.clone();
    other["endpoint"] = json!(publishers.endpoint(1));
    assert_eq!(http.post("/register", &other).await.status, 409);
    // Without configured hosts, the bridge connects only to this machine.
    let mut inner = dynamo.clone();
    (inner["instance_id"], inner["endpoint"]) = (json!(9), json!("tcp://169.254.169.254:80"));
    let refused = http.post("/register", &inner).await;
    let text = refused.json()["error"].as_str().unwrap().to_owned();
    assert!(
        refused.status == 403 && text.contains("--register-hosts"),
        "{text}"
    );
    (inner["endpoint"], inner["replay_endpoint"]) =
        (dynamo["endpoint"].clone(), json!("tcp://inner.example:1"));
    assert_eq!(http.post("/register", &inner).await.status, 403);
    // No host can be read from these endpoints, so the bridge may not connect to them either.
    for unreadable in ["tcp://::ffff:192.0.2.2:1", "tcp://fd00::1:1", "tcp://::1:1"] {
        (inner["endpoint"], inner["replay_endpoint"]) = (json!(unreadable), Value::Null);
        assert_eq!(http.post("/register", &inner).await.status, 400, "{unreadable}");
        (inner["endpoint"], inner["replay_endpoint"]) = (dynamo["endpoint"].clone(), json!(unreadable));
        assert_eq!(http.post("/register", &inner).await.status, 400, "{unreadable}");
    }
    // Another model is registered at an address that is followed already.
    let mut reused = dynamo.clone();
    (reused["instance_id"], reused["model_name"]) = (json!(9), json!("other"));
    let refused = http.post("/register", &reused).await;
    let text = refused.json()["error"].as_str().unwrap().to_owned();
    assert!(
        refused.status == 409 && text.contains("is followed as 7/0 of m"),
        "{text}"
    );
    // A registration with a time to live gives way to what is registered at its address.
    reused["ttl_ms"] = json!(1000);
    assert_eq!(http.post("/register", &reused).await.status, 400);
    reused["ttl_ms"] = json!(60_000);
    assert_eq!(http.post("/register", &reused).await.status, 409);
    let mut lasting = dynamo.clone();
    lasting["ttl_ms"] = json!(60_000);
    for taken in [&lasting, &reused, &dynamo] {
        assert_eq!(http.post("/register", taken).await.status, 201);
        eventually("it is alone", async || {
            let workers = http.get("/workers").await.json();
            let is_alone =
                workers.as_array()?.len() == 1 && workers[0]["instance_id"] == taken["instance_id"];
            is_alone.then_some(())
        })
        .await;
    }
    let mut bad = dynamo.clone();
    bad["endpoint"] = json!("ipc:///tmp/x");
    assert_eq!(http.post("/register", &bad).await.status, 400);
    // Queries by tokens would not find blocks of another size, and would say that no worker has any.
    let mut other_size = dynamo.clone();
    (other_size["instance_id"], other_size["block_size"]) = (json!(8), json!(32));
    let refused = http.post("/register", &other_size).await;
    let text = "block_size is 32, but the blocks of this model have 4 tokens here";
    assert!(refused.status == 409 && refused.json()["error"].as_str().unwrap().starts_with(text));
    let mooncake = json!({"instance_id": "b.c", "endpoint": publishers.endpoint(1), "replay_endpoint": publishers.replay(1), "type": "vLLM", "modelname": "m", "block_size": 4, "dp_rank": 1});
    let registered = http.post("/register", &mooncake).await;
    assert_eq!(
        registered.json(),
        json!({"status": "registered successfully", "instance_id": "b.c"})
    );
    let query = json!({"model_name": "m", "token_ids": tokens(1, 0, 3)});
    eventually("both are found", async || {
        let scores = http.post("/query", &query).await.json()["scores"].clone();
        (scores == json!({"7": {"0": 8}, "b.c": {"1": 12}})).then_some(())
    })
    .await;
    let workers = http.get("/workers").await.json();
    assert_eq!(workers[0]["instance_id"], 7);
    assert_eq!(workers[0]["listeners"]["0"]["status"], "active");
    assert_eq!(workers[1]["endpoints"]["1"], json!(publishers.endpoint(1)));
    let gone = http
        .post("/unregister", &json!({"instance_id": 7, "model_name": "m"}))
        .await;
    assert_eq!((gone.status, gone.json()), (200, json!({"status": "ok"})));
    assert_eq!(
        http.post("/unregister", &json!({"instance_id": 7, "model_name": "m"}))
            .await
            .status,
        404
    );
    let gone = http
        .post("/unregister", &json!({"instance_id": "b.c", "modelname": "m"}))
        .await;
    assert_eq!(gone.json()["removed_instances"], json!(["b.c|default|1"]));
    eventually("both are forgotten", async || {
        let scores = http.post("/query", &query).await.json()["scores"].clone();
        (scores == json!({})).then_some(())
    })
    .await;
}
