use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvatlas_core::wire::Subjects;
use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};
use kvatlas_process::registry::{EngineRegistry, MeantEngines, NewEngine, RegisterRefusal};

use super::super::BridgeOptions;
use super::super::kept::tests::{given, names};
use super::super::presumed::presumed_key;
use super::super::shared::tests::{entry_of, sharing};
use super::*;

fn bridge_of(engines_max: usize) -> Bridge {
    let options = BridgeOptions {
        engines_max,
        ..BridgeOptions::default()
    };
    Bridge::new(Subjects::new("kvatlas").unwrap(), options)
}

/// Makes a bridge that is connected to a NATS server of its own.
async fn started(engines_max: usize) -> (EmbeddedBroker, Bridge) {
    let broker = EmbeddedBroker::start(&find_nats_server(None).unwrap())
        .await
        .unwrap();
    let bridge = bridge_of(engines_max);
    bridge.start(&async_nats::connect(broker.url()).await.unwrap());
    (broker, bridge)
}

/// Returns whether daemons are told to forget a followed engine, once its task ends.
fn goodbye_of(bridge: &Bridge, name: &str) -> Arc<AtomicBool> {
    let state = bridge.inner.state.lock();
    let mut followed = state.engines.values();
    let followed = followed.find(|followed| followed.engine.key.instance == name);
    Arc::clone(&followed.unwrap().says_goodbye)
}

fn replays(bridge: &Bridge) -> Vec<Option<String>> {
    let engines = bridge.engines().into_iter();
    engines.map(|state| state.engine.replay).collect()
}

fn publisher(text: &str) -> NewEngine {
    match given(text) {
        GivenEngine::Publisher(engine) => engine,
        GivenEngine::Server(_) => panic!("it is a publisher"),
    }
}

const OLD: &str = "gpu-0=tcp://127.0.0.1:1";
const NEW: &str = "gpu-0=tcp://127.0.0.1:1,replay=tcp://127.0.0.1:2";

#[tokio::test]
async fn a_refused_engine_of_a_flag_is_followed_once_its_name_is_free() {
    let free: [fn(&Bridge); 2] = [
        |bridge| {
            let meant = MeantEngines::One(presumed_key(&given(OLD)));
            assert_eq!(bridge.unregister(&meant).len(), 1);
        },
        |bridge| {
            use crate::state::SharedRegistry;
            bridge.apply(entry_of(given(OLD), false));
        },
    ];
    for free in free {
        let bridge = sharing();
        bridge.register_given(given(OLD)).unwrap();
        bridge.replace("flags", &[given(NEW)]).unwrap_err();
        let goodbye = goodbye_of(&bridge, "gpu-0");
        free(&bridge);
        assert_eq!(replays(&bridge), [Some("tcp://127.0.0.1:2".to_owned())]);
        assert!(!goodbye.load(Ordering::Acquire), "daemons go on knowing the name");
    }
}

#[tokio::test]
async fn a_refused_engine_is_followed_once_its_address_is_free() {
    let bridge = bridge_of(9);
    bridge.replace("flags", &[given(OLD)]).unwrap();
    bridge
        .replace("file", &[given("gpu-1=tcp://127.0.0.1:1,model=n")])
        .unwrap_err();
    let goodbye = goodbye_of(&bridge, "gpu-0");
    bridge.replace("flags", &[]).unwrap();
    assert_eq!(names(&bridge), ["gpu-1"]);
    assert!(goodbye.load(Ordering::Acquire));
}

#[tokio::test]
async fn what_an_operator_removes_stays_away_until_its_source_gives_it_anew() {
    let bridge = bridge_of(9);
    let flags = [given(OLD), given("gpu-1=http://127.0.0.1:2")];
    bridge.replace("flags", &flags).unwrap();
    for engine in &flags {
        bridge.unregister(&MeantEngines::One(presumed_key(engine)));
    }
    for more in ["gpu-2=tcp://127.0.0.1:1,model=n", "gpu-3=tcp://127.0.0.1:3"] {
        // A report that gives them as before, as another engine is refused or new, is no reason to follow them.
        let others = [given("gpu-3=tcp://127.0.0.1:3"), given(more)];
        bridge.replace("flags", &[&flags[..], &others].concat()).unwrap();
        assert!(
            !names(&bridge)
                .iter()
                .any(|name| ["gpu-0", "gpu-1"].contains(&name.as_str()))
        );
    }
    let changed = [given(NEW), given("gpu-1=http://127.0.0.1:3")];
    bridge.replace("flags", &changed).unwrap();
    assert_eq!(names(&bridge), ["gpu-0", "gpu-1"]);
    for engine in &changed {
        bridge.unregister(&MeantEngines::One(presumed_key(engine)));
    }
    bridge.replace("flags", &[]).unwrap();
    bridge.replace("flags", &changed).unwrap();
    assert_eq!(names(&bridge), ["gpu-0", "gpu-1"]);
}

