use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker, find_nats_server};

use super::*;
use crate::{EngineDefaults, parse_engine};

const MINUTE: Duration = Duration::from_secs(60);

fn registration(text: &str, is_registered: bool) -> Registration {
    let defaults = EngineDefaults {
        model: Some("m".to_owned()),
        ..EngineDefaults::default()
    };
    Registration {
        engine: parse_engine(text, &defaults).unwrap().remove(0),
        is_registered,
    }
}

fn shared() -> SharedRegistrations {
    let [name, set, owner] = ["kept", "pair", "pair"].map(str::to_owned);
    SharedRegistrations::new(Arc::new(Bucket::new(name, set, owner)))
}

/// Returns the value of an entry as bridges of earlier releases write it, without the time of asking.
fn untimed(registration: &Registration) -> Bytes {
    rmp_serde::to_vec(registration).unwrap().into()
}

/// Returns the entry of a registration, as JetStream has taken it at the time `created`.
fn entry(
    shared: &SharedRegistrations,
    registration: &Registration,
    revision: u64,
    created: SystemTime,
) -> Entry {
    Entry {
        bucket: "kept".to_owned(),
        key: shared.key(&registration.engine),
        value: untimed(registration),
        revision,
        delta: 0,
        created: created.into(),
        operation: Operation::Put,
        seen_current: false,
    }
}

/// Returns the entries that a bridge knows that has heard those up to the revision `heard`.
fn known(until: u64, heard: u64) -> KnownEntries {
    KnownEntries {
        stream: SystemTime::UNIX_EPOCH,
        until,
        heard,
        written: BTreeMap::new(),
    }
}

/// A bridge that was cut off from JetStream hears what others have written meanwhile.
#[tokio::test]
async fn the_newest_of_what_clients_ask_for_counts() {
    let metrics = BridgeMetrics::new();
    let now = SystemTime::now();
    for is_registered in [true, false] {
        let shared = shared();
        let own = registration("gpu-0=tcp://127.0.0.1:1", is_registered);
        let other = registration("gpu-0=tcp://127.0.0.1:2", !is_registered);
        shared.note(own.clone(), &metrics);
        let mut known = known(9, 0);
        let mut heard = |revision: u64, created: SystemTime| {
            shared.is_known(&entry(&shared, &other, revision, created), &mut known)
        };
        assert_eq!(heard(7, now - MINUTE), None, "it is older than the request");
        assert_eq!(heard(8, now + MINUTE), Some(false), "it is news, and newer");
        assert_eq!(heard(9, now - MINUTE), Some(true));
        assert_eq!(shared.take_noted(&own.engine), None);
    }
}

/// JetStream was away. The other bridge has written later what it was asked before this one was.
#[tokio::test]
async fn the_time_of_asking_counts_and_not_that_of_writing() {
    let (metrics, now) = (BridgeMetrics::new(), SystemTime::now());
    for (asked, expected) in [(now - MINUTE, None), (now + MINUTE, Some(false))] {
        let shared = shared();
        let own = registration("gpu-0=tcp://127.0.0.1:1", true);
        let other = registration("gpu-0=tcp://127.0.0.1:1", false);
        shared.note(own, &metrics);
        let mut heard = entry(&shared, &other, 7, now + 2 * MINUTE);
        heard.value = encoded(&other, asked).unwrap();
        assert_eq!(decoded(&heard).unwrap(), (other.clone(), asked));
        assert_eq!(
            rmp_serde::from_slice::<Registration>(&heard.value).unwrap(),
            other
        );
        assert_eq!(shared.is_known(&heard, &mut known(0, 0)), expected);
    }
}

/// The clock of JetStream is ahead of the bridge's.
#[tokio::test]
async fn a_request_is_newer_than_what_the_bridge_has_written_before() {
    let (metrics, shared) = (BridgeMetrics::new(), shared());
    let before = registration("gpu-0=tcp://127.0.0.1:1", true);
    let now = registration("gpu-0=tcp://127.0.0.1:1", false);
    shared.note(now.clone(), &metrics);
    let shown = entry(&shared, &before, 7, SystemTime::now() + MINUTE);
    let mut known = known(0, 0);
    known.written.insert(shown.key.clone(), 7);
    assert_eq!(shared.is_known(&shown, &mut known), None);
    assert_eq!(shared.take_noted(&now.engine), Some(false));
}

