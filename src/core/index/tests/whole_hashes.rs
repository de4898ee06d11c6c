//! Tests of comparisons by whole hashes. Sequence hashes are compared in all 64 bits if both the event and the query
//! give whole hashes. Lineage hashes keep fewer bits.

use crate::hash::{Position, SequenceHash, lineage_hashes};
use crate::wire::{Event, QueryKey, RemovedBlocks, StoredBlocks, Tier};

use super::api::{PositionalIndexer, RejectReason, Search, SparseChain};
use super::plain::{holder, index, sequence};
use super::world::stored_by_lineage;

/// Highest bit of a sequence hash. No lineage hash keeps this bit.
const TOP: u64 = 1 << 63;
/// Number of blocks of the chain, enough for two of the three modes of lineage hashes.
const DEPTH: u64 = 300;

fn chain() -> Vec<u64> {
    (1..=DEPTH).collect()
}

/// Returns the hashes of `chain()`, with the top bit set in each hash from the offset `from` on.
fn other_from(from: usize) -> Vec<u64> {
    let flip = |(at, hash)| if at < from { hash } else { hash | TOP };
    chain().into_iter().enumerate().map(flip).collect()
}

fn stored(chain: &[u64]) -> Event {
    Event::Stored(StoredBlocks::by_sequence(None, None, sequence(chain)))
}

/// Returns the holders, each with the number of leading blocks that it holds.
fn found(index: &PositionalIndexer, key: &QueryKey) -> Vec<(String, u32)> {
    let matches = index.find_matches(key, Search::default()).unwrap();
    let mut found: Vec<_> = matches
        .holders()
        .map(|found| (found.holder.id.worker.as_str().to_owned(), found.matched_blocks))
        .collect();
    found.sort();
    found
}

/// Returns the minimum and maximum number of leading blocks of each worker, found by a query with every third block
/// and the last block.
fn bounds(index: &PositionalIndexer, chain: &[u64]) -> Vec<(String, u32, u32)> {
    let chosen = (0..chain.len()).filter(|at| at % 3 == 0 || at + 1 == chain.len());
    let chosen: Vec<usize> = chosen.collect();
    let positions: Vec<Position> = chosen
        .iter()
        .map(|at| Position::new(*at as u64).unwrap())
        .collect();
    let hashes = chosen.iter().map(|at| SequenceHash(chain[*at])).collect();
    let key = QueryKey::SequenceHashes(hashes);
    let chain = SparseChain::new(&key, &positions).unwrap();
    let bounds = index.find_bounds(&chain, Search::default());
    let mut found: Vec<_> = bounds
        .holders()
        .map(|of| {
            let worker = of.holder.id.worker.as_str().to_owned();
            (worker, of.matched_blocks, of.matched_blocks_max)
        })
        .collect();
    found.sort();
    found
}

#[test]
fn a_query_agrees_no_further_than_all_bits_do() {
    let index = index();
    let mut regular = holder(&index, "regular");
    regular.apply(stored(&chain()), Tier::DEVICE, 0);
    let mut irregular = holder(&index, "irregular");
    irregular.apply(stored(&chain()), Tier::DEVICE, 0);
    irregular.apply(stored(&chain()), Tier::new(1).unwrap(), 0);
    for from in [0_usize, 1, 5, 254, 255, 256, 299] {
        let other = other_from(from);
        let depth = u32::try_from(from).unwrap();
        let mut expected = vec![("irregular".to_owned(), depth), ("regular".to_owned(), depth)];
        expected.retain(|_| depth > 0);
        assert_eq!(
            found(&index, &QueryKey::SequenceHashes(sequence(&other))),
            expected,
            "from {from}"
        );
        let within = |(_, least, most): &(String, u32, u32)| *least <= depth && depth <= *most;
        let bounds = bounds(&index, &other);
        assert_eq!(bounds.is_empty(), from == 0, "from {from}");
        assert!(bounds.iter().all(within), "from {from}: {bounds:?}");
    }
}

