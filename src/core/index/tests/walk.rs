//! Walks over an index, compared with the holders' dumps, also while holders change.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::hash::{PositionalLineageHash, SequenceHash};
use crate::wire::{
    BlockContent, BlockNames, DegradedReason, DegradedReasons, Event, HolderId, QueryKey, RemovedBlocks,
    Resumable, StoredBlocks, Tier, WorkerName,
};

use super::api::{
    Capacity, Hashing, HolderWalk, HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer,
    QueryChain, RestoredRun, Search, WalkedHolder,
};
use super::plain::index;
use super::world::{block_hash_of_tokens, next_hash, tokens_of};
use kvatlas_lab::random::Random;

fn register(index: &PositionalIndexer, number: u32) -> HolderWriter {
    let worker = WorkerName::new("w").unwrap();
    index.register(&HolderId { worker, rank: number }).unwrap()
}

/// Returns hashes that encode each block's path in a tree with four branches at every block. So a block's parent can
/// be computed from its hash.
fn path_hashes(branches: impl IntoIterator<Item = u64>) -> Vec<SequenceHash> {
    let mut hash = 1;
    let step = |branch| {
        hash = hash << 2 | branch;
        SequenceHash(hash)
    };
    branches.into_iter().map(step).collect()
}

fn parent_of(hash: SequenceHash) -> Option<u64> {
    let parent = hash.as_u64() >> 2;
    (parent > 1).then_some(parent)
}

fn store(holder: &mut HolderWriter, hashes: &[SequenceHash]) {
    let stored = StoredBlocks::by_sequence(None, None, hashes.to_vec());
    holder.apply(Event::Stored(stored), Tier::DEVICE, 0);
}

fn remove(holder: &mut HolderWriter, hashes: &[SequenceHash]) {
    let removed = RemovedBlocks::by_sequence(hashes.to_vec());
    holder.apply(Event::Removed(removed), Tier::DEVICE, 0);
}

/// Returns a random path that probably shares a prefix with other paths.
fn random_path(random: &mut Random) -> Vec<SequenceHash> {
    let depth = 1 + random.below(20);
    let branches: Vec<u64> = (0..depth)
        .map(|_| if random.chance(80) { 0 } else { random.next() % 4 })
        .collect();
    path_hashes(branches)
}

/// Stores a path, or removes a leaf, so that the holder stays regular.
fn change(holder: &mut HolderWriter, random: &mut Random, held: &mut BTreeSet<u64>) {
    let path = random_path(random);
    if random.chance(70) || held.is_empty() {
        store(holder, &path);
        held.extend(path.iter().map(|hash| hash.as_u64()));
        return;
    }
    let leaf = path.iter().rev().find(|hash| {
        let children = hash.as_u64() << 2;
        held.contains(&hash.as_u64()) && held.range(children..children + 4).next().is_none()
    });
    if let Some(leaf) = leaf {
        remove(holder, &[*leaf]);
        held.remove(&leaf.as_u64());
    }
}

/// Restores the walked holders in another index. Returns the blocks of each holder that the walk found.
fn restored(walked: &[WalkedHolder]) -> Vec<BTreeSet<u64>> {
    let other = index();
    let mut writers: Vec<HolderWriter> = (0..)
        .zip(walked)
        .map(|(number, _)| register(&other, number))
        .collect();
    let mut found = vec![BTreeSet::new(); walked.len()];
    let mut walk = HolderWalk::new((0..).zip(walked)).unwrap();
    // The hashes on the path.
    let mut path: Vec<SequenceHash> = Vec::new();
    while let Some((run, parts)) = walk.next() {
        path.truncate(run.position);
        assert_eq!(path.len(), run.position);
        let parent = path.last().copied();
        path.extend(&run.hashes);
        for part in parts {
            let hashes = &run.hashes[..usize::from(part.blocks)];
            let holder = usize::try_from(part.holder).unwrap();
            found[holder].extend(hashes.iter().map(|hash| hash.as_u64()));
            let restored = RestoredRun {
                position: u32::try_from(run.position).unwrap(),
                parent,
                hashes,
            };
            let applied = writers[holder].restore_runs(Tier::DEVICE, [restored]);
            assert_eq!(applied.stored, hashes.len() as u64);
        }
    }
    for (writer, found) in writers.iter_mut().zip(&found) {
        assert!(writer.as_walked().is_some() || found.is_empty());
        assert_eq!(writer.blocks(), found.len());
        for hash in found {
            let chain = chain_to(SequenceHash(*hash));
            let depth = chain.len();
            let matches = other
                .find_matches(&QueryKey::SequenceHashes(chain), Search::default())
                .unwrap();
            let record = writer.record();
            let own = matches.holders().find(|own| own.holder.id.rank == record.id.rank);
            assert_eq!(own.map(|own| own.matched_blocks as usize), Some(depth));
        }
    }
    found
}

fn chain_to(hash: SequenceHash) -> Vec<SequenceHash> {
    let mut chain = vec![hash];
    while let Some(parent) = parent_of(chain[chain.len() - 1]) {
        chain.push(SequenceHash(parent));
    }
    chain.reverse();
    chain
}

