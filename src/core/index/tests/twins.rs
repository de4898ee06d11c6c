//! Twins: children of one block whose hashes agree in the bits that a lineage hash keeps. A query by lineage hashes
//! fits all of them, so a holder's depth is its greatest depth along any of them.

use std::collections::BTreeSet;

use crate::hash::{SequenceHash, lineage_hashes};
use crate::wire::{Event, HolderId, QueryKey, RemovedBlocks, StoredBlocks, Tier};

use super::api::{Applied, HolderWriter, PositionalIndexer, RejectReason, Search, TierDepth};
use super::hook;
use super::plain::{holder, index, sequence};
use super::world::stored_by_lineage;
use kvatlas_lab::random::{Random, mix, setting};

/// Bits of a hash that no lineage hash keeps. Hashes that differ only in these bits are twins.
const LOST_BITS: u32 = 59;

/// Positions from which on a chain can have one of two twins. Each choice is one of the lost bits of all hashes from
/// there on, so each hash stands for its whole prefix.
const CHOICES: [usize; 5] = [0, 3, 8, 13, 22];

/// Sequence hashes of a random chain. The bits that lineage hashes keep depend on the symbols up to the block, the
/// others on the choices of twins.
fn any_chain(random: &mut Random) -> Vec<u64> {
    let chosen: [bool; 5] = std::array::from_fn(|_| random.chance(30));
    let (mut kept, len) = (0, 1 + random.below(40));
    let hash = |at| {
        kept = mix(kept ^ mix(u64::from(random.chance(5)) + 1));
        let lost = (0..5).filter(|choice| chosen[*choice] && CHOICES[*choice] <= at);
        kept << (64 - LOST_BITS) >> (64 - LOST_BITS)
            | lost.map(|choice| 1 << (LOST_BITS as usize + choice)).sum::<u64>()
    };
    (0..len).map(hash).collect()
}

/// A model's holder: the chains of sequence hashes of its blocks.
struct Holder {
    writer: HolderWriter,
    blocks: BTreeSet<Vec<u64>>,
}

impl Holder {
    /// Greatest number of leading blocks of `query` that the holder has, if only the bits of lineage hashes count.
    fn depth(&self, query: &[u64]) -> u32 {
        let fits = |held: &Vec<u64>| {
            held.len() <= query.len()
                && held
                    .iter()
                    .zip(query)
                    .all(|(held, wanted)| (held ^ wanted) << (64 - LOST_BITS) == 0)
                && (1..held.len()).all(|end| self.blocks.contains(&held[..end]))
        };
        let depths = self.blocks.iter().filter(|held| fits(held)).map(Vec::len);
        u32::try_from(depths.max().unwrap_or(0)).unwrap()
    }

    fn store(&mut self, chain: &[u64], from: usize) {
        if from > 0 && !self.blocks.contains(&chain[..from]) {
            return;
        }
        let parent = from.checked_sub(1).map(|at| SequenceHash(chain[at]));
        let stored = Event::Stored(StoredBlocks::by_sequence(parent, None, sequence(&chain[from..])));
        self.writer.apply(stored, Tier::DEVICE, 0);
        self.blocks
            .extend((from..chain.len()).map(|end| chain[..=end].to_vec()));
    }

    fn remove(&mut self, chain: &[u64], from: usize) {
        let removed = RemovedBlocks {
            hashes: sequence(&chain[from..]),
            ..RemovedBlocks::default()
        };
        self.writer.apply(Event::Removed(removed), Tier::DEVICE, 0);
        for end in from..chain.len() {
            self.blocks.remove(&chain[..=end]);
        }
    }
}

#[test]
fn each_holder_is_found_at_its_greatest_depth_along_twins() {
    let mut random = Random::new(setting("KVATLAS_TEST_SEED", 5));
    let mut found_deep = 0;
    for _ in 0..setting("KVATLAS_TEST_ROUNDS", 200) {
        let index = index();
        let mut holders: Vec<Holder> = (0..3)
            .map(|number| Holder {
                writer: holder(&index, &number.to_string()),
                blocks: BTreeSet::new(),
            })
            .collect();
        for _ in 0..60 {
            let chain = any_chain(&mut random);
            let (from, number) = (random.below(chain.len()), random.below(holders.len()));
            let holder = &mut holders[number];
            match random.below(4) {
                0 => holder.remove(&chain, from),
                1 => holder.store(&chain, from),
                _ => holder.store(&chain, 0),
            }
            let query = any_chain(&mut random);
            let key = QueryKey::LineageHashes(
                lineage_hashes(&sequence(&query))
                    .collect::<Result<_, _>>()
                    .unwrap(),
            );
            let matches = index.find_matches(&key, Search::default()).unwrap();
            for (number, holder) in holders.iter().enumerate() {
                let is_it = |id: &HolderId| id.worker.as_str() == number.to_string();
                let found = matches.holders().find(|found| is_it(&found.holder.id));
                let depth = found.map_or(0, |found| found.matched_blocks);
                assert_eq!(depth, holder.depth(&query), "holder {number}, query {query:x?}");
                found_deep += usize::from(depth > 4);
            }
        }
    }
    assert!(found_deep > 100, "{found_deep}");
}

/// Highest bit of a sequence hash. No lineage hash keeps this bit.
const TOP: u64 = 1 << 63;

fn store(writer: &mut HolderWriter, parent: Option<u64>, hashes: &[u64]) -> Applied {
    let stored = StoredBlocks::by_sequence(parent.map(SequenceHash), None, sequence(hashes));
    writer.apply(Event::Stored(stored), Tier::DEVICE, 0)
}