#[tokio::test]
async fn what_an_operator_removes_stays_away_when_something_else_leaves_its_address() {
    let bridge = bridge_of(9);
    bridge.replace("flags", &[given(OLD)]).unwrap();
    let other = given("gpu-1=tcp://127.0.0.1:1");
    for engine in [given(OLD), other.clone()] {
        bridge.unregister(&MeantEngines::One(presumed_key(&engine)));
        bridge.register_given(other.clone()).unwrap();
    }
    bridge.unregister(&MeantEngines::One(presumed_key(&other)));
    assert!(names(&bridge).is_empty());
    bridge.replace("flags", &[given(NEW)]).unwrap();
    assert_eq!(names(&bridge), ["gpu-0"]);
}

#[tokio::test]
async fn a_kept_registration_is_followed_at_once_when_its_name_is_free() {
    let bridge = bridge_of(9);
    bridge.replace("flags", &[given(OLD)]).unwrap();
    let kept = given(NEW);
    let refusal = bridge
        .follow_in(&mut bridge.inner.state.lock(), kept.clone())
        .unwrap_err();
    let metrics = &bridge.inner.metrics;
    bridge.inner.state.lock().kept.keep(kept, refusal, metrics);
    let goodbye = goodbye_of(&bridge, "gpu-0");
    bridge.replace("flags", &[]).unwrap();
    assert_eq!(replays(&bridge), [Some("tcp://127.0.0.1:2".to_owned())]);
    assert!(!goodbye.load(Ordering::Acquire), "daemons go on knowing the name");
    bridge.replace("flags", &[]).unwrap();
    assert_eq!(names(&bridge), ["gpu-0"], "it is registered");
}

/// The server has told its publisher, whose name is followed from a file.
#[tokio::test]
async fn a_refused_publisher_of_a_server_is_followed_once_its_name_is_free() {
    let bridge = bridge_of(9);
    bridge.replace("file", &[given(OLD)]).unwrap();
    bridge
        .replace("found", &[given("gpu-0=http://127.0.0.1:9")])
        .unwrap();
    let handle = bridge.handle_of("gpu-0").unwrap();
    let refused = bridge.follow_publishers(&handle, vec![(publisher(NEW), None)]);
    assert!(matches!(refused, Err(RegisterRefusal::Conflict { .. })));
    let moved = given("gpu-0=http://127.0.0.1:9,address=10.0.0.9:80");
    bridge.replace("found", &[moved]).unwrap();
    let goodbye = goodbye_of(&bridge, "gpu-0");
    bridge.replace("file", &[]).unwrap();
    let address = bridge.engines()[0].engine.profile.address.clone();
    assert_eq!(address.unwrap().as_str(), "10.0.0.9:80", "as it is given now");
    assert_eq!(replays(&bridge), [Some("tcp://127.0.0.1:2".to_owned())]);
    assert_eq!(handle.progress().engines, [publisher(NEW).key]);
    assert!(!goodbye.load(Ordering::Acquire));
    let goodbye = goodbye_of(&bridge, "gpu-0");
    bridge.replace("found", &[]).unwrap();
    assert!(names(&bridge).is_empty() && goodbye.load(Ordering::Acquire));
}

