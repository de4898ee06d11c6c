//! `dump_events`: what a holder holds, as events that rebuild it in a fresh index.

use crate::hash::{Position, SequenceHash};
use crate::wire::{BlockNames, Event, StoredBlocks, Tier};

use super::forest::{Block, BlockNumber, Forest};
use super::writer::HolderWriter;

/// A run of blocks that travel in one event: each the child of the one before, all in the same tiers.
struct Run {
    tiers: u8,
    blocks: Vec<BlockNumber>,
}

impl HolderWriter {
    /// Events that, applied in this order, make a fresh holder equal to this one: same blocks, names, tiers and holes,
    /// parents before children. Stored events that wait for their parent are not part of it.
    ///
    /// `blocks_per_event_max` bounds each event.
    pub fn dump_events(&self, blocks_per_event_max: usize) -> impl Iterator<Item = (Tier, Event)> + '_ {
        let forest = self.forest();
        let runs = Runs {
            forest,
            stack: forest.heads().collect(),
            blocks_max: blocks_per_event_max.max(1),
        };
        runs.flat_map(move |run| {
            let tiers = (0..Tier::COUNT)
                .filter_map(Tier::new)
                .filter(move |tier| run.tiers >> tier.as_u8() & 1 == 1);
            let events: Vec<Event> = run_events(forest, &run.blocks);
            tiers.flat_map(move |tier| events.clone().into_iter().map(move |event| (tier, event)))
        })
    }
}

/// Cuts the forest into runs, parents before children.
struct Runs<'a> {
    forest: &'a Forest,
    stack: Vec<BlockNumber>,
    blocks_max: usize,
}

impl Iterator for Runs<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        let first = self.stack.pop()?;
        let mut run = Run {
            tiers: self.forest.block(first).tiers,
            blocks: vec![first],
        };
        let mut last = first;
        loop {
            let mut children = self.forest.children(last);
            let next = children.next();
            self.stack.extend(children);
            let Some(next) = next else { break };
            if run.blocks.len() == self.blocks_max
                || !continues(self.forest.block(last), self.forest.block(next))
            {
                self.stack.push(next);
                break;
            }
            run.blocks.push(next);
            last = next;
        }
        Some(run)
    }
}

fn continues(block: &Block, child: &Block) -> bool {
    block.tiers == child.tiers
        && block.sequence_hash.is_some() == child.sequence_hash.is_some()
        && block.name.is_some() == child.name.is_some()
}

/// The run as a stored event, then one more for every further name of a block.
fn run_events(forest: &Forest, run: &[BlockNumber]) -> Vec<Event> {
    let blocks: Vec<&Block> = run.iter().map(|number| forest.block(*number)).collect();
    let names = blocks.iter().map(|block| block.name).collect();
    let mut events = vec![stored(&blocks, names)];
    for (number, block) in run.iter().zip(&blocks) {
        for alias in forest.aliases(*number) {
            events.push(stored(&[block], Some(vec![*alias])));
        }
    }
    events
}

fn stored(blocks: &[&Block], engine_hashes: Option<Vec<u64>>) -> Event {
    let sequence: Option<Vec<SequenceHash>> = blocks.iter().map(|block| block.sequence_hash).collect();
    let names = match (sequence, blocks.first()) {
        (Some(hashes), Some(first)) => {
            // The fragment of the parent is all that the lineage hash has of it, and all that it needs.
            let has_parent = first.key.position() > 0;
            let parent = has_parent.then(|| SequenceHash::from(first.key.parent_hash_fragment()));
            BlockNames::Sequence {
                parent,
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
