//! A fleet of simulated workers, and the truth about the blocks that they hold.

use std::num::NonZeroUsize;

use kvatlas_core::hash::{Position, SequenceHash};
use kvatlas_core::wire::{
    BatchCursor, Event, NameError, QueryReply, Rank, RemovedBlocks, StoredBlocks, WorkerName,
};

use super::attention::CacheModel;
use super::cache::{Admission, PrefixCache};
use super::request::Request;
use super::router::Router;
use fastrand::Rng;

/// The data-parallel rank of every simulated worker.
pub(super) const RANK: Rank = 0;

/// Size of a fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FleetSize {
    /// Number of workers.
    pub workers: NonZeroUsize,
    /// Maximum number of blocks that each worker may hold.
    pub blocks_per_worker: NonZeroUsize,
}

impl FleetSize {
    /// Returns the workers' names, in the order of their numbers.
    ///
    /// # Errors
    ///
    /// [`NameError`] if a name is not valid, which would be an error in this function.
    pub fn worker_names(self) -> Result<Vec<WorkerName>, NameError> {
        let count = self.workers.get();
        // All numbers have the same width, so that the order by name is the order by number.
        let width = (count - 1).to_string().len();
        (0..count)
            .map(|number| WorkerName::new(&format!("worker-{number:0width$}")))
            .collect()
    }
}

/// One simulated worker.
#[derive(Debug)]
struct SimulatedWorker {
    name: WorkerName,
    cache: PrefixCache,
}

/// A worker, and the number of leading blocks of a chain that it really holds. The number comes from the simulated cache, not
/// from the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpectedHolder {
    /// Name of the worker.
    pub worker: WorkerName,
    /// Number of leading blocks that the worker holds.
    pub matched_blocks: usize,
}

/// The effects of serving a request.
#[derive(Debug)]
pub struct ServedRequest {
    /// Index of the worker that served the request.
    pub worker: usize,
    /// The changes in the worker's cache.
    pub admission: Admission,
    /// Events with these changes, for the worker's publisher. Empty if nothing changed.
    pub events: Vec<Event>,
}

impl ServedRequest {
    /// Returns the number of blocks that the events name.
    pub fn event_blocks(&self) -> usize {
        let stored = self.admission.resident_blocks - self.admission.matched_blocks;
        stored + self.admission.evicted.len()
    }
}

/// The workers of one simulation and their router.
#[derive(Debug)]
pub struct Fleet {
    workers: Vec<SimulatedWorker>,
    router: Router,
}

impl Fleet {
    /// Creates a fleet with empty caches. `seed` decides between equally good workers.
    ///
    /// # Errors
    ///
    /// The errors of [`FleetSize::worker_names`].
    pub fn new(size: FleetSize, seed: u64) -> Result<Self, NameError> {
        let worker = |name| SimulatedWorker {
            name,
            cache: PrefixCache::new(size.blocks_per_worker, CacheModel::default()),
        };
        Ok(Self {
            workers: size.worker_names()?.into_iter().map(worker).collect(),
            router: Router::new(size.workers.get(), Rng::with_seed(seed)),
        })
    }

    /// Returns the workers' names, by index.
    pub fn names(&self) -> impl Iterator<Item = &WorkerName> {
        self.workers.iter().map(|worker| &worker.name)
    }

    /// Returns the numbers of leading blocks that the workers hold according to a reply: one number for each worker
    /// of the fleet, in the order of the workers' indices. Other holders in the reply are ignored.
    pub fn matches_in(&self, reply: &QueryReply) -> Vec<u64> {
        let mut matches = vec![0; self.workers.len()];
        for holder in &reply.holders {
            let index = self
                .workers
                .binary_search_by(|worker| worker.name.cmp(&holder.worker));
            if let Some(matched) = index.ok().and_then(|index| matches.get_mut(index)) {
                *matched = u64::from(holder.matched_blocks);
            }
        }
        matches
    }

    /// Lets the router choose a worker, and serves the request with that worker. `matched_blocks` has, for each worker,
    /// the number of the request's leading blocks that the worker holds.
    pub fn serve(&mut self, request: &Request, matched_blocks: &[u64]) -> ServedRequest {
        let worker = self.router.choose(request.arrival_ms, matched_blocks);
        self.serve_with(worker, request)
    }

    /// Serves a request with the worker whose index is `worker`.
    pub fn serve_with(&mut self, worker: usize, request: &Request) -> ServedRequest {
        let admission = match self.workers.get_mut(worker) {
            Some(worker) => worker.cache.admit(&request.chain),
            None => Admission::default(),
        };
        self.router.assign(worker, request, admission.hit_blocks);
        let events = events_of(&request.chain, &admission);
        ServedRequest {
            worker,
            admission,
            events,
        }
    }