#[tokio::test]
async fn an_engine_whose_server_is_asked_from_now_on_is_announced_without_a_break() {
    let (_broker, bridge) = started(1).await;
    let server = |number: u32| given(&format!("gpu-{number}=http://127.0.0.1:1{number},block_size=16"));
    let announced = |bridge: &Bridge| {
        let state = bridge.inner.state.lock();
        let (refused, awaited): (Vec<_>, Vec<_>) =
            state.announced.iter().partition(|(_, told)| told.is_refused());
        let names = |told: Vec<(&EngineKey, _)>| -> Vec<String> {
            told.into_iter().map(|(key, _)| key.instance.clone()).collect()
        };
        (names(awaited), names(refused))
    };
    let named = |names: &[&str]| -> Vec<String> { names.iter().copied().map(str::to_owned).collect() };
    bridge.replace("file", &[server(0), server(1)]).unwrap_err();
    assert_eq!(announced(&bridge), (named(&["gpu-0"]), named(&["gpu-1"])));
    // There is room for the refused one.
    bridge.replace("file", &[server(1)]).unwrap();
    assert_eq!(announced(&bridge), (named(&["gpu-1"]), named(&[])));
    // A publisher gives way to the server of its engine.
    bridge
        .replace("file", &[given("gpu-2=tcp://127.0.0.1:1,block_size=16")])
        .unwrap();
    let goodbye = goodbye_of(&bridge, "gpu-2");
    bridge.replace("file", &[server(2)]).unwrap();
    assert_eq!(announced(&bridge), (named(&["gpu-2"]), named(&[])));
    assert!(!goodbye.load(Ordering::Acquire));
    bridge.stop(false).await;
}

/// Returns the announced engines that are refused, each with its block size.
fn refused(bridge: &Bridge) -> Vec<(String, u32)> {
    let state = bridge.inner.state.lock();
    let refused = state.announced.iter().filter(|(_, told)| told.is_refused());
    let refused = refused.map(|(key, told)| (key.instance.clone(), told.block_size));
    refused.collect()
}

fn refused_names(bridge: &Bridge) -> Vec<String> {
    refused(bridge).into_iter().map(|(name, _)| name).collect()
}

#[tokio::test]
async fn a_refused_engine_is_announced_with_the_block_size_of_its_model() {
    let server = |number: u32, size: u32| {
        given(&format!(
            "gpu-{number}=http://127.0.0.1:1{number},block_size={size}"
        ))
    };
    for is_followed in [true, false] {
        let (_broker, bridge) = started(1).await;
        if is_followed {
            let engine = given("gpu-9=tcp://127.0.0.1:1,block_size=16");
            bridge.replace("flags", &[engine]).unwrap();
        }
        let own = if is_followed { 32 } else { 16 };
        bridge
            .replace("file", &[server(0, own), server(1, 64)])
            .unwrap_err();
        assert_eq!(refused(&bridge), [("gpu-1".to_owned(), 16)]);
        bridge.stop(false).await;
    }
}

/// The first of the servers whose publishers are refused does not answer, and the second one is known to be there.
#[tokio::test]
async fn an_engine_whose_server_is_away_stands_for_no_other() {
    let (_broker, bridge) = started(3).await;
    let flags = [0, 1, 2].map(|number| given(&format!("old-{number}=tcp://127.0.0.1:{}", 20 + number)));
    bridge.replace("flags", &flags).unwrap();
    let servers = [0, 1, 2].map(|number| {
        let mut server = given(&format!("gpu-{number}=http://127.0.0.1:1{number}"));
        if let GivenEngine::Server(server) = &mut server
            && number == 1
        {
            server.discovered.identity = "pod".to_owned();
        }
        server
    });
    bridge.replace("found", &servers).unwrap();
    for number in 0..3 {
        let handle = bridge.handle_of(&format!("gpu-{number}")).unwrap();
        let told = publisher(&format!("gpu-{number}=tcp://127.0.0.1:3{number}"));
        bridge.follow_publishers(&handle, vec![(told, None)]).unwrap_err();
    }
    assert_eq!(refused_names(&bridge), ["gpu-0", "gpu-1"]);
    let handle = bridge.handle_of("gpu-0").unwrap();
    bridge.forget_publishers(&handle);
    assert_eq!(refused_names(&bridge), ["gpu-1"]);
    bridge.stop(false).await;
}

