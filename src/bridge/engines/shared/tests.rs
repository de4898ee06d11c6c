use std::time::{Duration, SystemTime};

use kvatlas_core::wire::Subjects;
use kvatlas_process::registry::EngineRegistry;

use super::super::BridgeOptions;
use super::super::kept::tests::{given, names};
use super::super::lifetimes::tests::with_ttl;
use super::super::presumed::presumed_key;
use super::*;
use crate::StatePlace;
use crate::state::StateDirectory;

/// Makes a bridge whose registrations are in JetStream, and that is not connected yet.
pub(in super::super) fn sharing() -> Bridge {
    let (subjects, place) = (
        Subjects::new("kvatlas").unwrap(),
        "nats:kept".parse::<StatePlace>().unwrap(),
    );
    let state = StateDirectory::open_place(&place, Some("pair"), &subjects, Duration::ZERO).unwrap();
    let options = BridgeOptions {
        state: Some(state),
        ..BridgeOptions::default()
    };
    Bridge::new(subjects, options)
}

fn entry(text: &str, is_registered: bool) -> HeardRegistration {
    entry_of(given(text), is_registered)
}

pub(in super::super) fn entry_of(engine: GivenEngine, is_registered: bool) -> HeardRegistration {
    HeardRegistration {
        registration: Registration {
            engine,
            is_registered,
        },
        asked: SystemTime::now(),
        revision: 1,
        is_known: false,
    }
}

fn sizes(bridge: &Bridge) -> Vec<(String, u32)> {
    let engines = bridge.engines().into_iter();
    let engines = engines.map(|state| (state.engine.key.instance, state.engine.block_size));
    engines.collect()
}

/// Another bridge has registered both engines of a model anew, with another block size. JetStream keeps the last entry of
/// each engine only, so the first of them is refused beside the old entry of the second.
#[tokio::test]
async fn an_entry_that_is_refused_beside_an_old_one_is_tried_again() {
    let bridge = sharing();
    let at = |engine: u32, size: u32| format!("gpu-{engine}=tcp://127.0.0.1:{engine},block_size={size}");
    for (engine, size) in [(1, 16), (2, 16), (1, 32)] {
        bridge.apply(entry(&at(engine, size), true));
    }
    assert_eq!(sizes(&bridge), [("gpu-2".to_owned(), 16)]);
    bridge.take_up_registered();
    assert_eq!(sizes(&bridge), [("gpu-2".to_owned(), 16)], "it is refused again");
    bridge.apply(entry(&at(2, 32), true));
    bridge.take_up_registered();
    assert_eq!(
        sizes(&bridge),
        [("gpu-1".to_owned(), 32), ("gpu-2".to_owned(), 32)]
    );
}

#[tokio::test]
async fn the_last_entry_of_a_refused_engine_counts() {
    let bridge = sharing();
    bridge.apply(entry("gpu-1=tcp://127.0.0.1:1,block_size=16", true));
    for size in [32, 64, 16] {
        bridge.apply(entry(&format!("gpu-2=tcp://127.0.0.1:2,block_size={size}"), true));
    }
    assert_eq!(names(&bridge), ["gpu-1", "gpu-2"]);
    bridge.apply(entry("gpu-3=tcp://127.0.0.1:3,block_size=32", true));
    bridge.apply(entry("gpu-3=tcp://127.0.0.1:3,block_size=32", false));
    bridge.apply(entry("gpu-1=tcp://127.0.0.1:1,block_size=16", false));
    bridge.apply(entry("gpu-2=tcp://127.0.0.1:2,block_size=16", false));
    bridge.take_up_registered();
    assert!(names(&bridge).is_empty(), "nothing older comes back");
}

