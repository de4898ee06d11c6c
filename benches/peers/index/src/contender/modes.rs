//! The index of kvatlas with events such as real engines publish: blocks with the engine's own names, blocks on two
//! tiers, blocks that are stored twice, and blocks that are missing.

use std::marker::PhantomData;

use kvatlas_core::hash::{BlockHash, Position, SequenceHash};
use kvatlas_core::index::{Hashing, HolderWriter, NamespaceSettings, PositionalIndexer, give_back_memory};
use kvatlas_core::wire::{BlockContent, Event, RemovedBlocks, StoredBlocks, Tier};

use super::kvatlas::{limits_for, register_all};
use super::{ByWorker, Contender, Run, TwoLanes, Writer};
use crate::measure::{Applied, Timing, apply_here};
use crate::workload::mix;

/// Kind of events that an engine publishes.
pub trait Mode {
    /// Name of the mode in the tables.
    const NAME: &'static str;
    /// Hashes by which the index is keyed: the engine's own, or hashes that the index computes.
    const HASHING: Hashing;

    /// Type of the events of one store or removal. It is an array if this number of events is always the same. So the
    /// events need no allocation, as in a real lane.
    type Events: IntoIterator<Item = (Tier, Event)> + Send;

    /// Returns the events that store one run.
    fn stored(worker: u32, run: Run<'_>) -> Self::Events;

    /// Returns the events of one removal.
    fn removed(worker: u32, sequence: &[u64]) -> Self::Events;
}

fn hashes(hashes: &[u64]) -> Vec<SequenceHash> {
    hashes.iter().copied().map(SequenceHash).collect()
}

fn store(run: Run<'_>) -> Event {
    let position = Position::new(u64::from(run.position)).expect("no scenario is deeper than that");
    let parent = run.parent.map(SequenceHash);
    Event::Stored(StoredBlocks::by_sequence(
        parent,
        Some(position),
        hashes(run.sequence),
    ))
}

fn remove(names: &[u64]) -> Event {
    Event::Removed(RemovedBlocks::by_sequence(hashes(names)))
}

/// Mode in which every worker has its own name for each block. The index computes the sequence hashes from block hashes
/// within the timed store.
pub struct Names;

fn name(worker: u32, sequence: u64) -> u64 {
    mix(sequence ^ mix(u64::from(worker)))
}

impl Mode for Names {
    const NAME: &'static str = "kvatlas, engine's names";
    const HASHING: Hashing = Hashing::Recompute;
    type Events = [(Tier, Event); 1];

    fn stored(worker: u32, run: Run<'_>) -> Self::Events {
        let names: Vec<u64> = run.sequence.iter().map(|hash| name(worker, *hash)).collect();
        let parent = run.parent.map(|parent| SequenceHash(name(worker, parent)));
        let mut stored = StoredBlocks::by_sequence(parent, None, hashes(&names));
        stored.content = Some(BlockContent::BlockHashes(
            run.blocks.iter().copied().map(BlockHash).collect(),
        ));
        [(Tier::DEVICE, Event::Stored(stored))]
    }

    fn removed(worker: u32, sequence: &[u64]) -> Self::Events {
        let names: Vec<u64> = sequence.iter().map(|hash| name(worker, *hash)).collect();
        [(Tier::DEVICE, remove(&names))]
    }
}

/// Mode in which every block is on the device and on the host. So a store takes two events, one for each tier, and so
/// does a removal.
pub struct TwoTiers;

impl Mode for TwoTiers {
    const NAME: &'static str = "kvatlas, two tiers";
    const HASHING: Hashing = Hashing::Engine;
    type Events = [(Tier, Event); 2];

    fn stored(_: u32, run: Run<'_>) -> Self::Events {
        [Tier::DEVICE, host()].map(|tier| (tier, store(run)))
    }

