//! State that a bridge keeps in JetStream. A new bridge continues from this state, as it would from a state directory.
//! Bridges with the same state know each other's registered engines.

use std::path::Path;
use std::time::Duration;

use async_nats::jetstream;
use futures_util::{StreamExt, TryStreamExt};
use kvatlas_bridge::{Bridge, BridgeOptions, StateDirectory, StatePlace};
use kvatlas_core::wire::Profile;
use kvatlas_process::registry::{EngineRegistry, GivenEngine, MeantEngines, NewEngine};
use rustix::process::Signal;
use serde_json::json;

use super::lasting::{bridge, ends_and_goes_on};
use super::python::{Publishers, Spec, python};
use super::{Site, follow_text, stored};
use crate::support::http::HttpClient;
use crate::support::jetstream::{broker_on_port, broker_on_store, servers};
use crate::support::metrics::metric;
use crate::support::process::{Process, message};
use crate::support::{broker_on, eventually, http_get, lasting_port, reasons, server, subjects};

const STATE: &str = "--state=nats:kept/a";

/// Whether the state of the engine is in JetStream.
async fn is_kept(site: &Site, set: &str) -> bool {
    let jetstream = jetstream::new(site.client.nats.clone());
    let Ok(bucket) = jetstream.get_object_store("kept").await else {
        return false;
    };
    bucket.info(format!("{set}/m.gpu-0.0.engine")).await.is_ok()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_bridge_goes_on_from_jetstream() {
    for server in servers() {
        for signal in [Signal::TERM, Signal::KILL] {
            let store = tempfile::tempdir().unwrap();
            let site = Site::at(broker_on_store(&server, store.path()).await, &[]).await;
            ends_and_goes_on(&site, signal, STATE, async || is_kept(&site, "a").await).await;
        }
    }
}

/// A bridge that keeps its state in JetStream starts while the NATS server has no JetStream. It must follow the engine
/// nevertheless, and store its state when a server with JetStream has taken the place of the first server.
#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_begins_without_jetstream_and_keeps_its_state_once_it_is_there() {
    let Some(python) = python() else { return };
    let port = lasting_port();
    let mut site = Site::at(broker_on(port).await, &[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    let mut bridge = bridge(&site, &publishers, &[STATE]);
    let line = bridge.wait_for_line(|line| message(line).starts_with("what was kept cannot be read for now"));
    let error = line["error"].as_str().unwrap();
    assert!(
        error.starts_with("JetStream has not opened the bucket within"),
        "{error}"
    );
    site.settles("gpu-0", 2, &[]).await;
    bridge.wait_for_line(|line| line["message"] == "the bridge's state is not kept");
    assert_ne!(metric(&bridge, "kvatlas_bridge_state_failures_total"), 0);
    let store = tempfile::tempdir().unwrap();
    drop(site.broker);
    site.broker = broker_on_port(&server(), store.path(), port).await;
    // The engine has not changed since, so the bridge repeats the write that failed.
    eventually("its state is kept", async || {
        is_kept(&site, "a").await.then_some(())
    })
    .await;
}

/// Has a bridge keep an engine's first 8 batches in JetStream, and the next bridge begin without JetStream, which hears
/// one batch more: a block of `chain` at `part`. The replay socket keeps 4 batches.
async fn begun_late(
    python: &Path,
    store: &Path,
    port: u16,
    (chain, part): (u32, u32),
) -> (Site, Publishers, Process) {
    let mut site = Site::at(broker_on_port(&server(), store, port).await, &[]).await;
    let mut publishers = Publishers::start(python, &[Spec::with_buffer(4)]);
    let first = bridge(&site, &publishers, &[STATE]);
    for part in 0..8 {
        publishers.publish(0, &json!([stored(1, part, 1)]));
        site.settles("gpu-0", u64::from(part) + 1, &[]).await;
    }
    let (code, log) = first.stop();
    assert!(code == Some(0) && is_kept(&site, "a").await, "{log}");
    drop(site.broker);
    site.broker = broker_on(port).await;
    let mut second = bridge(&site, &publishers, &[STATE]);
    second.wait_for_line(|line| message(line).starts_with("what was kept cannot be read for now"));
    publishers.publish(0, &json!([stored(chain, part, 1)]));
    eventually("the engine is in doubt", async || {
        let holder = site.holder("gpu-0").await?;
        reasons(&holder).contains(&"upstream_gap").then_some(())
    })
    .await;
    (site, publishers, second)
}

/// The replay socket no longer has the engine's first batches, so the bridge must go on from the kept state, and not
/// write over it.
#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_goes_on_from_jetstream_that_comes_late() {
    let Some(python) = python() else { return };
    let (port, store) = (lasting_port(), tempfile::tempdir().unwrap());
    let (mut site, _publishers, _second) = Box::pin(begun_late(&python, store.path(), port, (1, 8))).await;
    drop(site.broker);
    site.broker = broker_on_port(&server(), store.path(), port).await;
    site.settles("gpu-0", 9, &[]).await;
    assert_eq!(site.depth(1, "gpu-0").await, 9);
}

/// The replay socket no longer has the batches behind the kept state. If the bridge went on from there, it would lose
/// what it has heard since.
#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_keeps_what_it_has_heard_where_the_kept_state_is_too_old() {
    let Some(python) = python() else { return };
    let (port, store) = (lasting_port(), tempfile::tempdir().unwrap());
    let (mut site, mut publishers, mut second) =
        Box::pin(begun_late(&python, store.path(), port, (2, 0))).await;
    for part in 0..8 {
        // The bridge may subscribe only now; the replay socket has what it has not heard of one batch, but not of all.
        if part > 0 {
            publishers.publish(0, &json!([stored(2, part, 1)]));
        }
        eventually("the batch is heard", async || {
            (site.depth(2, "gpu-0").await == part + 1).then_some(())
        })
        .await;
    }
    drop(site.broker);
    site.broker = broker_on_port(&server(), store.path(), port).await;
    second.wait_for_line(|line| message(line).starts_with("what was kept of an engine comes too late"));
    // The daemon may still ask for what it missed while the broker was away.
    eventually("all that was heard is known", async || {
        (site.depth(2, "gpu-0").await == 8).then_some(())
    })
    .await;
}

