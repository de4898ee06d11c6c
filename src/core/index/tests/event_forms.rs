//! Tests of the less usual forms of events that the contract allows. Each row of the contract's table of such forms has
//! one test.

use crate::hash::{BlockHash, BlockSize, Position, PositionalLineageHash, SequenceHash, lineage_hashes};
use crate::wire::{
    BlockContent, BlockNames, Event, HolderId, QueryKey, RemovedBlocks, Resumable, StoredBlocks, Tier,
    WorkerName,
};

use super::api::{
    Applied, Hashing, HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, RejectReason, Search,
};
use super::plain::sequence;
use super::world::stored_by_lineage;
use crate::names::UNPLACED_MAX;

fn holder(hashing: Hashing) -> (PositionalIndexer, HolderWriter) {
    let settings = NamespaceSettings {
        block_size: BlockSize::DEFAULT,
        hashing,
        ..NamespaceSettings::default()
    };
    let index = PositionalIndexer::new(settings, IndexLimits::default());
    let worker = WorkerName::new("w").unwrap();
    let writer = index.register(&HolderId { worker, rank: 0 }).unwrap();
    (index, writer)
}

/// Returns an event that stores `chain` after `parent`, under the engine's own `names` if they are given.
fn stored(parent: Option<u64>, position: Option<u64>, chain: &[u64], names: Option<&[u64]>) -> Event {
    Event::Stored(StoredBlocks {
        names: BlockNames::Sequence {
            parent: parent.map(SequenceHash),
            position: position.map(|position| Position::new(position).unwrap()),
            hashes: sequence(chain),
        },
        content: None,
        engine_hashes: names.map(<[u64]>::to_vec),
        resumable: Resumable::ALL,
    })
}

fn keys(chain: &[u64]) -> Vec<PositionalLineageHash> {
    lineage_hashes(&sequence(chain))
        .collect::<Result<_, _>>()
        .unwrap()
}

fn by_lineage(chain: &[u64]) -> Event {
    stored_by_lineage(keys(chain))
}

fn removed_keys(chain: &[u64], at: usize) -> Event {
    Event::Removed(RemovedBlocks {
        hashes: Vec::new(),
        lineage_hashes: vec![keys(chain)[at]],
    })
}

fn removed(hashes: &[u64]) -> Event {
    Event::Removed(RemovedBlocks::by_sequence(sequence(hashes)))
}

fn apply(writer: &mut HolderWriter, event: Event) -> Applied {
    writer.apply(event, Tier::DEVICE, 0)
}

fn matched(index: &PositionalIndexer, chain: &[u64]) -> u32 {
    let query = QueryKey::SequenceHashes(sequence(chain));
    let matches = index.find_matches(&query, Search::default()).unwrap();
    matches.holders().map(|found| found.matched_blocks).sum()
}

#[test]
fn what_waits_and_is_removed_by_its_lineage_hash_stays_away() {
    let (index, mut writer) = holder(Hashing::Engine);
    apply(&mut writer, stored(Some(1), None, &[2, 3, 4], None));
    apply(&mut writer, removed_keys(&[1, 2, 3, 4], 2));
    apply(&mut writer, stored(None, None, &[1], None));
    assert_eq!(matched(&index, &[1, 2, 3, 4]), 2);
    // The removal does not affect events that begin to wait only now.
    apply(&mut writer, stored(Some(77), None, &[78], None));
    apply(&mut writer, stored(Some(2), None, &[3], None));
    assert_eq!(matched(&index, &[1, 2, 3, 4]), 4);
}

#[test]
fn what_waits_under_another_name_and_is_removed_by_its_sequence_hash_stays_away() {
    let (index, mut writer) = holder(Hashing::Engine);
    apply(&mut writer, stored(Some(10), None, &[2, 3], Some(&[20, 30])));
    apply(&mut writer, removed(&[3]));
    apply(&mut writer, stored(None, None, &[1], Some(&[10])));
    assert_eq!(matched(&index, &[1, 2, 3]), 2);
}

#[test]
fn a_removal_from_another_tier_leaves_what_waits_alone() {
    let (index, mut writer) = holder(Hashing::Engine);
    apply(&mut writer, stored(Some(1), None, &[2], None));
    writer.apply(removed_keys(&[1, 2], 1), Tier::new(1).unwrap(), 0);
    apply(&mut writer, stored(None, None, &[1], None));
    assert_eq!(matched(&index, &[1, 2]), 2);
}

