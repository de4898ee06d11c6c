//! The index of one namespace.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::hash::{PositionError, PositionalLineageHash};
use crate::tracking::DegradedReason;
use crate::wire::{HolderId, QueryKey};

use super::capacity::{Capacity, TotalUsage};
use super::chain::QueryChain;
use super::forest::BLOCKS_MAX;
use super::matches::Matches;
use super::namespace::NamespaceSettings;
use super::parking::ParkingLimits;
use super::runs::RunStore;
use super::search::Search;
use super::slots::{HolderRecord, Slots};
use super::sparse::{BoundedMatches, CompressedChainRefused, SparseChain};
use super::storage::Storage;
use super::writer::HolderWriter;

pub use super::slots::RegisterError;

/// Bounds on one index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexLimits {
    /// Most workers.
    pub workers_max: usize,
    /// Most data-parallel ranks of one worker.
    pub ranks_per_worker_max: usize,
    /// Most blocks of one holder.
    pub blocks_per_holder_max: usize,
    /// What may wait for a parent, per holder.
    pub parking: ParkingLimits,
    /// How large the index may be before it forgets blocks. A radix tree forgets none.
    pub capacity: Capacity,
}

impl Default for IndexLimits {
    fn default() -> Self {
        Self {
            workers_max: 4096,
            ranks_per_worker_max: 64,
            blocks_per_holder_max: 1 << 24,
            parking: ParkingLimits::default(),
            capacity: Capacity::UNBOUNDED,
        }
    }
}

/// What lanes and queries of one index share. Aligned so that the counts of references, which lanes change all the time, are on another
/// cache line.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Shared {
    pub(crate) settings: NamespaceSettings,
    pub(crate) limits: IndexLimits,
    pub(crate) storage: Storage,
    pub(crate) slots: Slots,
    foreign_holders: AtomicU32,
    /// How often the state of a holder has been replaced as a whole.
    replacements: AtomicU64,
    total: Arc<TotalUsage>,
}

impl Shared {
    /// Forgets blocks where this index, or all together, have too many. To be called between turns.
    pub(crate) fn make_room(&self) {
        if let Some(runs) = self.storage.runs() {
            self.evict(runs.excess_blocks());
            self.total.make_room();
        }
    }

    /// Forgets `excess` blocks. Whose they are is degraded first, so that no shortened match counts as exact.
    pub(crate) fn evict(&self, excess: u64) {
        let Some(runs) = self.storage.runs().filter(|_| excess > 0) else {
            return;
        };
        let mut writer = runs.write();
        // Within the turn: all whose blocks are in the runs are registered by now.
        let directory = self.slots.load();
        writer.evict(excess, |slot, blocks| {
            if let Some(holder) = directory.holder(slot) {
                holder.status.degrade(DegradedReason::Capacity);
                holder.status.note_evicted(u64::from(blocks));
            }
        });
    }

    pub(crate) fn count_replacement(&self) -> u64 {
        self.replacements.fetch_add(1, Ordering::AcqRel) + 1
    }

    pub(crate) fn count_foreign_holder(&self, joins: bool) {
        if joins {
            self.foreign_holders.fetch_add(1, Ordering::Relaxed);
        } else {
            self.foreign_holders.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// How large an index is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexSizes {
    /// Distinct blocks that count for some holder.
    pub distinct_blocks: u64,
    /// Blocks held, summed over all holders, behind holes too.
    pub held_blocks: u64,
    /// Holders.
    pub holders: usize,
    /// Workers.
    pub workers: usize,
    /// Stored events that wait for their parent.
    pub parked_events: u64,
    /// Holders whose hashes are not the contract's chain.
    pub foreign_holders: u32,
    /// How often one place was stored with two parents: sequence hashes that are no chain. A radix tree does not notice it, because
    /// it does not matter there.
    pub chain_conflicts: u64,
    /// Distinct blocks forgotten so far because there were too many.
    pub evicted_blocks: u64,
    /// What the blocks and the table that leads to them take, in bytes; see [`Capacity`].
    pub bytes: u64,
}

/// An exact index of the blocks held by the workers of one namespace, keyed by lineage hash.
///
/// ```
/// use kvatlas::hash::{BlockSize, SequenceHash};
/// use kvatlas::index::{IndexLimits, NamespaceSettings, PositionalIndexer, Search};
/// use kvatlas::wire::{Event, HolderId, QueryKey, StoredBlocks, Tier, WorkerName};
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
    shared: Arc<Shared>,
}

impl PositionalIndexer {
    /// An empty index.
    pub fn new(settings: NamespaceSettings, limits: IndexLimits) -> Self {
        Self::sharing(settings, limits, &Arc::default())
    }

