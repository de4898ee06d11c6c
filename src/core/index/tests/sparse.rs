//! Searches that give only some blocks of a chain. The bounds that they return are compared with the oracle's depths.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::hash::{Position, SequenceHash};
use crate::wire::{Event, HolderId, QueryKey, RemovedBlocks, StoredBlocks, Tier, WorkerName};

use super::api::{
    HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, Search, SparseChain, TierDepth,
};
use super::world::Path;
use kvatlas_lab::random::{Random, setting};

/// Minimum and maximum number of leading blocks of each holder.
type Found = BTreeMap<HolderId, (usize, usize)>;

fn find(index: &PositionalIndexer, key: &QueryKey, positions: &[Position], search: Search<'_>) -> Found {
    let chain = SparseChain::new(key, positions).unwrap();
    let matches = index.find_bounds(&chain, search);
    let found: Vec<_> = matches
        .holders()
        .map(|bounds| {
            assert!(bounds.usable_blocks <= bounds.matched_blocks);
            let blocks = (bounds.matched_blocks as usize, bounds.matched_blocks_max as usize);
            (bounds.holder.id.clone(), blocks)
        })
        .collect();
    let by_holder: Found = found.iter().cloned().collect();
    assert_eq!(by_holder.len(), found.len(), "a holder is named twice");
    by_holder
}

/// Returns the tightest bounds that the chosen blocks allow for a holder with `depth` leading blocks. `None` if the
/// holder has none of the chosen blocks.
fn bounds(depth: usize, chosen: &[usize]) -> Option<(usize, usize)> {
    let held = chosen
        .iter()
        .copied()
        .filter(|position| *position < depth)
        .max()?;
    let missing = chosen.iter().copied().find(|position| *position >= depth);
    Some((held + 1, missing.unwrap_or(held + 1)))
}

/// Checks the bounds for random blocks of `path`, in queries by sequence hashes and by lineage hashes. `depths` gives
/// the number of leading blocks that each holder has.
pub(super) fn check_bounds(
    random: &mut Random,
    index: &PositionalIndexer,
    depths: &BTreeMap<HolderId, usize>,
    path: &Path,
    workers: Option<&[WorkerName]>,
) {
    let percent = 1 + random.below(100);
    let mut chosen: Vec<usize> = (0..path.len()).filter(|_| random.chance(percent)).collect();
    if chosen.is_empty() {
        chosen.push(random.below(path.len()));
    }
    let positions: Vec<Position> = chosen
        .iter()
        .map(|position| Position::new(*position as u64).unwrap())
        .collect();
    let hashes = chosen.iter().map(|position| SequenceHash(path.chain[*position]));
    let lineage = chosen.iter().map(|position| path.keys[*position].lineage());
    let is_asked = |id: &HolderId| workers.is_none_or(|workers| workers.contains(&id.worker));
    let expected: Found = depths
        .iter()
        .filter(|(id, _)| is_asked(id))
        .filter_map(|(id, depth)| Some((id.clone(), bounds(*depth, &chosen)?)))
        .collect();
    for key in [
        QueryKey::SequenceHashes(hashes.collect()),
        QueryKey::LineageHashes(lineage.collect()),
    ] {
        let found = find(
            index,
            &key,
            &positions,
            Search {
                workers,
                ..Search::default()
            },
        );
        assert_eq!(found, expected, "{} at {chosen:?}", key.kind());
    }
}

fn holder(name: &str) -> HolderId {
    HolderId {
        worker: WorkerName::new(name).unwrap(),
        rank: 0,
    }
}

fn hashes(hashes: &[u64]) -> Vec<SequenceHash> {
    hashes.iter().copied().map(SequenceHash).collect()
}

fn at(positions: &[u64]) -> Vec<Position> {
    positions.iter().map(|at| Position::new(*at).unwrap()).collect()
}

#[test]
fn hashes_that_are_no_chain_prove_only_what_has_no_gap() {
    let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
    let mut writers = Vec::new();
    // The third block has the same hash after two different prefixes.
    for (name, blocks) in [("a", [1, 2, 3, 4]), ("b", [1, 9, 3, 4])] {
        let mut writer = index.register(&holder(name)).unwrap();
        let stored = StoredBlocks::by_sequence(None, None, hashes(&blocks));
        writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
        writers.push(writer);
    }
    // The fourth block conflicts, too.
    assert_eq!(index.sizes().chain_conflicts, 2);
    let ask = |blocks: &[u64], positions: &[u64]| {
        let key = QueryKey::SequenceHashes(hashes(blocks));
        find(&index, &key, &at(positions), Search::default())
    };
    let expect = |bounds: [(&str, (usize, usize)); 2]| -> Found {
        bounds.map(|(name, blocks)| (holder(name), blocks)).into()
    };
    // `b` has another block between the two chosen blocks, which the query cannot tell.
    assert_eq!(ask(&[1, 4], &[0, 3]), expect([("a", (1, 4)), ("b", (1, 4))]));
    assert_eq!(
        ask(&[1, 2, 4], &[0, 1, 3]),
        expect([("a", (2, 4)), ("b", (1, 1))])
    );
    assert_eq!(
        ask(&[1, 2, 3, 4], &[0, 1, 2, 3]),
        expect([("a", (4, 4)), ("b", (1, 1))])
    );
    assert_eq!(ask(&[3, 5], &[2, 3]), expect([("a", (0, 3)), ("b", (0, 3))]));
}