#[test]
fn a_parent_is_found_by_its_sequence_hash_whatever_it_is_called() {
    // Three shapes: names of its own in one tier; two tiers; stored by lineage hashes.
    for shape in 0..3 {
        let (index, mut writer) = holder(Hashing::Engine);
        match shape {
            0 => {
                apply(&mut writer, stored(None, None, &[1, 2], Some(&[10, 20])));
            }
            1 => {
                apply(&mut writer, stored(None, None, &[1, 2], Some(&[10, 20])));
                writer.apply(stored(None, None, &[1], Some(&[11])), Tier::new(1).unwrap(), 0);
            }
            _ => {
                apply(&mut writer, by_lineage(&[1, 2]));
            }
        }
        let applied = apply(&mut writer, stored(Some(2), None, &[3], Some(&[30])));
        assert_eq!((applied.parked, applied.stored), (0, 1), "shape {shape}");
        assert_eq!(matched(&index, &[1, 2, 3]), 3, "shape {shape}");
    }
}

#[test]
fn what_waits_for_a_sequence_hash_comes_with_a_block_of_another_name() {
    let (index, mut writer) = holder(Hashing::Engine);
    assert_eq!(apply(&mut writer, stored(Some(2), None, &[3], None)).parked, 1);
    apply(&mut writer, stored(None, None, &[1, 2], Some(&[10, 20])));
    assert_eq!(matched(&index, &[1, 2, 3]), 3);
    assert_eq!(index.sizes().parked_events, 0);
}

#[test]
fn a_recomputed_chain_goes_on_behind_a_parent_named_by_its_sequence_hash() {
    let (index, mut writer) = holder(Hashing::Recompute);
    let content = |blocks: &[u64], parent: Option<u64>, names: &[u64]| {
        let mut event = stored(parent, None, names, None);
        if let Event::Stored(stored) = &mut event {
            let hashes = blocks.iter().copied().map(BlockHash).collect();
            stored.content = Some(BlockContent::BlockHashes(hashes));
        }
        event
    };
    apply(&mut writer, content(&[1, 2], None, &[10, 20]));
    let blocks = [1, 2, 3].map(BlockHash);
    let chain: Vec<SequenceHash> = crate::hash::sequence_hashes(blocks).collect();
    let applied = apply(&mut writer, content(&[3], Some(chain[1].as_u64()), &[30]));
    assert_eq!(applied.stored, 1);
    let query = QueryKey::SequenceHashes(chain);
    let matches = index.find_matches(&query, Search::default()).unwrap();
    assert_eq!(matches.holders().next().unwrap().matched_blocks, 3);
}

#[test]
fn a_removal_by_sequence_hash_takes_a_block_under_all_its_names() {
    for has_two_names in [false, true] {
        let (index, mut writer) = holder(Hashing::Engine);
        apply(&mut writer, stored(None, None, &[1, 2, 3], Some(&[10, 20, 30])));
        if has_two_names {
            apply(&mut writer, stored(Some(10), None, &[2], Some(&[21])));
        }
        let applied = apply(&mut writer, removed(&[2]));
        assert_eq!(
            (applied.removed, applied.rejected(RejectReason::UnknownBlock)),
            (1, 0)
        );
        assert_eq!(matched(&index, &[1, 2, 3]), 1);
        assert_eq!(writer.blocks(), 2);
        // A block after the hole is removed, too.
        assert_eq!(apply(&mut writer, removed(&[3])).removed, 1);
        apply(&mut writer, stored(Some(10), None, &[2], Some(&[20])));
        assert_eq!(matched(&index, &[1, 2, 3]), 2);
    }
}

#[test]
fn a_block_stored_by_its_lineage_hash_is_removed_by_its_sequence_hash() {
    let (index, mut writer) = holder(Hashing::Engine);
    apply(&mut writer, by_lineage(&[1, 2]));
    assert_eq!(apply(&mut writer, removed(&[2])).removed, 1);
    assert_eq!(matched(&index, &[1, 2]), 1);
}

