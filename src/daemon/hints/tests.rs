use kvatlas_core::hash::{BlockSize, SequenceHash};
use kvatlas_core::wire::{QueryKey, WorkerName};

use super::*;
use kvatlas_telemetry::rendered;

const TTL: Duration = Duration::from_secs(2);

fn name(text: &str) -> NamespaceName {
    NamespaceName::new(text).unwrap()
}

fn holder(worker: &str) -> HolderId {
    HolderId {
        worker: WorkerName::new(worker).unwrap(),
        rank: 0,
    }
}

fn key(hashes: std::ops::Range<u64>) -> QueryKey {
    QueryKey::SequenceHashes(hashes.map(SequenceHash).collect())
}

fn add(hints: &Hints, namespace: &str, worker: &str, key: &QueryKey, now: Instant) -> bool {
    let mut chain = QueryChain::new(key, BlockSize::DEFAULT).unwrap();
    hints.add(&name(namespace), holder(worker), &mut chain, now)
}

fn find(hints: &Hints, namespace: &str, key: &QueryKey, now: Instant) -> Vec<(String, usize)> {
    let mut chain = QueryChain::new(key, BlockSize::DEFAULT).unwrap();
    let found = hints.find(&name(namespace), &mut chain, now);
    found
        .iter()
        .map(|(hint, blocks)| (hint.holder.worker.to_string(), *blocks))
        .collect()
}

#[test]
fn a_hint_is_found_in_its_namespace_until_its_time_is_over() {
    let (hints, now) = (Hints::new(None, TTL, 1 << 20), Instant::now());
    assert!(add(&hints, "a", "w", &key(1..4), now));
    assert!(
        !add(&hints, "a", "w", &key(1..1), now),
        "a prompt without a block"
    );
    assert_eq!(find(&hints, "a", &key(1..9), now), [("w".to_owned(), 3)]);
    assert!(find(&hints, "b", &key(1..9), now).is_empty());
    assert!(
        find(&hints, "a", &key(2..9), now).is_empty(),
        "another first block"
    );
    assert!(add(&hints, "a", "w", &key(1..3), now + TTL / 2));
    assert_eq!(find(&hints, "a", &key(1..9), now + TTL), [("w".to_owned(), 2)]);
    assert!(find(&hints, "a", &key(1..9), now + TTL * 2).is_empty());
    assert!(hints.tables.lock().is_empty(), "nothing is left behind");
}

#[test]
fn where_there_is_no_room_who_has_the_most_loses_the_oldest() {
    let now = Instant::now();
    let text = rendered(|| {
        let hints = Hints::new(None, TTL, cost(10) * 3);
        assert!(add(&hints, "small", "w", &key(1..11), now));
        for first in [100, 200, 300, 400] {
            assert!(add(&hints, "large", "w", &key(first..first + 10), now));
        }
        assert_eq!(find(&hints, "small", &key(1..11), now).len(), 1);
        assert!(find(&hints, "large", &key(200..210), now).is_empty());
        assert_eq!(find(&hints, "large", &key(400..410), now).len(), 1);
        assert!(
            !add(&hints, "large", "w", &key(1..1000), now),
            "longer than the room"
        );
    });
    for line in [
        "kvatlas_hints_total 5",
        "kvatlas_hints_dropped_total{reason=\"no_room\"} 3",
    ] {
        assert!(text.lines().any(|found| found == line), "missing: {line}\n{text}");
    }
}

#[test]
fn hints_about_the_workers_of_other_shards_are_not_kept() {
    let worker = WorkerName::new("w").unwrap();
    let kept_by = |shard: &str| Hints::new(Some(shard.parse().unwrap()), TTL, 1 << 20).are_about(&worker);
    assert_ne!(kept_by("0/2"), kept_by("1/2"));
    assert!(Hints::new(None, TTL, 1 << 20).are_about(&worker));
}