/// The engine of a registration that has given way is registered at another address by now.
#[tokio::test]
async fn an_entry_that_has_not_given_way_counts() {
    let (metrics, shared) = (BridgeMetrics::new(), shared());
    let old = registration("gpu-0=tcp://127.0.0.1:1", true);
    let anew = registration("gpu-0=tcp://127.0.0.1:2", true);
    let (mut known, created) = (known(0, 0), SystemTime::now() - MINUTE);
    shared.note_replaced(old.engine.clone(), 8, &metrics);
    let given_way = entry(&shared, &old, 7, created);
    assert_eq!(shared.is_known(&given_way, &mut known), None);
    let later = entry(&shared, &old, 9, created);
    assert_eq!(
        shared.is_known(&later, &mut known),
        Some(false),
        "it is later than the other engine's"
    );
    shared.note_replaced(old.engine.clone(), 8, &metrics);
    let elsewhere = entry(&shared, &anew, 7, created);
    assert_eq!(shared.is_known(&elsewhere, &mut known), Some(false));
    assert_eq!(shared.take_noted(&old.engine), None, "its end is not written");
}

/// The clock of the other bridge is ahead of this one's. The connection to JetStream is a new one, so that the entry comes again.
#[tokio::test]
async fn a_request_is_newer_than_what_the_bridge_has_heard_before() {
    let (metrics, shared) = (BridgeMetrics::new(), shared());
    let before = registration("gpu-0=tcp://127.0.0.1:1", true);
    let now = registration("gpu-0=tcp://127.0.0.1:1", false);
    let shown = entry(&shared, &before, 7, SystemTime::now() + MINUTE);
    for (heard, expected) in [(7, (None, Some(false))), (6, (Some(false), None))] {
        shared.note(now.clone(), &metrics);
        let is_known = shared.is_known(&shown, &mut known(9, heard));
        assert_eq!((is_known, shared.take_noted(&now.engine)), expected);
    }
}

/// Opens the buckets of `shared` on a NATS server of their own.
async fn opened(shared: &SharedRegistrations) -> (EmbeddedBroker, Store) {
    let options = BrokerOptions {
        with_jetstream: true,
        ..BrokerOptions::default()
    };
    let server = find_nats_server(None).unwrap();
    let broker = EmbeddedBroker::start_with(&server, options).await.unwrap();
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let stores = shared.bucket().open(&async_nats::jetstream::new(nats)).await;
    (broker, stores.unwrap().keys)
}

/// Another bridge has written, and this one writes before the watch shows it that.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_not_written_over_a_newer_one_that_is_not_heard_yet() {
    let (metrics, shared) = (BridgeMetrics::new(), shared());
    let (_broker, keys) = opened(&shared).await;
    let own = registration("gpu-0=tcp://127.0.0.1:1", false);
    let other = registration("gpu-0=tcp://127.0.0.1:1", true);
    let key = shared.key(&own.engine);
    let later = encoded(&other, SystemTime::now() + MINUTE).unwrap();
    let revision = keys.put(&key, later).await.unwrap();
    for (heard, expected) in [(revision - 1, &other), (revision, &own)] {
        shared.note(own.clone(), &metrics);
        let written = shared.write_noted(&keys, &metrics, &mut known(0, heard)).await;
        written.unwrap();
        assert_eq!(shared.take_noted(&own.engine), None);
        let entry = keys.entry(&key).await.unwrap().unwrap();
        assert_eq!(decoded(&entry).unwrap().0, *expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_registration_that_has_given_way_ends_no_other_one() {
    let (metrics, shared) = (BridgeMetrics::new(), shared());
    let (_broker, keys) = opened(&shared).await;
    let old = registration("gpu-0=tcp://127.0.0.1:1", true);
    let anew = registration("gpu-0=tcp://127.0.0.1:2", true);
    let key = shared.key(&old.engine);
    let (keys, mut known) = (&keys, known(0, 0));
    let mut end = async |by: u64| {
        shared.note_replaced(old.engine.clone(), by, &metrics);
        shared.write_noted(keys, &metrics, &mut known).await.unwrap();
        assert_eq!(shared.take_noted(&old.engine), None);
        let entry = keys.entry(&key).await.unwrap();
        entry.map(|entry| decoded(&entry).unwrap().0)
    };
    assert_eq!(end(u64::MAX).await, None, "there is none");
    let revision = keys.put(&key, untimed(&anew)).await.unwrap();
    assert_eq!(end(revision + 1).await, Some(anew.clone()));
    let revision = keys.put(&key, untimed(&old)).await.unwrap();
    assert_eq!(
        end(revision).await,
        Some(old.clone()),
        "it is later than what it should give way to"
    );
    let ended = Registration {
        is_registered: false,
        ..old.clone()
    };
    assert_eq!(end(revision + 1).await, Some(ended));
    assert_eq!(known.written.get(&key), Some(&(revision + 1)));
}
