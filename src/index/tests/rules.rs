//! Rules at the edges: the last position, full holders, hashes that are no chain, slots and names that are taken.

use crate::hash::{Position, PositionalLineageHash, SequenceHash};
use crate::tracking::{DegradedReason, DegradedReasons, StreamTrust};
use crate::wire::{BlockNames, Event, HolderId, QueryKey, StoredBlocks, Tier, WorkerName};

use super::super::{
    HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, RegisterError, RejectReason, Search,
};
use super::oracle::Oracle;
use super::random::{Random, setting};
use super::world::PlainKey;

fn id(worker: &str, rank: u32) -> HolderId {
    let worker = WorkerName::new(worker).unwrap();
    HolderId { worker, rank }
}

fn hashes(hashes: &[u64]) -> Vec<SequenceHash> {
    hashes.iter().copied().map(SequenceHash).collect()
}

fn run_at(position: u64, parent: u64, chain: &[u64]) -> Event {
    let position = Position::new(position).unwrap();
    Event::Stored(StoredBlocks::by_sequence(
        Some(SequenceHash(parent)),
        Some(position),
        hashes(chain),
    ))
}

fn new_holder(limits: IndexLimits) -> (PositionalIndexer, HolderWriter) {
    let index = PositionalIndexer::new(NamespaceSettings::default(), limits);
    let writer = index.register(&id("w", 0)).unwrap();
    (index, writer)
}

#[test]
fn positions_end_below_two_to_the_24() {
    let (_index, mut writer) = new_holder(IndexLimits::default());
    let last = Position::MAX.as_u64();
    let applied = writer.apply(run_at(last - 1, 7, &[8, 9]), Tier::DEVICE, 0);
    assert_eq!(applied.stored, 2);
    // A child of the last block, and a run that would cross the end.
    let child = StoredBlocks::by_sequence(Some(SequenceHash(9)), None, hashes(&[10]));
    for event in [Event::Stored(child), run_at(last, 7, &[8, 9])] {
        let applied = writer.apply(event, Tier::DEVICE, 0);
        assert!(applied.rejected(RejectReason::PositionOutOfRange) > 0);
        assert_eq!(applied.stored, 0);
    }
    assert_eq!(writer.blocks(), 2);
}

#[test]
fn a_full_holder_keeps_what_it_has() {
    let limits = IndexLimits {
        blocks_per_holder_max: 3,
        ..IndexLimits::default()
    };
    let (index, mut writer) = new_holder(limits);
    let store = |chain: &[u64]| Event::Stored(StoredBlocks::by_sequence(None, None, hashes(chain)));
    let applied = writer.apply(store(&[1, 2, 3, 4, 5]), Tier::DEVICE, 0);
    assert_eq!((applied.stored, applied.rejected(RejectReason::Capacity)), (3, 2));
    // What is held can be stored again, and another holder has room of its own.
    assert_eq!(writer.apply(store(&[1, 2, 3]), Tier::DEVICE, 0).stored, 3);
    let mut other = index.register(&id("w", 1)).unwrap();
    assert_eq!(other.apply(store(&[1, 2, 3]), Tier::DEVICE, 0).stored, 3);
    assert_eq!(index.sizes().held_blocks, 6);
}

#[test]
fn registering_is_bounded() {
    let limits = IndexLimits {
        workers_max: 2,
        ranks_per_worker_max: 2,
        ..IndexLimits::default()
    };
    let (index, writer) = new_holder(limits);
    assert_eq!(
        index.register(&id("w", 0)).unwrap_err(),
        RegisterError::Registered(id("w", 0))
    );
    index.register(&id("w", 1)).unwrap();
    assert!(matches!(
        index.register(&id("w", 2)),
        Err(RegisterError::TooManyRanks { ranks: 2, .. })
    ));
    index.register(&id("x", 0)).unwrap();
    assert!(matches!(
        index.register(&id("y", 0)),
        Err(RegisterError::TooManyWorkers { workers: 2 })
    ));
    writer.retire();
    index.register(&id("w", 2)).unwrap();
}

/// The name of the parent can belong to a block elsewhere where hashes are no chain; an explicit position counts.
#[test]
fn an_explicit_position_is_believed() {
    let (_index, mut writer) = new_holder(IndexLimits::default());
    let store = |chain: &[u64]| Event::Stored(StoredBlocks::by_sequence(None, None, hashes(chain)));
    writer.apply(store(&[1, 2, 9]), Tier::DEVICE, 0);
    writer.apply(run_at(1, 9, &[5]), Tier::DEVICE, 0);
    let key = PositionalLineageHash::new(SequenceHash(5), Some(SequenceHash(9)), 1).unwrap();
    let dumped: Vec<_> = writer.dump_events(1).collect();
    let found = dumped.iter().any(|(_, event)| match event {
        Event::Stored(stored) => match &stored.names {
            BlockNames::Sequence {
                parent,
                position,
                hashes,
            } => {
                let position = position.map_or(0, Position::as_u64);
                PositionalLineageHash::new(hashes[0], *parent, position) == Ok(key)
            }
            BlockNames::Lineage(_) => false,
        },
        _ => false,
    });
    assert!(found, "{dumped:?}");
}