#[test]
fn bounds_are_of_one_instant_while_a_holder_changes() {
    let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
    let mut writer = index.register(&holder("a")).unwrap();
    let stored = |parent: Option<u64>, blocks: std::ops::RangeInclusive<u64>| {
        let blocks = hashes(&blocks.collect::<Vec<_>>());
        Event::Stored(StoredBlocks::by_sequence(parent.map(SequenceHash), None, blocks))
    };
    writer.apply(stored(None, 1..=10), Tier::DEVICE, 0);
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let tail = hashes(&(11..=40).collect::<Vec<_>>());
            for _ in 0..2000 {
                writer.apply(stored(Some(10), 11..=40), Tier::DEVICE, 0);
                let removed = RemovedBlocks {
                    hashes: tail.clone(),
                    ..RemovedBlocks::default()
                };
                writer.apply(Event::Removed(removed), Tier::DEVICE, 0);
            }
            is_done.store(true, Ordering::Release);
        });
        let key = QueryKey::SequenceHashes(hashes(&[5, 16, 21, 31]));
        while !is_done.load(Ordering::Acquire) {
            let found = find(&index, &key, &at(&[4, 15, 20, 30]), Search::default());
            let blocks: Vec<_> = found.into_values().collect();
            assert!(blocks == [(5, 15)] || blocks == [(31, 31)], "{blocks:?}");
        }
    });
}

#[test]
fn only_blocks_in_the_tiers_asked_for_have_bounds() {
    let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
    let mut writer = index.register(&holder("a")).unwrap();
    for (parent, block, tier) in [(None, 1, 0), (Some(1), 2, 0), (Some(2), 3, 1)] {
        let stored = StoredBlocks::by_sequence(parent.map(SequenceHash), None, hashes(&[block]));
        writer.apply(Event::Stored(stored), Tier::new(tier).unwrap(), 0);
    }
    let key = QueryKey::SequenceHashes(hashes(&[1, 2, 3]));
    for (tiers, blocks) in [(TierDepth::Device, 2), (TierDepth::Host, 3), (TierDepth::All, 3)] {
        let search = Search {
            tiers,
            ..Search::default()
        };
        let found = find(&index, &key, &at(&[0, 1, 2]), search);
        assert_eq!(found, Found::from([(holder("a"), (blocks, blocks))]));
    }
}

#[test]
fn hashes_that_are_no_chain_concern_no_other_chains() {
    let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
    let _honest = store_chains(&index, "honest", &[vec![1, 2, 3, 4, 5, 6]]);
    let mut foreign = store_chains(&index, "foreign", &[vec![70, 7, 8], vec![71, 7, 9]]);
    let ask = |blocks: &[u64], positions: &[u64]| {
        let key = QueryKey::SequenceHashes(hashes(blocks));
        find(&index, &key, &at(positions), Search::default())
    };
    let honest = Found::from([(holder("honest"), (6, 6))]);
    assert_eq!(ask(&[3, 6], &[2, 5]), honest);
    // A query that contains a hash with two parents still gets wider bounds.
    assert_eq!(ask(&[70, 8], &[0, 2]), Found::from([(holder("foreign"), (1, 3))]));
    // The table does not find all blocks with this hash. So no holder that may have such a block is left out.
    let chains: Vec<Vec<u64>> = (100..140).map(|first| vec![first, 5]).collect();
    let _many = store_chains(&index, "many", &chains);
    let mut last = index.register(&holder("last")).unwrap();
    let stored = StoredBlocks::by_sequence(None, None, hashes(&[200, 5]));
    last.apply(Event::Stored(stored), Tier::DEVICE, 0);
    let found = ask(&[200, 5], &[0, 1]);
    assert_eq!(found.get(&holder("last")).map(|(_, most)| *most), Some(2));
    assert_eq!(ask(&[3, 4], &[2, 3]), Found::from([(holder("honest"), (4, 4))]));
    foreign.clear();
}

/// Stores chains at a holder, each block under a name of its own. Under one name, the holder would have only the last
/// block.
fn store_chains(index: &PositionalIndexer, name: &str, chains: &[Vec<u64>]) -> HolderWriter {
    let mut writer = index.register(&holder(name)).unwrap();
    for (number, blocks) in (0u64..).zip(chains) {
        let mut stored = StoredBlocks::by_sequence(None, None, hashes(blocks));
        let name = |at| number << 32 | at << 8;
        stored.engine_hashes = Some((0..blocks.len() as u64).map(name).collect());
        writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
    }
    writer
}

