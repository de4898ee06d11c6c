//! `dump_events`: what a holder holds, as events that rebuild it in a fresh index.

use crate::hash::{Position, SequenceHash};
use crate::wire::{BlockNames, Event, StoredBlocks, Tier};

use super::forest::{Block, BlockNumber, Forest};
use super::holder_set::HolderSlot;
use super::namespace::Hashing;
use super::plain::Plain;
use super::runs::{RunId, RunStore, RunWriter, Spot};

/// Blocks that travel in one event: each the child of the one before, all in the same tiers under their first names.
struct Piece {
    tiers: u8,
    blocks: Vec<BlockNumber>,
}

/// The blocks of a regular holder, run by run; each run as it is when its turn comes, since blocks may be evicted meanwhile.
pub(crate) fn plain(
    store: &RunStore,
    plain: &Plain,
    slot: HolderSlot,
    hashing: Hashing,
    blocks_per_event_max: usize,
) -> impl Iterator<Item = (Tier, Event)> {
    let tier = plain.tier();
    let blocks_max = blocks_per_event_max.max(1);
    let runs = plain.runs(&store.write()).into_iter();
    runs.flat_map(move |(run, _)| {
        let stretch = Stretch::of(run, plain, slot, &store.write());
        let events = stretch.events(hashing, blocks_max);
        events.into_iter().map(move |event| (tier, Event::Stored(event)))
    })
}

/// What a regular holder has of one run.
#[derive(Debug)]
struct Stretch<'n> {
    /// Position of the run's first block.
    start: usize,
    /// What the engine calls the block before that.
    parent: Option<SequenceHash>,
    hashes: Vec<SequenceHash>,
    /// What the engine calls the blocks, where that is not their hashes.
    names: Option<&'n [u64]>,
}

impl<'n> Stretch<'n> {
    fn of(run: RunId, plain: &'n Plain, slot: HolderSlot, writer: &RunWriter<'_>) -> Self {
        let name_of = |spot: Spot| match plain.own_names(spot.run) {
            Some(names) => names.get(usize::from(spot.offset)).copied(),
            None => Some(writer.hash(spot)),
        };
        // Not what the holder thinks that it has.
        let cutoff = writer.cutoff(run, slot);
        let spots = (0..cutoff).map(|offset| Spot { run, offset });
        Self {
            start: writer.start(run),
            parent: writer.parent(run).and_then(name_of).map(SequenceHash),
            hashes: spots.map(|spot| SequenceHash(writer.hash(spot))).collect(),
            names: plain.own_names(run),
        }
    }

    fn events(&self, hashing: Hashing, blocks_max: usize) -> Vec<StoredBlocks> {
        let mut parent = self.parent;
        let mut events = Vec::new();
        for (index, hashes) in self.hashes.chunks(blocks_max).enumerate() {
            let from = index * blocks_max;
            let names = self.names.and_then(|names| names.get(from..from + hashes.len()));
            let position = Position::new((self.start + from) as u64).ok();
            // Where hashes are recomputed, what comes without names would have to come with its content.
            let hashes_as_names = || hashes.iter().map(|hash| hash.as_u64()).collect();
            let engine_hashes = match names {
                Some(names) => Some(names.to_vec()),
                None => (hashing == Hashing::Recompute).then(hashes_as_names),
            };
            events.push(StoredBlocks {
                names: BlockNames::Sequence {
                    parent,
                    position,
                    hashes: hashes.to_vec(),
                },
                content: None,
                engine_hashes,
            });
            let last = names.and_then(<[u64]>::last).copied().map(SequenceHash);
            parent = last.or(hashes.last().copied());
        }
        events
    }
}

/// The blocks of any other holder.
pub(crate) fn forest(
    forest: &Forest,
    blocks_per_event_max: usize,
) -> impl Iterator<Item = (Tier, Event)> + '_ {
    let pieces = Pieces {
        forest,
        stack: forest.heads().collect(),
        blocks_max: blocks_per_event_max.max(1),
    };
    pieces.flat_map(move |piece| {
        let first = run_event(forest, &piece.blocks);
        let further = piece.blocks.into_iter().flat_map(move |number| {
            let names = forest.further_names(number);
            names.map(move |(name, tiers)| (tiers, stored(forest, &[number], Some(vec![name]))))
        });
        std::iter::once((piece.tiers, first))
            .chain(further)
            .flat_map(each_tier)
    })
}

/// The event once for each of its tiers.
fn each_tier((tiers, event): (u8, Event)) -> impl Iterator<Item = (Tier, Event)> {
    let is_in = move |tier: &Tier| tiers >> tier.as_u8() & 1 == 1;
    let tiers = (0..Tier::COUNT).filter_map(Tier::new).filter(is_in);
    tiers.map(move |tier| (tier, event.clone()))
}

/// Cuts the forest into pieces, parents before children.
struct Pieces<'a> {
    forest: &'a Forest,
    stack: Vec<BlockNumber>,
    blocks_max: usize,
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        let first = self.stack.pop()?;
        let mut run = Piece {
            tiers: self.forest.first_name(first).1,
            blocks: vec![first],
        };
        let mut last = first;
        loop {
            let mut children = self.forest.children(last);
            let next = children.next();
            self.stack.extend(children);
            let Some(next) = next else { break };
            if run.blocks.len() == self.blocks_max || !continues(self.forest, last, next) {
                self.stack.push(next);
                break;
            }
            run.blocks.push(next);
            last = next;
        }
        Some(run)
    }
}

fn continues(forest: &Forest, block: BlockNumber, child: BlockNumber) -> bool {
    let ((name, tiers), (child_name, child_tiers)) = (forest.first_name(block), forest.first_name(child));
    let has_sequence_hash = |number| forest.block(number).sequence_hash.is_some();
    tiers == child_tiers
        && name.is_some() == child_name.is_some()
        && has_sequence_hash(block) == has_sequence_hash(child)
}

/// The run as a stored event, every block under its first name.
fn run_event(forest: &Forest, run: &[BlockNumber]) -> Event {
    let names = run.iter().map(|number| forest.first_name(*number).0).collect();
    stored(forest, run, names)
}

fn stored(forest: &Forest, run: &[BlockNumber], engine_hashes: Option<Vec<u64>>) -> Event {
    let blocks: Vec<&Block> = run.iter().map(|number| forest.block(*number)).collect();
    let sequence: Option<Vec<SequenceHash>> = blocks.iter().map(|block| block.sequence_hash).collect();
    let names = match (sequence, run.first(), blocks.first()) {
        (Some(hashes), Some(number), Some(first)) => {
            // A resident parent has come before, so its name finds it. Of another one the lineage hash has the
            // fragment, which is all that it needs.
            let resident = forest
                .parent(*number)
                .and_then(|parent| forest.first_name(parent).0);
            let fragment = (first.key.position() > 0).then(|| first.key.parent_hash_fragment());
            BlockNames::Sequence {
                parent: resident.or(fragment).map(SequenceHash::from),
                position: Some(Position::from(first.key)),
                hashes,
            }
        }
        _ => BlockNames::Lineage(blocks.iter().map(|block| block.key).collect()),
    };
    Event::Stored(StoredBlocks {
        names,
        content: None,
        engine_hashes,
    })
}