/// Announced is `y`, of a source; `x` and `z` are refused, too, and are of sources that report nothing more.
#[tokio::test]
async fn another_refused_engine_is_announced_when_the_announced_one_goes() {
    let (_broker, bridge) = started(1).await;
    let [a, x, y, z] =
        ["a", "x", "y", "z"].map(|name| given(&format!("{name}=tcp://127.0.0.1:{}", name.as_bytes()[0])));
    bridge.replace("flags", &[a]).unwrap();
    bridge.replace("found", std::slice::from_ref(&y)).unwrap_err();
    bridge.replace("file", &[x]).unwrap_err();
    bridge.replace("dns", &[z]).unwrap_err();
    assert_eq!(refused_names(&bridge), ["y"]);
    bridge.replace("found", &[]).unwrap();
    assert_eq!(refused_names(&bridge), ["z"]);
    bridge.replace("dns", &[]).unwrap();
    assert_eq!(refused_names(&bridge), ["x"]);
    // The announced one is followed, and stands for nobody from then on.
    bridge.replace("found", &[y]).unwrap_err();
    bridge.replace("flags", &[]).unwrap();
    assert_eq!(
        (names(&bridge), refused_names(&bridge)),
        (vec!["x".to_owned()], vec!["y".to_owned()])
    );
    bridge.stop(false).await;
}

/// Both are of one model. The server of the announced one goes, or has the name of the other.
#[tokio::test]
async fn a_refused_engine_is_announced_when_a_server_stands_for_it_no_longer() {
    let (_broker, bridge) = started(1).await;
    let refused_now = || {
        bridge.fill(&mut bridge.inner.state.lock());
        refused_names(&bridge)
    };
    bridge.replace("flags", &[given("a=tcp://127.0.0.1:1")]).unwrap();
    bridge
        .replace("found", &[given("gpu-0=http://127.0.0.1:9,block_size=16")])
        .unwrap();
    let handle = bridge.handle_of("gpu-0").unwrap();
    bridge
        .replace("file", &[given("gpu-0=tcp://127.0.0.1:2")])
        .unwrap_err();
    assert!(refused_now().is_empty(), "the server is awaited under that name");
    bridge.end_announcement(&handle).await;
    assert_eq!(refused_names(&bridge), ["gpu-0"]);
    bridge.replace("file", &[]).unwrap();
    handle.set_answers(true);
    let told = publisher("gpu-0=tcp://127.0.0.1:2");
    bridge.follow_publishers(&handle, vec![(told, None)]).unwrap_err();
    bridge
        .replace("file", &[given("x=tcp://127.0.0.1:3")])
        .unwrap_err();
    assert_eq!(refused_now(), ["gpu-0"]);
    handle.set_answers(false);
    assert_eq!(refused_now(), ["gpu-0", "x"]);
    bridge.stop(false).await;
}

#[tokio::test]
async fn a_refused_engine_is_announced_for_each_model() {
    let (_broker, bridge) = started(100).await;
    let engines = |first: usize, count: usize| -> Vec<GivenEngine> {
        let engines = first..first + count;
        engines
            .map(|number| {
                given(&format!(
                    "e{number}=tcp://127.0.0.1:{},model=m{number}",
                    number + 1
                ))
            })
            .collect()
    };
    bridge.replace("flags", &engines(0, 100)).unwrap();
    bridge.replace("found", &engines(100, 100)).unwrap_err();
    assert_eq!(refused(&bridge).len(), 100);
    bridge.replace("found", &engines(100, 101)).unwrap_err();
    assert_eq!(
        refused(&bridge).len(),
        100,
        "they are bounded as the followed ones are"
    );
    bridge.stop(false).await;
}

/// The publisher of the first server takes no place from that of the second one, which answers.
#[tokio::test]
async fn a_freed_place_goes_to_a_server_that_answers() {
    let bridge = bridge_of(2);
    let flags = [0, 1].map(|number| given(&format!("old-{number}=tcp://127.0.0.1:{}", 20 + number)));
    bridge.replace("flags", &flags).unwrap();
    let servers = [0, 1].map(|number| given(&format!("gpu-{number}=http://127.0.0.1:1{number}")));
    bridge.replace("found", &servers).unwrap();
    for number in 0..2 {
        let handle = bridge.handle_of(&format!("gpu-{number}")).unwrap();
        let told = publisher(&format!("gpu-{number}=tcp://127.0.0.1:3{number}"));
        bridge.follow_publishers(&handle, vec![(told, None)]).unwrap_err();
        handle.set_answers(number == 1);
    }
    let followed = || -> Vec<String> {
        let engines = bridge.engines().into_iter();
        engines.map(|state| state.engine.key.instance).collect()
    };
    bridge.replace("flags", &flags[..1]).unwrap();
    assert_eq!(followed(), ["gpu-1", "old-0"]);
    bridge.replace("flags", &[]).unwrap();
    assert_eq!(followed(), ["gpu-1"]);
    bridge.handle_of("gpu-0").unwrap().set_answers(true);
    bridge.replace("flags", &flags[..1]).unwrap();
    bridge.replace("flags", &[]).unwrap();
    assert_eq!(followed(), ["gpu-0", "gpu-1"]);
}

