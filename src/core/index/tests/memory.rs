//! Memory: what of it counts in an index's bytes, and what becomes of it when other blocks take the room.

use std::sync::Arc;

use crate::hash::{Position, PositionalLineageHash, SequenceHash};
use crate::wire::{Event, HolderId, RemovedBlocks, StoredBlocks, Tier, WorkerName};

use super::api::{Capacity, HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, TotalUsage};
use super::plain::{holder, index};
use super::world::stored_by_lineage;
use kvatlas_lab::random::mix;

fn bytes(bytes_max: u64) -> Capacity {
    Capacity {
        bytes_max,
        ..Capacity::UNBOUNDED
    }
}

/// Hashes of a chain's blocks from `from` up to `to`. Different chains have different hashes.
fn hashes(chain: u64, from: u64, to: u64) -> Vec<SequenceHash> {
    (from..to)
        .map(|block| SequenceHash(mix(chain << 32 | block)))
        .collect()
}

fn store(writer: &mut HolderWriter, parent: Option<SequenceHash>, hashes: Vec<SequenceHash>) {
    let stored = StoredBlocks::by_sequence(parent, None, hashes);
    writer.apply(Event::Stored(stored), Tier::DEVICE, 0);
}

#[test]
fn an_index_with_nothing_to_evict_leaves_the_total_to_the_others() {
    let bytes_max = 4 << 20;
    let total = Arc::new(TotalUsage::of(bytes(bytes_max)));
    let make = || PositionalIndexer::sharing(NamespaceSettings::default(), IndexLimits::default(), &total);
    let orphans = make();
    let mut writer = holder(&orphans, "orphans");
    for parent in 0..4000_u64 {
        let at = |number| SequenceHash(mix(parent << 8 | number));
        let position = Position::new(5).unwrap();
        let keys = (1..5).map(|number| PositionalLineageHash::at(position, at(0), at(number)));
        writer.apply(stored_by_lineage(keys.collect()), Tier::DEVICE, 0);
    }
    // The orphans take all that such blocks may take, and each of the other indexes takes less.
    let aside = orphans.sizes().bytes;
    assert!((1 << 20..2 << 20).contains(&aside), "{aside}");
    let others: Vec<_> = (0..8).map(|_| make()).collect();
    let mut writers: Vec<_> = others.iter().map(|index| holder(index, "a")).collect();
    for round in 0..7 {
        for (number, writer) in (0..).zip(&mut writers) {
            store(writer, None, hashes(number << 16 | round, 0, 4000));
        }
    }
    let used: u64 = others.iter().map(|index| index.sizes().bytes).sum();
    assert!(used + aside <= bytes_max + bytes_max / 16, "{used} {aside}");
    assert!(used > bytes_max / 2, "{used}");
}

#[test]
fn short_prompts_of_long_ago_leave_their_memory_to_long_ones() {
    let kept = [0, 60_000].map(|short| {
        let limits = IndexLimits {
            capacity: bytes(4 << 20),
            ..IndexLimits::default()
        };
        let index = PositionalIndexer::new(NamespaceSettings::default(), limits);
        let mut writer = holder(&index, "a");
        (0..short).for_each(|prompt| store(&mut writer, None, hashes(1 << 20 | prompt, 0, 1)));
        for chain in 0..150_u64 {
            for part in 0..10_u64 {
                let from = part * 200;
                let parent = from
                    .checked_sub(1)
                    .and_then(|last| hashes(chain, last, from).pop());
                store(&mut writer, parent, hashes(chain, from, from + 200));
            }
        }
        index.sizes().distinct_blocks
    });
    assert!(kept[1] > kept[0] / 4 * 3, "{kept:?}");
}

#[test]
fn the_holes_of_a_holder_count() {
    let (index, blocks, ranks) = (index(), 4000, 8);
    let chain = hashes(1, 0, blocks);
    let worker = || WorkerName::new("w").unwrap();
    let ids = (0..ranks).map(|rank| HolderId {
        worker: worker(),
        rank,
    });
    let mut writers: Vec<_> = ids.map(|id| index.register(&id).unwrap()).collect();
    writers
        .iter_mut()
        .for_each(|writer| store(writer, None, chain.clone()));
    let whole = index.sizes().bytes;
    let change = |writer: &mut HolderWriter| {
        let every_second = chain.iter().copied().step_by(2).collect();
        let removed = RemovedBlocks {
            hashes: every_second,
            ..RemovedBlocks::default()
        };
        writer.apply(Event::Removed(removed), Tier::DEVICE, 0);
    };
    writers.iter_mut().for_each(change);
    // Each interval has two ends and its attributes.
    let holes = u64::from(ranks) * blocks / 2 * 6;
    assert!(
        index.sizes().bytes >= whole + holes,
        "{whole} {:?}",
        index.sizes()
    );
    writers
        .iter_mut()
        .for_each(|writer| store(writer, None, chain.clone()));
    assert_eq!(index.sizes().bytes, whole);
}

#[test]
fn the_list_of_blocks_that_runs_branch_off_counts() {
    let (blocks, chain) = (1000, hashes(1, 0, 1000));
    let bytes_of = |is_child: bool| {
        let index = index();
        let mut writer = holder(&index, "a");
        store(&mut writer, None, chain.clone());
        let before = index.sizes().bytes;
        for (block, parent) in (0..blocks).zip(&chain) {
            store(
                &mut writer,
                Some(*parent).filter(|_| is_child),
                hashes(2, block, block + 1),
            );
        }
        index.sizes().bytes - before
    };
    let [children, others] = [true, false].map(bytes_of);
    assert!(children >= others + blocks * 8, "{children} {others}");
}
