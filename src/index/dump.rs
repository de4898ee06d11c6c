//! `dump_events`: what a holder holds, as events that rebuild it in a fresh index.

use std::ops::Range;

use hashbrown::HashMap;

use crate::hash::{Position, SequenceHash};
use crate::wire::{BlockNames, Event, StoredBlocks, Tier};

use super::forest::{Block, BlockNumber, Forest};
use super::plain::Plain;
use super::runs::{RunId, RunStore, Spot};

/// Blocks that travel in one event: each the child of the one before, all in the same tiers under their first names.
struct Piece {
    tiers: u8,
    blocks: Vec<BlockNumber>,
}

/// The blocks of a regular holder.
pub(crate) fn plain(
    store: &RunStore,
    plain: &Plain,
    blocks_per_event_max: usize,
) -> impl Iterator<Item = (Tier, Event)> {
    let names = plain.own_names();
    let tier = plain.tier();
    let stretches: Vec<Stretch> = {
        let writer = store.write();
        let runs = plain.runs(&writer).into_iter();
        let stretch = |(run, cutoff)| Stretch {
            run,
            cutoff,
            start: writer.start(run),
            parent: writer.parent(run).map(|parent| (parent, writer.hash(parent))),
        };
        runs.map(stretch).collect()
    };
    let step = blocks_per_event_max.clamp(1, usize::from(u16::MAX));
    let pieces = stretches.into_iter().flat_map(move |stretch| {
        let offsets = (0..stretch.cutoff).step_by(step);
        offsets.map(move |offset| (stretch, offset))
    });
    pieces.map(move |(stretch, from)| {
        let to = from
            .saturating_add(u16::try_from(step).unwrap_or(u16::MAX))
            .min(stretch.cutoff);
        (
            tier,
            Event::Stored(stretch.stored(store, from..to, names.as_ref())),
        )
    })
}

/// What a regular holder has of one run.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    run: RunId,
    cutoff: u16,
    /// Position of the run's first block.
    start: usize,
    /// The block before that, and its hash.
    parent: Option<(Spot, u64)>,
}

impl Stretch {
    fn stored(
        &self,
        store: &RunStore,
        offsets: Range<u16>,
        names: Option<&HashMap<Spot, u64>>,
    ) -> StoredBlocks {
        let run = self.run;
        let before = match offsets.start.checked_sub(1) {
            None => self.parent,
            Some(before) => {
                let hash = store
                    .hashes(run, before..offsets.start)
                    .first()
                    .map(|hash| hash.0);
                hash.map(|hash| (Spot { run, offset: before }, hash))
            }
        };
        let name_of = |spot: &Spot| names.and_then(|names| names.get(spot)).copied();
        let position = Position::new((self.start + usize::from(offsets.start)) as u64);
        let engine_hashes = names.map(|_| {
            let spots = offsets.clone().map(|offset| Spot { run, offset });
            spots.filter_map(|spot| name_of(&spot)).collect()
        });
        StoredBlocks {
            names: BlockNames::Sequence {
                parent: before.map(|(spot, hash)| SequenceHash(name_of(&spot).unwrap_or(hash))),
                position: position.ok(),
                hashes: store.hashes(run, offsets),
            },
            content: None,
            engine_hashes,
        }
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
