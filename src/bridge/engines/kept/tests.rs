use std::path::Path;

use futures_util::StreamExt;
use kvatlas_core::wire::Subjects;
use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};
use kvatlas_process::registry::EngineRegistry;
use kvatlas_telemetry::rendered;

use super::super::BridgeOptions;
use super::*;
use crate::state::StateDirectory;
use crate::{EngineDefaults, parse_engine};

pub(in super::super) fn given(text: &str) -> GivenEngine {
    let defaults = EngineDefaults {
        model: Some("m".to_owned()),
        ..EngineDefaults::default()
    };
    parse_engine(text, &defaults).unwrap().remove(0)
}

/// Makes a bridge with its state in the directory `path`.
fn bridge(path: &Path) -> Bridge {
    let options = BridgeOptions {
        state: Some(StateDirectory::open(path, Duration::ZERO).unwrap()),
        ..BridgeOptions::default()
    };
    Bridge::new(Subjects::new("kvatlas").unwrap(), options)
}

/// Registers engines with a bridge on `path`, which then ends.
async fn register(path: &Path, texts: &[&str]) {
    let bridge = bridge(path);
    for text in texts {
        bridge.register_given(given(text)).unwrap();
    }
    bridge.stop(false).await;
}

fn named(name: &str, rank: Option<u32>) -> MeantEngines {
    MeantEngines::Named {
        instance: name.to_owned(),
        model: "m".to_owned(),
        tenant: None,
        rank,
    }
}

/// Returns the followed engines, each with its address.
fn followed(bridge: &Bridge) -> Vec<(String, Option<String>)> {
    let address = |profile: &kvatlas_core::wire::Profile| {
        let address = profile.address.as_ref();
        address.map(|address| address.as_str().to_owned())
    };
    let engines = bridge.engines().into_iter();
    let engines = engines.map(|state| (state.engine.key.instance, address(&state.engine.profile)));
    let servers = bridge.servers().into_iter();
    let servers = servers.map(|state| (state.server.instance, address(&state.server.profile)));
    engines.chain(servers).collect()
}

pub(in super::super) fn names(bridge: &Bridge) -> Vec<String> {
    followed(bridge).into_iter().map(|(name, _)| name).collect()
}

#[tokio::test]
async fn a_registration_that_was_not_written_is_written_later() {
    let server = find_nats_server(None).unwrap();
    let broker = EmbeddedBroker::start(&server).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state");
    let bridge = bridge(&path);
    bridge.start(&async_nats::connect(broker.url()).await.unwrap());
    std::fs::remove_dir_all(&path).unwrap();
    bridge.register_given(given("gpu-0=tcp://127.0.0.1:1")).unwrap();
    assert!(bridge.inner.registered.as_ref().unwrap().is_behind());
    std::fs::create_dir(&path).unwrap();
    let written = async {
        while !path.join("registered").exists() {
            tokio::time::sleep(PAUSE_MIN).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), written)
        .await
        .unwrap();
    bridge.stop(false).await;
}

#[tokio::test]
async fn what_was_registered_before_has_the_address_that_is_given_now() {
    let folder = tempfile::tempdir().unwrap();
    let engines = ["gpu-0=tcp://127.0.0.1:1", "gpu-1=http://127.0.0.1:2"];
    let at = |address: &str| engines.map(|engine| format!("{engine},address={address}"));
    register(folder.path(), &at("10.0.0.1:80").each_ref().map(String::as_str)).await;
    let bridge = bridge(folder.path());
    let now = at("10.0.0.9:80").map(|text| given(&text));
    bridge.replace("flags", &now).unwrap();
    bridge.take_up_registered();
    let expected = ["gpu-0", "gpu-1"].map(|name| (name.to_owned(), Some("10.0.0.9:80".to_owned())));
    assert_eq!(followed(&bridge), expected);
    bridge.replace("flags", &[]).unwrap();
    assert_eq!(followed(&bridge), expected, "they were registered, too");
}

