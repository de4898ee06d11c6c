use std::path::Path;

use kvatlas_core::wire::Subjects;
use kvatlas_process::registry::{EngineRegistry, MeantEngines};

use super::super::BridgeOptions;
use super::super::kept::tests::{given, names};
use super::super::shared::tests::{entry_of, sharing};
use super::*;
use crate::state::{HeardRegistration, SharedRegistry, StateDirectory};

const TTL: Duration = Duration::from_secs(120);
const THIRD: Duration = Duration::from_secs(40);
const HALF: Duration = Duration::from_secs(60);

/// Returns an engine as a client registers it with a time to live.
pub(in super::super) fn with_ttl(text: &str) -> GivenEngine {
    let mut engine = given(text);
    match &mut engine {
        GivenEngine::Publisher(engine) => engine.ttl = Some(TTL),
        GivenEngine::Server(server) => server.ttl = Some(TTL),
    }
    engine
}

fn bridge(path: &Path) -> Bridge {
    let options = BridgeOptions {
        state: Some(StateDirectory::open(path, Duration::ZERO).unwrap()),
        ..BridgeOptions::default()
    };
    Bridge::new(Subjects::new("kvatlas").unwrap(), options)
}

#[tokio::test]
async fn a_registration_ends_unless_it_is_renewed() {
    let folder = tempfile::tempdir().unwrap();
    let bridge = bridge(folder.path());
    let (publisher, server) = ("gpu-0=tcp://127.0.0.1:1", "gpu-1=http://127.0.0.1:2");
    bridge.register_given(with_ttl(publisher)).unwrap();
    bridge.register_given(with_ttl(server)).unwrap();
    bridge.register_given(given("gpu-2=tcp://127.0.0.1:3")).unwrap();
    bridge.pass(HALF);
    bridge.register_given(with_ttl(server)).unwrap();
    bridge.pass(HALF - TICK);
    assert_eq!(names(&bridge), ["gpu-0", "gpu-2", "gpu-1"]);
    bridge.pass(TICK);
    assert_eq!(
        names(&bridge),
        ["gpu-2", "gpu-1"],
        "one was renewed, one has no end"
    );
    bridge.pass(HALF);
    assert_eq!(names(&bridge), ["gpu-2"]);
    let listed = bridge.inner.state.lock().known_registered();
    assert_eq!(listed, [given("gpu-2=tcp://127.0.0.1:3")]);
}

/// Engines that are refused count, too: nobody may be left to unregister them.
#[tokio::test]
async fn the_time_counts_anew_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let before = bridge(folder.path());
    before
        .register_given(with_ttl("gpu-0=tcp://127.0.0.1:1"))
        .unwrap();
    before
        .register_given(with_ttl("gpu-1=tcp://127.0.0.1:2"))
        .unwrap();
    before.pass(TTL - TICK);
    drop(before);
    let after = bridge(folder.path());
    let elsewhere = [given("gpu-1=tcp://127.0.0.1:9")];
    after.replace("flags", &elsewhere).unwrap();
    after.take_up_registered();
    after.pass(TTL - TICK);
    after.take_up_registered();
    assert_eq!(after.inner.state.lock().known_registered().len(), 2);
    after.pass(TICK);
    assert!(after.inner.state.lock().known_registered().is_empty());
    assert_eq!(names(&after), ["gpu-1"], "the flag's engine stays");
    drop(after);
    let last = bridge(folder.path());
    last.take_up_registered();
    assert!(names(&last).is_empty());
}

#[tokio::test]
async fn an_engine_that_a_source_gives_outlives_its_registration() {
    let folder = tempfile::tempdir().unwrap();
    let bridge = bridge(folder.path());
    bridge
        .register_given(with_ttl("gpu-0=tcp://127.0.0.1:1"))
        .unwrap();
    bridge
        .replace("flags", &[given("gpu-0=tcp://127.0.0.1:1")])
        .unwrap();
    bridge.pass(TTL);
    assert_eq!(names(&bridge), ["gpu-0"]);
    bridge.replace("flags", &[]).unwrap();
    assert!(names(&bridge).is_empty());
}

#[tokio::test]
async fn a_refused_engine_of_a_flag_takes_the_place_of_a_registration_that_has_ended() {
    let bridge = sharing();
    bridge.set_read(true);
    bridge
        .register_given(with_ttl("gpu-0=tcp://127.0.0.1:1"))
        .unwrap();
    let flag = given("gpu-0=tcp://127.0.0.1:1,replay=tcp://127.0.0.1:2");
    bridge.replace("flags", std::slice::from_ref(&flag)).unwrap_err();
    bridge.pass(TTL + THIRD);
    let followed = bridge.engines().remove(0).engine;
    assert_eq!(GivenEngine::Publisher(followed), flag);
}

