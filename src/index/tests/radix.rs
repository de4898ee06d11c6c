//! What is different where an index is a radix tree.

use std::sync::Arc;

use crate::hash::{BlockSize, PositionalLineageHash, SequenceHash, lineage_hashes};
use crate::wire::{Event, HolderId, QueryKey, RemovedBlocks, StoredBlocks, Tier, WorkerName};

use super::super::{
    Capacity, HolderWriter, IndexKind, IndexLimits, NamespaceSettings, PositionalIndexer, QueryChain, Search,
    TotalUsage,
};

const UNUSED: Capacity = Capacity {
    blocks_max: 10,
    bytes_max: 1000,
};

fn settings() -> NamespaceSettings {
    NamespaceSettings {
        index: IndexKind::Radix,
        ..NamespaceSettings::default()
    }
}

fn new_index() -> PositionalIndexer {
    PositionalIndexer::new(settings(), IndexLimits::default())
}

fn register(index: &PositionalIndexer, worker: &str, rank: u32) -> HolderWriter {
    let worker = WorkerName::new(worker).unwrap();
    index.register(&HolderId { worker, rank }).unwrap()
}

fn hashes(hashes: impl IntoIterator<Item = u64>) -> Vec<SequenceHash> {
    hashes.into_iter().map(SequenceHash).collect()
}

fn store(writer: &mut HolderWriter, blocks: impl IntoIterator<Item = u64>) {
    let stored = StoredBlocks::by_sequence(None, None, hashes(blocks));
    writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
}

fn remove(writer: &mut HolderWriter, blocks: impl IntoIterator<Item = u64>) {
    let removed = RemovedBlocks::by_sequence(hashes(blocks));
    writer.apply(Event::Removed(removed), Tier::DEVICE, 0);
}

fn ask(index: &PositionalIndexer, key: &QueryKey) -> Vec<(String, u32)> {
    let matches = index.find_matches(key, Search::default()).unwrap();
    let found = matches
        .holders()
        .map(|found| (found.holder.id.worker.to_string(), found.matched_blocks));
    let mut found: Vec<_> = found.collect();
    found.sort_unstable();
    found
}

fn found(expected: &[(&str, u32)]) -> Vec<(String, u32)> {
    let own = |(worker, blocks): &(&str, u32)| ((*worker).to_owned(), *blocks);
    expected.iter().map(own).collect()
}

#[test]
fn hashes_that_are_no_chain_are_told_apart() {
    let index = new_index();
    let (mut one, mut other) = (register(&index, "a", 0), register(&index, "b", 0));
    // The third block has one hash behind two prefixes.
    store(&mut one, [1, 2, 3, 4]);
    store(&mut other, [1, 9, 3, 4]);
    let ask = |blocks: [u64; 4]| ask(&index, &QueryKey::SequenceHashes(hashes(blocks)));
    assert_eq!(ask([1, 2, 3, 4]), found(&[("a", 4), ("b", 1)]));
    assert_eq!(ask([1, 9, 3, 4]), found(&[("a", 1), ("b", 4)]));
    assert_eq!(ask([1, 9, 3, 5]), found(&[("a", 1), ("b", 3)]));
    assert_eq!(ask([2, 9, 3, 4]), []);
    assert_eq!(index.sizes().distinct_blocks, 7);
    assert_eq!(index.sizes().chain_conflicts, 0, "it does not matter");
}

