//! Attacks by one publisher, which must not harm the holders of other publishers. These holders must never wait for a
//! whole event of the attacker, and the attacker must not get the whole capacity.

use crate::hash::{Position, PositionalLineageHash, SequenceHash};
use crate::wire::{
    BlockNames, Event, HolderId, QueryKey, RemovedBlocks, Resumable, StoredBlocks, Tier, WorkerName,
};

use super::api::{
    Capacity, HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, RejectReason, Search,
    SparseChain,
};
use super::hook::TURNS;
use super::world::stored_by_lineage;
use kvatlas_lab::random::mix;

/// Number of blocks in an attack, so many that the attacker must release the locks very often.
const BLOCKS: u64 = 60_000;
/// Minimum number of times that other writers can take the lock on the runs during an attack.
const TURNS_MIN: usize = 20;

fn new_index(capacity: Capacity) -> PositionalIndexer {
    let limits = IndexLimits {
        capacity,
        ..IndexLimits::default()
    };
    PositionalIndexer::new(NamespaceSettings::default(), limits)
}

fn register(index: &PositionalIndexer, rank: u32) -> HolderWriter {
    let worker = WorkerName::new("w").unwrap();
    index.register(&HolderId { worker, rank }).unwrap()
}

fn hashes(hashes: impl IntoIterator<Item = u64>) -> Vec<SequenceHash> {
    hashes.into_iter().map(SequenceHash).collect()
}

fn store(writer: &mut HolderWriter, parent: Option<u64>, position: Option<u64>, chain: Vec<SequenceHash>) {
    let position = position.map(|position| Position::new(position).unwrap());
    let stored = StoredBlocks::by_sequence(parent.map(SequenceHash), position, chain);
    writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
}

fn lineage(position: u64, parent: u64, own: u64) -> PositionalLineageHash {
    let position = Position::new(position).unwrap();
    PositionalLineageHash::at(position, SequenceHash(parent), SequenceHash(own))
}

fn removed_by_lineage(keys: Vec<PositionalLineageHash>) -> Event {
    Event::Removed(RemovedBlocks {
        hashes: Vec::new(),
        lineage_hashes: keys,
    })
}

/// Returns the number of times that other writers can take the lock on the runs while `work` runs.
fn turns_of(work: impl FnOnce()) -> usize {
    let before = TURNS.get();
    work();
    TURNS.get() - before
}

#[test]
fn blocks_that_waited_for_one_block_come_in_many_turns() {
    let index = new_index(Capacity::UNBOUNDED);
    let mut writer = register(&index, 0);
    store(&mut writer, Some(1), Some(1), hashes(2..BLOCKS));
    let turns = turns_of(|| store(&mut writer, None, None, hashes([1])));
    assert!(turns >= TURNS_MIN, "{turns}");
    let found = index.find_matches(&QueryKey::SequenceHashes(hashes(1..BLOCKS)), Search::default());
    assert_eq!(
        found.unwrap().holders().next().unwrap().matched_blocks,
        u32::try_from(BLOCKS).unwrap() - 1
    );
}

#[test]
fn children_of_one_block_that_came_before_it_come_in_many_turns() {
    let index = new_index(Capacity::UNBOUNDED);
    let mut writer = register(&index, 0);
    let children = (0..BLOCKS).map(|block| lineage(1, 1, mix(block)));
    writer.apply(stored_by_lineage(children.collect()), Tier::DEVICE, 0);
    let first = stored_by_lineage(vec![lineage(0, 0, 1)]);
    let turns = turns_of(|| {
        writer.apply(first, Tier::DEVICE, 0);
    });
    assert!(turns >= TURNS_MIN, "{turns}");
    assert_eq!(index.sizes().distinct_blocks, BLOCKS + 1);
    writer.retire();
    assert_eq!((index.sizes().bytes, index.sizes().distinct_blocks), (0, 0));
}

/// Checks a deep tree in which each block begins a run. When its last held block is removed, the whole tree must be
/// removed, in many turns.
#[test]
fn a_deep_tree_that_nobody_has_goes_in_many_turns() {
    let index = new_index(Capacity::UNBOUNDED);
    let mut writer = register(&index, 0);
    let parent = |level: u64| level.checked_sub(1).map_or(0, mix);
    let trunk = |level: u64| lineage(level, parent(level), mix(level));
    let side = |level: u64| lineage(level, parent(level), mix(BLOCKS + level));
    let both = (0..BLOCKS).flat_map(|level| [side(level), trunk(level)]);
    writer.apply(stored_by_lineage(both.collect()), Tier::DEVICE, 0);
    writer.apply(
        removed_by_lineage((0..BLOCKS).map(side).collect()),
        Tier::DEVICE,
        0,
    );
    writer.apply(
        removed_by_lineage((0..BLOCKS - 1).map(trunk).collect()),
        Tier::DEVICE,
        0,
    );
    assert_eq!(index.sizes().distinct_blocks, BLOCKS);
    let last = removed_by_lineage(vec![trunk(BLOCKS - 1)]);
    let turns = turns_of(|| {
        writer.apply(last, Tier::DEVICE, 0);
    });
    assert!(turns >= TURNS_MIN, "{turns}");
    writer.retire();
    assert_eq!((index.sizes().bytes, index.sizes().distinct_blocks), (0, 0));
}