#[test]
fn a_walk_finds_what_holders_have() {
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let index = index();
        let mut holders: Vec<HolderWriter> = (0..5).map(|number| register(&index, number)).collect();
        let mut held = vec![BTreeSet::new(); holders.len()];
        for _ in 0..200 {
            let which = random.below(holders.len());
            change(&mut holders[which], &mut random, &mut held[which]);
        }
        held.retain(|held| !held.is_empty());
        let walked: Vec<WalkedHolder> = holders.iter_mut().filter_map(HolderWriter::as_walked).collect();
        assert_eq!(restored(&walked), held, "seed {seed}");

        let mut counts: BTreeMap<u64, usize> = BTreeMap::new();
        held.iter()
            .flatten()
            .for_each(|hash| *counts.entry(*hash).or_default() += 1);
        let mut walk = index.walk();
        while let Some(run) = walk.next() {
            for (offset, hash) in run.hashes.iter().enumerate() {
                let beyond = run
                    .holders
                    .iter()
                    .filter(|(_, blocks)| usize::from(*blocks) > offset);
                assert_eq!(counts.remove(&hash.as_u64()), Some(beyond.count()));
            }
        }
        assert!(counts.is_empty(), "seed {seed}: {counts:?}");
    }
}

#[test]
fn a_walk_below_a_block_finds_its_subtree() {
    for seed in 0..40 {
        let mut random = Random::new(seed);
        let index = index();
        let mut holders = [register(&index, 0), register(&index, 1)];
        let mut held = [BTreeSet::new(), BTreeSet::new()];
        for _ in 0..60 {
            let which = random.below(2);
            change(&mut holders[which], &mut random, &mut held[which]);
        }
        for root in held.iter().flatten().copied() {
            let query = QueryKey::SequenceHashes(chain_to(SequenceHash(root)));
            let mut chain = QueryChain::new(&query, index.settings().block_size).unwrap();
            let depth = chain.len();
            let mut walk = index.walk_below(chain.key(depth - 1)).unwrap();
            let mut found = BTreeSet::new();
            while let Some(run) = walk.next() {
                assert_eq!(run.position == depth - 1, run.depth == 1);
                found.extend(run.hashes.iter().map(|hash| hash.as_u64()));
            }
            let mut expected: BTreeSet<u64> = held.iter().flatten().copied().collect();
            expected.retain(|hash| {
                chain_to(SequenceHash(*hash))
                    .iter()
                    .any(|above| above.as_u64() == root)
            });
            assert_eq!(found, expected, "seed {seed}");
        }
    }
    let nowhere = PositionalLineageHash::new(SequenceHash(77), None, 0).unwrap();
    assert!(index().walk_below(nowhere).is_none());
}

#[test]
fn what_is_skipped_is_not_met() {
    let index = index();
    let mut holder = register(&index, 0);
    for branches in [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 0]] {
        store(&mut holder, &path_hashes(branches));
    }
    let mut walk = index.walk();
    let mut met = Vec::new();
    while let Some(run) = walk.next() {
        let below_first = run.position == 0 && run.hashes[0] == path_hashes([0])[0];
        met.push((run.depth, run.position, run.hashes.len()));
        if below_first {
            walk.skip_subtree();
        }
    }
    assert_eq!(met, [(1, 0, 4), (1, 0, 4)]);
}

