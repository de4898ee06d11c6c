//! Steps of writers in the middle of a search: a hash that gets its second parent, a run number that another run gets,
//! and hashes that turn out to be foreign.

use std::cell::RefCell;
use std::rc::Rc;

use crate::hash::{BlockHash, Position, SequenceHash};
use crate::index::runs::{RosterEntry, Spot, Wanted};
use crate::wire::{BlockContent, Event, QueryKey, RemovedBlocks, Resumable, StoredBlocks, Tier};

use super::api::*;
use super::hook;
use super::plain::{holder, index, sequence};

fn stored(hashes: &[u64]) -> StoredBlocks {
    StoredBlocks::by_sequence(None, None, sequence(hashes))
}

fn removed(hashes: &[u64]) -> Event {
    Event::Removed(RemovedBlocks {
        hashes: sequence(hashes),
        ..RemovedBlocks::default()
    })
}

fn apply(holder: &mut HolderWriter, stored: StoredBlocks) {
    holder.apply(Event::Stored(stored), Tier::DEVICE, 0);
}

/// Returns how many leading blocks of the prompt each holder has, and how many of these a request can reuse.
fn depths(index: &PositionalIndexer, hashes: &[u64]) -> Vec<(String, u32, u32)> {
    let key = QueryKey::SequenceHashes(sequence(hashes));
    let matches = index.find_matches(&key, Search::default()).unwrap();
    let found = matches.holders().map(|found| {
        (
            found.holder.id.worker.to_string(),
            found.matched_blocks,
            found.usable_blocks,
        )
    });
    found.collect()
}

fn of(found: &[(String, u32, u32)], worker: &str) -> (u32, u32) {
    let own = found.iter().find(|(name, ..)| name == worker).unwrap();
    (own.1, own.2)
}

#[test]
fn a_hash_that_gets_its_second_parent_during_a_search_is_compared_like_all_others() {
    let mut has_run = 0;
    for points in 0..20 {
        let index = index();
        let (mut other, mut before) = (holder(&index, "other"), holder(&index, "before"));
        let late = Rc::new(RefCell::new(holder(&index, "late")));
        apply(&mut other, stored(&[10, 15]));
        apply(&mut before, stored(&[10, 11, 12, 13, 14]));
        apply(&mut late.borrow_mut(), stored(&[10]));
        let own = Rc::clone(&late);
        hook::set(points, move || {
            let event = StoredBlocks::by_sequence(Some(SequenceHash(10)), None, sequence(&[11, 99, 13, 14]));
            apply(&mut own.borrow_mut(), event);
        });
        let found = depths(&index, &[10, 11, 99, 13, 14]);
        has_run += usize::from(!hook::clear());
        assert_eq!(of(&found, "before").0, 2, "{points}");
        assert!([1, 5].contains(&of(&found, "late").0), "{points}: {found:?}");
    }
    assert!(has_run > 3);
}

#[test]
fn a_run_number_that_another_run_gets_during_a_search_hides_no_bars() {
    for (one, other) in (0..16).flat_map(|one| (0..10).map(move |other| (one, other))) {
        let index = index();
        let (mut long, mut barred, mut last) = (
            holder(&index, "long"),
            holder(&index, "barred"),
            holder(&index, "last"),
        );
        apply(&mut long, stored(&[1, 2, 9]));
        let marked = StoredBlocks {
            resumable: Resumable::from_flags([true, false]),
            ..stored(&[1, 2])
        };
        apply(&mut barred, marked);
        apply(&mut last, stored(&[1, 2, 3]));
        let (slot, inner) = (last.record().slot(), index.clone());
        hook::set(one, move || {
            // A turn in which `last` loses block 3. The step has ended, and the run is not cut off yet.
            let mut runs = inner.shared.runs.write();
            let first = runs.child(None, 0, Wanted::whole(1)).unwrap();
            let before = Spot { offset: 1, ..first };
            let spot = runs.child(Some(before), 2, Wanted::whole(3)).unwrap();
            runs.step(&[spot.run], |runs| {
                runs.set_entry(spot.run, slot, RosterEntry::default(), 0);
            });
            drop(runs);
            let inner = inner.clone();
            hook::set(other, move || {
                // The run is cut off. Another one gets its number, and is not published yet.
                let mut runs = inner.shared.runs.write();
                runs.trim(spot.run);
                let (new, _) = runs.put(None, 0, &[SequenceHash(77)], true).unwrap();
                assert_eq!(new.run, spot.run);
            });
        });
        let found = depths(&index, &[1, 2, 3]);
        hook::clear();
        assert_eq!(of(&found, "barred"), (2, 1), "{one} {other}");
    }
}

