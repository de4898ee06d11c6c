//! Random events that change the blocks of a holder.

use crate::hash::{BlockHash, Position, SequenceHash};
use crate::wire::{
    BlockContent, BlockNames, Event, RemovedBlocks, Resumable, ResumableBlocks, StoredBlocks, Tier,
};

use super::api::Hashing;
use super::world::{Path, World, tokens_of};
use kvatlas_lab::random::{Random, mix};

/// Parameters of a run of the differential test.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) hashing: Hashing,
    pub(super) workers: usize,
    pub(super) ranks: u32,
    pub(super) paths: usize,
    pub(super) depth_max: usize,
    pub(super) alphabet: u32,
    pub(super) tiers: u8,
    pub(super) blocks_per_holder_max: usize,
}

/// One operation of a test run.
#[derive(Debug, Clone)]
pub(super) enum Operation {
    /// Applies an event to a holder.
    Apply { holder: usize, tier: Tier, event: Event },
    /// Makes a holder leave and register again. In the differential test the holder `before` does so too, so that
    /// each of the two gets the other's slot.
    Replace { holder: usize, before: usize },
    /// Dumps all holders and restores them into a new index, with which the run continues.
    Restore { blocks_per_event_max: usize },
}

/// Returns the engine's name of the block with the sequence hash `hash`. Each `variant` gives another name: some
/// engines hash more than the contract does, and then have several names for one block.
pub(super) fn name_of(hashing: Hashing, hash: u64, variant: u64) -> u64 {
    match (hashing, variant) {
        (Hashing::Engine, 0) => hash,
        (Hashing::Engine, _) => mix(hash ^ variant),
        (Hashing::Recompute, _) => mix(hash ^ (variant + 77)),
    }
}

impl Operation {
    pub(super) fn random(random: &mut Random, shape: &Shape, world: &World) -> Self {
        let holders = shape.workers * shape.ranks as usize;
        let holder = random.below(holders);
        match random.below(1000) {
            0..3 => {
                return Self::Replace {
                    holder,
                    before: random.below(holders),
                };
            }
            3..5 => {
                return Self::Restore {
                    blocks_per_event_max: 1 + random.below(20),
                };
            }
            _ => {}
        }
        // Half of the time, each holder takes a path of its own, so that long chains build up.
        let path = if random.chance(50) {
            holder % shape.paths
        } else {
            random.below(shape.paths)
        };
        let path = &world.paths[path];
        let tier = if random.chance(70) {
            0
        } else {
            random.below(usize::from(shape.tiers))
        };
        let event = match random.below(1000) {
            0..3 => Event::Cleared,
            3..5 => Event::Goodbye,
            5..500 => Event::Stored(store(random, shape.hashing, path)),
            500..600 => Event::Resumable(mark(random, shape.hashing, path)),
            _ => Event::Removed(remove(random, shape.hashing, path)),
        };
        let tier = Tier::new(u8::try_from(tier).unwrap()).unwrap();
        Self::Apply { holder, tier, event }
    }
}

/// Random choice of the resumable blocks among `blocks` blocks: usually all of them, otherwise only the last one, or
/// some of them.
fn resumable(random: &mut Random, blocks: usize) -> Resumable {
    let percent = random.below(100);
    match random.below(4) {
        0 | 1 => Resumable::ALL,
        2 => Resumable::from_flags((1..=blocks).map(|block| block == blocks)),
        _ => Resumable::from_flags((0..blocks).map(|_| random.chance(percent))),
    }
}

/// Content of an event that marks blocks as resumable. The blocks are named as in a removed event.
fn mark(random: &mut Random, hashing: Hashing, path: &Path) -> ResumableBlocks {
    let RemovedBlocks {
        hashes,
        lineage_hashes,
    } = remove(random, hashing, path);
    ResumableBlocks {
        hashes,
        lineage_hashes,
        resumable: random.chance(50),
    }
}

fn variant(random: &mut Random) -> u64 {
    if random.chance(80) {
        0
    } else {
        1 + random.next() % 2
    }
}

