//! Engines with their own block names, whose hashes are not a chain: the same hash follows many parents, and one name
//! is used for several blocks.
//!
//! The blocks are the nodes of a tree, and each of the few hashes belongs to many nodes. In an event, only the
//! engine's names distinguish the blocks.

use std::collections::{BTreeMap, BTreeSet};

use crate::hash::SequenceHash;
use crate::wire::{
    BlockNames, Event, HolderId, QueryKey, RemovedBlocks, Resumable, StoredBlocks, Tier, WorkerName,
};

use super::api::{
    HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, RejectReason, Search, TierDepth,
};
use super::world::PlainKey;
use kvatlas_lab::random::{Random, mix, setting};

/// Number of a block in the tree.
type Node = usize;

/// A tree of blocks. The children of each block have different hashes.
struct Tree {
    parents: Vec<Option<Node>>,
    hashes: Vec<u64>,
    children: BTreeMap<(Option<Node>, u64), Node>,
    /// Number of names that any block may get.
    shared_names: u64,
}

impl Tree {
    fn new(random: &mut Random, paths: usize, depth_max: usize, hashes: usize) -> Self {
        let mut tree = Self {
            parents: Vec::new(),
            hashes: Vec::new(),
            children: BTreeMap::new(),
            shared_names: 4,
        };
        for _ in 0..paths {
            let mut parent = None;
            for _ in 0..1 + random.below(depth_max) {
                let hash = mix(random.below(hashes) as u64);
                let next = tree.hashes.len();
                let node = *tree.children.entry((parent, hash)).or_insert(next);
                if node == next {
                    tree.parents.push(parent);
                    tree.hashes.push(hash);
                }
                parent = Some(node);
            }
        }
        tree
    }

    /// Returns the blocks from position 0 to `node`.
    fn path(&self, node: Node) -> Vec<Node> {
        let mut path = vec![node];
        while let Some(parent) = path.last().and_then(|last| self.parents[*last]) {
            path.push(parent);
        }
        path.reverse();
        path
    }

    fn name(&self, random: &mut Random, node: Node) -> u64 {
        match random.below(100) {
            0 => mix((1 << 40) | (random.next() % self.shared_names)),
            1..10 => mix((1 << 41) | node as u64),
            _ => mix((1 << 42) | node as u64),
        }
    }
}

/// Model of one holder's blocks. Its one rule: a name belongs to the last block that was stored under it.
#[derive(Default)]
struct Model {
    names: BTreeMap<u64, (Node, u8)>,
}

impl Model {
    fn store(&mut self, name: u64, node: Node, tier: u8) -> bool {
        let held = self.names.entry(name).or_insert((node, 0));
        let has_moved = held.0 != node;
        if has_moved {
            *held = (node, 0);
        }
        held.1 |= 1 << tier;
        has_moved
    }

    fn remove(&mut self, name: u64, tier: u8) {
        if let Some((_, tiers)) = self.names.get_mut(&name) {
            *tiers &= !(1 << tier);
            if *tiers == 0 {
                self.names.remove(&name);
            }
        }
    }

    /// Returns the blocks that are in at least one of `tiers`.
    fn held(&self, tiers: u8) -> BTreeSet<Node> {
        let names = self.names.values();
        names
            .filter(|held| held.1 & tiers != 0)
            .map(|held| held.0)
            .collect()
    }
}

struct Run {
    tree: Tree,
    index: PositionalIndexer,
    holders: Vec<(HolderId, HolderWriter, Model)>,
}

impl Run {
    fn new(random: &mut Random, holders: usize, paths: usize, depth_max: usize, hashes: usize) -> Self {
        let tree = Tree::new(random, paths, depth_max, hashes);
        let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
        let holder = |number: usize| {
            let worker = WorkerName::new(&number.to_string()).unwrap();
            let id = HolderId { worker, rank: 0 };
            let writer = index.register(&id).unwrap();
            (id, writer, Model::default())
        };
        let holders = (0..holders).map(holder).collect();
        Self { tree, index, holders }
    }

    fn step(&mut self, random: &mut Random) {
        let number = random.below(self.holders.len());
        let path = self.tree.path(random.below(self.tree.hashes.len()));
        let tier = u8::from(random.chance(20));
        if random.below(200) == 0 {
            // Blocks of the other holders get the places that become free.
            let (_, writer, model) = &mut self.holders[number];
            writer.apply(Event::Cleared, Tier::DEVICE, 0);
            *model = Model::default();
        } else if random.chance(55) {
            self.store(random, number, &path, tier);
        } else {
            self.remove(random, number, &path, tier);
        }
    }

    /// Stores a stretch of a path after a block of the holder. The event names that block by one of its names.
    fn store(&mut self, random: &mut Random, number: usize, path: &[Node], tier: u8) {
        let (_, writer, model) = &mut self.holders[number];
        let from = random.below(path.len());
        let from = if random.chance(40) { 0 } else { from };
        let parent = from.checked_sub(1).map(|before| {
            let mut names = model.names.iter();
            names
                .find(|(_, held)| held.0 == path[before])
                .map(|(name, _)| *name)
        });
        // If the holder lacks the parent, the event stores from the root on: other tests are about events that wait.
        let (from, parent) = match parent {
            Some(Some(parent)) => (from, Some(SequenceHash(parent))),
            _ => (0, None),
        };
        let stretch = &path[from..from + 1 + random.below(path.len() - from)];
        let names: Vec<u64> = stretch.iter().map(|node| self.tree.name(random, *node)).collect();
        let hashes = stretch.iter().map(|node| SequenceHash(self.tree.hashes[*node]));
        let event = Event::Stored(StoredBlocks {
            names: BlockNames::Sequence {
                parent,
                position: None,
                hashes: hashes.collect(),
            },
            content: None,
            engine_hashes: Some(names.clone()),
            resumable: Resumable::ALL,
        });
        let applied = writer.apply(event.clone(), Tier::new(tier).unwrap(), 0);
        let mut moved = 0;
        for (name, node) in names.iter().zip(stretch) {
            moved += u64::from(model.store(*name, *node, tier));
        }
        assert_eq!(applied.stored, names.len() as u64, "{event:?}");
        assert_eq!(applied.rejected(RejectReason::Moved), moved, "{event:?}");
        assert_eq!(writer.blocks(), model.held(u8::MAX).len(), "{event:?}");
    }

