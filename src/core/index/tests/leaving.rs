//! Tests of the search for the first block at which a query and a run differ. The search compares marks, which are one
//! byte of some of the run's hashes. So different hashes can have equal marks.

use crate::hash::SequenceHash;
use crate::wire::{Event, HolderId, QueryKey, StoredBlocks, Tier, WorkerName};

use super::api::{IndexLimits, NamespaceSettings, PositionalIndexer, Search};
use kvatlas_lab::random::mix;

/// Number of blocks of each chain. It is the maximum for one run. The marks of a run cover only its first blocks, so
/// the chain has blocks without marks.
const DEPTH: usize = 4032;

/// Returns a chain of hashes. From the offset `from` on, the hashes are not those of `chain(DEPTH, 0)`: only the bits
/// of `kept` are the same.
fn chain(from: usize, kept: u64) -> Vec<SequenceHash> {
    let hash = |at: usize| match (mix(at as u64), mix(!(at as u64))) {
        (own, other) if at >= from => own & kept | other & !kept,
        (own, _) => own,
    };
    (0..DEPTH).map(|at| SequenceHash(hash(at))).collect()
}

#[test]
fn a_query_is_followed_to_where_it_leaves_a_run() {
    let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
    let worker = WorkerName::new("w").unwrap();
    let mut writer = index.register(&HolderId { worker, rank: 0 }).unwrap();
    // The run grows in steps, as the prompt of a chat does.
    let (mut held, chain_held) = (0_usize, chain(DEPTH, 0));
    for grown in (1..).map(|turn: usize| (turn * turn * 7).min(DEPTH)) {
        let parent = held.checked_sub(1).map(|last: usize| chain_held[last]);
        let blocks = StoredBlocks::by_sequence(parent, None, chain_held[held..grown].to_vec());
        writer.apply(Event::Stored(blocks), Tier::DEVICE, 0);
        held = grown;
        check(&index, held);
        if held == DEPTH {
            break;
        }
    }
}

/// Checks queries that differ from the `held` blocks at many places, and queries that end earlier.
fn check(index: &PositionalIndexer, held: usize) {
    let near = |of: usize| [of.saturating_sub(1), of, of + 1];
    let around = [0, 1, 2, 5, 8, 23, 24, 25, 31, 62].map(|marks| near(marks * 64));
    let places = around.into_iter().flatten().chain((0..DEPTH).step_by(149));
    for from in places.chain(near(held)).filter(|from| *from <= DEPTH) {
        // With 0xff, every mark of the query equals the run's mark. With 0x7f, some marks are equal by chance.
        for kept in [0, 0xff, 0x7f] {
            let query = chain(from, kept);
            for len in [DEPTH, from + (DEPTH - from) / 2, from.min(held)] {
                let key = QueryKey::SequenceHashes(query[..len].to_vec());
                let matches = index.find_matches(&key, Search::default()).unwrap();
                let found = matches
                    .holders()
                    .next()
                    .map_or(0, |found| found.matched_blocks as usize);
                assert_eq!(
                    found,
                    from.min(held).min(len),
                    "{held} blocks, from {from}, {kept:x}, {len} asked for"
                );
            }
        }
    }
}