/// JetStream stops to answer, while NATS goes on. The bridge must end in good order nevertheless.
#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_ends_in_time_while_jetstream_does_not_answer() {
    let Some(python) = python() else { return };
    let (port, store) = (lasting_port(), tempfile::tempdir().unwrap());
    let mut site = Site::at(broker_on_port(&server(), store.path(), port).await, &[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default(); 3]);
    let more: Vec<String> = [1, 2]
        .map(|engine| format!("--engine={}", publishers.flag(engine, &format!("gpu-{engine}"))))
        .into();
    let bridge = bridge(&site, &publishers, &[STATE, &more[0], &more[1]]);
    for engine in 0..3 {
        publishers.publish(engine, &json!([stored(1, 0, 1)]));
        site.settles(&format!("gpu-{engine}"), 1, &[]).await;
    }
    eventually("its state is kept", async || {
        is_kept(&site, "a").await.then_some(())
    })
    .await;
    drop(site.broker);
    site.broker = broker_on(port).await;
    // Somebody takes the questions to JetStream, and answers none.
    let hole = async_nats::connect(site.broker.url()).await.unwrap();
    let mut swallowing = Vec::new();
    for subject in ["$JS.>", "$KV.>", "$O.>"] {
        swallowing.push(hole.subscribe(subject).await.unwrap());
    }
    hole.flush().await.unwrap();
    for engine in 0..3 {
        publishers.publish(engine, &json!([stored(1, 1, 1)]));
        site.settles(&format!("gpu-{engine}"), 2, &[]).await;
    }
    let (code, log) = bridge.stop();
    assert_eq!(code, Some(0), "{log}");
}

