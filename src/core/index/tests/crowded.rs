//! Hashes that very many blocks have: more than the table from hashes to places keeps places for. What the table does not
//! find must neither stay for ever nor be called exact.

use crate::hash::{Position, PositionalLineageHash, SequenceHash};
use crate::wire::{Event, QueryKey, RemovedBlocks, ResumableBlocks, StoredBlocks, Tier};

use super::api::*;
use super::plain::{holder, index, sequence};
use super::world::stored_by_lineage;

/// Hash that very many blocks have.
const H: u64 = 0x1234_5678_9abc_def0;

/// Number of blocks with one hash that the table finds.
const PLACES: u64 = 16;

fn stored(hashes: &[u64]) -> Event {
    Event::Stored(StoredBlocks::by_sequence(None, None, sequence(hashes)))
}

fn removed(hashes: &[u64]) -> Event {
    Event::Removed(RemovedBlocks::by_sequence(sequence(hashes)))
}

fn apply(holder: &mut HolderWriter, event: Event) -> Applied {
    holder.apply(event, Tier::DEVICE, 0)
}

/// A holder with [`PLACES`] blocks that have the hash [`H`], each after another block. The engine has names of its own for
/// them, from 100 on: two for each path.
fn crowd(index: &PositionalIndexer) -> HolderWriter {
    let mut crowd = holder(index, "crowd");
    (0..PLACES).for_each(|path| store_path(&mut crowd, path));
    crowd
}

/// Stores a path of two blocks. The second one has the hash [`H`].
fn store_path(holder: &mut HolderWriter, path: u64) {
    let event = StoredBlocks {
        engine_hashes: Some(vec![100 + 2 * path, 101 + 2 * path]),
        ..StoredBlocks::by_sequence(None, None, sequence(&[0x1000 + path, H]))
    };
    assert!(!apply(holder, Event::Stored(event)).is_short());
}

/// Returns how many leading blocks of the prompt each holder has.
fn depths(index: &PositionalIndexer, hashes: &[u64]) -> Vec<(String, u32)> {
    let key = QueryKey::SequenceHashes(sequence(hashes));
    let matches = index.find_matches(&key, Search::default()).unwrap();
    let found = matches.holders();
    let mut found: Vec<_> = found
        .map(|found| (found.holder.id.worker.to_string(), found.matched_blocks))
        .collect();
    found.sort();
    found
}

/// Returns the bounds on the leading blocks of each holder, from the hashes at some positions.
fn bounds(index: &PositionalIndexer, hashes: &[u64], positions: &[u64]) -> Vec<(String, u32, u32)> {
    let key = QueryKey::SequenceHashes(sequence(hashes));
    let positions: Vec<_> = positions.iter().map(|at| Position::new(*at).unwrap()).collect();
    let chain = SparseChain::new(&key, &positions).unwrap();
    let matches = index.find_bounds(&chain, Search::default());
    let found = matches.holders().map(|found| {
        (
            found.holder.id.worker.to_string(),
            found.matched_blocks,
            found.matched_blocks_max,
        )
    });
    let mut found: Vec<_> = found.collect();
    found.sort();
    found
}

fn key(position: u64, parent: u64, own: u64) -> PositionalLineageHash {
    PositionalLineageHash::at(
        Position::new(position).unwrap(),
        SequenceHash(parent),
        SequenceHash(own),
    )
}

fn who(found: &[(&str, u32)]) -> Vec<(String, u32)> {
    found
        .iter()
        .map(|(name, blocks)| ((*name).to_owned(), *blocks))
        .collect()
}

#[test]
fn a_block_that_found_no_place_is_found_once_others_have_gone() {
    let index = index();
    let mut crowd = crowd(&index);
    let (mut one, mut other) = (holder(&index, "one"), holder(&index, "other"));
    apply(&mut one, stored(&[5, H, 6]));
    apply(&mut crowd, Event::Cleared);
    assert_eq!(index.sizes().chain_conflicts, 0);
    apply(&mut other, stored(&[5, H, 6]));
    let after = StoredBlocks::by_sequence(Some(SequenceHash(H)), None, sequence(&[9]));
    assert_eq!(apply(&mut other, Event::Stored(after)).parked, 0);
    assert_eq!(bounds(&index, &[5, H], &[0, 1]).len(), 2);
    assert_eq!(apply(&mut other, removed(&[6, 9, H])).removed, 3);
    assert_eq!(depths(&index, &[5, H]), who(&[("one", 2), ("other", 1)]));
    assert_eq!(apply(&mut one, removed(&[6, H])).removed, 2);
    assert_eq!(depths(&index, &[5, H]), who(&[("one", 1), ("other", 1)]));
}

