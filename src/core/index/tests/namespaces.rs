//! Namespaces: which ones may be made, and when they are removed.

use std::sync::{Arc, Barrier};

use crate::hash::{BlockSize, SequenceHash};
use crate::stream::{RefusedAt, RefusedName};
use crate::wire::{Event, HolderId, NamespaceName, RemovedBlocks, StoredBlocks, Tier, WorkerName};

use super::api::{Capacity, IndexLimits, Namespace, NamespaceRefused, NamespaceSettings, Namespaces};

fn name(name: &str) -> NamespaceName {
    NamespaceName::new(name).unwrap()
}

fn namespaces() -> Namespaces {
    let settings = NamespaceSettings::default();
    let configured = [(name("configured"), settings)];
    Namespaces::new(
        Capacity::UNBOUNDED,
        settings,
        configured,
        IndexLimits::default(),
        3,
    )
}

#[test]
fn an_empty_namespace_gives_its_place_back_after_a_while() {
    let namespaces = namespaces();
    let (busy, empty) = (name("busy"), name("empty"));
    let worker = WorkerName::new("w").unwrap();
    let id = HolderId { worker, rank: 0 };
    let writer = namespaces
        .get_or_create(&busy, None)
        .unwrap()
        .indexer
        .register(&id)
        .unwrap();
    drop(namespaces.get_or_create(&empty, None).unwrap());
    let refused = namespaces.get_or_create(&name("other"), None).unwrap_err();
    assert_eq!(refused, NamespaceRefused::LimitReached { namespaces: 3 });
    assert!(namespaces.forget_empty(0, 10).is_empty(), "not long enough");
    // A reference is held, as by a thread that is about to use the namespace.
    let used = namespaces.get(&empty).unwrap();
    assert!(namespaces.forget_empty(11, 10).is_empty());
    assert!(namespaces.get(&empty).is_some());
    drop(used);
    let gone = namespaces.forget_empty(11, 10);
    assert_eq!(gone.iter().map(|gone| &gone.name).collect::<Vec<_>>(), [&empty]);
    assert!(namespaces.get(&empty).is_none());
    namespaces.get_or_create(&name("other"), None).unwrap();
    assert!(namespaces.get(&busy).is_some() && namespaces.get(&name("configured")).is_some());
    // The time begins when the last holder leaves.
    writer.retire();
    assert!(namespaces.forget_empty(1_000, 10).is_empty());
    let gone = namespaces.forget_empty(1_010, 10);
    assert!(gone.iter().any(|gone| gone.name == busy));
}

#[test]
fn the_namespace_of_a_probe_goes_as_soon_as_it_is_empty() {
    let namespaces = namespaces();
    let probe = name(crate::wire::PROBE_NAME);
    drop(namespaces.get_or_create(&probe, None).unwrap());
    drop(namespaces.get_or_create(&name("empty"), None).unwrap());
    assert!(
        namespaces.forget_empty(1, 1_000).is_empty(),
        "seen for the first time"
    );
    let gone = namespaces.forget_empty(2, 1_000);
    assert_eq!(gone.iter().map(|gone| &gone.name).collect::<Vec<_>>(), [&probe]);
    assert!(namespaces.get(&name("empty")).is_some());
}

#[test]
fn where_only_named_ones_may_exist_no_other_is_made() {
    let mut namespaces = namespaces();
    namespaces.is_open = false;
    assert!(namespaces.get_or_create(&name("configured"), None).is_ok());
    let refused = namespaces.get_or_create(&name("other"), None).unwrap_err();
    assert_eq!(refused, NamespaceRefused::NotNamed);
}