#[tokio::test]
async fn a_refused_engine_of_a_flag_is_followed_once_there_is_room() {
    let (_broker, bridge) = started(1).await;
    let flags = [0, 1, 2].map(|number| given(&format!("gpu-{number}=tcp://127.0.0.1:1{number}")));
    bridge.replace("flags", &flags).unwrap_err();
    for (followed, announced) in [
        ("gpu-0", Some("gpu-1")),
        ("gpu-1", Some("gpu-2")),
        ("gpu-2", None),
    ] {
        assert_eq!(names(&bridge), [followed]);
        let told = refused(&bridge).pop().map(|(name, _)| name);
        assert_eq!(told.as_deref(), announced);
        let meant = MeantEngines::One(publisher(&format!("{followed}=tcp://127.0.0.1:1")).key);
        bridge.unregister(&meant);
    }
    assert!(names(&bridge).is_empty(), "what an operator removes stays away");
    bridge.stop(false).await;
}

/// A test that what a client has unregistered stays away, and not what another source calls so.
#[tokio::test]
async fn the_name_of_what_an_operator_removes_is_free_for_another_engine() {
    let bridge = bridge_of(9);
    bridge.replace("file", &[given(OLD)]).unwrap();
    let other = given("gpu-0=tcp://127.0.0.1:7,replay=tcp://127.0.0.1:8");
    bridge.replace("found", &[other]).unwrap_err();
    bridge.unregister(&MeantEngines::One(presumed_key(&given(OLD))));
    let at = Some("tcp://127.0.0.1:8".to_owned());
    assert_eq!(replays(&bridge), [at]);
    bridge.replace("found", &[]).unwrap();
    assert!(names(&bridge).is_empty(), "the first one stays away");
}

#[tokio::test]
async fn an_engine_whose_name_is_free_is_announced_where_there_is_no_room() {
    let (_broker, bridge) = started(1).await;
    bridge.replace("file", &[given(OLD)]).unwrap();
    let same_name = given("gpu-0=tcp://127.0.0.1:7");
    bridge.replace("found", &[same_name]).unwrap_err();
    assert!(refused(&bridge).is_empty(), "it may be the same engine");
    let next = given("gpu-1=tcp://127.0.0.1:9");
    bridge.replace("file", &[next]).unwrap();
    assert_eq!(
        (names(&bridge), refused_names(&bridge)),
        (vec!["gpu-1".to_owned()], vec!["gpu-0".to_owned()])
    );
    bridge.stop(false).await;
}

/// Daemons would drop all batches of the followed engine otherwise.
#[tokio::test]
async fn an_announced_engine_takes_the_block_size_of_what_is_followed_later() {
    let (_broker, bridge) = started(1).await;
    bridge
        .replace("file", &[given("gpu-0=tcp://127.0.0.1:1,model=other")])
        .unwrap();
    let early = given("gpu-1=tcp://127.0.0.1:2,block_size=16");
    bridge.replace("found", &[early]).unwrap_err();
    assert_eq!(refused(&bridge), [("gpu-1".to_owned(), 16)]);
    let other_size = given("gpu-2=tcp://127.0.0.1:3,block_size=32");
    bridge.replace("file", &[other_size]).unwrap();
    assert_eq!(refused(&bridge), [("gpu-1".to_owned(), 32)]);
    bridge.stop(false).await;
}