    /// Returns the holders that a reply about a chain must list, that is, the workers that hold leading blocks of the chain.
    /// Workers with more blocks come first; workers with equally many are sorted by name.
    pub fn expected_holders(&self, chain: &[SequenceHash]) -> Vec<ExpectedHolder> {
        let holder = |worker: &SimulatedWorker| ExpectedHolder {
            worker: worker.name.clone(),
            matched_blocks: worker.cache.matched_blocks(chain),
        };
        let mut holders: Vec<_> = self
            .workers
            .iter()
            .map(holder)
            .filter(|holder| holder.matched_blocks > 0)
            .collect();
        holders.sort_by(|one, other| {
            let by_blocks = other.matched_blocks.cmp(&one.matched_blocks);
            by_blocks.then_with(|| one.worker.cmp(&other.worker))
        });
        holders
    }
}

/// Returns the changes of an admission as events, in an order that leaves no hole at any time. Removals come first, from the
/// leaves up. Then come the stored blocks of the chain, after its resident prefix.
pub(super) fn events_of(chain: &[SequenceHash], admission: &Admission) -> Vec<Event> {
    let mut events = Vec::new();
    if !admission.evicted.is_empty() {
        events.push(Event::Removed(RemovedBlocks::by_sequence(
            admission.evicted.clone(),
        )));
    }
    let before = admission.matched_blocks;
    let stored = chain.get(before..admission.resident_blocks).unwrap_or_default();
    if !stored.is_empty() {
        let parent = before.checked_sub(1).and_then(|last| chain.get(last)).copied();
        let position = u64::try_from(before).ok().and_then(|at| Position::new(at).ok());
        let blocks = StoredBlocks::by_sequence(parent, position, stored.to_vec());
        events.push(Event::Stored(blocks));
    }
    events
}

/// A worker, with the last batch that its publisher has published (epoch and number).
pub(super) type WorkerCursor = (WorkerName, BatchCursor);

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::request::chain_of;
    use super::super::synthetic::SyntheticLoad;
    use super::*;
    use kvatlas_core::wire::BlockNames;

    fn size(workers: usize, blocks_per_worker: usize) -> FleetSize {
        FleetSize {
            workers: NonZeroUsize::new(workers).unwrap(),
            blocks_per_worker: NonZeroUsize::new(blocks_per_worker).unwrap(),
        }
    }

    /// Blocks that one worker holds according to its events, each with its parent.
    #[derive(Default)]
    struct Listener(HashMap<SequenceHash, Option<SequenceHash>>);

    impl Listener {
        fn apply(&mut self, event: &Event) {
            match event {
                Event::Removed(removed) => {
                    for hash in &removed.hashes {
                        assert!(self.0.remove(hash).is_some(), "removed what was not stored");
                        let has_child = self.0.values().any(|parent| *parent == Some(*hash));
                        assert!(!has_child, "a removal left a hole");
                    }
                }
                Event::Stored(stored) => {
                    let BlockNames::Sequence { parent, hashes, .. } = &stored.names else {
                        panic!("named by sequence hashes");
                    };
                    let mut before = *parent;
                    assert!(before.is_none_or(|parent| self.0.contains_key(&parent)));
                    for hash in hashes {
                        assert_eq!(self.0.insert(*hash, before), None, "stored twice");
                        before = Some(*hash);
                    }
                }
                other => panic!("unexpected {other:?}"),
            }
        }
    }

    #[test]
    fn the_events_alone_give_the_truth() {
        let mut fleet = Fleet::new(size(3, 40), 1).unwrap();
        let mut listeners: Vec<_> = (0..3).map(|_| Listener::default()).collect();
        let requests: Vec<_> = SyntheticLoad::new(1).take(120).collect();
        for request in &requests {
            let matches: Vec<_> = (0..3)
                .map(|worker| fleet.workers[worker].cache.matched_blocks(&request.chain) as u64)
                .collect();
            let served = fleet.serve(request, &matches);
            let listener = &mut listeners[served.worker];
            served.events.iter().for_each(|event| listener.apply(event));
        }
        for (worker, listener) in fleet.workers.iter().zip(&listeners) {
            assert_eq!(worker.cache.len(), listener.0.len());
            assert!(
                listener
                    .0
                    .keys()
                    .all(|hash| worker.cache.position(*hash).is_some())
            );
        }
    }

    #[test]
    fn expected_holders_are_ordered_like_a_reply() {
        let mut fleet = Fleet::new(size(11, 40), 1).unwrap();
        let request = |ids: &[u64]| Request {
            arrival_ms: 0,
            chain: chain_of(ids),
            output_tokens: 1,
        };
        fleet.serve_with(10, &request(&[1, 2]));
        fleet.serve_with(2, &request(&[1, 2]));
        fleet.serve_with(7, &request(&[1, 2, 3]));
        fleet.serve_with(4, &request(&[9]));
        let found: Vec<_> = fleet
            .expected_holders(&chain_of(&[1, 2, 3, 4]))
            .into_iter()
            .map(|holder| (holder.worker.as_str().to_owned(), holder.matched_blocks))
            .collect();
        let expected = [("worker-07", 3), ("worker-02", 2), ("worker-10", 2)];
        assert_eq!(found, expected.map(|(name, blocks)| (name.to_owned(), blocks)));
    }
}
