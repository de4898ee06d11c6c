//! Regression tests for defects of an earlier design of the index. Further tests are about tiers, about holes, and
//! about attacks on weak points of the design.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::hash::SequenceHash;
use crate::wire::{BlockNames, Event, HolderId, QueryKey, RemovedBlocks, StoredBlocks, Tier, WorkerName};

use super::api::{Capacity, HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, Search};
use super::plain::index;

fn register(index: &PositionalIndexer, rank: u32) -> HolderWriter {
    let worker = WorkerName::new("w").unwrap();
    index.register(&HolderId { worker, rank }).unwrap()
}

fn hashes(hashes: impl IntoIterator<Item = u64>) -> Vec<SequenceHash> {
    hashes.into_iter().map(SequenceHash).collect()
}

fn store(writer: &mut HolderWriter, parent: Option<u64>, chain: Vec<SequenceHash>) {
    let stored = StoredBlocks::by_sequence(parent.map(SequenceHash), None, chain);
    writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
}

fn remove(writer: &mut HolderWriter, chain: Vec<SequenceHash>) {
    writer.apply(Event::Removed(RemovedBlocks::by_sequence(chain)), Tier::DEVICE, 0);
}

fn depth(index: &PositionalIndexer, chain: Vec<SequenceHash>) -> u32 {
    let matches = index.find_matches(&QueryKey::SequenceHashes(chain), Search::default());
    matches
        .unwrap()
        .holders()
        .map(|found| found.matched_blocks)
        .max()
        .unwrap_or(0)
}

/// Test for defects 2 and 9: first blocks whose hashes agree in the 51 bits that every lineage hash keeps must all be
/// found.
#[test]
fn first_blocks_that_are_equal_in_most_bits_are_all_found() {
    let index = index();
    let mut writer = register(&index, 0);
    let first = |number: u64| number << 51 | 0x1234;
    for number in 0..200 {
        store(
            &mut writer,
            None,
            hashes([first(number), number + 10, number + 1000]),
        );
    }
    for number in 0..200 {
        assert_eq!(
            depth(&index, hashes([first(number), number + 10, number + 1000])),
            3,
            "{number}"
        );
    }
    for number in 0..200 {
        remove(&mut writer, hashes([first(number)]));
        assert_eq!(depth(&index, hashes([first(number), number + 10])), 0);
    }
    writer.retire();
    assert_eq!((index.sizes().bytes, index.sizes().chain_conflicts), (0, 0));
}

/// Test for defect 3: if a block moves to another parent, its children must not move with it.
#[test]
fn a_block_that_moves_is_credited_in_one_place() {
    let index = index();
    let mut writer = register(&index, 0);
    store(&mut writer, None, hashes([1, 5, 7]));
    store(&mut writer, None, hashes([2, 5]));
    assert_eq!(depth(&index, hashes([1, 5, 7])), 1);
    assert_eq!(depth(&index, hashes([2, 5, 7])), 2);
}

/// Checks that a hash under two parents is noticed, whatever names the engine gives the blocks. Each holder's depth
/// must count only its own blocks.
#[test]
fn hashes_that_are_no_chain_are_noticed_under_names_too() {
    let index = index();
    let (mut one, mut other, mut unnamed) = (register(&index, 0), register(&index, 1), register(&index, 2));
    let store_named = |writer: &mut HolderWriter, chain: &[u64], names: u64| {
        let mut stored = StoredBlocks::by_sequence(None, None, hashes(chain.iter().copied()));
        stored.engine_hashes = Some((names..).take(chain.len()).collect());
        writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
    };
    let ask = |chain: &[u64]| {
        let key = QueryKey::SequenceHashes(hashes(chain.iter().copied()));
        let matches = index.find_matches(&key, Search::default()).unwrap();
        let mut found: Vec<(u32, u32)> = matches
            .holders()
            .map(|found| (found.holder.id.rank, found.matched_blocks))
            .collect();
        found.sort_unstable();
        found
    };
    store_named(&mut one, &[1, 2, 3], 100);
    store_named(&mut other, &[1, 8, 3], 200);
    assert_eq!(ask(&[1, 2, 3]), [(0, 3), (1, 1)]);
    assert_eq!(ask(&[1, 8, 3]), [(0, 1), (1, 3)]);
    // The first blocks are shared with a holder whose blocks are named by their hashes.
    store(&mut unnamed, None, hashes([1, 9, 3]));
    assert_eq!(ask(&[1, 9, 3]), [(0, 1), (1, 1), (2, 3)]);
    remove(&mut other, hashes([200, 201, 202]));
    assert_eq!(ask(&[1, 9, 3]), [(0, 1), (2, 3)]);
    assert_eq!(ask(&[1, 2, 3]), [(0, 3), (2, 1)]);
}

