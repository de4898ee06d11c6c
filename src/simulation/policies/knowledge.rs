//! A router's knowledge of the caches: an index fed with the workers' events, or the router's own guesses.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroUsize;

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::index::{
    HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer, QueryChain, Search,
};
use kvatlas_core::wire::{Event, HolderId, QueryKey, Tier, WorkerName};

use super::super::attention::CacheModel;
use super::super::cache::{Admission, PrefixCache};
use super::super::error::SimulationError;
use super::super::fleet::{FleetSize, RANK, events_of};

/// One change of a worker's cache, as the worker publishes it.
pub(super) enum CacheChange {
    /// Blocks of full attention were stored or removed.
    Blocks(Event),
    /// Blocks that got a side block (a block of the windows or states).
    SidesStored(Vec<SequenceHash>),
    /// Blocks whose side block was evicted.
    SidesEvicted(Vec<SequenceHash>),
}

/// Returns the changes that an admission makes to a cache, in a safe order: an index that applies them in this order
/// never shows more reusable blocks than the cache has.
pub(super) fn changes_of(chain: &[SequenceHash], admission: Admission) -> Vec<CacheChange> {
    let blocks = events_of(chain, &admission);
    let mut changes = vec![CacheChange::SidesEvicted(admission.sides_evicted)];
    changes.extend(blocks.into_iter().map(CacheChange::Blocks));
    changes.push(CacheChange::SidesStored(admission.sides_stored));
    changes.retain(|change| !change.is_empty());
    changes
}

impl CacheChange {
    fn is_empty(&self) -> bool {
        match self {
            Self::Blocks(_) => false,
            Self::SidesStored(blocks) | Self::SidesEvicted(blocks) => blocks.is_empty(),
        }
    }
}

/// The index of a daemon, which all routers share.
pub(super) struct DaemonIndex {
    model: CacheModel,
    index: PositionalIndexer,
    writers: Vec<HolderWriter>,
    numbers: HashMap<WorkerName, usize>,
    /// Blocks that have a side block (a block of the windows or states), by worker.
    sides: Vec<HashSet<SequenceHash>>,
}

impl DaemonIndex {
    /// Creates an index that knows all workers, but no blocks yet.
    pub(super) fn new(size: FleetSize, model: CacheModel) -> Result<Self, SimulationError> {
        let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
        let mut writers = Vec::new();
        let mut numbers = HashMap::new();
        for (number, worker) in size.worker_names()?.into_iter().enumerate() {
            numbers.insert(worker.clone(), number);
            writers.push(index.register(&HolderId { worker, rank: RANK })?);
        }
        Ok(Self {
            model,
            index,
            sides: vec![HashSet::new(); writers.len()],
            writers,
            numbers,
        })
    }

    /// Applies the changes of a worker.
    pub(super) fn apply(&mut self, worker: usize, changes: Vec<CacheChange>) {
        let (Some(writer), Some(sides)) = (self.writers.get_mut(worker), self.sides.get_mut(worker)) else {
            return;
        };
        for change in changes {
            match change {
                CacheChange::Blocks(event) => {
                    if matches!(event, Event::Cleared) {
                        sides.clear();
                    }
                    writer.apply(event, Tier::DEVICE, 0);
                }
                CacheChange::SidesStored(blocks) => sides.extend(blocks),
                CacheChange::SidesEvicted(blocks) => blocks.iter().for_each(|block| {
                    sides.remove(block);
                }),
            }
        }
    }

    /// Returns how many leading blocks of a prompt a request could reuse at each worker, as far as the index knows.
    pub(super) fn usable(&self, chain: &[SequenceHash]) -> Result<Vec<u64>, SimulationError> {
        let mut found = self.matched(chain)?;
        for (blocks, sides) in found.iter_mut().zip(&self.sides) {
            let matched = usize::try_from(*blocks).unwrap_or(usize::MAX);
            let is_kept = |position| chain.get(position).is_some_and(|hash| sides.contains(hash));
            *blocks = self.model.usable_blocks(chain.len(), matched, is_kept) as u64;
        }
        Ok(found)
    }

    /// Returns how many leading blocks of a prompt each worker has for full attention, as far as the index knows.
    pub(super) fn matched(&self, chain: &[SequenceHash]) -> Result<Vec<u64>, SimulationError> {
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

/// Guesses of one router about the workers' caches. The router assumes that a worker keeps the prompts that the router itself
/// sent there, as long as the worker's cache has room. The router knows by which rules caches keep blocks.
pub(super) struct RouterGuesses {
    caches: Vec<PrefixCache>,
}

impl RouterGuesses {
    /// Creates the guesses of a router that has sent no prompt yet. `capacity` is the real size of the workers' caches, in
    /// blocks.
    pub(super) fn new(workers: usize, capacity: NonZeroUsize, model: CacheModel) -> Self {
        let cache = || PrefixCache::new(capacity, model);
        Self {
            caches: (0..workers).map(|_| cache()).collect(),
        }
    }

    /// Notes that a prompt was sent to a worker.
    pub(super) fn sent(&mut self, worker: usize, chain: &[SequenceHash]) {
        if let Some(cache) = self.caches.get_mut(worker) {
            cache.admit(chain);
        }
    }

    /// Returns, for each worker, how many leading blocks of a prompt a request could reuse there if the router's
    /// guesses are right.
    pub(super) fn usable(&self, chain: &[SequenceHash]) -> Vec<u64> {
        let usable = |cache: &PrefixCache| u64::try_from(cache.usable_blocks(chain)).unwrap_or(u64::MAX);
        self.caches.iter().map(usable).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::super::attention::{Attention, Retention};
    use super::super::super::request::chain_of;
    use super::*;

    proptest! {
        /// Tests that the index gives the same depths as the worker's cache. This also holds after the cache was
        /// emptied, and for prompts that were never admitted.
        #[test]
        fn what_is_heard_is_the_cache(
            capacity in 4_usize..30,
            window in 1_usize..4,
            every in 0_usize..4,
            prompts in prop::collection::vec(prop::collection::vec(0_u64..3, 0..10), 1..40),
        ) {
            let model = CacheModel {
                attention: Attention::Window(NonZeroUsize::new(window).unwrap()),
                retention: NonZeroUsize::new(every).map_or(Retention::Boundaries, Retention::Every),
            };
            let capacity = NonZeroUsize::new(capacity).unwrap();
            let workers = NonZeroUsize::MIN;
            let size = FleetSize { workers, blocks_per_worker: capacity };
            let mut heard = DaemonIndex::new(size, model).unwrap();
            let mut cache = PrefixCache::new(capacity, model);
            for prompt in &prompts {
                let chain = chain_of(prompt);
                if prompt.starts_with(&[2, 2]) {
                    cache = PrefixCache::new(capacity, model);
                    heard.apply(0, vec![CacheChange::Blocks(Event::Cleared)]);
                }
                let admission = cache.admit(&chain);
                heard.apply(0, changes_of(&chain, admission));
                for other in &prompts {
                    let chain = chain_of(other);
                    prop_assert_eq!(heard.matched(&chain).unwrap(), [cache.matched_blocks(&chain) as u64]);
                    prop_assert_eq!(heard.usable(&chain).unwrap(), [cache.usable_blocks(&chain) as u64]);
                }
            }
        }
    }
}