/// Engines that a client has found once may be gone, and their addresses another engine's.
#[tokio::test]
async fn a_registration_gives_way_to_what_is_registered_in_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let bridge = bridge(folder.path());
    for next in [
        "a=tcp://127.0.0.1:1,block_size=16",
        "a=tcp://127.0.0.1:1,block_size=32",
        "a=tcp://127.0.0.1:1,block_size=32,model=n",
        "b=tcp://127.0.0.1:1,block_size=64,model=n",
        "b=tcp://127.0.0.1:2,block_size=64,model=n",
    ] {
        bridge.register_given(with_ttl(next)).unwrap();
        assert_eq!(bridge.inner.state.lock().known_registered(), [with_ttl(next)]);
        assert_eq!(bridge.engines().len(), 1, "{next} is alone");
    }
    bridge
        .register_given(given("c=tcp://127.0.0.1:2,model=o"))
        .unwrap();
    let refused = bridge.register_given(with_ttl("d=tcp://127.0.0.1:2,model=p"));
    assert!(
        matches!(refused, Err(RegisterRefusal::SameAddress { .. })),
        "no end, no way"
    );
    assert_eq!(names(&bridge), ["c"]);
}

/// The engine has the name and the address of one registration, and is refused because of another one.
#[tokio::test]
async fn a_refused_registration_ends_no_other_one() {
    let folder = tempfile::tempdir().unwrap();
    let bridge = bridge(folder.path());
    let old = with_ttl("gpu-0=tcp://127.0.0.1:1,block_size=16");
    bridge.register_given(old.clone()).unwrap();
    bridge
        .register_given(given("gpu-1=tcp://127.0.0.1:2,block_size=16"))
        .unwrap();
    let stop = {
        let state = bridge.inner.state.lock();
        state.engines.values().next().unwrap().stop.clone()
    };
    let refused = bridge.register_given(with_ttl("gpu-9=tcp://127.0.0.1:1,block_size=32"));
    assert!(matches!(refused, Err(RegisterRefusal::OtherBlockSize { .. })));
    assert_eq!(names(&bridge), ["gpu-0", "gpu-1"]);
    let state = bridge.inner.state.lock();
    assert!(state.known_registered().contains(&old));
    assert!(!stop.is_cancelled(), "it is followed without a break");
    drop(state);
    bridge.pass(TTL);
    assert_eq!(names(&bridge), ["gpu-1"]);
}

/// The engine's name is followed elsewhere, and stays. So what is at the address that it should have stays, too.
#[tokio::test]
async fn a_name_that_is_taken_ends_nothing_at_the_address() {
    for is_given in [true, false] {
        let bridge = sharing();
        let (old, name) = (with_ttl("gpu-1=tcp://127.0.0.1:2"), "gpu-2=tcp://127.0.0.1:1");
        match is_given {
            true => bridge.replace("flags", &[given(name)]).unwrap(),
            false => bridge.register_given(given(name)).unwrap(),
        }
        bridge.register_given(old.clone()).unwrap();
        let refused = bridge.register_given(with_ttl("gpu-2=tcp://127.0.0.1:2"));
        assert!(matches!(refused, Err(RegisterRefusal::Conflict { .. })));
        assert_eq!(names(&bridge), ["gpu-1", "gpu-2"]);
        assert!(bridge.inner.state.lock().known_registered().contains(&old));
        assert_eq!(is_told(&bridge, &old), Some(true));
    }
}

#[tokio::test]
async fn a_renewal_leaves_the_address_that_a_source_gives() {
    let bridge = sharing();
    bridge.set_read(true);
    let address = || {
        let engine = bridge.engines().remove(0).engine;
        engine.profile.address.map(|address| address.to_string())
    };
    let engine = with_ttl("gpu-0=tcp://127.0.0.1:1");
    bridge.register_given(engine.clone()).unwrap();
    let flag = given("gpu-0=tcp://127.0.0.1:1,address=10.0.0.9:80");
    bridge.replace("flags", &[flag]).unwrap();
    bridge.register_given(engine.clone()).unwrap();
    assert_eq!(address().as_deref(), Some("10.0.0.9:80"));
    bridge.apply(entry_of(engine, true));
    assert_eq!(
        address().as_deref(),
        Some("10.0.0.9:80"),
        "another bridge tells of it"
    );
    let other = with_ttl("gpu-0=tcp://127.0.0.1:1,address=10.0.0.8:80");
    bridge.register_given(other).unwrap();
    assert_eq!(
        address().as_deref(),
        Some("10.0.0.8:80"),
        "it says something else"
    );
    let flag = given("gpu-0=tcp://127.0.0.1:1,address=10.0.0.9:80");
    bridge.replace("flags", &[flag]).unwrap();
    bridge.replace("flags", &[]).unwrap();
    let other = with_ttl("gpu-0=tcp://127.0.0.1:1,address=10.0.0.8:80");
    bridge.register_given(other).unwrap();
    assert_eq!(
        address().as_deref(),
        Some("10.0.0.8:80"),
        "no source gives it any more"
    );
}