#[test]
fn walks_see_whole_runs_while_holders_change() {
    let index = index();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 0..2 {
            let (mut holder, is_over) = (register(&index, number), &is_over);
            scope.spawn(move || {
                let mut random = Random::new(u64::from(number));
                let mut held = BTreeSet::new();
                while !is_over.load(Ordering::Relaxed) {
                    change(&mut holder, &mut random, &mut held);
                    if random.chance(1) {
                        holder.clear();
                        held.clear();
                    }
                }
            });
        }
        let mut runs = 0_u64;
        while runs < 20_000 {
            let mut walk = index.walk();
            let mut path: Vec<SequenceHash> = Vec::new();
            while let Some(run) = walk.next() {
                runs += 1;
                path.truncate(run.position);
                assert_eq!(path.len(), run.position);
                for hash in &run.hashes {
                    // The path is one chain, although its runs were met at different instants.
                    assert_eq!(parent_of(*hash), path.last().map(|before| before.as_u64()));
                    path.push(*hash);
                }
            }
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn what_a_walk_cannot_tell_is_noticed() {
    let path = path_hashes([0, 1, 2, 3, 0, 1]);
    let is_same_after = |change: &dyn Fn(&mut HolderWriter)| {
        let index = index();
        let mut holder = register(&index, 0);
        store(&mut holder, &path);
        let before = holder.as_walked().unwrap();
        change(&mut holder);
        holder.as_walked().is_some_and(|now| now.is_same_as(&before))
    };
    assert!(is_same_after(&|_| ()));
    assert!(is_same_after(&|holder| {
        remove(holder, &path[3..]);
        store(holder, &path_hashes([0, 1, 1]));
        store(holder, &path);
    }));
    // After a hole, the holder does not count as the same, even if the hole is filled again.
    assert!(!is_same_after(&|holder| remove(holder, &path[2..3])));
    assert!(!is_same_after(&|holder| {
        remove(holder, &path[2..3]);
        store(holder, &path);
    }));
    // So do blocks in another tier, even if these blocks are removed again.
    let in_host = |event, holder: &mut HolderWriter| holder.apply(event, Tier::new(1).unwrap(), 0);
    assert!(!is_same_after(&|holder| {
        remove(holder, &path);
        in_host(
            Event::Stored(StoredBlocks::by_sequence(None, None, path.clone())),
            holder,
        );
        in_host(Event::Removed(RemovedBlocks::by_sequence(path.clone())), holder);
        store(holder, &path);
    }));
    assert!(!is_same_after(&|holder| {
        holder.clear();
        store(holder, &path);
    }));
    assert!(!is_same_after(&|holder| {
        holder.status().degrade(DegradedReason::Gap);
        holder.replace_reasons(DegradedReasons::default());
    }));

    let index = index();
    let mut holder = register(&index, 0);
    store(&mut holder, &path);
    let mut before = holder.as_walked().unwrap();
    before.give_up();
    assert!(!holder.as_walked().unwrap().is_same_as(&before));
    // A new holder gets the same name.
    let before = holder.as_walked().unwrap();
    holder.retire();
    let mut holder = register(&index, 0);
    store(&mut holder, &path);
    assert!(!holder.as_walked().unwrap().is_same_as(&before));
    // The new holder has the same slot, but its blocks do not count as those of the holder before.
    let mut walk = HolderWalk::new([(0, &before)]).unwrap();
    assert_eq!(walk.next().map(|(_, parts)| parts.len()), Some(0));
}

#[test]
fn runs_without_their_parents_are_left_out_and_counted() {
    let path = path_hashes([0, 1, 2, 3]);
    let limits = IndexLimits {
        blocks_per_holder_max: 2,
        ..IndexLimits::default()
    };
    let index = PositionalIndexer::new(NamespaceSettings::default(), limits);
    let mut holder = register(&index, 0);
    let run = |position: usize, hashes| RestoredRun {
        position: u32::try_from(position).unwrap(),
        parent: position.checked_sub(1).map(|before| path[before]),
        hashes,
    };
    let applied = holder.restore_runs(Tier::DEVICE, [run(0, &path[..3]), run(3, &path[3..])]);
    let rejected = applied.rejected(super::api::RejectReason::Capacity);
    assert_eq!((applied.stored, rejected, holder.blocks()), (2, 2, 2));
}

#[test]
fn names_that_are_our_own_chain_can_be_dumped_and_walked() {
    let settings = NamespaceSettings {
        hashing: Hashing::Recompute,
        block_size: crate::hash::BlockSize::new(super::world::BLOCK_SIZE).unwrap(),
        ..NamespaceSettings::default()
    };
    let tokens: Vec<_> = (0..3).flat_map(tokens_of).collect();
    let mut chain = Vec::new();
    for symbol in 0..3 {
        let block = block_hash_of_tokens(&tokens_of(symbol));
        chain.push(next_hash(chain.last().copied(), block));
    }
    let hashes: Vec<SequenceHash> = chain.into_iter().map(SequenceHash).collect();
    let index = PositionalIndexer::new(settings, IndexLimits::default());
    let mut holder = register(&index, 0);
    let stored = StoredBlocks {
        names: BlockNames::Sequence {
            parent: None,
            position: None,
            hashes,
        },
        content: Some(BlockContent::Tokens {
            tokens,
            lora_name: None,
            cache_salt: None,
        }),
        engine_hashes: None,
        resumable: Resumable::ALL,
    };
    holder.apply(Event::Stored(stored), Tier::DEVICE, 0);
    assert!(holder.as_walked().is_some());
    let events: Vec<_> = holder.dump_events(2).collect();
    let other = PositionalIndexer::new(settings, IndexLimits::default());
    let mut rebuilt = register(&other, 0);
    for (tier, event) in events {
        rebuilt.apply(event, tier, 0);
    }
    assert_eq!(rebuilt.blocks(), 3);
    assert!(rebuilt.as_walked().is_some(), "the names are the hashes");
}

#[test]
fn evicted_blocks_are_not_met() {
    let limits = IndexLimits {
        capacity: Capacity {
            blocks_max: 64,
            ..Capacity::UNBOUNDED
        },
        ..IndexLimits::default()
    };
    let index = PositionalIndexer::new(NamespaceSettings::default(), limits);
    let mut holder = register(&index, 0);
    let mut random = Random::new(7);
    for _ in 0..400 {
        store(&mut holder, &random_path(&mut random));
    }
    let walked = holder.as_walked().unwrap();
    let found = restored(&[walked]);
    assert_eq!(found[0].len(), holder.blocks());
    assert!(
        holder.blocks() <= 64
            && holder
                .status()
                .lasting_reasons()
                .contains(DegradedReason::Capacity)
    );
}