/// A foreign chain of blocks, as an engine with names of its own stores it. Its content shows that it is foreign.
fn foreign(blocks: u64) -> StoredBlocks {
    let hashes: Vec<u64> = (1..=blocks).collect();
    StoredBlocks {
        content: Some(BlockContent::BlockHashes((1..=blocks).map(BlockHash).collect())),
        engine_hashes: Some(hashes.iter().map(|hash| hash + 1_000_000).collect()),
        ..stored(&hashes)
    }
}

#[test]
fn foreign_hashes_are_known_before_their_blocks_are_seen() {
    for points in 0..6 {
        let index = index();
        let mut engine = holder(&index, "foreign");
        let (inner, seen) = (index.clone(), Rc::new(RefCell::new(Vec::new())));
        let out = Rc::clone(&seen);
        hook::set(points, move || {
            // Only the first block and the last one of the first run agree.
            let mut prompt: Vec<u64> = (1..=4032).collect();
            prompt[1..4031].iter_mut().for_each(|hash| *hash += 5_000_000);
            *out.borrow_mut() = depths(&inner, &prompt);
        });
        apply(&mut engine, foreign(6000));
        hook::clear();
        assert!(
            seen.borrow().iter().all(|(_, matched, _)| *matched <= 1),
            "{points}"
        );
    }
}

#[test]
fn bounds_do_not_trust_foreign_hashes() {
    let index = index();
    apply(&mut holder(&index, "foreign"), foreign(4));
    assert_eq!(of(&depths(&index, &[1, 22, 33, 4]), "foreign").0, 1);
    let positions = [0, 3].map(|at| Position::new(at).unwrap());
    let key = QueryKey::SequenceHashes(sequence(&[1, 4]));
    let chain = SparseChain::new(&key, &positions).unwrap();
    let matches = index.find_bounds(&chain, Search::default());
    let found = matches
        .holders()
        .map(|found| (found.matched_blocks, found.matched_blocks_max));
    assert_eq!(found.collect::<Vec<_>>(), [(1, 4)]);
}

#[test]
fn memory_of_runs_that_is_freed_and_made_again_during_a_search_changes_no_answer() {
    let mut has_run = 0;
    for points in 0..20 {
        let index = index();
        let (mut long, mut late) = (holder(&index, "long"), holder(&index, "late"));
        let mut filler = holder(&index, "filler");
        apply(&mut long, stored(&[1, 2, 9]));
        (1000..1080).for_each(|hash| apply(&mut filler, stored(&[hash])));
        apply(&mut late, stored(&[1, 2, 3]));
        let inner = index.clone();
        hook::set(points, move || {
            let before = inner.sizes().bytes;
            late.apply(removed(&[3]), Tier::DEVICE, 0);
            filler.apply(removed(&(1000..1080).collect::<Vec<_>>()), Tier::DEVICE, 0);
            // A run has at least 128 bytes, and one chunk is kept beside those with runs.
            assert!(inner.sizes().bytes + 40 * 128 < before);
            (2000..2080).for_each(|hash| apply(&mut filler, stored(&[hash])));
            let event = StoredBlocks::by_sequence(Some(SequenceHash(2)), None, sequence(&[3]));
            apply(&mut late, event);
        });
        let found = depths(&index, &[1, 2, 3]);
        has_run += usize::from(!hook::clear());
        assert_eq!(of(&found, "long").0, 2, "{points}");
        assert!([2, 3].contains(&of(&found, "late").0), "{points}: {found:?}");
        assert_eq!(of(&depths(&index, &[1, 2, 3]), "late").0, 3);
    }
    assert!(has_run > 3);
}