/// Waits until an engine of the set `set` is registered in JetStream.
async fn is_written(site: &Site, set: &str) {
    eventually("the registration is written", async || {
        let jetstream = jetstream::new(site.client.nats.clone());
        let keys = jetstream.get_key_value("kept").await.ok()?.keys().await.ok()?;
        let keys: Vec<String> = keys.try_collect().await.ok()?;
        keys.iter()
            .any(|key| key.starts_with(&format!("{set}.registered.")))
            .then_some(())
    })
    .await;
}

/// Starts a bridge that accepts registrations. Returns it, with a client for its HTTP listener.
async fn registering(site: &Site, more: &[&str]) -> (Process, HttpClient) {
    let mut arguments = vec!["--http-listen=127.0.0.1:0"];
    arguments.extend_from_slice(more);
    let mut bridge = Process::bridge(site.broker.url(), &arguments);
    let line = bridge.wait_for_line(|line| line["message"] == "query listener started");
    let address = line["local_addr"].as_str().unwrap().parse().unwrap();
    (bridge, HttpClient::connect(address).await)
}

/// Waits until the bridge follows exactly `engines` engines.
async fn follows(http: &mut HttpClient, engines: usize) {
    eventually("the bridge knows the registrations", async || {
        let workers = http.get("/workers").await.json();
        (workers.as_array()?.len() == engines).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_registered_with_one_bridge_is_followed_by_the_other() {
    let Some(python) = python() else { return };
    for server in servers() {
        let store = tempfile::tempdir().unwrap();
        let site = Site::at(broker_on_store(&server, store.path()).await, &[]).await;
        let mut publishers = Publishers::start(&python, &[Spec::default(), Spec::default()]);
        publishers.publish(0, &json!([stored(1, 0, 2)]));
        let flags = ["--lease=pair", "--state=nats:kept"];
        let (first, mut at_first) = registering(&site, &flags).await;
        let (second, mut at_second) = registering(&site, &flags).await;
        for (engine, name) in [(0, "gpu-0"), (1, "gpu-1")] {
            let body = json!({"instance_id": name, "endpoint": publishers.endpoint(engine), "replay_endpoint": publishers.replay(engine),
                "model_name": "m", "block_size": 4});
            assert_eq!(at_first.post("/register", &body).await.status, 201);
        }
        follows(&mut at_second, 2).await;
        site.settles("gpu-0", 2, &[]).await;
        // The second bridge removes the engine.
        let gone = json!({"instance_id": "gpu-1", "model_name": "m"});
        assert_eq!(at_second.post("/unregister", &gone).await.status, 200);
        follows(&mut at_first, 1).await;
        eventually("its state is kept", async || {
            is_kept(&site, "pair").await.then_some(())
        })
        .await;
        first.kill();
        publishers.publish(0, &json!([stored(2, 0, 5)]));
        site.settles("gpu-0", 7, &[]).await;
        // A third bridge knows the registrations from its start.
        second.kill();
        let (_third, mut at_third) = registering(&site, &flags).await;
        follows(&mut at_third, 1).await;
        publishers.publish(0, &json!([stored(3, 0, 1)]));
        site.settles("gpu-0", 8, &[]).await;
    }
}

/// A bridge begins with a flag that gives an engine another address than its earlier registration.
#[tokio::test(flavor = "multi_thread")]
async fn a_registration_in_jetstream_leaves_a_given_address() {
    let store = tempfile::tempdir().unwrap();
    let site = Site::at(broker_on_store(&server(), store.path()).await, &[]).await;
    let flags = ["--lease=pair", "--state=nats:kept"];
    let (_first, mut at_first) = registering(&site, &flags).await;
    let (_second, mut at_second) = registering(&site, &flags).await;
    for (name, port) in [("gpu-0", 1), ("gpu-1", 2)] {
        let body = json!({"instance_id": name, "endpoint": format!("tcp://127.0.0.1:{port}"), "model_name": "m", "block_size": 4,
            "address": "10.0.0.1:80"});
        assert_eq!(at_first.post("/register", &body).await.status, 201);
        // The registrations are in JetStream, in this order.
        follows(&mut at_second, port).await;
    }
    let given = "--engine=gpu-0=tcp://127.0.0.1:1,model=m,block_size=4,address=10.0.0.9:80";
    let (third, mut at_third) = registering(&site, &[flags[0], flags[1], given]).await;
    follows(&mut at_third, 2).await;
    let (_, shown) = http_get(third.admin_address(), "/workers");
    let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
    let addresses: Vec<_> = (0..2)
        .map(|engine| &shown["engines"][engine]["address"])
        .collect();
    assert_eq!(addresses, ["10.0.0.9:80", "10.0.0.1:80"], "{shown}");
}

/// Starts a bridge that shares registrations with others in JetStream.
fn sharing(site: &Site) -> Bridge {
    let bridge = unconnected();
    bridge.start(&site.client.nats);
    bridge
}

/// Makes a bridge that will share registrations with others in JetStream.
fn unconnected() -> Bridge {
    let place: StatePlace = "nats:kept".parse().unwrap();
    let interval = Duration::from_secs(5);
    let options = BridgeOptions {
        state: Some(StateDirectory::open_place(&place, Some("pair"), &subjects(), interval).unwrap()),
        ..BridgeOptions::default()
    };
    Bridge::new(subjects(), options)
}

fn register(bridge: &Bridge, name: &str, address: &str) {
    follow_text(bridge, &format!("{name}=tcp://127.0.0.1:1,address={address}"));
}

fn address_of(bridge: &Bridge, name: &str) -> Option<String> {
    let mut engines = bridge.engines().into_iter().map(|state| state.engine);
    let engine = engines.find(|engine| engine.key.instance == name)?;
    engine.profile.address.map(|address| address.to_string())
}

/// Waits until the bridge has this address of an engine.
async fn has_address(bridge: &Bridge, name: &str, address: &str) {
    eventually("the address is known", async || {
        (address_of(bridge, name).as_deref() == Some(address)).then_some(())
    })
    .await;
}

/// The entries of a new bucket have smaller numbers than those that the second bridge has found at its start.
#[tokio::test(flavor = "multi_thread")]
async fn a_registration_is_news_after_jetstream_has_lost_the_others() {
    let store = tempfile::tempdir().unwrap();
    let site = Site::at(broker_on_store(&server(), store.path()).await, &[]).await;
    let jetstream = jetstream::new(site.client.nats.clone());
    let first = sharing(&site);
    for written in 1..=8 {
        register(&first, "gpu-0", &format!("10.0.0.{written}:80"));
        eventually("the registration is written", async || {
            let keys = jetstream.get_key_value("kept").await.ok()?;
            let info = keys.stream.get_info().await.ok()?;
            (info.state.last_sequence > written).then_some(())
        })
        .await;
    }
    let second = sharing(&site);
    has_address(&second, "gpu-0", "10.0.0.8:80").await;
    jetstream.delete_key_value("kept").await.unwrap();
    is_written(&site, "pair").await;
    register(&first, "gpu-0", "10.0.0.9:80");
    has_address(&second, "gpu-0", "10.0.0.9:80").await;
    for bridge in [first, second] {
        bridge.stop(false).await;
    }
}

/// A request to unregister an engine reaches a bridge that has not read JetStream yet.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_is_unregistered_with_a_bridge_that_has_not_heard_of_it() {
    let store = tempfile::tempdir().unwrap();
    let site = Site::at(broker_on_store(&server(), store.path()).await, &[]).await;
    let first = sharing(&site);
    register(&first, "gpu-0", "10.0.0.1:80");
    is_written(&site, "pair").await;
    register(&first, "gpu-1", "10.0.0.1:81");
    let second = unconnected();
    let meant = MeantEngines::Named {
        instance: "gpu-0".to_owned(),
        model: "m".to_owned(),
        tenant: None,
        rank: None,
    };
    assert!(second.unregister(&meant).is_empty());
    second.start(&site.client.nats);
    for bridge in [&first, &second] {
        eventually("only the other engine is followed", async || {
            let engines = bridge.engines().into_iter();
            let names: Vec<_> = engines.map(|state| state.engine.key.instance).collect();
            (names == ["gpu-1"]).then_some(())
        })
        .await;
    }
    for bridge in [first, second] {
        bridge.stop(false).await;
    }
}

/// A bridge that is cut off from JetStream takes a registration. Then the engine is registered with another bridge.
#[tokio::test(flavor = "multi_thread")]
async fn a_registration_that_waited_is_not_written_over_a_newer_one() {
    let store = tempfile::tempdir().unwrap();
    let site = Site::at(broker_on_store(&server(), store.path()).await, &[]).await;
    let (first, second) = (sharing(&site), unconnected());
    register(&second, "gpu-0", "10.0.0.1:80");
    register(&second, "gpu-1", "10.0.0.1:81");
    register(&first, "gpu-0", "10.0.0.2:80");
    is_written(&site, "pair").await;
    second.start(&site.client.nats);
    has_address(&second, "gpu-0", "10.0.0.2:80").await;
    // What is written last is heard last.
    has_address(&first, "gpu-1", "10.0.0.1:81").await;
    assert_eq!(address_of(&first, "gpu-0").as_deref(), Some("10.0.0.2:80"));
    for bridge in [first, second] {
        bridge.stop(false).await;
    }
}

/// A second entry would be a newer registration to the other bridges, and take the place of what they have from elsewhere.
#[tokio::test(flavor = "multi_thread")]
async fn a_registration_from_before_jetstream_is_written_once() {
    let store = tempfile::tempdir().unwrap();
    let site = Site::at(broker_on_store(&server(), store.path()).await, &[]).await;
    let mut entries = site
        .client
        .nats
        .subscribe("$KV.kept.pair.registered.>")
        .await
        .unwrap();
    site.client.nats.flush().await.unwrap();
    let bridge = unconnected();
    register(&bridge, "gpu-0", "10.0.0.1:80");
    bridge.start(&site.client.nats);
    let first = entries.next().await.unwrap();
    register(&bridge, "gpu-1", "10.0.0.2:80");
    let second = entries.next().await.unwrap();
    assert_ne!(first.subject, second.subject);
    bridge.stop(false).await;
}

/// A source gives an engine another address than a registration that the bridge has heard before. Then JetStream is away,
/// and the bridge hears all registrations again.
#[tokio::test(flavor = "multi_thread")]
async fn a_registration_that_is_heard_again_leaves_a_newer_address() {
    let (store, port) = (tempfile::tempdir().unwrap(), lasting_port());
    let mut site = Site::at(broker_on_port(&server(), store.path(), port).await, &[]).await;
    let (first, second) = (sharing(&site), sharing(&site));
    register(&first, "gpu-0", "10.0.0.1:80");
    has_address(&second, "gpu-0", "10.0.0.1:80").await;
    let given = second.engines().remove(0).engine;
    let profile = Profile {
        address: "10.0.0.2:80".parse().ok(),
        ..given.profile.clone()
    };
    let given = GivenEngine::Publisher(NewEngine { profile, ..given });
    second.replace("flags", &[given]).unwrap();
    assert_eq!(address_of(&second, "gpu-0").as_deref(), Some("10.0.0.2:80"));
    drop(site.broker);
    site.broker = broker_on_port(&server(), store.path(), port).await;
    // The registrations come in the order in which they were written.
    register(&first, "gpu-1", "10.0.0.3:80");
    has_address(&second, "gpu-1", "10.0.0.3:80").await;
    assert_eq!(address_of(&second, "gpu-0").as_deref(), Some("10.0.0.2:80"));
    for bridge in [first, second] {
        bridge.stop(false).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_whose_set_another_one_has_taken_is_told_so() {
    for server in servers() {
        let store = tempfile::tempdir().unwrap();
        let site = Site::at(broker_on_store(&server, store.path()).await, &[]).await;
        let opened = |line: &serde_json::Value| line["message"] == "the bridge's state is kept in JetStream";
        let (mut first, _) = registering(&site, &[STATE]).await;
        first.wait_for_line(opened);
        let (mut other, _) = registering(&site, &["--state=nats:kept/b"]).await;
        other.wait_for_line(opened);
        let (mut second, mut at_second) = registering(&site, &[STATE]).await;
        second.wait_for_line(opened);
        let line = first.wait_for_line(|line| line["message"] == "the bridge's state is not kept");
        let error = line["error"].as_str().unwrap();
        assert!(
            error.starts_with("kvatlas-bridge@") && error.contains("--state nats:BUCKET/NAME"),
            "{error}"
        );
        let body = json!({"instance_id": "gpu-0", "endpoint": "tcp://127.0.0.1:1", "model_name": "m", "block_size": 4});
        assert_eq!(at_second.post("/register", &body).await.status, 201);
        is_written(&site, "a").await;
        // Only the second bridge has used this set of files, and the next bridge continues from it.
        second.kill();
        let (_third, mut at_third) = registering(&site, &[STATE]).await;
        follows(&mut at_third, 1).await;
        for bridge in [first, other] {
            let mut admin = HttpClient::connect(bridge.admin_address()).await;
            let workers = admin.get("/workers").await.json();
            assert_eq!(workers["engines"], json!([]), "{workers}");
        }
    }
}

/// A registration that nobody renews would count for ever at a bridge that waits for news of others.
#[tokio::test(flavor = "multi_thread")]
async fn registrations_end_at_a_bridge_that_has_lost_its_set() {
    let store = tempfile::tempdir().unwrap();
    let site = Site::at(broker_on_store(&server(), store.path()).await, &[]).await;
    let (mut first, mut http) = registering(&site, &[STATE]).await;
    first.wait_for_line(|line| line["message"] == "the bridge's state is kept in JetStream");
    let body = json!({
        "instance_id": "gpu-0", "endpoint": "tcp://127.0.0.1:1", "model_name": "m", "block_size": 4, "ttl_ms": 10_000
    });
    assert_eq!(http.post("/register", &body).await.status, 201);
    let _second = registering(&site, &[STATE]).await;
    first.wait_for_line(|line| line["message"] == "the bridge's state is not kept");
    follows(&mut http, 1).await;
    follows(&mut http, 0).await;
}

/// The bucket is deleted, or the server comes back with nothing. In between, none of what bridges share can be read.
#[tokio::test(flavor = "multi_thread")]
async fn registrations_that_jetstream_has_lost_are_written_anew() {
    let (store, empty, port) = (
        tempfile::tempdir().unwrap(),
        tempfile::tempdir().unwrap(),
        lasting_port(),
    );
    let mut site = Site::at(broker_on_port(&server(), store.path(), port).await, &[]).await;
    let (mut bridge, mut http) = registering(&site, &[STATE]).await;
    let body =
        json!({"instance_id": "gpu-0", "endpoint": "tcp://127.0.0.1:1", "model_name": "m", "block_size": 4});
    assert_eq!(http.post("/register", &body).await.status, 201);
    is_written(&site, "a").await;
    let jetstream = jetstream::new(site.client.nats.clone());
    jetstream.delete_key_value("kept").await.unwrap();
    is_written(&site, "a").await;
    drop(site.broker);
    // No engine is connected, so nothing else of the state is written.
    bridge.wait_for_line(|line| message(line) == "the bridge's state is not kept");
    assert_ne!(metric(&bridge, "kvatlas_bridge_state_failures_total"), 0);
    site.broker = broker_on_port(&server(), empty.path(), port).await;
    is_written(&site, "a").await;
}