fn store(random: &mut Random, hashing: Hashing, path: &Path) -> StoredBlocks {
    let from = if random.chance(45) {
        0
    } else {
        random.below(path.len())
    };
    let to = from + random.below(path.len() - from + 1);
    let variant = variant(random);
    let names: Vec<u64> = path.chain[from..to]
        .iter()
        .map(|hash| name_of(hashing, *hash, variant))
        .collect();
    if random.chance(25) {
        let mut order: Vec<usize> = (from..to).collect();
        random.shuffle(&mut order);
        let keys = order.iter().map(|index| path.keys[*index].lineage()).collect();
        let engine_hashes = random
            .chance(60)
            .then(|| order.iter().map(|index| names[index - from]).collect());
        return StoredBlocks {
            names: BlockNames::Lineage(keys),
            content: None,
            engine_hashes,
            resumable: resumable(random, to - from),
        };
    }
    let before = from.checked_sub(1);
    let position = random.chance(30).then(|| Position::new(from as u64).unwrap());
    let parent = before.map(|before| name_of(hashing, path.chain[before], variant));
    // A block has several names, and the event may give any of them for the parent. If the holder does not know this
    // name, the event waits. If the event also gives a position, its blocks become orphans instead.
    let parent = match before {
        Some(before) if random.chance(10) => {
            let other = random.next() % 3;
            Some(name_of(hashing, path.chain[before], other))
        }
        _ => parent,
    };
    // A parent can be named by its sequence hash, too.
    let parent = if random.chance(if position.is_some() { 50 } else { 15 }) {
        before.map(|before| path.chain[before])
    } else {
        parent
    };
    let chain: Vec<u64> = path.chain[from..to].to_vec();
    let (hashes, engine_hashes, content) = match hashing {
        Hashing::Engine => (chain, (variant != 0).then_some(names), None),
        // If the event gives the contract's hashes in addition to the names, it needs no content.
        Hashing::Recompute if random.chance(10) => (chain, Some(names), None),
        Hashing::Recompute => (names, None, content(random, path, from, to)),
    };
    StoredBlocks {
        names: BlockNames::Sequence {
            parent: parent.map(SequenceHash),
            position,
            hashes: hashes.into_iter().map(SequenceHash).collect(),
        },
        content,
        engine_hashes,
        resumable: resumable(random, to - from),
    }
}

fn content(random: &mut Random, path: &Path, from: usize, to: usize) -> Option<BlockContent> {
    match random.below(20) {
        0 => None,
        1..10 => Some(BlockContent::BlockHashes(
            path.blocks[from..to].iter().copied().map(BlockHash).collect(),
        )),
        _ => Some(BlockContent::Tokens {
            tokens: path.symbols[from..to]
                .iter()
                .flat_map(|symbol| tokens_of(*symbol))
                .collect(),
            lora_name: None,
            cache_salt: None,
        }),
    }
}

fn remove(random: &mut Random, hashing: Hashing, path: &Path) -> RemovedBlocks {
    let depth = path.len();
    let range = match random.below(5) {
        // The removed blocks are the tail, as engines evict; or the head; a stretch in the middle; one block; or all
        // blocks.
        0 | 1 => random.below(depth)..depth,
        2 => 0..1 + random.below(depth),
        3 => {
            let from = random.below(depth);
            from..from + random.below(depth - from + 1)
        }
        _ => {
            let one = random.below(depth);
            one..one + 1
        }
    };
    let mut removed = RemovedBlocks::default();
    let variant = variant(random);
    let by_lineage = random.chance(30);
    let by_sequence = random.chance(15);
    for index in range {
        if by_lineage || random.chance(3) {
            removed.lineage_hashes.push(path.keys[index].lineage());
        } else {
            let name = if by_sequence {
                path.chain[index]
            } else {
                name_of(hashing, path.chain[index], variant)
            };
            removed.hashes.push(SequenceHash(name));
        }
    }
    if random.chance(5) {
        removed.hashes.push(SequenceHash(random.next()));
    }
    // Engines name what they evict in any order, sometimes twice.
    if random.chance(50) {
        random.shuffle(&mut removed.hashes);
        random.shuffle(&mut removed.lineage_hashes);
    }
    if random.chance(5) {
        removed.hashes.extend(removed.hashes.first().copied());
    }
    removed
}