/// The clock of JetStream is behind that of the bridge, so the registration seems older than the request.
#[tokio::test]
async fn an_engine_that_is_registered_after_a_request_to_unregister_it_stays() {
    let bridge = sharing();
    let engine = given("gpu-1=tcp://127.0.0.1:1");
    bridge.unregister(&kvatlas_process::registry::MeantEngines::One(presumed_key(
        &engine,
    )));
    bridge.register_given(engine.clone()).unwrap();
    bridge.apply(HeardRegistration {
        asked: SystemTime::UNIX_EPOCH,
        ..entry_of(engine, true)
    });
    assert_eq!(names(&bridge), ["gpu-1"]);
}

/// The other bridge may not have known the registration, so that its entry would stay.
#[tokio::test]
async fn a_registration_that_gives_way_to_another_bridges_ends_for_all() {
    let bridge = sharing();
    let old = with_ttl("gpu-1=tcp://127.0.0.1:1");
    bridge.apply(entry_of(old.clone(), true));
    bridge.apply(entry("gpu-2=tcp://127.0.0.1:1,model=n", true));
    assert_eq!(names(&bridge), ["gpu-2"]);
    let shared = bridge.shared_registrations().unwrap();
    assert_eq!(shared.take_noted(&old), Some(false));
}

/// JetStream was away while a client registered the engine that is there now.
#[tokio::test]
async fn a_registration_that_waits_gives_way_to_no_older_one() {
    let (older, newer) = (
        with_ttl("gpu-1=tcp://127.0.0.1:1"),
        with_ttl("gpu-2=tcp://127.0.0.1:1,model=n"),
    );
    for (ago, followed) in [(60, "gpu-2"), (0, "gpu-1")] {
        let bridge = sharing();
        bridge.register_given(newer.clone()).unwrap();
        bridge.apply(HeardRegistration {
            asked: SystemTime::now() - Duration::from_secs(ago),
            ..entry_of(older.clone(), true)
        });
        assert_eq!(names(&bridge), [followed]);
    }
    // What has no end gives way to nothing, so that the newer one would have been refused.
    let bridge = sharing();
    bridge.register_given(newer).unwrap();
    bridge.apply(HeardRegistration {
        asked: SystemTime::UNIX_EPOCH,
        ..entry("gpu-1=tcp://127.0.0.1:1", true)
    });
    assert_eq!(names(&bridge), ["gpu-1"]);
}

/// The entry has the key of the registration that it replaces: telling of that one's end would end the new one.
#[tokio::test]
async fn a_registration_that_another_bridge_has_changed_is_told_by_nobody() {
    let bridge = sharing();
    for endpoint in ["tcp://127.0.0.1:1", "tcp://127.0.0.1:2"] {
        let engine = with_ttl(&format!("gpu-1={endpoint}"));
        bridge.apply(entry_of(engine.clone(), true));
        assert_eq!(
            bridge.inner.state.lock().known_registered(),
            std::slice::from_ref(&engine)
        );
        assert_eq!(bridge.shared_registrations().unwrap().take_noted(&engine), None);
    }
}

/// A request to unregister an engine comes before the bridge has read JetStream, or names an engine that the bridge refuses.
#[tokio::test]
async fn a_request_for_an_engine_that_is_not_followed_counts() {
    let bridge = sharing();
    let meant = |name: &str| kvatlas_process::registry::MeantEngines::Named {
        instance: name.to_owned(),
        model: "m".to_owned(),
        tenant: None,
        rank: None,
    };
    let earlier = entry("gpu-1=tcp://127.0.0.1:1", true);
    assert!(bridge.unregister(&meant("gpu-1")).is_empty());
    bridge.apply(earlier);
    assert!(names(&bridge).is_empty());
    bridge.apply(entry("gpu-1=tcp://127.0.0.1:1", true));
    assert_eq!(names(&bridge), ["gpu-1"], "it was registered again since then");
    bridge.set_read(true);
    bridge.apply(entry("gpu-2=tcp://127.0.0.1:2,block_size=64", true));
    assert_eq!(names(&bridge), ["gpu-1"]);
    assert_eq!(bridge.unregister(&meant("gpu-2")).len(), 1);
    bridge.unregister(&meant("gpu-1"));
    bridge.take_up_registered();
    assert!(names(&bridge).is_empty());
}