#[test]
fn a_position_with_an_absent_parent_is_taken_at_its_word_until_that_is_contradicted() {
    let (index, mut writer) = holder(Hashing::Engine);
    // The parent is given by its sequence hash. The child is found as soon as the parent arrives.
    apply(&mut writer, stored(Some(2), Some(2), &[3], Some(&[30])));
    let applied = apply(&mut writer, stored(None, None, &[1, 2], Some(&[10, 20])));
    assert_eq!(applied.rejected(RejectReason::AmbiguousParent), 0);
    assert_eq!(matched(&index, &[1, 2, 3]), 3);
    // The event gives its parent by the engine's name, where the sequence hash is expected. That is noticed as soon as
    // a block of that name arrives.
    apply(&mut writer, stored(Some(50), Some(2), &[6], Some(&[60])));
    let applied = apply(&mut writer, stored(None, None, &[4, 5], Some(&[40, 50])));
    assert_eq!(applied.rejected(RejectReason::AmbiguousParent), 1);
}

#[test]
fn a_child_without_names_may_have_meant_its_parents_name() {
    // After a dump and restore, the name is noticed, too, because an orphan itself contains the parent that its event
    // gave.
    for is_restored in [false, true] {
        let (index, mut writer) = holder(Hashing::Engine);
        apply(&mut writer, stored(Some(20), Some(2), &[3], None));
        let (restored_index, mut restored) = holder(Hashing::Engine);
        for (tier, event) in writer.dump_events(10) {
            restored.apply(event, tier, 0);
        }
        let (index, mut writer) = match is_restored {
            true => (restored_index, restored),
            false => (index, writer),
        };
        let applied = apply(&mut writer, stored(None, None, &[1, 2], Some(&[10, 20])));
        assert_eq!(applied.rejected(RejectReason::AmbiguousParent), 1);
        // The orphan follows another block than the new block with that name.
        assert_eq!(matched(&index, &[1, 2, 3]), 2);
        assert!(RejectReason::AmbiguousParent.doubt().is_some());
    }
}

#[test]
fn a_removed_name_of_an_event_that_waits_is_no_hash() {
    for twice in [false, true] {
        let (index, mut writer) = holder(Hashing::Engine);
        apply(&mut writer, stored(None, None, &[1, 2], Some(&[10, 20])));
        // Another event gives the second block by its hash as its name, after a parent that has not arrived.
        apply(&mut writer, stored(Some(77), None, &[2, 3], None));
        let removed = removed(if twice { &[2, 2] } else { &[2] });
        let applied = apply(&mut writer, removed);
        assert_eq!(applied.removed, 1);
        assert_eq!(applied.rejected(RejectReason::UnknownBlock), u64::from(twice));
        // The block is still held under its first name.
        assert_eq!(matched(&index, &[1, 2]), 2);
    }
}

#[test]
fn one_hash_under_two_parents_leaves_doubt() {
    let (index, mut writer) = holder(Hashing::Engine);
    apply(&mut writer, stored(None, None, &[1], None));
    apply(&mut writer, stored(None, None, &[2], None));
    apply(&mut writer, stored(Some(1), None, &[3], None));
    let applied = apply(&mut writer, stored(Some(2), None, &[3], None));
    assert_eq!(applied.rejected(RejectReason::Moved), 1);
    assert!(RejectReason::Moved.doubt().is_some());
    assert_eq!((matched(&index, &[1, 3]), matched(&index, &[2, 3])), (1, 2));
    // If each block has a name of its own, the holder has both blocks.
    let (index, mut writer) = holder(Hashing::Engine);
    apply(&mut writer, stored(None, None, &[1, 3], Some(&[10, 13])));
    let applied = apply(&mut writer, stored(None, None, &[2, 3], Some(&[20, 23])));
    assert_eq!(applied.rejected(RejectReason::Moved), 0);
    assert_eq!((matched(&index, &[1, 3]), matched(&index, &[2, 3])), (2, 2));
    // Two sequence hashes with the same lineage hash leave doubt, too.
    let (_, mut writer) = holder(Hashing::Engine);
    apply(&mut writer, stored(Some(5), Some(300), &[7], Some(&[70])));
    let applied = apply(
        &mut writer,
        stored(Some(5), Some(300), &[7 | 1 << 63], Some(&[71])),
    );
    assert_eq!(applied.rejected(RejectReason::Moved), 1);
}

#[test]
fn removals_are_kept_in_mind_within_bounds() {
    let (index, mut writer) = holder(Hashing::Engine);
    apply(&mut writer, stored(Some(1), None, &[2], None));
    let many: Vec<u64> = (10..11 + UNPLACED_MAX as u64).collect();
    let applied = apply(&mut writer, removed(&many));
    // Not all removals could be remembered. So the event that waited was dropped: its block may have been removed.
    assert_eq!(applied.rejected(RejectReason::ParkingFull), 1);
    assert_eq!(index.sizes().parked_events, 0);
}