/// Checks that other writers can take the lock while a long chain is cleared. In that time the table of hashes shrinks
/// in many parts at nearly the same time.
#[test]
fn a_chain_that_is_cleared_goes_in_many_turns() {
    let index = new_index(Capacity::UNBOUNDED);
    let mut writer = register(&index, 0);
    store(&mut writer, None, None, hashes((0..3 * BLOCKS).map(mix)));
    let turns = turns_of(|| writer.clear());
    assert!(turns >= TURNS_MIN, "{turns}");
    assert_eq!(index.sizes().bytes, 0);
}

/// A test that removes a long chain: first all blocks but the last one, then the last one. A run stays as long as a
/// holder has a block after it. So only the second removal removes the runs, in many turns.
#[test]
fn a_long_chain_that_nobody_has_goes_in_many_turns() {
    let index = new_index(Capacity::UNBOUNDED);
    let mut writer = register(&index, 0);
    let blocks = 3 * BLOCKS;
    store(&mut writer, None, None, hashes((0..blocks).map(mix)));
    let mut remove = |blocks: std::ops::Range<u64>| {
        let removed = RemovedBlocks::by_sequence(hashes(blocks.map(mix)));
        writer.apply(Event::Removed(removed), Tier::DEVICE, 0);
    };
    remove(0..blocks - 1);
    assert_eq!(index.sizes().distinct_blocks, blocks);
    let turns = turns_of(|| remove(blocks - 1..blocks));
    assert!(turns >= TURNS_MIN, "{turns}");
    assert_eq!((index.sizes().bytes, index.sizes().distinct_blocks), (0, 0));
}

/// Checks a holder that has lost blocks to eviction and then begins to use names. It must lose all blocks that have no
/// name, in many turns.
#[test]
fn blocks_without_a_name_go_in_many_turns() {
    let index = new_index(Capacity {
        blocks_max: BLOCKS,
        bytes_max: u64::MAX,
    });
    let mut writer = register(&index, 0);
    let keys = (0..BLOCKS + 1).map(|block| lineage(0, 0, mix(block)));
    writer.apply(stored_by_lineage(keys.collect()), Tier::DEVICE, 0);
    assert!(index.sizes().evicted_blocks > 0);
    let turns = turns_of(|| store(&mut writer, None, None, hashes([1])));
    assert!(turns >= TURNS_MIN, "{turns}");
    assert_eq!(writer.blocks(), 1);
    writer.retire();
    assert_eq!((index.sizes().bytes, index.sizes().distinct_blocks), (0, 0));
}

/// Checks an event that comes after an eviction. It stores blocks after an unknown parent, under names that blocks of
/// the holder already have. The new blocks must be left out, and the old blocks must lose their names.
#[test]
fn what_follows_forgotten_blocks_is_left_out_in_many_turns() {
    let index = new_index(Capacity {
        blocks_max: BLOCKS,
        bytes_max: u64::MAX,
    });
    let mut writer = register(&index, 0);
    store(&mut writer, None, None, hashes(1..BLOCKS));
    store(
        &mut register(&index, 1),
        None,
        None,
        hashes(2 * BLOCKS..2 * BLOCKS + 5000),
    );
    assert!(index.sizes().evicted_blocks > 0);
    let held = writer.blocks() as u64;
    let turns = turns_of(|| store(&mut writer, Some(u64::MAX), None, hashes(1..=held)));
    assert!(turns >= TURNS_MIN, "{turns}");
    assert_eq!(writer.blocks(), 0);
}

#[test]
fn what_waits_is_counted_until_it_no_longer_does() {
    let index = new_index(Capacity::UNBOUNDED);
    let mut writer = register(&index, 0);
    store(&mut writer, Some(7), None, hashes(1000..2000));
    let waiting = index.sizes().bytes;
    assert!(waiting >= 16_000, "{waiting}");
    let removed = RemovedBlocks::by_sequence(hashes(5000..9000));
    writer.apply(Event::Removed(removed), Tier::DEVICE, 0);
    assert!(index.sizes().bytes >= waiting + 4000 * 32);
    assert_eq!(
        writer
            .expire_parked(u64::MAX)
            .rejected(RejectReason::ParkingExpired),
        1000
    );
    assert_eq!(index.sizes().bytes, 0);
    // The memory is also given back if the parent arrives.
    store(&mut writer, Some(7), None, hashes(1000..2000));
    store(&mut writer, None, None, hashes([7]));
    writer.retire();
    assert_eq!(index.sizes().bytes, 0);
}