#[test]
fn lineage_hashes_are_followed_as_far_as_they_follow_one_another() {
    let index = new_index();
    let mut writer = register(&index, "a", 0);
    store(&mut writer, [1, 2, 3]);
    store(&mut writer, [5, 6, 7]);
    let keys = |blocks: [u64; 3]| -> Vec<PositionalLineageHash> {
        lineage_hashes(&hashes(blocks)).collect::<Result<_, _>>().unwrap()
    };
    let (one, other) = (keys([1, 2, 3]), keys([5, 6, 7]));
    assert_eq!(
        ask(&index, &QueryKey::LineageHashes(one.clone())),
        found(&[("a", 3)])
    );
    let mixed = vec![one[0], one[1], other[2]];
    assert_eq!(ask(&index, &QueryKey::LineageHashes(mixed)), found(&[("a", 2)]));
    let shifted = one[1..].to_vec();
    assert_eq!(ask(&index, &QueryKey::LineageHashes(shifted)), []);
}

#[test]
fn explaining_counts_the_holders_of_a_block() {
    let index = new_index();
    let mut writers: Vec<_> = (0..20).map(|rank| register(&index, "a", rank)).collect();
    for (writer, depth) in writers.iter_mut().zip(1..) {
        store(writer, 1..=depth);
    }
    let key = QueryKey::SequenceHashes(hashes(1..=21));
    let mut chain = QueryChain::new(&key, BlockSize::DEFAULT).unwrap();
    let expected: Vec<PositionalLineageHash> =
        lineage_hashes(&hashes(1..=21)).collect::<Result<_, _>>().unwrap();
    for (position, key) in expected.into_iter().enumerate() {
        let holders = 20_usize.saturating_sub(position);
        assert_eq!(index.block_at(&mut chain, position), Some((key, holders)));
    }
    assert_eq!(index.block_at(&mut chain, 21), None);
}

#[test]
fn memory_is_given_back() {
    let index = new_index();
    let mut writers: Vec<_> = (0..64).map(|rank| register(&index, "a", rank)).collect();
    assert_eq!(index.sizes().bytes, 0);
    for writer in &mut writers {
        for first in 0..200 {
            store(writer, [first, first + 1000, first + 2000]);
        }
    }
    let full = index.sizes();
    assert_eq!(full.distinct_blocks, 600);
    let per_block = full.bytes / full.distinct_blocks;
    assert!((80..400).contains(&per_block), "{per_block} bytes a block");
    for writer in &mut writers {
        remove(
            writer,
            (2..200).flat_map(|first| [first, first + 1000, first + 2000]),
        );
    }
    let few = index.sizes();
    assert_eq!(few.distinct_blocks, 6);
    assert!(few.bytes < 6 * 1000, "{} bytes for six blocks", few.bytes);
    for writer in &mut writers {
        remove(writer, [0, 1, 1000, 1001]);
        // What is behind the holes is no longer shared.
        assert_eq!(writer.blocks(), 2);
    }
    assert_eq!((index.sizes().distinct_blocks, index.sizes().bytes), (0, 0));
}

#[test]
fn no_capacity_bounds_it_and_it_counts_in_no_total() {
    let total = Arc::new(TotalUsage::of(UNUSED));
    let limits = IndexLimits {
        capacity: UNUSED,
        ..IndexLimits::default()
    };
    let index = PositionalIndexer::sharing(settings(), limits, &total);
    let beside = PositionalIndexer::sharing(NamespaceSettings::default(), IndexLimits::default(), &total);
    let used = total.usage().blocks();
    let mut writer = register(&index, "a", 0);
    store(&mut writer, 0..100);
    assert_eq!(total.usage().blocks(), used);
    assert_eq!(index.sizes().evicted_blocks, 0);
    assert_eq!(
        ask(&index, &QueryKey::SequenceHashes(hashes(0..100))),
        found(&[("a", 100)])
    );
    assert!(writer.status().own_reasons().is_empty());
    drop(beside);
}

#[test]
fn a_deep_tree_is_dropped_without_a_deep_stack() {
    let index = new_index();
    let (mut one, mut other) = (register(&index, "a", 0), register(&index, "b", 0));
    store(&mut one, 0..200_000);
    store(&mut other, 0..100_000);
    drop(index);
    // The holders' own blocks go with the tree, one before it and one after.
    drop(one);
    drop(other);
}