/// Test for defect 4: very many blocks with one 51-bit fragment must cost as much as any other blocks.
#[test]
fn one_fragment_of_many_blocks_takes_neither_long_nor_much() {
    let index = index();
    let mut writer = register(&index, 0);
    // All of these hashes differ, but they agree in the bits by which the table finds them.
    for number in 0..4096_u64 {
        store(
            &mut writer,
            None,
            hashes([number << 51 | 0x77, (number + 1) << 32]),
        );
    }
    // Each hash comes at many positions.
    store(
        &mut writer,
        None,
        hashes((0..60_000).map(|number| ((number % 4096) << 51) | 0x99)),
    );
    let sizes = index.sizes();
    assert!(sizes.bytes < 4 << 20, "{sizes:?}");
    writer.retire();
    assert_eq!(index.sizes().bytes, 0);
}

/// Test for defect 5: two holders have one hash under two parents, which is a conflict. The conflict must end when one
/// of these holders leaves.
#[test]
fn a_conflict_ends_with_its_holders() {
    let index = index();
    let (mut one, mut other) = (register(&index, 0), register(&index, 1));
    store(&mut one, None, hashes([1, 5]));
    store(&mut other, None, hashes([2, 5]));
    assert_eq!(index.sizes().chain_conflicts, 1);
    assert_eq!(
        [depth(&index, hashes([1, 5])), depth(&index, hashes([2, 5]))],
        [2, 2]
    );
    one.retire();
    assert_eq!(index.sizes().chain_conflicts, 0);
    assert_eq!(
        [depth(&index, hashes([1, 5])), depth(&index, hashes([2, 5]))],
        [0, 2]
    );
}

/// Test for defect 6: storing and removing the same blocks again and again must keep no memory.
#[test]
fn changing_one_block_again_and_again_keeps_no_memory() {
    let index = index();
    let mut writer = register(&index, 0);
    for _ in 0..20_000 {
        store(&mut writer, None, hashes(1..=100));
        remove(&mut writer, hashes(1..=100));
    }
    assert_eq!(index.sizes().bytes, 0);
}

/// Test for defect 7: the cost of an event must depend on the blocks that it names, not on the holder's blocks after
/// them.
#[test]
fn a_first_block_comes_and_goes_beside_any_number_of_others() {
    let index = index();
    let mut writer = register(&index, 0);
    store(&mut writer, None, hashes(1..=200_000));
    assert_eq!(depth(&index, hashes(1..=200_000)), 200_000);
    // An earlier design took a second for every few of these.
    for _ in 0..20_000 {
        remove(&mut writer, hashes([1]));
        store(&mut writer, None, hashes([1]));
    }
    assert_eq!(depth(&index, hashes(1..=200_000)), 200_000);
    remove(&mut writer, hashes([1]));
    assert_eq!(depth(&index, hashes(1..=200_000)), 0);
}

/// Test for defect 8: removing a branch must look at no other run.
#[test]
fn a_branch_goes_beside_very_many_others() {
    let index = index();
    let mut writer = register(&index, 0);
    store(&mut writer, None, hashes([1]));
    for branch in 2..50_000 {
        store(&mut writer, Some(1), hashes([branch]));
    }
    for branch in 2..50_000 {
        remove(&mut writer, hashes([branch]));
    }
    assert_eq!((writer.blocks(), index.sizes().distinct_blocks), (1, 1));
}

/// Checks that a hole in the middle ends the prefix, and that the blocks after it count again once the hole is filled.
#[test]
fn holes_are_local() {
    let index = index();
    let mut writer = register(&index, 0);
    store(&mut writer, None, hashes(1..=10_000));
    remove(&mut writer, hashes((50..10_000).step_by(100)));
    assert_eq!(depth(&index, hashes(1..=10_000)), 49);
    store(&mut writer, Some(49), hashes([50]));
    assert_eq!(depth(&index, hashes(1..=10_000)), 149);
    for hole in (150..10_000).step_by(100) {
        store(&mut writer, Some(hole - 1), hashes([hole]));
    }
    assert_eq!(depth(&index, hashes(1..=10_000)), 10_000);
}