#[test]
fn holders_of_hashes_with_other_top_bits_are_told_apart() {
    let index = index();
    let (mut one, mut other) = (holder(&index, "one"), holder(&index, "other"));
    one.apply(stored(&chain()), Tier::DEVICE, 0);
    other.apply(stored(&other_from(3)), Tier::DEVICE, 0);
    let is = |worker: &str, blocks| (worker.to_owned(), blocks);
    let all = u32::try_from(DEPTH).unwrap();
    let ask = |chain: &[u64]| found(&index, &QueryKey::SequenceHashes(sequence(chain)));
    assert_eq!(ask(&chain()), [is("one", all), is("other", 3)]);
    assert_eq!(ask(&other_from(3)), [is("one", 3), is("other", all)]);
    // A lineage hash lacks the bits that distinguish the two holders' blocks.
    let hashes = sequence(&chain()[..200]);
    let lineage = lineage_hashes(&hashes).collect::<Result<Vec<_>, _>>().unwrap();
    assert_eq!(
        found(&index, &QueryKey::LineageHashes(lineage)),
        [is("one", 200), is("other", 200)]
    );
    // A removal by names that only the other holder uses removes nothing.
    let foreign = RemovedBlocks::by_sequence(sequence(&other_from(3)[250..]));
    let applied = one.apply(Event::Removed(foreign), Tier::DEVICE, 0);
    assert_eq!(applied.rejected(RejectReason::UnknownBlock), 50);
    assert_eq!(one.blocks() as u64, DEPTH);
}

#[test]
fn a_holder_can_have_both_of_two_blocks_that_only_their_top_bits_tell_apart() {
    let index = index();
    let mut writer = holder(&index, "w");
    writer.apply(stored(&chain()[..4]), Tier::DEVICE, 0);
    writer.apply(stored(&other_from(3)[..4]), Tier::DEVICE, 0);
    assert_eq!(writer.blocks(), 5);
    let ask = |chain: &[u64]| found(&index, &QueryKey::SequenceHashes(sequence(&chain[..4])));
    assert_eq!(ask(&chain()), [("w".to_owned(), 4)]);
    assert_eq!(ask(&other_from(3)), [("w".to_owned(), 4)]);
    let gone = RemovedBlocks::by_sequence(sequence(&chain()[3..4]));
    writer.apply(Event::Removed(gone), Tier::DEVICE, 0);
    assert_eq!(ask(&chain()), [("w".to_owned(), 3)]);
    assert_eq!(ask(&other_from(3)), [("w".to_owned(), 4)]);
    // One lineage hash stands for both blocks.
    writer.apply(stored(&chain()[..4]), Tier::DEVICE, 0);
    let key = lineage_hashes(&sequence(&chain()[..4])).last().unwrap().unwrap();
    let gone = RemovedBlocks {
        hashes: Vec::new(),
        lineage_hashes: vec![key],
    };
    assert_eq!(writer.apply(Event::Removed(gone), Tier::DEVICE, 0).removed, 2);
    assert_eq!(ask(&chain()), [("w".to_owned(), 3)]);
    assert_eq!(ask(&other_from(3)), [("w".to_owned(), 3)]);
}

#[test]
fn a_block_known_by_its_fragment_is_completed_by_whoever_knows_more() {
    let index = index();
    let hashes = sequence(&other_from(290));
    let keys = lineage_hashes(&hashes).collect::<Result<Vec<_>, _>>().unwrap();
    let mut by_lineage = holder(&index, "lineage");
    by_lineage.apply(stored_by_lineage(keys.clone()), Tier::DEVICE, 0);
    let is = |worker: &str, blocks| (worker.to_owned(), blocks);
    let all = u32::try_from(DEPTH).unwrap();
    let ask = |chain: &[u64]| found(&index, &QueryKey::SequenceHashes(sequence(chain)));
    // Only fragments of the hashes are known, so the highest bits agree with anything.
    assert_eq!(ask(&chain()), [is("lineage", all)]);
    assert_eq!(ask(&other_from(290)), [is("lineage", all)]);
    let mut whole = holder(&index, "whole");
    whole.apply(stored(&other_from(290)), Tier::DEVICE, 0);
    assert_eq!(index.sizes().distinct_blocks, DEPTH);
    assert_eq!(ask(&chain()), [is("lineage", 290), is("whole", 290)]);
    assert_eq!(ask(&other_from(290)), [is("lineage", all), is("whole", all)]);
    assert_eq!(
        found(&index, &QueryKey::LineageHashes(keys)),
        [is("lineage", all), is("whole", all)]
    );
}
