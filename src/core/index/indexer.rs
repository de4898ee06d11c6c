//! The index of one namespace.

use std::sync::Arc;

use crate::hash::PositionError;
use crate::stream::{DoubtfulHolders, StreamTrust};
use crate::wire::{DegradedReasons, HolderId, QueryKey, Rank, WorkerName};

use super::directory::{HolderRecord, RegisterError};
use super::holder::Holder;
use super::search::{self, Matches, QueryChain, Search, SparseChain};
use super::settings::{Capacity, IndexLimits, NamespaceSettings};
use super::shared::{IndexShared, TotalUsage};
use super::writer::HolderWriter;

/// How large an index is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IndexSizes {
    /// Distinct blocks that some holder has, and those missing in the middle before them.
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
    /// Holders of whom it is not known how many tokens their blocks have.
    pub unsized_holders: u32,
    /// Blocks whose hash another block has, too: sequence hashes that are no chain.
    pub chain_conflicts: u64,
    /// Distinct blocks forgotten so far because there were too many.
    pub evicted_blocks: u64,
    /// Bytes of the blocks, the tables that lead to them and the holders; see [`Capacity`](super::Capacity).
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
    pub(super) shared: Arc<IndexShared>,
}

impl PositionalIndexer {
    /// An empty index.
    pub fn new(settings: NamespaceSettings, limits: IndexLimits) -> Self {
        Self::sharing(settings, limits, &Arc::new(TotalUsage::of(Capacity::UNBOUNDED)))
    }

    /// An empty index whose size counts in `total`, too.
    pub fn sharing(settings: NamespaceSettings, limits: IndexLimits, total: &Arc<TotalUsage>) -> Self {
        let shared = IndexShared::new(settings, limits, total);
        Self { shared }
    }

    /// Block size and hashing of the namespace.
    pub fn settings(&self) -> &NamespaceSettings {
        &self.shared.settings
    }

    /// Whether asking for the full state of `holder` may bring back blocks for which there was no room.
    pub fn has_room_for(&self, holder: &HolderRecord) -> bool {
        let blocks_max = self.shared.limits.blocks_per_holder_max as u64;
        let has_room = || self.shared.runs.has_room() || self.shared.is_short_of_share(&holder.id.worker);
        holder.status.blocks.load() < blocks_max - blocks_max / 8 && has_room()
    }

    /// Adds a holder; the writer is the only one who may change what it holds.
    pub fn register(&self, id: &HolderId) -> Result<HolderWriter, RegisterError> {
        let (slot, record) = self.shared.slots.register(id, &self.shared.limits)?;
        self.shared.unsized_holders.fetch_add(1);
        let holder = Arc::new(Holder::new(record, slot));
        self.shared.holders.write().insert(slot, Arc::clone(&holder));
        Ok(HolderWriter::new(Arc::clone(&self.shared), holder))
    }

    /// Which holders hold how long a prefix of `query`. Fails only where the query is deeper than 2^24 blocks.
    pub fn find_matches(&self, query: &QueryKey, search: Search<'_>) -> Result<Matches, PositionError> {
        let mut chain = QueryChain::new(query, self.shared.settings.block_size)?;
        Ok(self.find_chain(&mut chain, search))
    }

    /// As [`Self::find_matches`], with a chain that the caller goes on using.
    pub fn find_chain(&self, chain: &mut QueryChain<'_>, search: Search<'_>) -> Matches {
        search::find(&self.shared, chain, search)
    }

    /// Bounds on how long a prefix each holder holds, from blocks chosen from one chain.
    pub fn find_bounds(&self, chain: &SparseChain<'_>, search: Search<'_>) -> Matches {
        search::find_bounds(&self.shared, chain, search)
    }

    /// About how many blocks the next [`Self::find_bounds`] has to enter into its table before it looks for any.
    pub fn blocks_to_prepare(&self) -> u64 {
        self.shared.runs.write().not_looked_up()
    }

    /// Enters some blocks into the table of [`Self::find_bounds`], which takes some microseconds; says whether more are missing.
    pub fn prepare_bounds(&self) -> bool {
        self.shared.runs.write().look_up_more()
    }

    /// All holders, in no particular order.
    pub fn holders(&self) -> Vec<Arc<HolderRecord>> {
        self.shared.slots.load().holders().cloned().collect()
    }

    /// How many holders there are. Costs no look at them.
    pub fn holder_count(&self) -> usize {
        self.shared.slots.load().len()
    }

    /// The holders of these workers, each once, in no particular order.
    pub fn holders_of(&self, workers: &[WorkerName]) -> Vec<Arc<HolderRecord>> {
        self.shared.slots.load().holders_of(workers).cloned().collect()
    }

    /// How many holders' states are not certain. Costs no look at each of them, unless something has changed since the last time.
    pub fn doubtful_holders(&self, trust: &StreamTrust) -> DoubtfulHolders {
        self.shared.slots.doubtful(trust, self.shared.replacements.load())
    }

    /// Why the state of `holder` is not certain that a search since `before` has seen.
    pub fn reasons_since(
        &self,
        before: &DoubtfulHolders,
        holder: &HolderRecord,
        trust: &StreamTrust,
    ) -> DegradedReasons {
        holder.status.reasons_since(before.replacements, trust)
    }

    /// Notes that a batch of a holder that is not registered was dropped: what it has is not known. Its rank is absent where the batch cannot be
    /// read. `reason` says in a word why it was dropped. `now_us` is any clock in microseconds that does not run backwards.
    pub fn note_refused(&self, worker: &WorkerName, rank: Option<Rank>, reason: &'static str, now_us: u64) {
        self.shared.slots.note_refused(worker, rank, reason, now_us);
    }

    /// Forgets a refused holder, which has left.
    pub fn forget_refused(&self, id: &HolderId) {
        self.shared.slots.forget_refused(id);
    }

    /// Forgets refused holders of whose last batch's time `is_over` says that it is over.
    pub fn expire_refused(&self, is_over: impl Fn(u64) -> bool) {
        self.shared.slots.expire_refused(is_over);
    }

    /// How many holders of these workers, or of all, are refused. They are among the [`Self::doubtful_holders`].
    pub fn refused_holders(&self, workers: Option<&[WorkerName]>) -> usize {
        self.shared.slots.refused(workers)
    }

    /// The first by name of the workers with refused holders, at most so many, each with why its last batch was dropped.
    pub fn refused_workers(&self, max: usize) -> Vec<(WorkerName, &'static str)> {
        self.shared.slots.refused_workers(max)
    }

    /// Holders of whom it is not known how many tokens their blocks have.
    pub fn unsized_holders(&self) -> u32 {
        self.shared.unsized_holders.load()
    }

    /// Gives back what queries have made for themselves, where none has used it since the last call: compressed chains make a table of all blocks.
    /// To be called every few seconds.
    pub fn rest(&self) {
        self.shared.runs.write().rest_lookups();
    }

    /// Holders whose hashes are not the contract's chain.
    pub fn foreign_holders(&self) -> u32 {
        self.shared.foreign_holders.load()
    }

    /// How large the index is.
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