#[test]
fn the_namespace_of_probes_exists_beside_the_limits_on_namespaces() {
    let probe = name(crate::wire::PROBE_NAME);
    let mut namespaces = namespaces();
    namespaces.is_open = false;
    let probed = namespaces.get_or_create(&probe, None).unwrap();
    assert_eq!(namespaces.refusal(&probe), None);
    // The namespace of probes does not count in the number of namespaces, and can be made when no more are allowed.
    namespaces.is_open = true;
    for made in ["second", "third"] {
        namespaces.get_or_create(&name(made), None).unwrap();
    }
    let refused = namespaces.get_or_create(&name("fourth"), None).unwrap_err();
    assert_eq!(refused, NamespaceRefused::LimitReached { namespaces: 3 });
    drop(probed);
    namespaces.forget_empty(1, 1_000);
    assert_eq!(namespaces.forget_empty(2, 1_000).len(), 1);
    let probed = namespaces.get_or_create(&probe, None).unwrap();

    // Little can be kept in the namespace of probes.
    let id = |worker: String, rank| HolderId {
        worker: WorkerName::new(&worker).unwrap(),
        rank,
    };
    let register = |number: usize| probed.indexer.register(&id(format!("w{number}"), 0));
    let mut writers: Vec<_> = (0..99).map_while(|number| register(number).ok()).collect();
    assert_eq!(writers.len(), 8);
    let ranks: Vec<_> = (1..99)
        .map_while(|rank| probed.indexer.register(&id("w0".to_owned(), rank)).ok())
        .collect();
    assert_eq!(ranks.len(), 7, "each probe of a worker has a rank of its own");
    for (number, writer) in writers.iter_mut().enumerate() {
        let first = 1 + 1000 * number as u64;
        let hashes = (first..first + 999).map(SequenceHash).collect();
        writer.apply(
            Event::Stored(StoredBlocks::by_sequence(None, None, hashes)),
            Tier::DEVICE,
            0,
        );
    }
    assert!(probed.indexer.sizes().held_blocks <= 8 * 16);
    // Missing blocks before the last block of a chain are bounded, too.
    let writer = &mut writers[0];
    writer.apply(Event::Cleared, Tier::DEVICE, 0);
    for number in 1..5_000 {
        let (parent, hash) = (SequenceHash(number), SequenceHash(number + 1));
        let parent = (number > 1).then_some(parent);
        writer.apply(
            Event::Stored(StoredBlocks::by_sequence(parent, None, vec![hash])),
            Tier::DEVICE,
            0,
        );
        if let Some(parent) = parent {
            writer.apply(
                Event::Removed(RemovedBlocks::by_sequence(vec![parent])),
                Tier::DEVICE,
                0,
            );
        }
    }
    assert!(probed.indexer.sizes().distinct_blocks <= 1024);
}

#[test]
fn who_was_refused_is_remembered_until_there_is_room() {
    let namespaces = namespaces();
    let (second, third) = (name("second"), name("third"));
    assert_eq!(namespaces.refusal(&third), None);
    for made in [&second, &third] {
        drop(namespaces.get_or_create(made, None).unwrap());
    }
    let wanted = name("wanted");
    assert_eq!(namespaces.refusal(&wanted), None, "nobody has wanted it yet");
    let refused = namespaces.get_or_create(&wanted, None).unwrap_err();
    assert_eq!(namespaces.refusal(&wanted), Some(refused));
    assert_eq!(namespaces.refusal(&name("other")), None);
    // There are too many refused names to remember all. So any name may be one of the refused names.
    for number in 0..2000 {
        namespaces
            .get_or_create(&name(&format!("n{number}")), None)
            .unwrap_err();
    }
    for name in ["n1999", "other"].map(name) {
        assert!(namespaces.refusal(&name).is_some(), "{name}");
    }
    namespaces.forget_empty(0, 10);
    assert_eq!(namespaces.forget_empty(11, 10).len(), 2);
    assert_eq!(namespaces.refusal(&wanted), None);
    namespaces.get_or_create(&wanted, None).unwrap();
}

#[test]
fn a_namespace_with_a_refused_publisher_stays_and_its_successor_knows_it() {
    let namespaces = namespaces();
    let worker = RefusedName::in_subject("w");
    let at = RefusedAt {
        listened_us: 7,
        unix_us: 7,
    };
    let refused = |told| {
        let namespace = namespaces.get_or_create(&name("a"), told).unwrap();
        (size(&namespace), namespace.indexer.refused().count(None))
    };
    let namespace = namespaces.get_or_create(&name("a"), tokens(64)).unwrap();
    namespace
        .indexer
        .refused()
        .note_unread(&worker, false, "undecodable", at);
    drop(namespace);
    for now_us in [0, 11, 22] {
        assert!(namespaces.forget_empty(now_us, 10).is_empty());
    }
    assert_eq!((refused(tokens(64)), refused(tokens(32))), ((64, 1), (32, 1)));
    namespaces
        .get(&name("a"))
        .unwrap()
        .indexer
        .refused()
        .expire(8, 0, Some(0));
    for (now_us, gone) in [(33, 0), (44, 1)] {
        assert_eq!(namespaces.forget_empty(now_us, 10).len(), gone);
    }
}

fn tokens(count: u32) -> Option<BlockSize> {
    Some(BlockSize::new(count).unwrap())
}

fn size(namespace: &Namespace) -> u32 {
    namespace.indexer.settings().block_size.as_u32()
}

#[test]
fn the_first_to_tell_a_block_size_gives_it_to_the_namespace_until_all_have_left() {
    let namespaces = namespaces();
    let told = |told| namespaces.get_or_create(&name("a"), told).unwrap();
    let worker = WorkerName::new("w").unwrap();
    let id = HolderId { worker, rank: 0 };
    let writer = told(tokens(64)).indexer.register(&id).unwrap();
    for (told, is_taken) in [
        (told(tokens(64)), true),
        (told(tokens(32)), false),
        (told(None), false),
    ] {
        assert_eq!(size(&told), 64);
        let asked = if is_taken { tokens(64) } else { tokens(32) };
        assert_eq!(told.indexer.settings().takes(asked), is_taken);
    }
    // A batch without a block size has blocks of the configuration's size.
    assert!(!told(None).indexer.settings().takes(None));
    writer.retire();
    let used = told(tokens(64));
    assert_eq!(size(&told(tokens(32))), 64, "somebody is about to use it");
    drop(used);
    assert_eq!(size(&told(tokens(32))), 32);
    let silent = told(None);
    assert_eq!(*silent.indexer.settings(), NamespaceSettings::default());
    assert!(silent.indexer.settings().takes(None) && silent.indexer.settings().takes(tokens(16)));
}

