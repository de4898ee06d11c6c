//! Block names: an engine's names for a block, several names for one block, and how long each name keeps the block
//! held.

use crate::hash::{BlockHash, PositionalLineageHash, SequenceHash};
use crate::wire::{BlockContent, Event, HolderId, QueryKey, RemovedBlocks, StoredBlocks, Tier, WorkerName};

use super::api::{
    Applied, Hashing, HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, RejectReason, Search,
};
use super::world::stored_by_lineage;

const HOST: u8 = 1;
/// Maximum number of names of one block.
const NAMES_MAX: usize = 16;

fn tier(number: u8) -> Tier {
    Tier::new(number).unwrap()
}

fn new_holder() -> (PositionalIndexer, HolderWriter) {
    let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
    let worker = WorkerName::new("w").unwrap();
    let writer = index.register(&HolderId { worker, rank: 0 }).unwrap();
    (index, writer)
}

fn hashes(hashes: &[u64]) -> Vec<SequenceHash> {
    hashes.iter().copied().map(SequenceHash).collect()
}

/// Returns an event that stores `chain` from position 0 on, under the engine's own `names`.
fn stored(chain: &[u64], names: &[u64]) -> Event {
    let mut stored = StoredBlocks::by_sequence(None, None, hashes(chain));
    stored.engine_hashes = Some(names.to_vec());
    Event::Stored(stored)
}

fn removed(names: &[u64]) -> Event {
    Event::Removed(RemovedBlocks::by_sequence(hashes(names)))
}

fn matched(index: &PositionalIndexer, chain: &[u64]) -> u32 {
    let query = QueryKey::SequenceHashes(hashes(chain));
    let matches = index.find_matches(&query, Search::default()).unwrap();
    matches.holders().map(|found| found.matched_blocks).sum()
}

fn unknown(applied: Applied) -> u64 {
    applied.rejected(RejectReason::UnknownBlock)
}

#[test]
fn a_block_with_two_names_stays_until_both_are_removed() {
    let (index, mut writer) = new_holder();
    writer.apply(stored(&[1, 2], &[10, 20]), Tier::DEVICE, 0);
    writer.apply(stored(&[1, 2], &[11, 21]), Tier::DEVICE, 0);
    assert_eq!(writer.blocks(), 2);
    writer.apply(removed(&[20]), Tier::DEVICE, 0);
    assert_eq!(matched(&index, &[1, 2]), 2);
    // The name is gone with its removal.
    assert_eq!(unknown(writer.apply(removed(&[20]), Tier::DEVICE, 0)), 1);
    writer.apply(removed(&[21]), Tier::DEVICE, 0);
    assert_eq!(matched(&index, &[1, 2]), 1);
    assert_eq!(writer.blocks(), 1);
}

#[test]
fn each_name_has_its_own_tiers() {
    let (index, mut writer) = new_holder();
    writer.apply(stored(&[1], &[10]), Tier::DEVICE, 0);
    writer.apply(stored(&[1], &[10]), tier(HOST), 0);
    writer.apply(stored(&[1], &[11]), Tier::DEVICE, 0);
    // The name 11 does not hold the block on the host.
    assert_eq!(unknown(writer.apply(removed(&[11]), tier(HOST), 0)), 1);
    for (name, from) in [(10, HOST), (11, 0)] {
        assert_eq!(writer.apply(removed(&[name]), tier(from), 0).removed, 1);
        assert_eq!(matched(&index, &[1]), 1, "after {name}");
    }
    assert_eq!(writer.apply(removed(&[10]), Tier::DEVICE, 0).removed, 1);
    assert_eq!(matched(&index, &[1]), 0);
    assert_eq!(writer.blocks(), 0);
}

#[test]
fn a_removal_by_lineage_hash_takes_all_names() {
    let (index, mut writer) = new_holder();
    let key = PositionalLineageHash::new(SequenceHash(1), None, 0).unwrap();
    writer.apply(stored(&[1], &[10]), Tier::DEVICE, 0);
    writer.apply(stored(&[1], &[11]), tier(HOST), 0);
    let by_lineage = Event::Removed(RemovedBlocks {
        hashes: Vec::new(),
        lineage_hashes: vec![key],
    });
    writer.apply(by_lineage.clone(), Tier::DEVICE, 0);
    assert_eq!(matched(&index, &[1]), 1);
    assert_eq!(unknown(writer.apply(removed(&[10]), Tier::DEVICE, 0)), 1);
    writer.apply(by_lineage, tier(HOST), 0);
    assert_eq!(matched(&index, &[1]), 0);
    assert_eq!(unknown(writer.apply(removed(&[11]), tier(HOST), 0)), 1);
}