/// Number of leading blocks of `chain` that a holder of `chains` has, with only the blocks at `given` compared.
fn depth_in(chains: &[Vec<u64>], chain: &[u64], given: impl Fn(usize) -> bool) -> usize {
    let depth = |own: &Vec<u64>| {
        let pairs = own.iter().zip(chain).enumerate();
        pairs
            .take_while(|(at, (own, block))| !given(*at) || own == block)
            .count()
    };
    chains.iter().map(depth).max().unwrap_or(0)
}

#[test]
fn a_block_behind_other_blocks_than_the_query_gives_does_not_count() {
    for chains in [vec![vec![1, 2], vec![9, 2, 3]], vec![vec![1], vec![9, 2, 3]]] {
        let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
        let _writer = store_chains(&index, "a", &chains);
        let ask = |blocks: &[u64], positions: &[u64]| {
            let key = QueryKey::SequenceHashes(hashes(blocks));
            find(&index, &key, &at(positions), Search::default())
        };
        let depth = chains[0].len();
        let exact = Found::from([(holder("a"), (depth, depth))]);
        assert_eq!(ask(&[1, 2, 3], &[0, 1, 2]), exact);
        assert_eq!(ask(&[1, 3], &[0, 2]), Found::from([(holder("a"), (1, 2))]));
    }
}

#[test]
fn bounds_hold_where_few_hashes_stand_behind_many_prefixes() {
    for seed in 0..setting("KVATLAS_TEST_SPARSE_SEEDS", 400) {
        let mut random = Random::new(seed);
        let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
        let symbols = 2 + random.below(4);
        let chain = |random: &mut Random| -> Vec<u64> {
            let blocks = 1 + random.below(7);
            (0..blocks).map(|_| 1 + random.below(symbols) as u64).collect()
        };
        let mut writers = Vec::new();
        let mut held = BTreeMap::new();
        for name in ["a", "b", "c"] {
            let chains: Vec<Vec<u64>> = (0..1 + random.below(5)).map(|_| chain(&mut random)).collect();
            writers.push(store_chains(&index, name, &chains));
            held.insert(holder(name), chains);
        }
        for _ in 0..20 {
            let asked = chain(&mut random);
            let percent = [50, 100][random.below(2)];
            let chosen: Vec<usize> = (0..asked.len()).filter(|_| random.chance(percent)).collect();
            let Some(last) = chosen.last() else { continue };
            let key =
                QueryKey::SequenceHashes(hashes(&chosen.iter().map(|at| asked[*at]).collect::<Vec<_>>()));
            let positions: Vec<u64> = chosen.iter().map(|at| *at as u64).collect();
            let found = find(&index, &key, &at(&positions), Search::default());
            for (id, chains) in &held {
                let (own, asked) = (found.get(id).copied(), &asked[..=*last]);
                let told =
                    format!("seed {seed}: {id} has {chains:?}, asked {asked:?} at {chosen:?}: {own:?}");
                let (least, most) = own.unwrap_or((0, chosen[0]));
                // As far as the query tells, a holder may have the blocks that it leaves out.
                let possible = depth_in(chains, asked, |at| chosen.contains(&at));
                let certain = depth_in(chains, asked, |_| true);
                assert!(least <= possible && certain <= most, "{told}");
                if chosen.len() == asked.len() && index.sizes().distinct_blocks <= 16 {
                    assert_eq!((least, most), (certain, certain), "{told}");
                }
            }
        }
    }
}

#[test]
fn a_query_leaves_nothing_behind() {
    let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
    let mut writer = index.register(&holder("a")).unwrap();
    let blocks: Vec<u64> = (1..=20_000).collect();
    let mut stored = StoredBlocks::by_sequence(None, None, hashes(&blocks));
    stored.engine_hashes = Some(blocks.iter().map(|block| block << 32).collect());
    writer.apply(Event::Stored(stored.clone()), Tier::DEVICE, 0);
    let before = index.sizes().bytes;
    let key = QueryKey::SequenceHashes(hashes(&[5001, 10_001]));
    let ask = || find(&index, &key, &at(&[5000, 10_000]), Search::default());
    let expected = Found::from([(holder("a"), (10_001, 10_001))]);
    assert_eq!(ask(), expected);
    assert_eq!(index.sizes().bytes, before);
    let removed = RemovedBlocks::by_sequence(hashes(&[20_000 << 32]));
    writer.apply(Event::Removed(removed), Tier::DEVICE, 0);
    assert_eq!(ask(), expected);
    writer.clear();
    assert_eq!(ask(), Found::new());
    assert_eq!(index.sizes().bytes, 0);
    writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
    // Each table hashes with new random keys, so its size differs a little.
    assert!(index.sizes().bytes.abs_diff(before) < before / 100);
    assert_eq!(ask(), expected);
}
