//! Known prompts: prompts that an earlier query gave. A query for a known prompt gets the same answer as a query for
//! a new prompt, whatever is kept, evicted or written at the same time.

use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;

use crate::hash::{BlockHash, BlockSize, SequenceHash, sequence_hashes};
use crate::wire::{Event, HolderId, QueryKey, RemovedBlocks, StoredBlocks, Tier, WorkerName};

use super::api::{Capacity, HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, Search};
use super::world::{BLOCK_SIZE, Path, World};
use kvatlas_lab::random::{Random, mix};

const DEPTH_MAX: usize = 400;

fn new_index(blocks_max: u64) -> PositionalIndexer {
    let settings = NamespaceSettings {
        block_size: BlockSize::new(BLOCK_SIZE).unwrap(),
        ..NamespaceSettings::default()
    };
    let capacity = Capacity {
        blocks_max,
        bytes_max: u64::MAX,
    };
    let limits = IndexLimits {
        capacity,
        ..IndexLimits::default()
    };
    PositionalIndexer::new(settings, limits)
}

fn register(index: &PositionalIndexer, rank: u32) -> HolderWriter {
    let worker = WorkerName::new("w").unwrap();
    index.register(&HolderId { worker, rank }).unwrap()
}

fn hashes(chain: &[u64]) -> Vec<SequenceHash> {
    chain.iter().copied().map(SequenceHash).collect()
}

fn change(writer: &mut HolderWriter, path: &Path, random: &mut Random) {
    let depth = 1 + random.below(path.len());
    let event = if random.chance(70) {
        Event::Stored(StoredBlocks::by_sequence(
            None,
            None,
            hashes(&path.chain[..depth]),
        ))
    } else {
        Event::Removed(RemovedBlocks::by_sequence(hashes(&path.chain[depth - 1..])))
    };
    writer.apply(event, Tier::DEVICE, 0);
}

/// Returns the holders, each with the number of leading blocks that it holds.
fn found(index: &PositionalIndexer, key: &QueryKey) -> Vec<(u32, u32)> {
    let matches = index.find_matches(key, Search::default()).unwrap();
    let mut found: Vec<_> = matches
        .holders()
        .map(|found| (found.holder.id.rank, found.matched_blocks))
        .collect();
    found.sort_unstable();
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    /// Checks that answers for known prompts equal answers for new prompts, with and without eviction.
    #[test]
    fn known_prompts_are_answered_as_unknown_ones(
        seed: u64,
        paths in 1_usize..12,
        blocks_max in prop_oneof![Just(u64::MAX), 100_u64..2000],
    ) {
        let mut random = Random::new(seed);
        let world = World::new(&mut random, paths, DEPTH_MAX, 3);
        let index = new_index(blocks_max);
        let mut writers: Vec<HolderWriter> = (0..3).map(|rank| register(&index, rank)).collect();
        for _ in 0..120 {
            let path = &world.paths[random.below(paths)];
            change(&mut writers[random.below(3)], path, &mut random);
            // The prompt is known as a whole, or in part, or only up to the block where it branches off.
            let asked = if random.chance(70) { path.clone() } else { world.branch(&mut random, DEPTH_MAX) };
            let [tokens, blocks, sequence, _] = asked.queries();
            let expected = found(&index, &sequence);
            for key in [&tokens, &blocks, &tokens] {
                prop_assert_eq!(&found(&index, key), &expected);
            }
        }
        writers.into_iter().for_each(HolderWriter::retire);
        prop_assert_eq!(index.sizes().bytes, 0);
    }
}

/// Checks the fingerprints that a run keeps of prompts. Later the run has other blocks, and some of their sequence
/// hashes equal the prompt's block hashes. The old fingerprints must match no block.
#[test]
fn what_was_kept_of_a_run_says_nothing_of_other_blocks() {
    let blocks: Vec<BlockHash> = (0..200).map(|block| BlockHash(mix(block))).collect();
    let chain: Vec<u64> = sequence_hashes(blocks.iter().copied())
        .map(|hash| hash.0)
        .collect();
    let exchanged: Vec<u64> = blocks.iter().map(|block| block.0).collect();
    let swapped = QueryKey::BlockHashes(chain.iter().copied().map(BlockHash).collect());
    let keys = [
        QueryKey::BlockHashes(blocks),
        QueryKey::SequenceHashes(hashes(&chain)),
    ];
    let index = new_index(u64::MAX);
    let mut writer = register(&index, 0);
    let all = u32::try_from(chain.len()).unwrap();
    for agreed in [0, 1, 31, 32, 33, 64, 100, 128, 160, 200] {
        let other = chain[..agreed].iter().chain(&exchanged[agreed..]);
        let other: Vec<u64> = other.copied().collect();
        for (chain, expected) in [(&chain, all), (&other, u32::try_from(agreed.max(1)).unwrap())] {
            let stored = StoredBlocks::by_sequence(None, None, hashes(chain));
            writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
            for key in keys.iter().chain(&keys) {
                assert_eq!(found(&index, key), [(0, expected)], "{agreed}");
            }
            // The swapped prompt agrees with the run at position 0 only, where the sequence hash equals the block hash.
            assert!(found(&index, &swapped).iter().all(|found| found.1 <= 1));
            // The run stays, with the blocks that both have.
            let removed = RemovedBlocks::by_sequence(hashes(&chain[agreed..]));
            writer.apply(Event::Removed(removed), Tier::DEVICE, 0);
        }
    }
}

#[test]
fn readers_and_writers_share_what_is_known() {
    let mut random = Random::new(11);
    let world = World::new(&mut random, 40, DEPTH_MAX, 3);
    let index = new_index(u64::MAX);
    let mut still = register(&index, 0);
    for path in &world.paths {
        let stored = StoredBlocks::by_sequence(None, None, hashes(&path.chain));
        still.apply(Event::Stored(stored), Tier::DEVICE, 0);
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in 0..2 {
            let (index, world, is_over) = (&index, &world, &is_over);
            scope.spawn(move || {
                let mut random = Random::new(reader);
                while !is_over.load(Ordering::Relaxed) {
                    let path = &world.paths[random.below(world.paths.len())];
                    let key = &path.queries()[random.below(2)];
                    let all = u32::try_from(path.len()).unwrap();
                    let depths = found(index, key);
                    assert!(depths.contains(&(0, all)), "{depths:?} of {all}");
                }
            });
        }
        // Runs come and go meanwhile.
        let mut moving = register(&index, 1);
        for step in 0..400 {
            let base = 1_u64 << 40 | step << 20;
            let chain: Vec<u64> = (base..base + 4000).collect();
            let stored = StoredBlocks::by_sequence(None, None, hashes(&chain));
            moving.apply(Event::Stored(stored), Tier::DEVICE, 0);
            change(&mut moving, &world.paths[random.below(40)], &mut random);
            if step % 8 == 7 {
                moving.clear();
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
}