#[test]
fn a_name_that_moves_takes_its_block_along_only_if_it_was_the_last() {
    let (index, mut writer) = new_holder();
    writer.apply(stored(&[1], &[10]), Tier::DEVICE, 0);
    writer.apply(stored(&[1], &[11]), tier(HOST), 0);
    let applied = writer.apply(stored(&[2], &[10]), Tier::DEVICE, 0);
    assert_eq!(applied.rejected(RejectReason::Moved), 1);
    assert_eq!((matched(&index, &[1]), matched(&index, &[2])), (1, 1));
    // The other name holds the block in its own tier only.
    assert_eq!(unknown(writer.apply(removed(&[11]), Tier::DEVICE, 0)), 1);
    writer.apply(stored(&[2], &[11]), tier(HOST), 0);
    assert_eq!((matched(&index, &[1]), matched(&index, &[2])), (0, 1));
}

#[test]
fn a_first_name_takes_over_what_was_stored_without_one() {
    let (index, mut writer) = new_holder();
    let key = PositionalLineageHash::new(SequenceHash(1), None, 0).unwrap();
    writer.apply(stored_by_lineage(vec![key]), tier(HOST), 0);
    writer.apply(stored(&[1], &[10]), Tier::DEVICE, 0);
    for from in [HOST, 0] {
        assert_eq!(matched(&index, &[1]), 1);
        writer.apply(removed(&[10]), tier(from), 0);
    }
    assert_eq!(matched(&index, &[1]), 0);
}

#[test]
fn names_of_one_block_are_bounded() {
    let (index, mut writer) = new_holder();
    let names_max = NAMES_MAX as u64;
    for name in 0..names_max {
        assert_eq!(
            writer.apply(stored(&[1], &[100 + name]), Tier::DEVICE, 0).stored,
            1
        );
    }
    let applied = writer.apply(stored(&[1], &[99]), Tier::DEVICE, 0);
    assert_eq!((applied.stored, applied.rejected(RejectReason::Capacity)), (0, 1));
    // A name that the block has already does not count as one more name.
    assert_eq!(writer.apply(stored(&[1], &[100]), tier(HOST), 0).stored, 1);
    for name in 0..names_max {
        assert_eq!(matched(&index, &[1]), 1);
        writer.apply(removed(&[100 + name]), Tier::DEVICE, 0);
    }
    writer.apply(removed(&[100]), tier(HOST), 0);
    assert_eq!(matched(&index, &[1]), 0);
}

/// Checks an engine that hashes more than the contract does, and so has two names for the same content. In a namespace
/// that recomputes hashes, both names must stand for the same block.
#[test]
fn two_opaque_names_of_one_content_are_one_block() {
    let settings = NamespaceSettings {
        hashing: Hashing::Recompute,
        ..NamespaceSettings::default()
    };
    let index = PositionalIndexer::new(settings, IndexLimits::default());
    let worker = WorkerName::new("w").unwrap();
    let mut writer = index.register(&HolderId { worker, rank: 0 }).unwrap();
    let store = |names: &[u64], parent: Option<u64>, content: &[u64]| {
        let mut stored = StoredBlocks::by_sequence(parent.map(SequenceHash), None, hashes(names));
        stored.content = Some(BlockContent::BlockHashes(
            content.iter().copied().map(BlockHash).collect(),
        ));
        Event::Stored(stored)
    };
    let query = QueryKey::BlockHashes([5, 6, 7].map(BlockHash).to_vec());
    let depth = |index: &PositionalIndexer| -> u32 {
        let matches = index.find_matches(&query, Search::default()).unwrap();
        matches.holders().map(|found| found.matched_blocks).sum()
    };
    writer.apply(store(&[1001, 1002], None, &[5, 6]), Tier::DEVICE, 0);
    writer.apply(store(&[2001, 2002], None, &[5, 6]), Tier::DEVICE, 0);
    // A child can give either name as its parent.
    writer.apply(store(&[2003], Some(2002), &[7]), Tier::DEVICE, 0);
    assert_eq!((writer.blocks(), depth(&index)), (3, 3));
    writer.apply(removed(&[2001, 2002]), Tier::DEVICE, 0);
    assert_eq!(depth(&index), 3);
    writer.apply(removed(&[1002]), Tier::DEVICE, 0);
    assert_eq!((writer.blocks(), depth(&index)), (2, 1));
}
