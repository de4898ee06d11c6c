//! Design 7: the daemon's own index, for comparison with the other designs.

use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;
use parking_lot::Mutex;

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::index::{
    HolderWriter, IndexLimits, NamespaceSettings, ParkingLimits, PositionalIndexer, Search,
};
use kvatlas_core::wire::{Event, HolderId, RemovedBlocks, StoredBlocks, Tier, WorkerName};

use super::pool::SharedIndex;
use super::prefix_index::{Depth, HolderNumber, PrefixBlock, PrefixIndexSize, PrefixQuery};

/// Design 7: the daemon's own [`PositionalIndexer`], keyed by lineage hashes. The design is made for a
/// [`ThreadPool`](super::ThreadPool), whose threads apply the events, as the lanes of the daemon do.
///
/// # Promise
///
/// Exact at every instant, per holder: the holder had the returned depth at some instant between the query's start
/// and its end. If the sequence hashes are not a chain, the index notices and walks block by block.
///
/// # What differs from the daemon
///
/// Holders are the ranks of one worker, so that a rank is a holder's number. No store waits for its parent: a store
/// without a held parent is refused immediately, as in the other designs.
///
/// # Cost
///
/// A few look-ups. Their number grows with the number of distinct depths and the logarithm of the query's depth. The
/// query is given as sequence hashes and needs no hashing.
#[derive(Debug)]
pub struct LineageIndex {
    indexer: PositionalIndexer,
    worker: WorkerName,
    writers: DashMap<HolderNumber, Mutex<HolderWriter>>,
    refused_stores: AtomicU64,
}

impl LineageIndex {
    /// Makes an empty index whose holders are the ranks of `worker`.
    pub fn new(worker: WorkerName) -> Self {
        let limits = IndexLimits {
            ranks_per_worker_max: usize::MAX,
            parking: ParkingLimits {
                events_max: 0,
                ..ParkingLimits::default()
            },
            ..IndexLimits::default()
        };
        Self {
            indexer: PositionalIndexer::new(NamespaceSettings::default(), limits),
            worker,
            writers: DashMap::new(),
            refused_stores: AtomicU64::new(0),
        }
    }

    /// Calls `change` with the holder's writer, and returns the result. A new holder is registered first. `None` if
    /// the index has no room for a new holder.
    fn with_writer<T>(&self, holder: HolderNumber, change: impl FnOnce(&mut HolderWriter) -> T) -> Option<T> {
        if !self.writers.contains_key(&holder) {
            let id = HolderId {
                worker: self.worker.clone(),
                rank: holder.0,
            };
            let writer = self.indexer.register(&id).ok()?;
            self.writers.insert(holder, Mutex::new(writer));
        }
        let writer = self.writers.get(&holder)?;
        let mut writer = writer.lock();
        Some(change(&mut writer))
    }
}

impl SharedIndex for LineageIndex {
    fn store(&self, holder: HolderNumber, parent: Option<SequenceHash>, blocks: &[PrefixBlock]) {
        let names = blocks.iter().map(|block| block.name).collect();
        let event = Event::Stored(StoredBlocks::by_sequence(parent, None, names));
        let is_stored = self.with_writer(holder, |writer| {
            let applied = writer.apply(event, Tier::DEVICE, 0);
            applied.stored == blocks.len() as u64
        });
        if is_stored != Some(true) {
            self.refused_stores.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn remove(&self, holder: HolderNumber, names: &[SequenceHash]) {
        let event = Event::Removed(RemovedBlocks::by_sequence(names.to_vec()));
        self.with_writer(holder, |writer| writer.apply(event, Tier::DEVICE, 0));
    }

    fn clear(&self, holder: HolderNumber) {
        self.with_writer(holder, HolderWriter::clear);
    }

    fn find_matches(&self, query: &PrefixQuery) -> Vec<Depth> {
        // The search fails only if the query is deeper than any block that can be stored. No holder can have such a
        // block.
        let Ok(matches) = self.indexer.find_matches(query.chain(), Search::default()) else {
            return Vec::new();
        };
        let depth = |found: kvatlas_core::index::Match<'_>| Depth {
            holder: HolderNumber(found.holder.id.rank),
            matched_blocks: found.matched_blocks,
        };
        matches.holders().map(depth).collect()
    }

    fn refused_stores(&self) -> u64 {
        self.refused_stores.load(Ordering::Relaxed)
    }

    fn sizes(&self) -> PrefixIndexSize {
        let sizes = self.indexer.sizes();
        let holds_something = |writer: &dashmap::mapref::multiple::RefMulti<'_, _, Mutex<HolderWriter>>| {
            writer.lock().blocks() > 0
        };
        PrefixIndexSize {
            entries: usize::try_from(sizes.distinct_blocks).unwrap_or(usize::MAX),
            names: usize::try_from(sizes.held_blocks).unwrap_or(usize::MAX),
            holders: self.writers.iter().filter(holds_something).count(),
        }
    }
}