    /// An empty index whose size counts in `total`, too, unless it is a radix tree.
    pub fn sharing(settings: NamespaceSettings, mut limits: IndexLimits, total: &Arc<TotalUsage>) -> Self {
        limits.blocks_per_holder_max = limits.blocks_per_holder_max.min(BLOCKS_MAX);
        let shared = Arc::new(Shared {
            settings,
            limits,
            storage: Storage::new(settings.index, limits.capacity, total.usage()),
            slots: Slots::default(),
            foreign_holders: AtomicU32::new(0),
            replacements: AtomicU64::new(0),
            total: Arc::clone(total),
        });
        if shared.storage.runs().is_some() {
            total.join(&shared);
        }
        Self { shared }
    }

    /// The index of some holder.
    pub(super) fn of(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
        }
    }

    /// What walks look at.
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The runs of an index that is stored as such.
    #[cfg(test)]
    pub(crate) fn runs(&self) -> &RunStore {
        self.shared.storage.runs().unwrap()
    }

    /// Block size, hashing and kind of index of the namespace.
    pub fn settings(&self) -> &NamespaceSettings {
        &self.shared.settings
    }

    /// Adds a holder; the writer is the only one who may change what it holds.
    pub fn register(&self, id: &HolderId) -> Result<HolderWriter, RegisterError> {
        let limits = &self.shared.limits;
        let (slot, record) =
            self.shared
                .slots
                .register(id, limits.workers_max, limits.ranks_per_worker_max)?;
        Ok(HolderWriter::new(Arc::clone(&self.shared), slot, record))
    }

    /// Which holders hold how long a prefix of `query`. Fails only where the query is deeper than 2^24 blocks.
    pub fn find_matches(&self, query: &QueryKey, search: Search<'_>) -> Result<Matches, PositionError> {
        let mut chain = QueryChain::new(query, self.shared.settings.block_size)?;
        Ok(self.find_chain(&mut chain, search))
    }

    /// As [`Self::find_matches`], with a chain that the caller goes on using.
    pub fn find_chain(&self, chain: &mut QueryChain<'_>, search: Search<'_>) -> Matches {
        // Before the first probe, so that what is replaced from now on is noticed.
        let replacements = self.shared.replacements.load(Ordering::Acquire);
        self.shared
            .storage
            .find(&self.shared.slots, chain, search)
            .begun_at(replacements)
    }

    /// Bounds on how long a prefix each holder holds, from blocks chosen from one chain.
    ///
    /// # Errors
    ///
    /// Where the index is a radix tree.
    pub fn find_bounds(
        &self,
        chain: &SparseChain<'_>,
        search: Search<'_>,
    ) -> Result<BoundedMatches, CompressedChainRefused> {
        // Before the first probe, so that what is replaced from now on is noticed.
        let replacements = self.shared.replacements.load(Ordering::Acquire);
        let matches = self
            .shared
            .storage
            .find_bounds(&self.shared.slots, chain, search)?;
        Ok(matches.begun_at(replacements))
    }

    /// The block at `position` of a query, and how many holders have it; for explaining where a holder dropped out.
    pub fn block_at(
        &self,
        chain: &mut QueryChain<'_>,
        position: usize,
    ) -> Option<(PositionalLineageHash, usize)> {
        (position < chain.len()).then(|| self.shared.storage.block_at(chain, position))
    }

    /// All holders, in no particular order.
    pub fn holders(&self) -> Vec<Arc<HolderRecord>> {
        self.shared.slots.load().holders().cloned().collect()
    }

    /// Holders whose hashes are not the contract's chain.
    pub fn foreign_holders(&self) -> u32 {
        self.shared.foreign_holders.load(Ordering::Relaxed)
    }

    /// How large the index is.
    pub fn sizes(&self) -> IndexSizes {
        let (directory, storage) = (self.shared.slots.load(), &self.shared.storage);
        let mut sizes = IndexSizes {
            distinct_blocks: storage.len(),
            workers: directory.workers(),
            foreign_holders: self.foreign_holders(),
            chain_conflicts: storage.runs().map_or(0, RunStore::chain_conflicts),
            evicted_blocks: storage.runs().map_or(0, RunStore::evicted),
            bytes: storage.bytes(),
            ..IndexSizes::default()
        };
        for holder in directory.holders() {
            sizes.holders += 1;
            sizes.held_blocks += holder.status.blocks();
            sizes.parked_events += u64::from(holder.status.parked_events());
        }
        sizes
    }
}