/// Returns whether a registration of `engine` waits to be told to other bridges, which is then taken for told.
fn is_told(bridge: &Bridge, engine: &GivenEngine) -> Option<bool> {
    bridge.shared_registrations().unwrap().take_noted(engine)
}

#[tokio::test]
async fn other_bridges_are_told_of_a_renewal_once_per_third() {
    let bridge = sharing();
    bridge.set_read(true);
    let engine = with_ttl("gpu-0=tcp://127.0.0.1:1");
    bridge.register_given(engine.clone()).unwrap();
    assert_eq!(is_told(&bridge, &engine), Some(true));
    for expected in [None, None, Some(true), None, None, Some(true)] {
        bridge.pass(THIRD / 3 + TICK);
        bridge.register_given(engine.clone()).unwrap();
        assert_eq!(is_told(&bridge, &engine), expected);
    }
    let elsewhere = with_ttl("gpu-0=tcp://127.0.0.1:1,address=10.0.0.9:80");
    bridge.register_given(elsewhere.clone()).unwrap();
    assert_eq!(is_told(&bridge, &elsewhere), Some(true), "news is told at once");
    bridge.pass(TTL);
    assert_eq!(is_told(&bridge, &engine), None);
    bridge.pass(THIRD);
    assert_eq!(is_told(&bridge, &engine), Some(false), "its end is told");
}

#[tokio::test]
async fn a_renewal_with_another_bridge_counts() {
    let bridge = sharing();
    let heard = || bridge.apply(entry_of(with_ttl("gpu-0=tcp://127.0.0.1:1"), true));
    heard();
    bridge.pass(TTL + THIRD);
    assert_eq!(names(&bridge), ["gpu-0"], "what is written is not read yet");
    bridge.set_read(true);
    for _ in 0..3 {
        bridge.pass(TTL);
        heard();
    }
    assert_eq!(names(&bridge), ["gpu-0"]);
    bridge.apply(entry_of(with_ttl("gpu-0=tcp://127.0.0.1:1,model=n"), true));
    bridge.pass(TTL);
    let listed = bridge.inner.state.lock().known_registered();
    assert_eq!(
        listed,
        [with_ttl("gpu-0=tcp://127.0.0.1:1,model=n")],
        "it has taken the place"
    );
    bridge.pass(THIRD);
    assert!(names(&bridge).is_empty());
}

#[tokio::test]
async fn a_renewal_changes_nothing_for_the_engine() {
    let folder = tempfile::tempdir().unwrap();
    let bridge = bridge(folder.path());
    let engine = with_ttl("gpu-0=tcp://127.0.0.1:1");
    bridge.register_given(engine.clone()).unwrap();
    let GivenEngine::Publisher(publisher) = &engine else {
        panic!("it is a publisher");
    };
    let profiles = bridge.inner.profiles_of(publisher);
    bridge.register_given(engine.clone()).unwrap();
    assert!(!profiles.has_changed().unwrap());
    let meant = MeantEngines::One(publisher.key.clone());
    assert_eq!(bridge.unregister(&meant).len(), 1);
    assert!(names(&bridge).is_empty());
}

/// The exchange with JetStream begins anew, and the bridge hears all registrations again. Their clients are dead.
#[tokio::test]
async fn a_registration_that_is_heard_again_is_not_renewed() {
    let bridge = sharing();
    bridge.set_read(true);
    let (followed, refused) = (
        with_ttl("gpu-0=tcp://127.0.0.1:1,block_size=16"),
        with_ttl("gpu-1=tcp://127.0.0.1:2,block_size=64"),
    );
    let heard = |is_known: bool| {
        for engine in [&followed, &refused] {
            bridge.apply(HeardRegistration {
                is_known,
                ..entry_of(engine.clone(), true)
            });
        }
    };
    heard(true);
    bridge.pass(TTL);
    heard(true);
    assert_eq!(
        bridge.inner.state.lock().known_registered(),
        [followed.clone(), refused.clone()]
    );
    bridge.pass(THIRD);
    assert!(bridge.inner.state.lock().known_registered().is_empty());
    heard(false);
    bridge.pass(TTL);
    heard(false);
    bridge.pass(THIRD);
    assert_eq!(
        bridge.inner.state.lock().known_registered().len(),
        2,
        "these are renewals"
    );
}