#[tokio::test]
async fn an_engine_that_is_refused_stays_registered_until_it_is_unregistered() {
    let folder = tempfile::tempdir().unwrap();
    register(folder.path(), &["gpu-0=tcp://127.0.0.1:1"]).await;
    let elsewhere = [given("gpu-0=tcp://127.0.0.1:2")];
    let endpoints = |bridge: &Bridge| -> Vec<String> {
        let engines = bridge.engines().into_iter();
        engines.map(|state| state.engine.endpoint).collect()
    };
    let once = bridge(folder.path());
    once.replace("flags", &elsewhere).unwrap();
    once.take_up_registered();
    assert_eq!(endpoints(&once), ["tcp://127.0.0.1:2"]);
    drop(once);
    let next = bridge(folder.path());
    next.replace("flags", &elsewhere).unwrap();
    next.take_up_registered();
    next.replace("flags", &[]).unwrap();
    assert_eq!(
        endpoints(&next),
        ["tcp://127.0.0.1:1"],
        "it is tried again at once"
    );
    drop(next);
    let stopped = bridge(folder.path());
    stopped.stop(false).await;
    stopped.take_up_registered();
    assert!(names(&stopped).is_empty());
    drop(stopped);
    let last = bridge(folder.path());
    last.replace("flags", &elsewhere).unwrap();
    last.take_up_registered();
    assert_eq!(
        last.inner.state.lock().kept.engines.len(),
        1,
        "a stop has not lost it"
    );
    assert_eq!(last.unregister(&named("gpu-0", None)).len(), 1);
    last.catch_up_registered();
    drop(last);
    let none = bridge(folder.path());
    none.take_up_registered();
    assert!(names(&none).is_empty());
}

#[tokio::test]
async fn an_engine_that_is_registered_anew_is_as_it_was_registered_last() {
    let folder = tempfile::tempdir().unwrap();
    register(folder.path(), &["gpu-0=tcp://127.0.0.1:1"]).await;
    let bridge = bridge(folder.path());
    bridge
        .replace("flags", &[given("gpu-0=tcp://127.0.0.1:2")])
        .unwrap();
    bridge.take_up_registered();
    bridge.register_given(given("gpu-0=tcp://127.0.0.1:2")).unwrap();
    bridge.catch_up_registered();
    let state = bridge.inner.state.lock();
    let registered = state.all_registered().unwrap();
    assert_eq!(registered, [given("gpu-0=tcp://127.0.0.1:2")]);
}

#[cfg(unix)]
#[tokio::test]
async fn a_list_that_is_read_late_brings_nothing_older_back() {
    let folder = tempfile::tempdir().unwrap();
    let engines = [
        "gpu-0=tcp://127.0.0.1:1",
        "gpu-1=tcp://127.0.0.1:2",
        "gpu-2=tcp://127.0.0.1:3",
    ];
    register(
        folder.path(),
        &[engines[0], engines[1], engines[2], "gpu-3=tcp://127.0.0.1:4"],
    )
    .await;
    let (path, aside) = (folder.path().join("registered"), folder.path().join("aside"));
    std::fs::rename(&path, &aside).unwrap();
    // A link to itself cannot be read.
    std::os::unix::fs::symlink(&path, &path).unwrap();
    let bridge = bridge(folder.path());
    bridge.take_up_registered();
    assert!(names(&bridge).is_empty());
    bridge
        .register_given(given("gpu-1=tcp://127.0.0.1:2,address=10.0.0.9:80"))
        .unwrap();
    assert!(
        bridge.unregister(&named("gpu-0", Some(0))).is_empty(),
        "it is in the file only"
    );
    bridge.catch_up_registered();
    assert_eq!(names(&bridge), ["gpu-1"]);
    std::fs::remove_file(&path).unwrap();
    std::fs::rename(&aside, &path).unwrap();
    let registered = bridge.inner.registered.as_ref().unwrap();
    let listed = registered.read_late(&bridge.inner.metrics).unwrap();
    // Requests that come between the reading and what follows from it count, too.
    bridge.unregister(&named("gpu-3", None));
    bridge.register_given(given("gpu-4=tcp://127.0.0.1:5")).unwrap();
    assert!(registered.is_behind(), "the list lacks the engines of the file");
    bridge.inner.state.lock().kept.read_late(listed);
    bridge.take_up_registered();
    let expected = [("gpu-1", Some("10.0.0.9:80")), ("gpu-2", None), ("gpu-4", None)];
    let expected = expected.map(|(name, address)| (name.to_owned(), address.map(str::to_owned)));
    assert_eq!(followed(&bridge), expected);
    drop(bridge);
    let next = self::bridge(folder.path());
    next.take_up_registered();
    assert_eq!(followed(&next), expected);
}

/// A client asks again and again to unregister an engine while the list cannot be read. A request of another client must
/// count nevertheless.
#[test]
fn a_request_that_is_repeated_takes_no_room() {
    let metrics = BridgeMetrics::new();
    let mut kept = KeptRegistrations::new(None);
    kept.unregister(&named("gpu-0", None), &metrics);
    for _ in 0..=GONE_MAX {
        kept.unregister(&named("gpu-1", None), &metrics);
    }
    kept.read_late(vec![
        given("gpu-0=tcp://127.0.0.1:1"),
        given("gpu-2=tcp://127.0.0.1:2"),
    ]);
    assert_eq!(kept.engines.len(), 1);
    assert_eq!(kept.engines[0].tried.engine.instance(), "gpu-2");
}

