//! The index of one namespace.

use std::sync::Arc;

use crate::hash::PositionError;
use crate::stream::{DoubtfulHolders, RefusedHolders, StreamTrust};
use crate::wire::{DegradedReasons, QueryKey, WorkerName};

use super::directory::HolderRecord;
use super::search::{self, Matches, QueryChain, Search, SparseChain};
use super::settings::{Capacity, IndexLimits, NamespaceSettings};
use super::shared::{IndexShared, TotalUsage};

/// Numbers of blocks, holders and events in an index, and its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexSizes {
    /// Number of distinct blocks that some holder has. Missing blocks in holes before such blocks count, too.
    pub distinct_blocks: u64,
    /// Number of held blocks, summed over all holders. Blocks after holes count, too.
    pub held_blocks: u64,
    /// Number of holders.
    pub holders: usize,
    /// Number of workers.
    pub workers: usize,
    /// Number of stored events that wait for their parent block.
    pub parked_events: u64,
    /// Number of holders whose hashes do not follow the contract's hash chain.
    pub foreign_holders: u32,
    /// Number of holders whose blocks have an unknown number of tokens.
    pub unsized_holders: u32,
    /// Number of blocks that have the same hash as an earlier block. If above 0, a sequence hash does not identify
    /// its prefix.
    pub chain_conflicts: u64,
    /// Number of distinct blocks evicted so far because the index was too large.
    pub evicted_blocks: u64,
    /// Bytes that blocks, the tables that find blocks, and holders take; see [`Capacity`](super::Capacity).
    pub bytes: u64,
}

/// An exact index of the blocks held by the workers of one namespace, keyed by lineage hash.
///
/// ```
/// use kvatlas_core::hash::{BlockSize, SequenceHash};
/// use kvatlas_core::index::{IndexLimits, NamespaceSettings, PositionalIndexer, Search};
/// use kvatlas_core::wire::{Event, HolderId, QueryKey, StoredBlocks, Tier, WorkerName};
///
/// let index = PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default());
/// let worker = WorkerName::new("gpu-0")?;
/// let mut holder = index.register(&HolderId { worker, rank: 0 })?;
/// let prefix = vec![SequenceHash(11), SequenceHash(22), SequenceHash(33)];
/// holder.apply(Event::Stored(StoredBlocks::by_sequence(None, None, prefix)), Tier::DEVICE, 0);
///
/// let query = QueryKey::SequenceHashes(vec![SequenceHash(11), SequenceHash(22), SequenceHash(44)]);
/// let matches = index.find_matches(&query, Search::default())?;
/// let depths: Vec<u32> = matches.holders().map(|found| found.matched_blocks).collect();
/// assert_eq!(depths, [2]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct PositionalIndexer {
    pub(crate) shared: Arc<IndexShared>,
}

impl PositionalIndexer {
    /// Makes an empty index.
    pub fn new(settings: NamespaceSettings, limits: IndexLimits) -> Self {
        Self::sharing(settings, limits, &Arc::new(TotalUsage::of(Capacity::UNBOUNDED)))
    }

    /// Makes an empty index whose size also counts in `total`.
    pub fn sharing(settings: NamespaceSettings, limits: IndexLimits, total: &Arc<TotalUsage>) -> Self {
        let shared = IndexShared::new(settings, limits, total);
        Self { shared }
    }

    /// Block size and hashing of the namespace.
    pub fn settings(&self) -> &NamespaceSettings {
        &self.shared.settings
    }

    /// Whether the index again has room for blocks of `holder`: blocks that were evicted, or that were not stored for
    /// lack of room. If so, a request for the holder's full state may bring these blocks back.
    pub fn has_room_for(&self, holder: &HolderRecord) -> bool {
        let blocks_max = self.shared.limits.blocks_per_holder_max as u64;
        let has_room = || self.shared.runs.has_room() || self.shared.is_short_of_share(&holder.id.worker);
        holder.status.blocks.load() < blocks_max - blocks_max / 8 && has_room()
    }