/// Checks that blocks whose parent is unknown take only a small part of the capacity. Eviction cannot remove such
/// blocks, so without a limit they would displace all other blocks.
#[test]
fn blocks_without_a_place_take_a_small_part_of_a_bounded_index() {
    let capacity = Capacity {
        blocks_max: u64::MAX,
        bytes_max: 4 << 20,
    };
    let index = new_index(capacity);
    let (mut writer, mut other) = (register(&index, 0), register(&index, 1));
    store(&mut other, None, None, hashes(1..=20_000));
    let absent = BlockNames::Sequence {
        parent: Some(SequenceHash(1 << 40)),
        position: Some(Position::new(1).unwrap()),
        hashes: hashes(1 << 50..(1 << 50) + BLOCKS),
    };
    let stored = StoredBlocks {
        names: absent,
        content: None,
        engine_hashes: None,
        resumable: Resumable::ALL,
    };
    let applied = writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
    assert!(
        applied.rejected(RejectReason::Capacity) > BLOCKS / 2,
        "{applied:?}"
    );
    assert_eq!(other.blocks(), 20_000);
    assert!(
        index.sizes().bytes < capacity.bytes_max / 2,
        "{:?}",
        index.sizes()
    );
    // Waiting events do not take this room either.
    for number in 0..64 {
        store(
            &mut writer,
            Some(1 << 41 | number),
            None,
            hashes((number << 20)..(number << 20) + 1000),
        );
    }
    assert_eq!((other.blocks(), index.sizes().parked_events), (20_000, 0));
    writer.retire();
    other.retire();
    assert_eq!(index.sizes().bytes, 0);
}

/// Checks that storing more names for existing blocks takes many turns, because this can take much longer than
/// storing new blocks.
#[test]
fn a_further_name_for_each_block_comes_in_many_turns() {
    let index = new_index(Capacity::UNBOUNDED);
    let mut writer = register(&index, 0);
    let mut stored = StoredBlocks::by_sequence(None, None, hashes((0..BLOCKS).map(mix)));
    for copy in 1..=3 {
        stored.engine_hashes = Some((0..BLOCKS).map(|block| copy << 62 | block).collect());
        let event = Event::Stored(stored.clone());
        let turns = turns_of(|| {
            writer.apply(event, Tier::DEVICE, 0);
        });
        assert!(copy == 1 || turns >= 2 * TURNS_MIN, "{turns}");
    }
    writer.retire();
    assert_eq!(index.sizes().bytes, 0);
}

/// Checks that the first lineage hash in an event causes no long work. The table that finds blocks by hash is filled
/// when blocks are stored, so it need not be built at that moment.
#[test]
fn blocks_come_to_be_found_by_their_hashes_in_many_turns() {
    let index = new_index(Capacity::UNBOUNDED);
    let mut writer = register(&index, 0);
    let blocks = 2 * BLOCKS;
    let mut stored = StoredBlocks::by_sequence(None, None, hashes((0..blocks).map(mix)));
    stored.engine_hashes = Some((0..blocks).map(|block| 1 << 62 | block).collect());
    let turns = turns_of(|| {
        writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
    });
    assert!(turns >= TURNS_MIN, "{turns}");
    let absent = removed_by_lineage(vec![lineage(0, 0, 5)]);
    let turns = turns_of(|| {
        writer.apply(absent, Tier::DEVICE, 0);
    });
    assert_eq!(turns, 0);
}

/// Checks that compressed queries of several threads at the same time find the blocks of every chain.
#[test]
fn compressed_queries_of_several_threads_find_all() {
    for _ in 0..5 {
        let index = new_index(Capacity::UNBOUNDED);
        let mut writer = register(&index, 0);
        let mut stored = StoredBlocks::by_sequence(None, None, Vec::new());
        for chain in 0..600_u64 {
            let own = |block: u64| mix(chain << 20 | block);
            stored.names = BlockNames::Sequence {
                parent: None,
                position: None,
                hashes: hashes((0..100).map(own)),
            };
            stored.engine_hashes = Some((0..100).map(|block| 1 << 62 | chain << 20 | block).collect());
            writer.apply(Event::Stored(stored.clone()), Tier::DEVICE, 0);
        }
        let key = QueryKey::SequenceHashes(hashes([mix(599 << 20 | 99)]));
        let positions = [Position::new(99).unwrap()];
        let depths: Vec<u32> = std::thread::scope(|scope| {
            let ask = || {
                let chain = SparseChain::new(&key, &positions).unwrap();
                let found = index.find_bounds(&chain, Search::default());
                let depth = found.holders().map(|found| found.matched_blocks).max();
                depth.unwrap_or(0)
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(ask)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(depths, [100; 4]);
    }
}
