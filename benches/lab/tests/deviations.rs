//! Examples in which a design deviates from its published form, or from exact answers.

use std::num::NonZeroUsize;

use hashbrown::HashSet;

use kvatlas_core::hash::SequenceHash;

use super::oracle::{blocks, content, name, query};
use crate::{
    Actor, ConcurrentRadixTree, Depth, Design, HolderNumber, JumpIndex, PrefixBlock, PrefixIndex, RadixTree,
    SeqEntry, SharedIndex, ThreadPool,
};

const HOLDER: HolderNumber = HolderNumber(7);
const A: u32 = 1;
const B: u32 = 2;
const X: u32 = 3;

fn store(index: &mut dyn PrefixIndex, holder: HolderNumber, path: &[u32]) {
    index.store(holder, None, &blocks(path));
}

fn remove(index: &mut dyn PrefixIndex, path: &[u32]) {
    index.remove(HOLDER, &[name(path).unwrap()]);
}

/// Returns the holder's number of matched blocks of `path`, according to the index.
fn depth(index: &dyn PrefixIndex, path: &[u32]) -> u32 {
    index.flush();
    let found = index.find_matches(&query(path));
    let of_holder = found.iter().find(|depth| depth.holder == HOLDER);
    of_holder.map_or(0, |depth| depth.matched_blocks)
}

/// Returns the depth that each design gives after the same change, in the order of [`Design::ALL`].
fn depths(change: impl Fn(&mut dyn PrefixIndex), path: &[u32]) -> Vec<(Design, u32)> {
    let depth_in = |design: Design| {
        let mut index = design.build(2).unwrap();
        change(&mut *index);
        (design, depth(&*index, path))
    };
    Design::ALL.into_iter().map(depth_in).collect()
}

fn expect(change: impl Fn(&mut dyn PrefixIndex), path: &[u32], truth: u32, nested: u32, inverted: u32) {
    for (design, depth) in depths(change, path) {
        let expected = match design {
            Design::NestedDictionary | Design::Actor => nested,
            Design::InvertedIndex => inverted,
            _ => truth,
        };
        assert_eq!(depth, expected, "{design:?}");
    }
}

#[test]
fn the_conflating_designs_match_contents_in_any_order() {
    expect(|index| store(index, HOLDER, &[A, B]), &[B, A], 0, 2, 2);
}

#[test]
fn the_conflating_designs_match_behind_another_prefix() {
    let two_prompts = |index: &mut dyn PrefixIndex| {
        store(index, HOLDER, &[A]);
        store(index, HOLDER, &[X, B]);
    };
    expect(two_prompts, &[A, B], 1, 2, 2);
}

#[test]
fn the_conflating_designs_match_one_block_again_and_again() {
    expect(|index| store(index, HOLDER, &[A]), &[A, A, A], 1, 3, 3);
}

#[test]
fn a_nested_dictionary_knows_only_the_last_name_of_a_content() {
    let twice = |index: &mut dyn PrefixIndex| store(index, HOLDER, &[A, B, A]);
    // The holder no longer has the first block. But the dictionary has forgotten the name of that block, so it removes
    // nothing.
    let without_first = |index: &mut dyn PrefixIndex| {
        twice(index);
        remove(index, &[A]);
    };
    expect(without_first, &[A, B], 0, 2, 0);
    // The holder no longer has the last block. The dictionary and the inverted index lose the first block, too.
    let without_last = |index: &mut dyn PrefixIndex| {
        twice(index);
        remove(index, &[A, B, A]);
    };
    expect(without_last, &[A, B, A], 2, 0, 0);
}

#[test]
fn the_conflating_designs_refuse_no_store() {
    let orphan = |index: &mut dyn PrefixIndex| {
        index.store(HOLDER, name(&[A]), &blocks(&[A, B])[1..]);
        store(index, HOLDER, &[A]);
    };
    expect(orphan, &[A, B], 1, 2, 2);
    for design in Design::ALL {
        let mut index = design.build(1).unwrap();
        orphan(&mut *index);
        index.flush();
        assert_eq!(index.refused_stores(), u64::from(design.is_exact()), "{design:?}");
    }
}

#[test]
fn what_lies_behind_a_hole_matches_again_when_it_is_filled() {
    // The published radix tree drops the children of a node with its last holder.
    let refilled = |index: &mut dyn PrefixIndex| {
        store(index, HOLDER, &[A, B, X]);
        remove(index, &[A, B]);
        index.store(HOLDER, name(&[A]), &blocks(&[A, B])[1..]);
    };
    expect(refilled, &[A, B, X], 3, 3, 3);
    let holed = |index: &mut dyn PrefixIndex| {
        store(index, HOLDER, &[A, B, X]);
        remove(index, &[A, B]);
    };
    expect(holed, &[A, B, X], 1, 1, 1);
}

