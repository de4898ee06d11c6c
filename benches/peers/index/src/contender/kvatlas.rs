//! The index of kvatlas.

use std::hint::black_box;

use kvatlas_core::hash::{BlockHash, Position, SequenceHash};
use kvatlas_core::index::{
    HolderWriter, IndexLimits, Matches, NamespaceSettings, PositionalIndexer, Search, give_back_memory,
};
use kvatlas_core::wire::{Event, HolderId, QueryKey, RemovedBlocks, StoredBlocks, Tier, WorkerName};

use super::{ByWorker, Contender, Form, Reader, Run, Shape, TwoLanes, Writer};
use crate::measure::{Applied, Timing, apply_here};
use crate::workload::Prompt;

/// `kvatlas_core::index::PositionalIndexer` as a contender.
pub struct Kvatlas;

/// The writers of the index, one for each worker.
pub struct Holders(ByWorker<HolderWriter>);

impl Contender for Kvatlas {
    const NAME: &'static str = "kvatlas";
    type Reader = PositionalIndexer;
    type Writer = Holders;

    fn build(workers: u32) -> (Self::Reader, Self::Writer) {
        let index = PositionalIndexer::new(NamespaceSettings::default(), limits_for(workers));
        let holders = register_all(&index, workers);
        (index, Holders(holders))
    }
}

/// Registers workers 0 to `workers` − 1.
pub(super) fn register_all(index: &PositionalIndexer, workers: u32) -> ByWorker<HolderWriter> {
    ByWorker::of_all((0..workers).map(|number| {
        let worker = WorkerName::new(&number.to_string()).expect("digits are a worker's name");
        index
            .register(&HolderId { worker, rank: 0 })
            .expect("the limits allow as many as the scenarios need")
    }))
}

/// Returns limits with room for this number of workers.
pub(super) fn limits_for(workers: u32) -> IndexLimits {
    let limits = IndexLimits::default();
    IndexLimits {
        workers_max: limits.workers_max.max(workers as usize),
        ..limits
    }
}

fn matches(index: &PositionalIndexer, query: &QueryKey) -> Matches {
    index
        .find_matches(query, Search::default())
        .expect("no scenario is deeper than a position can say")
}

impl Reader for PositionalIndexer {
    type Query = QueryKey;

    const SHAPES: &'static [(Shape, &'static str)] = &[(Shape::Lean, "groups"), (Shape::List, "list")];

    fn query(form: Form, prompt: &Prompt) -> QueryKey {
        match form {
            Form::Native => QueryKey::SequenceHashes(sequence_hashes(&prompt.sequence)),
            Form::BlockHashes => {
                QueryKey::BlockHashes(prompt.blocks.iter().copied().map(BlockHash).collect())
            }
            Form::Tokens => QueryKey::Tokens {
                tokens: prompt.tokens(),
                lora_name: None,
                cache_salt: None,
            },
        }
    }

    fn find(&self, query: &mut QueryKey, shape: Shape) -> usize {
        let found = matches(self, query);
        match shape {
            Shape::Lean => {
                black_box(&found);
                0
            }
            Shape::List => {
                let list: Vec<_> = found
                    .holders()
                    .map(|found| (found.holder, found.matched_blocks))
                    .collect();
                black_box(&list).len()
            }
        }
    }

    fn answer(&self, query: &mut QueryKey, _: Shape) -> Vec<(u32, u32)> {
        let found = matches(self, query);
        let mut answer: Vec<(u32, u32)> = found
            .holders()
            .map(|found| {
                let worker = found.holder.id.worker.as_str().parse();
                (
                    worker.expect("`build` has made the name of digits"),
                    found.matched_blocks,
                )
            })
            .collect();
        answer.sort_unstable();
        answer
    }
}

impl Writer for Holders {
    type Event = (u32, Event);

    fn stored(worker: u32, run: Run<'_>) -> Self::Event {
        let position = Position::new(u64::from(run.position)).expect("no scenario is deeper than that");
        let hashes = sequence_hashes(run.sequence);
        let stored = StoredBlocks::by_sequence(run.parent.map(SequenceHash), Some(position), hashes);
        (worker, Event::Stored(stored))
    }

    fn removed(worker: u32, sequence: &[u64]) -> Self::Event {
        let removed = RemovedBlocks::by_sequence(sequence_hashes(sequence));
        (worker, Event::Removed(removed))
    }

    fn apply(&mut self, events: Vec<Self::Event>, timing: Timing) -> Applied {
        apply_here(events, timing, |(worker, event)| {
            let applied = self.0.of(worker).apply(event, Tier::DEVICE, 0);
            applied.parked == 0 && applied.stored + applied.removed > 0
        })
    }

    fn upkeep(&mut self) {
        give_back_memory();
    }
}

impl TwoLanes for Holders {
    fn split(self) -> [Self; 2] {
        self.0.split().map(Self)
    }
}

fn sequence_hashes(hashes: &[u64]) -> Vec<SequenceHash> {
    hashes.iter().copied().map(SequenceHash).collect()
}