    fn removed(_: u32, sequence: &[u64]) -> Self::Events {
        [Tier::DEVICE, host()].map(|tier| (tier, remove(sequence)))
    }
}

fn host() -> Tier {
    Tier::new(1).expect("there is a second tier")
}

/// Mode in which every block is stored twice, under two names of the engine. So a store takes two events, one for each
/// copy. A removal removes both copies.
pub struct Copies;

impl Mode for Copies {
    const NAME: &'static str = "kvatlas, two copies";
    const HASHING: Hashing = Hashing::Engine;
    type Events = [(Tier, Event); 2];

    fn stored(worker: u32, run: Run<'_>) -> Self::Events {
        let copy = |number: u64| {
            let copy_name = |hash: &u64| name(worker, *hash) ^ number;
            let mut event = store(run);
            if let Event::Stored(stored) = &mut event {
                stored.engine_hashes = Some(run.sequence.iter().map(copy_name).collect());
            }
            (Tier::DEVICE, event)
        };
        [copy(0), copy(1)]
    }

    fn removed(worker: u32, sequence: &[u64]) -> Self::Events {
        let copy = |number: u64| {
            let names: Vec<u64> = sequence.iter().map(|hash| name(worker, *hash) ^ number).collect();
            (Tier::DEVICE, remove(&names))
        };
        [copy(0), copy(1)]
    }
}

/// Mode in which one block in a hundred is removed immediately after it was stored.
pub struct Holes;

impl Mode for Holes {
    const NAME: &'static str = "kvatlas, 1 % missing";
    const HASHING: Hashing = Hashing::Engine;
    type Events = Vec<(Tier, Event)>;

    fn stored(_: u32, run: Run<'_>) -> Self::Events {
        let missing: Vec<u64> = run.sequence.iter().copied().skip(50).step_by(100).collect();
        vec![(Tier::DEVICE, store(run)), (Tier::DEVICE, remove(&missing))]
    }

    fn removed(_: u32, sequence: &[u64]) -> Self::Events {
        vec![(Tier::DEVICE, remove(sequence))]
    }
}

/// `kvatlas_core::index::PositionalIndexer` as a contender, in a mode.
pub struct InMode<M>(PhantomData<M>);

/// The writers of the index, one for each worker.
pub struct Holders<M> {
    writers: ByWorker<HolderWriter>,
    mode: PhantomData<M>,
}

impl<M: Mode> Contender for InMode<M> {
    const NAME: &'static str = M::NAME;
    type Reader = PositionalIndexer;
    type Writer = Holders<M>;

    fn build(workers: u32) -> (Self::Reader, Self::Writer) {
        let settings = NamespaceSettings {
            hashing: M::HASHING,
            ..NamespaceSettings::default()
        };
        let index = PositionalIndexer::new(settings, limits_for(workers));
        let writers = register_all(&index, workers);
        (
            index,
            Holders {
                writers,
                mode: PhantomData,
            },
        )
    }
}

impl<M: Mode> Writer for Holders<M> {
    type Event = (u32, M::Events);

    fn stored(worker: u32, run: Run<'_>) -> Self::Event {
        (worker, M::stored(worker, run))
    }

    fn removed(worker: u32, sequence: &[u64]) -> Self::Event {
        (worker, M::removed(worker, sequence))
    }

    fn apply(&mut self, events: Vec<Self::Event>, timing: Timing) -> Applied {
        apply_here(events, timing, |(worker, events)| {
            let writer = self.writers.of(worker);
            let mut is_taken = true;
            for (tier, event) in events {
                let applied = writer.apply(event, tier, 0);
                is_taken &= applied.parked == 0 && applied.stored + applied.removed > 0;
            }
            is_taken
        })
    }

    fn upkeep(&mut self) {
        give_back_memory();
    }
}

impl<M: Mode + Send> TwoLanes for Holders<M> {
    fn split(self) -> [Self; 2] {
        self.writers.split().map(|writers| Self {
            writers,
            mode: PhantomData,
        })
    }
}