#[test]
fn a_request_for_which_there_is_no_room_is_counted() {
    let failures = |requests: usize| {
        let page = rendered(|| {
            let metrics = BridgeMetrics::new();
            let mut kept = KeptRegistrations::new(None);
            for request in 0..requests {
                kept.unregister(&named(&format!("gpu-{request}"), None), &metrics);
            }
            kept.read_late(vec![given("gpu-0=tcp://127.0.0.1:1")]);
            assert!(kept.engines.is_empty(), "the first request is remembered");
        });
        page.contains("kvatlas_bridge_state_failures_total 1")
    };
    assert_eq!((failures(GONE_MAX), failures(GONE_MAX + 1)), (false, true));
}

/// The bridge cannot know which ranks a server has before the server has told them.
#[tokio::test]
async fn one_rank_stands_for_a_server_that_has_told_none() {
    let server = || given("gpu-0=http://127.0.0.1:1");
    let mut kept = KeptRegistrations::new(None);
    kept.unregister(&named("gpu-0", Some(1)), &BridgeMetrics::new());
    kept.read_late(vec![server(), given("gpu-0=tcp://127.0.0.1:2")]);
    let left: Vec<_> = kept.engines.into_iter().map(|kept| kept.tried.engine).collect();
    assert_eq!(
        left,
        [given("gpu-0=tcp://127.0.0.1:2")],
        "the publisher has rank 0"
    );
    let folder = tempfile::tempdir().unwrap();
    let bridge = bridge(folder.path());
    bridge.register_given(server()).unwrap();
    assert_eq!(bridge.unregister(&named("gpu-0", Some(1))).len(), 1);
    assert!(bridge.servers().is_empty());
}

#[tokio::test]
async fn each_change_of_a_refusal_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    register(folder.path(), &["gpu-0=tcp://127.0.0.1:1"]).await;
    let bridge = bridge(folder.path());
    let refusal = || {
        let state = bridge.inner.state.lock();
        let [kept] = state.kept.engines.as_slice() else {
            panic!("it is kept");
        };
        kept.tried.refusal.clone()
    };
    assert_eq!(refusal(), None);
    let mut seen = Vec::new();
    for port in [2, 2, 3] {
        let elsewhere = given(&format!("gpu-0=tcp://127.0.0.1:{port}"));
        bridge.replace("flags", &[elsewhere]).unwrap();
        bridge.take_up_registered();
        seen.extend(refusal());
    }
    assert_eq!(seen.len(), 3);
    assert!(seen[0] == seen[1] && seen[1] != seen[2]);
}

#[tokio::test]
async fn a_registered_engine_that_is_refused_after_a_restart_is_announced_until_it_is_unregistered() {
    let server = find_nats_server(None).unwrap();
    let broker = EmbeddedBroker::start(&server).await.unwrap();
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let mut reports = nats.subscribe("kvatlas.v1.events.>").await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    register(
        folder.path(),
        &["gpu-0=tcp://127.0.0.1:1", "gpu-1=tcp://127.0.0.1:2"],
    )
    .await;
    let options = BridgeOptions {
        engines_max: 1,
        ..bridge(folder.path()).inner.options.clone()
    };
    let bridge = Bridge::new(Subjects::new("kvatlas").unwrap(), options);
    bridge.start(&nats);
    bridge.take_up_registered();
    assert_eq!(names(&bridge), ["gpu-0"]);
    while !reports.next().await.unwrap().subject.ends_with(".gpu-1") {}
    let announced = || bridge.inner.state.lock().announced.len();
    assert_eq!(announced(), 1);
    assert_eq!(bridge.unregister(&named("gpu-1", None)).len(), 1);
    assert_eq!(announced(), 0);
    bridge.stop(false).await;
}

#[tokio::test]
async fn a_kept_registration_that_is_followed_at_last_is_as_old_as_it_was() {
    let second = Duration::from_secs(1);
    for address in [1, 2] {
        let folder = tempfile::tempdir().unwrap();
        let bridge = bridge(folder.path());
        bridge
            .replace("flags", &[given("gpu-0=tcp://127.0.0.1:1")])
            .unwrap();
        let GivenEngine::Publisher(mut engine) = given(&format!("gpu-0=tcp://127.0.0.1:{address}")) else {
            panic!("it is a publisher");
        };
        engine.ttl = Some(60 * second);
        let mut state = bridge.inner.state.lock();
        let kept = KeptRegistration::new(GivenEngine::Publisher(engine), None);
        state.kept.engines.push(kept);
        assert!(state.kept.pass(59 * second, false).is_empty());
        drop(state);
        bridge.take_up_registered();
        bridge.replace("flags", &[]).unwrap();
        assert_eq!(names(&bridge), ["gpu-0"]);
        bridge.pass(second);
        assert!(names(&bridge).is_empty(), "its time is over");
    }
}