/// Checks that a block is held as long as one tier has it.
#[test]
fn tiers_are_held_one_by_one() {
    let index = index();
    let mut writer = register(&index, 0);
    let host = Tier::new(1).unwrap();
    let stored = || Event::Stored(StoredBlocks::by_sequence(None, None, hashes(1..=100)));
    writer.apply(stored(), Tier::DEVICE, 0);
    writer.apply(stored(), host, 0);
    remove(&mut writer, hashes(51..=100));
    assert_eq!(depth(&index, hashes(1..=100)), 100);
    let gone = RemovedBlocks::by_sequence(hashes(31..=100));
    let applied = writer.apply(Event::Removed(gone), host, 0);
    assert_eq!(applied.removed, 70);
    assert_eq!(depth(&index, hashes(1..=100)), 50);
    remove(&mut writer, hashes(1..=100));
    assert_eq!((depth(&index, hashes(1..=100)), writer.blocks()), (30, 30));
}

/// Checks that holders share blocks although each holder has its own names for them. Removing a name that only another
/// holder uses must remove nothing.
#[test]
fn holders_with_names_of_their_own_share_blocks() {
    let index = index();
    let mut writers: Vec<HolderWriter> = (0..3).map(|rank| register(&index, rank)).collect();
    for (own, writer) in (1..).zip(&mut writers) {
        let mut stored = StoredBlocks::by_sequence(None, None, hashes(1..=500));
        stored.engine_hashes = Some((1..=500).map(|name| name + own * 1_000_000).collect());
        assert!(matches!(stored.names, BlockNames::Sequence { .. }));
        writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
    }
    assert_eq!(index.sizes().distinct_blocks, 500);
    remove(&mut writers[0], hashes(1_000_101..=1_000_500));
    // Holder 1 removes names that only holder 0 uses.
    remove(&mut writers[1], hashes(1_000_001..=1_000_500));
    let matches = index
        .find_matches(&QueryKey::SequenceHashes(hashes(1..=500)), Search::default())
        .unwrap();
    let depths: Vec<u32> = matches.holders().map(|found| found.matched_blocks).collect();
    assert_eq!(depths, [500, 500, 100]);
}

/// Test for defect 7: nobody must wait for the end of a long event, whether it stores, removes or clears.
#[test]
fn queries_see_a_long_event_in_parts() {
    const BLOCKS: u64 = 200_000;
    let index = index();
    let mut writer = register(&index, 0);
    let is_over = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let chain = hashes(1..=BLOCKS);
            let all = u32::try_from(BLOCKS).unwrap();
            let mut seen = 0_u64;
            while !is_over.load(Ordering::Relaxed) {
                let depth = depth(&index, chain.clone());
                seen += u64::from(depth > 0 && depth < all);
            }
            seen
        });
        for round in 0..30 {
            store(&mut writer, None, hashes(1..=BLOCKS));
            assert_eq!(writer.blocks() as u64, BLOCKS);
            match round % 3 {
                0 => remove(&mut writer, hashes((1..=BLOCKS).rev())),
                1 => remove(&mut writer, hashes(1..=BLOCKS)),
                _ => writer.clear(),
            }
            assert_eq!(writer.blocks(), 0);
        }
        is_over.store(true, Ordering::Relaxed);
        reader.join().unwrap()
    });
    assert!(seen > 0, "each search waited for a whole event");
    let sizes = index.sizes();
    assert_eq!((sizes.bytes, sizes.distinct_blocks), (0, 0));
}

/// Checks that nothing is left over if eviction removes a block while a long event stores the blocks after it.
#[test]
fn long_events_beside_eviction_leave_nothing_behind() {
    let limits = IndexLimits {
        capacity: Capacity {
            blocks_max: 30_000,
            bytes_max: u64::MAX,
        },
        ..IndexLimits::default()
    };
    let index = PositionalIndexer::new(NamespaceSettings::default(), limits);
    std::thread::scope(|scope| {
        for rank in 0..3_u64 {
            let mut writer = register(&index, u32::try_from(rank).unwrap());
            let index = &index;
            scope.spawn(move || {
                for round in 0..12 {
                    let base = 1 + (rank * 100 + round) * 100_000;
                    store(&mut writer, None, hashes(base..base + 40_000));
                    remove(&mut writer, hashes(base + 20_000..base + 40_000));
                    assert!(index.sizes().distinct_blocks < 400_000);
                }
                writer.retire();
            });
        }
    });
    let sizes = index.sizes();
    assert_eq!((sizes.bytes, sizes.distinct_blocks, sizes.held_blocks), (0, 0, 0));
}