/// Sequence hashes out of a handful of numbers: the same one under many parents, in many holders.
#[test]
fn hashes_that_are_no_chain_are_answered_block_by_block() {
    let operations = setting("KVATLAS_TEST_OPERATIONS", 200_000) / 20;
    let mut random = Random::new(setting("KVATLAS_TEST_SEED", 42));
    let limits = IndexLimits::default();
    let mut index = PositionalIndexer::new(NamespaceSettings::default(), limits);
    let mut holders: Vec<(HolderWriter, Oracle)> = (0..10)
        .map(|rank| {
            (
                index.register(&id("w", rank)).unwrap(),
                Oracle::new(false, usize::MAX, limits.parking),
            )
        })
        .collect();
    for operation in 0..operations {
        let length = 1 + random.below(6);
        let chain: Vec<u64> = (0..length).map(|_| 1 + random.next() % 4).collect();
        // The first two holders keep two parents for one place, so that every index of the run has seen a conflict.
        let (event, number) = match operation {
            0 | 1 => {
                let chain = [[1, 3], [2, 3]][usize::try_from(operation).unwrap()];
                (stored_from(0, &chain), usize::try_from(operation).unwrap())
            }
            _ => (random_event(&mut random, &chain), 2 + random.below(8)),
        };
        let (writer, oracle) = &mut holders[number];
        oracle.apply(&event, Tier::DEVICE);
        writer.apply(event, Tier::DEVICE, 0);
        assert_eq!(writer.blocks(), oracle.len());
        if operation > 0 {
            check_garbage(&index, &holders, &chain);
        }
        if operation % 1000 == 999 {
            index = rebuild(&mut holders);
        }
    }
}

fn stored_from(parent: u64, chain: &[u64]) -> Event {
    let parent = (parent > 0).then_some(SequenceHash(parent));
    Event::Stored(StoredBlocks::by_sequence(parent, None, hashes(chain)))
}

fn random_event(random: &mut Random, chain: &[u64]) -> Event {
    match random.below(12) {
        0..3 => stored_from(0, chain),
        3 => stored_from(1 + random.next() % 4, chain),
        4 => run_at(1 + random.next() % 5, 1 + random.next() % 4, chain),
        // By lineage hashes, the blocks keep no names, so that many of them stay.
        5..9 => {
            let mut keys: Vec<_> = PlainKey::run(0, None, chain)
                .into_iter()
                .map(PlainKey::lineage)
                .collect();
            random.shuffle(&mut keys);
            Event::Stored(StoredBlocks {
                names: BlockNames::Lineage(keys),
                content: None,
                engine_hashes: None,
            })
        }
        9 if random.chance(5) => Event::Cleared,
        9 => Event::Removed(crate::wire::RemovedBlocks::by_sequence(hashes(chain))),
        _ => {
            let keys = PlainKey::run(0, None, chain).into_iter().map(PlainKey::lineage);
            Event::Removed(crate::wire::RemovedBlocks {
                hashes: Vec::new(),
                lineage_hashes: keys.collect(),
            })
        }
    }
}

fn check_garbage(index: &PositionalIndexer, holders: &[(HolderWriter, Oracle)], chain: &[u64]) {
    assert!(index.sizes().chain_conflicts > 0);
    let keys = PlainKey::run(0, None, chain);
    let lineage = keys.iter().map(|key| key.lineage()).collect();
    for query in [
        QueryKey::SequenceHashes(hashes(chain)),
        QueryKey::LineageHashes(lineage),
    ] {
        let matches = index.find_matches(&query, Search::default()).unwrap();
        let mut found = vec![0; holders.len()];
        for holder in matches.holders() {
            found[holder.holder.id.rank as usize] = holder.matched_blocks as usize;
        }
        let expected: Vec<usize> = holders.iter().map(|(_, oracle)| oracle.matched(&keys)).collect();
        assert_eq!(found, expected, "{} {chain:?}", query.kind());
    }
}

/// Dumps all holders into a fresh index, which takes their place.
fn rebuild(holders: &mut [(HolderWriter, Oracle)]) -> PositionalIndexer {
    let fresh = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
    for (writer, oracle) in holders {
        let mut next = fresh.register(&writer.record().id).unwrap();
        for (tier, event) in writer.dump_events(4) {
            next.apply(event, tier, 0);
        }
        assert_eq!(next.blocks(), oracle.len());
        oracle.forget_parked();
        *writer = next;
    }
    fresh
}

#[test]
fn a_search_does_not_vouch_for_a_state_that_was_replaced_behind_its_back() {
    let (index, mut writer) = new_holder(IndexLimits::default());
    let trust = StreamTrust::default();
    let blocks = || Event::Stored(StoredBlocks::by_sequence(None, None, hashes(&[1, 2, 3])));
    let query = QueryKey::SequenceHashes(hashes(&[1, 2, 3]));
    let search = || index.find_matches(&query, Search::default()).unwrap();
    writer.status().confirm(trust.generation());
    writer.apply(blocks(), Tier::DEVICE, 0);
    writer.status().degrade(DegradedReason::Gap);
    // The search finds what the gap left behind; only then is the state replaced, and its reasons with it.
    let before = search();
    writer.apply(Event::Cleared, Tier::DEVICE, 0);
    writer.replace_reasons(DegradedReasons::default());
    let found = before.holders().next().unwrap();
    assert_eq!(found.matched_blocks, 3);
    assert!(found.holder.status.reasons(&trust).is_empty());
    assert!(!before.reasons(found.holder, &trust).is_empty());

    writer.apply(blocks(), Tier::DEVICE, 0);
    let after = search();
    let found = after.holders().next().unwrap();
    assert!(after.reasons(found.holder, &trust).is_empty());
}