#[test]
fn a_told_block_size_does_not_change_what_the_configuration_says() {
    let mut namespaces = namespaces();
    let told = |namespaces: &Namespaces, which| {
        let namespace = namespaces.get_or_create(&name(which), tokens(64)).unwrap();
        (size(&namespace), namespace.indexer.settings().takes(tokens(64)))
    };
    assert_eq!(told(&namespaces, "configured"), (16, false));
    namespaces.takes_sizes = false;
    let [a, configured] = [tokens(64), tokens(16)].map(Option::unwrap);
    let refused = NamespaceRefused::OtherBlockSize { told: a, configured };
    assert_eq!(
        namespaces.get_or_create(&name("a"), Some(a)).unwrap_err(),
        refused
    );
    // The namespace is made as soon as a batch gives the configuration's size.
    assert_eq!(namespaces.refusal(&name("a")), Some(refused));
    drop(namespaces.get_or_create(&name("a"), Some(configured)).unwrap());
    assert_eq!(namespaces.refusal(&name("a")), None);
    assert_eq!(told(&namespaces, "a"), (16, false));
}

#[test]
fn of_two_who_tell_block_sizes_at_once_one_wins() {
    for _ in 0..200 {
        let namespaces = Arc::new(namespaces());
        let barrier = Arc::new(Barrier::new(2));
        let tell = |count| {
            let (namespaces, barrier) = (Arc::clone(&namespaces), Arc::clone(&barrier));
            std::thread::spawn(move || {
                barrier.wait();
                let namespace = namespaces.get_or_create(&name("a"), tokens(count)).unwrap();
                // Both threads have the namespace at the same time.
                barrier.wait();
                (
                    size(&namespace),
                    namespace.indexer.settings().takes(tokens(count)),
                )
            })
        };
        let told = [tell(32), tell(64)].map(|teller| teller.join().unwrap());
        assert_eq!(told[0].0, told[1].0);
        assert_ne!(told[0].1, told[1].1, "one is taken, the other is not");
    }
}

/// A test of a namespace whose bytes are all of events that wait for a parent. It is the largest, and has nothing to
/// evict.
#[test]
fn where_the_largest_namespace_has_nothing_to_evict_the_next_one_gives_way() {
    const BYTES_MAX: u64 = 4 << 20;
    let capacity = Capacity {
        bytes_max: BYTES_MAX,
        ..Capacity::UNBOUNDED
    };
    let settings = NamespaceSettings::default();
    let namespaces = Namespaces::new(capacity, settings, Vec::new(), IndexLimits::default(), 64);
    let worker = WorkerName::new("w").unwrap();
    let register = |which: &str| {
        let namespace = namespaces.get_or_create(&name(which), None).unwrap();
        let id = HolderId {
            worker: worker.clone(),
            rank: 0,
        };
        let writer = namespace.indexer.register(&id).unwrap();
        (namespace, writer)
    };
    let stored = |parent: Option<u64>, chain: u64, blocks: u64| {
        let hashes = (1..=blocks)
            .map(|block| SequenceHash(chain << 32 | block))
            .collect();
        Event::Stored(StoredBlocks::by_sequence(parent.map(SequenceHash), None, hashes))
    };
    let (full, mut writer) = register("full");
    for chain in 0..64 {
        writer.apply(stored(Some(u64::MAX - chain), chain, 1000), Tier::DEVICE, 0);
    }
    let largest = full.indexer.sizes().bytes;
    assert!(full.indexer.sizes().distinct_blocks == 0 && largest > BYTES_MAX / 10);
    let mut writers = Vec::new();
    for number in 0..20 {
        let (namespace, mut writer) = register(&format!("n{number}"));
        for chain in 0..100 {
            if namespace.indexer.sizes().bytes < largest / 2 {
                writer.apply(stored(None, chain, 64), Tier::DEVICE, 0);
            }
        }
        writers.push(writer);
    }
    let all = namespaces.all();
    let bytes: u64 = all.iter().map(|namespace| namespace.indexer.sizes().bytes).sum();
    let evicted: u64 = all
        .iter()
        .map(|namespace| namespace.indexer.sizes().evicted_blocks)
        .sum();
    assert!(
        bytes < BYTES_MAX + BYTES_MAX / 8 && evicted > 0,
        "{bytes} bytes, {evicted} evicted"
    );
}