    fn remove(&mut self, random: &mut Random, number: usize, path: &[Node], tier: u8) {
        let (_, writer, model) = &mut self.holders[number];
        let from = random.below(path.len());
        let to = if random.chance(60) {
            path.len()
        } else {
            from + 1 + random.below(path.len() - from)
        };
        let mut names: Vec<u64> = path[from..to]
            .iter()
            .map(|node| self.tree.name(random, *node))
            .collect();
        match random.below(3) {
            0 => names.reverse(),
            1 => random.shuffle(&mut names),
            _ => {}
        }
        let hashes = names.iter().copied().map(SequenceHash).collect();
        let event = Event::Removed(RemovedBlocks::by_sequence(hashes));
        writer.apply(event.clone(), Tier::new(tier).unwrap(), 0);
        for name in &names {
            model.remove(*name, tier);
        }
        assert_eq!(writer.blocks(), model.held(u8::MAX).len(), "{event:?}");
    }

    /// Sends a query whose hashes mostly follow a path of the tree, and checks the answer.
    fn check_random_query(&self, random: &mut Random) {
        let mut hashes: Vec<u64> = self
            .tree
            .path(random.below(self.tree.hashes.len()))
            .iter()
            .map(|node| self.tree.hashes[*node])
            .collect();
        if random.chance(30) {
            let (one, other) = (random.below(hashes.len()), random.below(hashes.len()));
            hashes[one] = hashes[other];
        }
        let sequence = hashes.iter().copied().map(SequenceHash).collect();
        let lineage = PlainKey::run(0, None, &hashes);
        let lineage = lineage.into_iter().map(PlainKey::lineage).collect();
        for query in [
            QueryKey::SequenceHashes(sequence),
            QueryKey::LineageHashes(lineage),
        ] {
            for (tiers, bits) in [
                (TierDepth::Device, 1),
                (TierDepth::All, u8::MAX),
                (TierDepth::Each, u8::MAX),
            ] {
                let search = Search {
                    tiers,
                    ..Search::default()
                };
                let matches = self.index.find_matches(&query, search).unwrap();
                let found: BTreeMap<HolderId, usize> = matches
                    .holders()
                    .map(|found| (found.holder.id.clone(), found.matched_blocks as usize))
                    .collect();
                assert_eq!(
                    found,
                    self.expected(&hashes, bits),
                    "{} {hashes:x?}",
                    query.kind()
                );
                let near = matches.holders().filter_map(|found| {
                    let near = matches.near_blocks(found.holder);
                    let [device, _] = near.filter(|[device, _]| device.matched_blocks > 0)?;
                    Some((found.holder.id.clone(), device.matched_blocks as usize))
                });
                if tiers == TierDepth::Each {
                    assert_eq!(near.collect::<BTreeMap<_, _>>(), self.expected(&hashes, 1));
                }
            }
        }
    }

    fn expected(&self, hashes: &[u64], tiers: u8) -> BTreeMap<HolderId, usize> {
        let mut expected = BTreeMap::new();
        for (id, _, model) in &self.holders {
            let held = model.held(tiers);
            let (mut parent, mut depth) = (None, 0);
            for hash in hashes {
                let child = self.tree.children.get(&(parent, *hash));
                let Some(child) = child.filter(|child| held.contains(child)) else {
                    break;
                };
                (parent, depth) = (Some(*child), depth + 1);
            }
            if depth > 0 {
                expected.insert(id.clone(), depth);
            }
        }
        expected
    }

    /// Retires all holders, and checks that the index is empty afterwards.
    fn finish(self) {
        let index = self.index;
        for (_, writer, _) in self.holders {
            writer.retire();
        }
        let sizes = index.sizes();
        assert_eq!((sizes.distinct_blocks, sizes.held_blocks, sizes.bytes), (0, 0, 0));
    }
}

/// Runs `share` percent of the configured operations.
fn run(share: u64, holders: usize, paths: usize, depth_max: usize, hashes: usize) {
    let operations = setting("KVATLAS_TEST_OPERATIONS", 200_000) * share / 100;
    let seed = setting("KVATLAS_TEST_SEED", 20_260_703);
    eprintln!("KVATLAS_TEST_SEED={seed} replays this run of {operations} operations");
    let mut random = Random::new(seed);
    let mut run = Run::new(&mut random, holders, paths, depth_max, hashes);
    for operation in 1..=operations {
        run.step(&mut random);
        if operation % 5 == 0 {
            run.check_random_query(&mut random);
        }
    }
    run.finish();
}

#[test]
fn few_hashes_on_many_blocks_equal_the_tree() {
    run(10, 4, 12, 12, 3);
}

#[test]
fn long_paths_of_few_hashes_equal_the_tree() {
    run(2, 3, 6, 200, 2);
}

#[test]
fn seventy_holders_of_colliding_blocks_equal_the_tree() {
    run(2, 70, 5, 10, 4);
}
