//! `dump_events`: what a holder holds, as events that rebuild it in a fresh index.

use crate::hash::{Position, SequenceHash};
use crate::wire::{BlockNames, Event, StoredBlocks, Tier};

use super::forest::{Block, BlockNumber, Forest};
use super::writer::HolderWriter;

/// A run of blocks that travel in one event: each the child of the one before, all in the same tiers under their first names.
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
            let first = run_event(forest, &run.blocks);
            let further = run.blocks.into_iter().flat_map(move |number| {
                let names = forest.further_names(number);
                names.map(move |(name, tiers)| (tiers, stored(forest, &[number], Some(vec![name]))))
            });
            std::iter::once((run.tiers, first))
                .chain(further)
                .flat_map(each_tier)
        })
    }
}

/// The event once for each of its tiers.
fn each_tier((tiers, event): (u8, Event)) -> impl Iterator<Item = (Tier, Event)> {
    let is_in = move |tier: &Tier| tiers >> tier.as_u8() & 1 == 1;
    let tiers = (0..Tier::COUNT).filter_map(Tier::new).filter(is_in);
    tiers.map(move |tier| (tier, event.clone()))
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
