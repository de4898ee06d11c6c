//! What a router knows about the caches: what an index has heard, or what the router itself assumes.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::index::{
    HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, QueryChain, Search,
};
use kvatlas_core::wire::{Event, HolderId, QueryKey, Tier, WorkerName};

use super::super::cache::PrefixCache;
use super::super::error::SimulationError;
use super::super::fleet::{FleetSize, RANK};

/// The index of a daemon, as all routers share it.
pub(super) struct Heard {
    index: PositionalIndexer,
    writers: Vec<HolderWriter>,
    numbers: HashMap<WorkerName, usize>,
}

impl Heard {
    /// An index that has heard of all workers, and of no block.
    pub(super) fn new(size: FleetSize) -> Result<Self, SimulationError> {
        let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
        let mut writers = Vec::new();
        let mut numbers = HashMap::new();
        for (number, worker) in size.worker_names()?.into_iter().enumerate() {
            numbers.insert(worker.clone(), number);
            writers.push(index.register(&HolderId { worker, rank: RANK })?);
        }
        Ok(Self {
            index,
            writers,
            numbers,
        })
    }

    /// Applies a worker's events.
    pub(super) fn apply(&mut self, worker: usize, events: Vec<Event>) {
        if let Some(writer) = self.writers.get_mut(worker) {
            for event in events {
                writer.apply(event, Tier::DEVICE, 0);
            }
        }
    }

    /// How many leading blocks each worker has of a prompt, as far as the index knows.
    pub(super) fn matches(&self, chain: &[SequenceHash]) -> Result<Vec<u64>, SimulationError> {
        let mut matched = vec![0; self.writers.len()];
        let key = QueryKey::SequenceHashes(chain.to_vec());
        let mut query = QueryChain::new(&key, self.index.settings().block_size)?;
        for found in self.index.find_chain(&mut query, Search::default()).holders() {
            if let Some(number) = self.numbers.get(&found.holder.id.worker)
                && let Some(matched) = matched.get_mut(*number)
            {
                *matched = u64::from(found.matched_blocks);
            }
        }
        Ok(matched)
    }
}

/// What one router assumes: that a worker keeps what the router sent to it, as long as its cache has room.
pub(super) struct Guesses {
    caches: Vec<PrefixCache>,
}

impl Guesses {
    /// Knows the size of the caches, and nothing in them.
    pub(super) fn new(workers: usize, capacity: NonZeroUsize) -> Self {
        Self {
            caches: (0..workers).map(|_| PrefixCache::new(capacity)).collect(),
        }
    }

    /// Notes that a prompt was sent to a worker.
    pub(super) fn sent(&mut self, worker: usize, chain: &[SequenceHash]) {
        if let Some(cache) = self.caches.get_mut(worker) {
            cache.admit(chain);
        }
    }

    /// How many leading blocks each worker should have of a prompt.
    pub(super) fn matches(&self, chain: &[SequenceHash]) -> Vec<u64> {
        let matched = |cache: &PrefixCache| u64::try_from(cache.matched_blocks(chain)).unwrap_or(u64::MAX);
        self.caches.iter().map(matched).collect()
    }
}