#[test]
fn blocks_without_a_place_count_as_conflicts_of_the_chain() {
    let index = index();
    let mut crowd = crowd(&index);
    let (mut one, mut other) = (holder(&index, "one"), holder(&index, "other"));
    apply(&mut one, stored(&[1, 2, H]));
    apply(&mut other, stored(&[1, 3, H]));
    let right = who(&[("one", 1), ("other", 3)]);
    assert_eq!(
        (depths(&index, &[1, 3, H]), index.sizes().chain_conflicts),
        (right.clone(), PLACES + 1)
    );
    apply(&mut crowd, Event::Cleared);
    assert_eq!(
        (depths(&index, &[1, 3, H]), index.sizes().chain_conflicts),
        (right, 1)
    );
    apply(&mut one, Event::Cleared);
    assert_eq!(index.sizes().chain_conflicts, 0);
    apply(&mut other, Event::Cleared);
    assert_eq!(index.sizes().chain_conflicts, 0);
}

#[test]
fn bounds_hold_while_blocks_have_no_place_and_afterwards() {
    let index = index();
    let mut crowd = crowd(&index);
    let mut one = holder(&index, "one");
    apply(&mut one, stored(&[H, 5, 6]));
    for path in 0..3 {
        let found = bounds(&index, &[H, 6], &[0, 2]);
        let (_, least, most) = found.iter().find(|(name, ..)| name == "one").unwrap();
        assert!(*least <= 3 && *most == 3, "{path}: {found:?}");
        apply(&mut crowd, removed(&[101 + 2 * path]));
    }
    // All paths of one holder end with the same block.
    let mut many = holder(&index, "many");
    (100..120).for_each(|path| store_path(&mut many, path));
    (100..116).for_each(|path| {
        assert_eq!(apply(&mut many, removed(&[101 + 2 * path])).removed, 1);
    });
    let found = bounds(&index, &[0x1000 + 119, H], &[0, 1]);
    let (_, least, most) = found.iter().find(|(name, ..)| name == "many").unwrap();
    assert!(*least <= 2 && *most == 2, "{found:?}");
}

#[test]
fn a_hash_that_may_miss_blocks_leaves_the_holder_in_doubt() {
    let index = index();
    let _crowd = crowd(&index);
    // A removal by the hash of twenty blocks reaches only some of them.
    let mut many = holder(&index, "many");
    (100..120).for_each(|path| store_path(&mut many, path));
    assert!(apply(&mut many, removed(&[H])).is_short());
    let marks = ResumableBlocks {
        resumable: false,
        hashes: sequence(&[H]),
        lineage_hashes: Vec::new(),
    };
    assert!(apply(&mut many, Event::Resumable(marks)).is_short());
    // A block without a name is found by its hash only, and so is the parent of a block that is stored alone.
    let mut nameless = holder(&index, "nameless");
    let first = stored_by_lineage(vec![key(0, 0, 5), key(1, 5, H)]);
    assert!(apply(&mut nameless, first).is_short());
    let mut child = holder(&index, "child");
    assert!(!apply(&mut child, stored(&[5, H])).is_short());
    assert!(apply(&mut child, stored_by_lineage(vec![key(2, H, 6)])).is_short());
    let by_key = RemovedBlocks {
        hashes: Vec::new(),
        lineage_hashes: vec![key(1, 5, H)],
    };
    assert!(apply(&mut child, Event::Removed(by_key)).is_short());
}

#[test]
fn more_orphans_of_one_hash_than_are_looked_at_leave_the_holder_in_doubt() {
    let index = index();
    let mut orphans = holder(&index, "orphans");
    let stored = (0..65).map(|parent| key(1, 0x1000 + parent, H)).collect();
    assert!(!apply(&mut orphans, stored_by_lineage(stored)).is_short());
    assert!(apply(&mut orphans, removed(&[H])).is_short());
}
