//! Edge cases of the rules: the last position, full holders, hashes that are not a chain, slots and names that are in
//! use.

use std::collections::HashMap;

use crate::hash::{Position, PositionalLineageHash, SequenceHash};
use crate::stream::StreamTrust;
use crate::wire::{
    BlockNames, DegradedReason, DegradedReasons, Event, HolderId, QueryKey, StoredBlocks, Tier, WorkerName,
};

use super::api::{
    HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, RegisterError, RejectReason, Search,
};
use super::world::PlainKey;
use kvatlas_lab::random::{Random, setting};

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
    // The two events: a child of the last block, and a sequence that would extend beyond the last position.
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
    // Blocks that the holder has can be stored again. Another holder has room of its own.
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

/// Checks a position that an event gives explicitly. If hashes are not a chain, the parent's name can belong to a block
/// at another position. Then the explicit position must count.
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

/// Blocks of a holder whose names are their hashes. For each hash, the map has the hashes of the whole path to the
/// block.
#[derive(Default)]
struct Paths(HashMap<u64, Vec<u64>>);

impl Paths {
    fn store(&mut self, parent: Option<u64>, chain: &[u64]) {
        let mut path = parent.map(|parent| self.0[&parent].clone()).unwrap_or_default();
        for hash in chain {
            path.push(*hash);
            // A block that had this name before loses the name, and is removed.
            self.0.insert(*hash, path.clone());
        }
    }

    fn matched(&self, chain: &[u64]) -> usize {
        let is_held = |end: &usize| {
            self.0
                .get(&chain[end - 1])
                .is_some_and(|path| path == &chain[..*end])
        };
        (1..=chain.len()).take_while(is_held).count()
    }
}

/// Checks hashes that are drawn from a few numbers. Many holders then have the same hash under many parents.
#[test]
fn hashes_that_are_no_chain_are_told_apart_by_what_is_before_them() {
    let operations = setting("KVATLAS_TEST_OPERATIONS", 200_000) / 5;
    let mut random = Random::new(setting("KVATLAS_TEST_SEED", 42));
    let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
    let conflict = conflict(&index);
    let mut holders: Vec<(HolderWriter, Paths)> = (0..10)
        .map(|rank| (index.register(&id("w", rank)).unwrap(), Paths::default()))
        .collect();
    for _ in 0..operations {
        let length = 1 + random.below(6);
        let chain: Vec<u64> = (0..length).map(|_| 1 + random.next() % 7).collect();
        let (writer, paths) = &mut holders[random.below(10)];
        match random.below(8) {
            0..4 => {
                writer.apply(stored_from(0, &chain), Tier::DEVICE, 0);
                paths.store(None, &chain);
            }
            4..6 => {
                let parent = 1 + random.next() % 7;
                if paths.0.contains_key(&parent) {
                    writer.apply(stored_from(parent, &chain), Tier::DEVICE, 0);
                    paths.store(Some(parent), &chain);
                }
            }
            6 if random.chance(5) => {
                writer.apply(Event::Cleared, Tier::DEVICE, 0);
                paths.0.clear();
            }
            _ => {
                writer.apply(
                    Event::Removed(crate::wire::RemovedBlocks::by_sequence(hashes(&chain))),
                    Tier::DEVICE,
                    0,
                );
                chain.iter().for_each(|name| drop(paths.0.remove(name)));
            }
        }
        assert_eq!(writer.blocks(), paths.0.len());
        let expected: Vec<usize> = holders.iter().map(|(_, paths)| paths.matched(&chain)).collect();
        check_garbage(&index, &expected, &chain);
    }
    for writer in holders.into_iter().map(|(writer, _)| writer).chain(conflict) {
        writer.retire();
    }
    let sizes = index.sizes();
    assert_eq!(
        (sizes.distinct_blocks, sizes.chain_conflicts, sizes.bytes),
        (0, 0, 0)
    );
}

fn stored_from(parent: u64, chain: &[u64]) -> Event {
    let parent = (parent > 0).then_some(SequenceHash(parent));
    Event::Stored(StoredBlocks::by_sequence(parent, None, hashes(chain)))
}

fn check_garbage(index: &PositionalIndexer, expected: &[usize], chain: &[u64]) {
    let keys = PlainKey::run(0, None, chain);
    let lineage = keys.iter().map(|key| key.lineage()).collect();
    for query in [
        QueryKey::SequenceHashes(hashes(chain)),
        QueryKey::LineageHashes(lineage),
    ] {
        let matches = index.find_matches(&query, Search::default()).unwrap();
        let mut found = vec![0; expected.len()];
        for holder in matches.holders() {
            found[holder.holder.id.rank as usize] = holder.matched_blocks as usize;
        }
        assert_eq!(found, expected, "{} {chain:?}", query.kind());
    }
}

/// Checks that one holder whose content contradicts its hashes makes a search compare every hash.
#[test]
fn where_a_chain_is_foreign_every_hash_is_compared() {
    let (index, mut writer) = new_holder(IndexLimits::default());
    let chain: Vec<u64> = (100..400).collect();
    let Event::Stored(mut stored) = stored_from(0, &chain) else {
        unreachable!()
    };
    stored.engine_hashes = Some((1000..1300).collect());
    writer.apply(Event::Stored(stored.clone()), Tier::DEVICE, 0);
    let mut foreign = index.register(&id("foreign", 1)).unwrap();
    stored.content = Some(crate::wire::BlockContent::BlockHashes(
        chain.iter().copied().map(crate::hash::BlockHash).collect(),
    ));
    foreign.apply(Event::Stored(stored), Tier::DEVICE, 0);
    assert_eq!((index.foreign_holders(), index.sizes().chain_conflicts), (1, 0));
    let mut other = chain;
    other[100] += 1000;
    check_garbage(&index, &[100, 100], &other);
}

/// Registers two holders that have the same hash under two different parents.
fn conflict(index: &PositionalIndexer) -> [HolderWriter; 2] {
    [10, 11].map(|rank| {
        let mut writer = index.register(&id("conflict", rank)).unwrap();
        writer.apply(
            stored_from(0, &[u64::from(rank) << 40, 12 << 40]),
            Tier::DEVICE,
            0,
        );
        writer
    })
}

/// Checks queries that differ from a chain in the index, and in most cases agree with it again afterwards. The search
/// must find only the blocks before the first difference.
#[test]
fn where_hashes_are_no_chain_one_in_its_place_proves_nothing_about_those_before_it() {
    let (index, mut writer) = new_holder(IndexLimits::default());
    // The index knows that hashes are no chain, because one hash has two parents.
    let _conflict = conflict(&index);
    writer.apply(stored_from(0, &[27, 6, 19, 24, 22, 4, 14]), Tier::DEVICE, 0);
    check_garbage(&index, &[1], &[27, 2, 21, 3, 3, 4]);
    // The chain is covered by several fingerprints. The query differs in one block.
    let chain: Vec<u64> = (100..400).collect();
    writer.apply(stored_from(0, &chain), Tier::DEVICE, 0);
    for place in [0, 31, 32, 100, 254, 255, 256, 299] {
        let mut other = chain.clone();
        other[place] += 1000;
        check_garbage(&index, &[place], &other);
    }
    check_garbage(&index, &[300], &chain);
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
    // The search sees the state after the gap. After the search, the state and its reasons are replaced.
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