    /// Returns, for each holder, the length of the longest prefix of `query` that it holds. Fails only if the query
    /// is deeper than 2^24 blocks.
    pub fn find_matches(&self, query: &QueryKey, search: Search<'_>) -> Result<Matches, PositionError> {
        let mut chain = QueryChain::new(query, self.shared.settings.block_size)?;
        Ok(self.find_chain(&mut chain, search))
    }

    /// Returns the same as [`Self::find_matches`], for a hash chain that the caller keeps and can reuse.
    pub fn find_chain(&self, chain: &mut QueryChain<'_>, search: Search<'_>) -> Matches {
        search::find(&self.shared, chain, search)
    }

    /// Returns bounds on the length of the prefix that each holder holds, for a query that gives only some blocks of
    /// its chain.
    pub fn find_bounds(&self, chain: &SparseChain<'_>, search: Search<'_>) -> Matches {
        search::find_bounds(&self.shared, chain, search)
    }

    /// Returns all holders, in no particular order.
    pub fn holders(&self) -> Vec<Arc<HolderRecord>> {
        self.shared.slots.load().holders().cloned().collect()
    }

    /// Number of holders. The call takes the same time for any number of holders.
    pub fn holder_count(&self) -> usize {
        self.shared.slots.load().len()
    }

    /// Returns the holders of `workers`, each once, in no particular order.
    pub fn holders_of(&self, workers: &[WorkerName]) -> Vec<Arc<HolderRecord>> {
        self.shared.slots.load().holders_of(workers).cloned().collect()
    }

    /// Whether the index has a holder of `worker`.
    pub fn has_worker(&self, worker: &WorkerName) -> bool {
        let slots = self.shared.slots.load();
        slots.holders_of(std::slice::from_ref(worker)).next().is_some()
    }

    /// Returns the number of holders whose state is not certain. Looks at each holder only if something has changed
    /// since the last call.
    pub fn doubtful_holders(&self, trust: &StreamTrust) -> DoubtfulHolders {
        self.shared.slots.doubtful(trust, self.shared.replacements.load())
    }

    /// Returns the reasons why the state of `holder`, as a search saw it, is not certain. `before` is the result of a
    /// [`Self::doubtful_holders`] call made before the search.
    pub fn reasons_since(
        &self,
        before: &DoubtfulHolders,
        holder: &HolderRecord,
        trust: &StreamTrust,
    ) -> DegradedReasons {
        holder.status.reasons_since(before.replacements, trust)
    }

    /// Returns the unregistered holders whose batches are dropped. They are included in the
    /// [`Self::doubtful_holders`].
    pub fn refused(&self) -> &RefusedHolders {
        self.shared.slots.refused()
    }

    /// Number of holders whose blocks have an unknown number of tokens.
    pub fn unsized_holders(&self) -> u32 {
        self.shared.unsized_holders.load()
    }

    /// Number of holders whose hashes do not follow the contract's hash chain.
    pub fn foreign_holders(&self) -> u32 {
        self.shared.foreign_holders.load()
    }

    /// Returns the numbers of blocks, holders and events in the index, and its bytes.
    pub fn sizes(&self) -> IndexSizes {
        let (directory, runs) = (self.shared.slots.load(), &self.shared.runs);
        let mut sizes = IndexSizes {
            distinct_blocks: runs.usage().blocks.load(),
            workers: directory.workers,
            foreign_holders: self.foreign_holders(),
            unsized_holders: self.unsized_holders(),
            chain_conflicts: runs.doubles(),
            evicted_blocks: runs.evicted(),
            bytes: runs.usage().bytes.load(),
            ..IndexSizes::default()
        };
        for holder in directory.holders() {
            sizes.holders += 1;
            sizes.held_blocks += holder.status.blocks.load();
            sizes.parked_events += u64::from(holder.status.parked_events.load());
        }
        sizes
    }
}
