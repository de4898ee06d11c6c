//! Tests of queries that run at the same time as the threads of a pool.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::random::Random;
use kvatlas_core::wire::WorkerName;

use super::oracle::{Oracle, Prefix, blocks, name, query};
use crate::{
    ConcurrentRadixTree, HolderNumber, JumpIndex, LineageIndex, PrefixIndex, SharedIndex, ThreadPool,
};

const HOLDERS: u32 = 12;
const CHANGES: usize = 1500;
/// Number of blocks that every holder keeps during the test.
const KEPT: usize = 40;
const DEPTH: usize = 100;

/// Returns a prompt whose first [`KEPT`] blocks are the same for every `tail`. Some of the later blocks depend on
/// `tail`.
fn path(tail: u32) -> Prefix {
    let kept = std::iter::repeat_n(1, KEPT);
    kept.chain((KEPT..DEPTH).map(|position| 2 + u32::from(position % 7 == 0) * tail))
        .collect()
}

/// Checks answers while blocks change. Writers change the blocks of each holder after the first [`KEPT`] blocks, and
/// readers send queries at the same time. In each answer, every holder must have at least the kept blocks, and at most
/// the blocks that a prompt has. At the end every answer must equal the oracle's answer. The index must be empty after
/// all holders are cleared.
fn tails_come_and_go(index: impl SharedIndex) {
    let mut pool = ThreadPool::new(index, 3).unwrap();
    let mut oracle = Oracle::default();
    for number in 0..HOLDERS {
        oracle.store(HolderNumber(number), &path(0)[..KEPT], 0);
        pool.store(HolderNumber(number), None, &blocks(&path(0)[..KEPT]));
    }
    pool.flush();
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        for reader in 0..2 {
            let (index, is_done) = (pool.index(), &is_done);
            scope.spawn(move || read(&*index, is_done, reader));
        }
        let mut random = Random::new(11);
        for _ in 0..CHANGES {
            change(&mut pool, &mut oracle, &mut random);
        }
        pool.flush();
        is_done.store(true, Ordering::Relaxed);
    });
    for tail in 0..3 {
        let mut found = pool.find_matches(&query(&path(tail)));
        found.sort_unstable();
        assert_eq!(found, oracle.matches(&path(tail)));
    }
    for number in 0..HOLDERS {
        pool.clear(HolderNumber(number));
    }
    pool.flush();
    assert_eq!(pool.sizes(), crate::PrefixIndexSize::default());
}

fn change<I: SharedIndex>(pool: &mut ThreadPool<I>, oracle: &mut Oracle, random: &mut Random) {
    let holder = HolderNumber(u32::try_from(random.below(HOLDERS as usize)).unwrap());
    let path = path(u32::try_from(random.below(3)).unwrap());
    let all = blocks(&path);
    if random.chance(50) {
        let end = KEPT + random.below(DEPTH - KEPT) + 1;
        oracle.store(holder, &path[..end], KEPT);
        pool.store(holder, name(&path[..KEPT]), &all[KEPT..end]);
    } else {
        let from = KEPT + random.below(DEPTH - KEPT);
        let removed: Vec<Prefix> = (from..DEPTH).map(|index| path[..=index].to_vec()).collect();
        oracle.remove(holder, &removed);
        let names: Vec<_> = all[from..].iter().rev().map(|block| block.name).collect();
        pool.remove(holder, &names);
    }
}

fn read(index: &impl SharedIndex, is_done: &AtomicBool, reader: u32) {
    let queries: Vec<_> = (0..3).map(|tail| query(&path(tail))).collect();
    let mut next = reader as usize;
    while !is_done.load(Ordering::Relaxed) {
        next = (next + 1) % queries.len();
        let found = index.find_matches(&queries[next]);
        assert_eq!(found.len(), HOLDERS as usize);
        for depth in found {
            assert!(
                (KEPT..=DEPTH).contains(&(depth.matched_blocks as usize)),
                "{depth:?}"
            );
        }
    }
}

#[test]
fn a_concurrent_radix_tree_is_read_while_it_changes() {
    tails_come_and_go(ConcurrentRadixTree::default());
}

#[test]
fn a_jump_index_is_read_while_it_changes() {
    tails_come_and_go(JumpIndex::default());
}

#[test]
fn a_lineage_index_is_read_while_it_changes() {
    tails_come_and_go(LineageIndex::new(WorkerName::new("w").unwrap()));
}