#[tokio::test]
async fn an_awaited_engine_takes_the_block_size_of_what_is_followed_later() {
    let (_broker, bridge) = started(9).await;
    let awaited = given("gpu-0=http://127.0.0.1:9,block_size=16");
    bridge.replace("found", &[awaited]).unwrap();
    let told = || {
        let state = bridge.inner.state.lock();
        let announced = state.announced.iter();
        let told = announced.map(|(key, told)| (key.instance.clone(), told.block_size));
        told.collect::<Vec<_>>()
    };
    assert_eq!(told(), [("gpu-0".to_owned(), 16)]);
    let other_size = given("gpu-1=tcp://127.0.0.1:3,block_size=32");
    bridge.replace("file", &[other_size]).unwrap();
    assert_eq!(told(), [("gpu-0".to_owned(), 32)]);
    bridge.stop(false).await;
}

#[tokio::test]
async fn daemons_forget_an_awaited_engine_that_is_refused_in_the_end() {
    let (_broker, bridge) = started(1).await;
    let taken = given("gpu-1=tcp://127.0.0.1:2,block_size=16");
    bridge.replace("file", &[taken]).unwrap();
    let stands = given("gpu-2=tcp://127.0.0.1:3,block_size=16");
    bridge.replace("other", &[stands]).unwrap_err();
    let awaited = given("gpu-0=http://127.0.0.1:9,block_size=16");
    bridge.replace("found", &[awaited]).unwrap();
    let announced = |name: &str| {
        let state = bridge.inner.state.lock();
        let mut announced = state.announced.iter();
        let told = announced.find(|(key, _)| key.instance == name)?;
        Some(Arc::clone(&told.1.says_goodbye))
    };
    let goodbye = announced("gpu-0").unwrap();
    let handle = bridge.handle_of("gpu-0").unwrap();
    bridge
        .follow_publishers(&handle, vec![(publisher(OLD), None)])
        .unwrap_err();
    assert!(announced("gpu-0").is_none() && announced("gpu-2").is_some());
    assert!(goodbye.load(Ordering::Acquire), "nobody tells of it any more");
    bridge.stop(false).await;
}

#[tokio::test]
async fn daemons_forget_the_name_of_a_refused_plane_that_is_followed() {
    let (_broker, bridge) = started(1).await;
    bridge
        .replace("file", &[given("gpu-1=tcp://127.0.0.1:2")])
        .unwrap();
    let plane = given("gpu-0=tcp://127.0.0.1:1,format=dynamo");
    bridge.replace("found", std::slice::from_ref(&plane)).unwrap_err();
    let goodbye = {
        let state = bridge.inner.state.lock();
        let told = state.announced.values().next();
        Arc::clone(&told.unwrap().says_goodbye)
    };
    bridge.replace("file", &[]).unwrap();
    assert_eq!(names(&bridge), ["gpu-0"]);
    assert!(goodbye.load(Ordering::Acquire), "its workers have other names");
    bridge.stop(false).await;
}

#[tokio::test]
async fn what_is_unregistered_again_and_again_is_noted_once() {
    let bridge = bridge_of(9);
    bridge.replace("flags", &[given(OLD)]).unwrap();
    for _ in 0..3 {
        bridge.unregister(&MeantEngines::One(presumed_key(&given(OLD))));
        bridge.register_given(given(OLD)).unwrap();
    }
    bridge.unregister(&MeantEngines::One(presumed_key(&given(OLD))));
    assert_eq!(bridge.inner.state.lock().dismissed.len(), 1);
}

/// The names of a plane's workers, and of a pool, are not the engine's.
#[tokio::test]
async fn daemons_forget_a_holder_whose_key_another_kind_of_engine_takes() {
    for (format, is_goodbye) in [
        ("replay=tcp://127.0.0.1:2", false),
        ("format=mooncake", true),
        ("format=dynamo", true),
    ] {
        let bridge = bridge_of(9);
        bridge.replace("flags", &[given(OLD)]).unwrap();
        let goodbye = goodbye_of(&bridge, "gpu-0");
        let other = given(&format!("gpu-0=tcp://127.0.0.1:1,{format}"));
        bridge.replace("flags", std::slice::from_ref(&other)).unwrap();
        assert_eq!(goodbye.load(Ordering::Acquire), is_goodbye, "{format}");
        let goodbye = goodbye_of(&bridge, "gpu-0");
        bridge
            .replace("flags", &[given("gpu-0=tcp://127.0.0.1:1,block_size=32")])
            .unwrap();
        assert!(goodbye.load(Ordering::Acquire), "the block size is another one");
    }
}