fn depth(index: &PositionalIndexer, worker: &str, hashes: &[u64]) -> u32 {
    let key = QueryKey::SequenceHashes(sequence(hashes));
    let matches = index.find_matches(&key, Search::default()).unwrap();
    let found = matches
        .holders()
        .find(|found| found.holder.id.worker.as_str() == worker);
    found.map_or(0, |found| found.matched_blocks)
}

#[test]
fn a_run_that_is_made_during_a_search_counts_at_all_steps_of_tiers_or_at_none() {
    let mut has_run = 0;
    for points in 0..40 {
        let index = index();
        let (mut one, mut other) = (holder(&index, "one"), holder(&index, "other"));
        store(&mut one, None, &[1]);
        store(&mut other, None, &[1 | TOP]);
        store(&mut other, None, &[5, 7]);
        store(&mut one, None, &[5]);
        hook::set(points, move || {
            store(&mut one, Some(5), &[6]);
        });
        let keys = lineage_hashes(&sequence(&[5, 6]))
            .collect::<Result<_, _>>()
            .unwrap();
        let search = Search {
            tiers: TierDepth::Each,
            ..Search::default()
        };
        let matches = index
            .find_matches(&QueryKey::LineageHashes(keys), search)
            .unwrap();
        has_run += u32::from(!hook::clear());
        for found in matches.holders() {
            let near = matches.near_blocks(found.holder).unwrap();
            let all = found.matched_blocks;
            assert_eq!(
                near.map(|near| near.matched_blocks),
                [all, all],
                "after {points} points"
            );
        }
    }
    assert!(has_run > 5, "{has_run}");
}

/// Stores as many twins as a holder may store.
fn store_twins(writer: &mut HolderWriter) {
    for choice in 0..32 {
        let applied = store(writer, None, &[77, 78 | choice << 59]);
        assert_eq!(applied.rejected(RejectReason::CrowdedHash), 0);
    }
    for last in [79, 79 | TOP] {
        let applied = store(writer, None, &[77, 78, last]);
        assert_eq!(applied.rejected(RejectReason::CrowdedHash), 0);
    }
}

#[test]
fn a_holder_stores_few_twins_and_is_doubted_for_the_rest() {
    let index = index();
    let (mut one, mut other) = (holder(&index, "one"), holder(&index, "other"));
    store(&mut other, None, &[1, 2, 3]);
    store(&mut one, None, &[1, 2 | TOP]);
    store_twins(&mut one);
    // The next twin would lie in a run of its own, or in the middle of a run.
    for refused in [[77, 78, 79 | 1 << 62], [1, 2, 3]] {
        let applied = store(&mut one, None, &refused);
        let stored = 3 - applied.rejected(RejectReason::CrowdedHash);
        assert!(applied.is_short() && applied.stored == stored, "{applied:?}");
        assert_eq!(u64::from(depth(&index, "one", &refused)), stored);
    }
    assert_eq!(depth(&index, "one", &[77, 78 | TOP]), 2);
    // Twins of others do not count, and what is stored again is no further twin.
    let applied = [
        store(&mut other, None, &[1, 2 | TOP]),
        store(&mut one, None, &[77, 78, 79 | TOP]),
    ];
    assert!(applied.iter().all(|applied| !applied.is_short()), "{applied:?}");
    one.apply(Event::Cleared, Tier::DEVICE, 0);
    store_twins(&mut one);
}

#[test]
fn an_orphan_gets_no_place_beside_its_twin_of_a_holder_with_many() {
    let index = index();
    let mut one = holder(&index, "one");
    store_twins(&mut one);
    let before = one.status().blocks.load();
    let keys: Vec<_> = lineage_hashes(&sequence(&[8, 9]))
        .collect::<Result<_, _>>()
        .unwrap();
    one.apply(stored_by_lineage(vec![keys[1]]), Tier::DEVICE, 0);
    store(&mut one, Some(9), &[3 | TOP]);
    assert_eq!(one.status().blocks.load(), before + 2);
    let applied = store(&mut one, None, &[8, 9, 3]);
    assert_eq!(applied.rejected(RejectReason::CrowdedHash), 1);
    let found = [[8, 9, 3], [8, 9, 3 | TOP]].map(|hashes| depth(&index, "one", &hashes));
    assert_eq!(found, [3, 2]);
}

/// Checks an attack: a worker that knows the first blocks of another's chain stores all chains that differ from them in
/// bits that no lineage hash keeps.
#[test]
fn a_worker_gives_queries_few_branches_to_follow() {
    let index = index();
    let (mut honest, mut attacker) = (holder(&index, "honest"), holder(&index, "attacker"));
    let chain = [1, 2, 3, 4];
    store(&mut honest, None, &chain);
    for choice in 0..32_u64.pow(2) {
        let twins = [1 | choice << 59, 2 | choice >> 5 << 59, 3];
        let mut stored = StoredBlocks::by_sequence(None, None, sequence(&twins));
        stored.engine_hashes = Some(vec![choice << 2 | 1, choice << 2 | 2, choice << 2 | 3]);
        attacker.apply(Event::Stored(stored), Tier::DEVICE, 0);
    }
    assert!(attacker.status().blocks.load() <= 3 * 33);
    assert!(index.sizes().distinct_blocks <= 4 + 3 * 33, "{:?}", index.sizes());
    assert_eq!(depth(&index, "honest", &chain), 4);
}