#[test]
fn an_actor_may_own_an_index_that_cannot_leave_its_thread() {
    let mut actor = Actor::new(RadixTree::default).unwrap();
    store(&mut actor, HOLDER, &[A, B]);
    assert_eq!(depth(&actor, &[A, B, X]), 2);
    assert_eq!(depth(&actor, &[B]), 0);
}

#[test]
fn radix_trees_take_names_that_are_no_chain() {
    fn check(mut index: impl PrefixIndex) {
        // Names as an engine makes them: unrelated to the contents, and different for each holder.
        let named = |offset: u64| -> Vec<PrefixBlock> {
            let block = |(number, symbol): (u64, u32)| PrefixBlock {
                content: content(symbol),
                name: SequenceHash(offset + number),
            };
            (0..).zip([A, B, X]).map(block).collect()
        };
        index.store(HOLDER, None, &named(100)[..1]);
        index.store(HOLDER, Some(SequenceHash(100)), &named(100)[1..]);
        index.store(HolderNumber(8), None, &named(200)[..2]);
        index.flush();
        let mut found = index.find_matches(&query(&[A, B, X]));
        found.sort_unstable();
        let expected = [(HOLDER, 3), (HolderNumber(8), 2)].map(|(holder, matched_blocks)| Depth {
            holder,
            matched_blocks,
        });
        assert_eq!(found, expected);
        index.remove(HOLDER, &[SequenceHash(102)]);
        assert_eq!(depth(&index, &[A, B, X]), 2);
    }
    check(RadixTree::default());
    check(ThreadPool::new(ConcurrentRadixTree::default(), 2).unwrap());
}

/// Makes a positional index whose searches jump over three blocks at a time.
fn jumping() -> ThreadPool<JumpIndex> {
    ThreadPool::new(JumpIndex::new(NonZeroUsize::new(3).unwrap()), 1).unwrap()
}

#[test]
fn a_jump_compares_sets_and_not_counts() {
    let mut index = jumping();
    // Two holders have the block at position 0, and two have the block at position 3. But only one has both.
    store(&mut index, HOLDER, &[A, B]);
    store(&mut index, HolderNumber(8), &[A, B, X, A]);
    store(&mut index, HolderNumber(9), &[A, B, X, A]);
    index.remove(HolderNumber(9), &[name(&[A]).unwrap()]);
    assert_eq!(depth(&index, &[A, B, X, A]), 2);
    assert_eq!(index.find_matches(&query(&[A, B, X, A])).len(), 2);
}

#[test]
fn a_jump_does_not_believe_an_entry_of_another_prefix() {
    let mut index = jumping();
    // The entry of each position has only one block, with the content of the query. But it follows another prefix.
    store(&mut index, HOLDER, &[A]);
    store(&mut index, HOLDER, &[X, B, X, A, B, A, X]);
    assert_eq!(depth(&index, &[A, B, X, A, B, A, X]), 1);
    assert_eq!(depth(&index, &[X, B, X, A, B, A, X]), 7);
}

#[test]
fn a_jump_does_not_pass_over_a_hole() {
    let mut index = jumping();
    store(&mut index, HOLDER, &[A, B, X, A]);
    remove(&mut index, &[A, B]);
    assert_eq!(depth(&index, &[A, B, X, A]), 1);
}

#[test]
fn an_entry_has_a_map_only_while_prefixes_meet() {
    let [one, other] = [SequenceHash(1), SequenceHash(2)];
    let holders = HashSet::from_iter([HOLDER]);
    let mut entry = SeqEntry::vacant(one);
    entry.insert(one, HOLDER);
    assert_eq!(entry, SeqEntry::Single(one, holders.clone()));
    entry.insert(other, HOLDER);
    assert!(matches!(&entry, SeqEntry::Multi(names) if names.len() == 2));
    assert_eq!(
        (entry.holders(one), entry.holders(SequenceHash(3))),
        (Some(&holders), None)
    );
    assert!(!entry.remove(one, HOLDER));
    assert_eq!(entry, SeqEntry::Single(other, holders));
    assert!(!entry.remove(one, HOLDER) && entry.remove(other, HOLDER));
}

#[test]
fn prompts_of_any_depth_are_dropped_without_a_deep_stack() {
    let path = vec![A; 200_000];
    let all = blocks(&path);
    let mut tree = RadixTree::default();
    tree.store(HOLDER, None, &all);
    drop(tree);
    let tree = ConcurrentRadixTree::default();
    tree.store(HOLDER, None, &all);
    drop(tree);
}
