//! The index of one namespace.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use crate::hash::{PositionError, PositionalLineageHash};
use crate::wire::{HolderId, QueryKey};

use super::capacity::TotalUsage;
use super::directory::{HolderRecord, HolderSlot, RegisterError, Slots};
use super::holder::{Holder, HolderState, HolderWriter};
use super::runs::RunStore;
use super::search::{self, BoundedMatches, Matches, QueryChain, Search, SparseChain, TierDepth};
use super::settings::{IndexLimits, NamespaceSettings};

/// What lanes and queries of one index share. Aligned so that the counts of references, which lanes change all the time, are on another
/// cache line.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Shared {
    pub(crate) settings: NamespaceSettings,
    pub(crate) limits: IndexLimits,
    pub(crate) runs: RunStore,
    pub(crate) slots: Slots,
    /// Holders by slot.
    holders: RwLock<Vec<Option<Arc<Holder>>>>,
    /// Held by whoever evicts.
    pub(crate) evicting: Mutex<()>,
    foreign_holders: AtomicU32,
    /// How often the state of a holder has been replaced as a whole.
    replacements: AtomicU64,
    total: Arc<TotalUsage>,
}

impl Shared {
    /// Forgets blocks where this index, or all together, have too many. To be called between turns.
    pub(crate) fn make_room(&self) {
        if self.runs.is_bounded() {
            self.evict(|| self.runs.excess_blocks());
            self.total.make_room();
        }
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

    /// Whether nothing is known that contradicts that a hash stands for its whole prefix.
    #[inline]
    pub(crate) fn is_chain(&self) -> bool {
        self.runs.is_chain() && self.foreign_holders.load(Ordering::Relaxed) == 0
    }

    /// The holder that has a slot now.
    pub(crate) fn holder(&self, slot: HolderSlot) -> Option<Arc<Holder>> {
        self.holders.read().get(slot.index())?.clone()
    }

    fn add(&self, holder: &Arc<Holder>, slot: HolderSlot) {
        let mut holders = self.holders.write();
        let len = holders.len().max(slot.index() + 1);
        holders.resize(len, None);
        holders[slot.index()] = Some(Arc::clone(holder));
    }

    /// Gives the slot of a holder back that has no blocks.
    pub(crate) fn release(&self, slot: HolderSlot) {
        if let Some(holder) = self.holders.write().get_mut(slot.index()) {
            *holder = None;
        }
        self.slots.release(slot);
    }
}

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
    /// Blocks whose hash another block has, too: sequence hashes that are no chain.
    pub chain_conflicts: u64,
    /// Distinct blocks forgotten so far because there were too many.
    pub evicted_blocks: u64,
    /// What the blocks, the tables that lead to them and the holders take, in bytes; see [`Capacity`](super::Capacity).
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
    shared: Arc<Shared>,
}

impl PositionalIndexer {
    /// An empty index.
    pub fn new(settings: NamespaceSettings, limits: IndexLimits) -> Self {
        Self::sharing(settings, limits, &Arc::default())
    }

    /// An empty index whose size counts in `total`, too.
    pub fn sharing(settings: NamespaceSettings, limits: IndexLimits, total: &Arc<TotalUsage>) -> Self {
        let shared = Arc::new(Shared {
            settings,
            limits,
            runs: RunStore::new(limits.capacity, Arc::clone(total.usage())),
            slots: Slots::default(),
            holders: RwLock::default(),
            evicting: Mutex::default(),
            foreign_holders: AtomicU32::new(0),
            replacements: AtomicU64::new(0),
            total: Arc::clone(total),
        });
        total.join(&shared);
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

    /// Block size and hashing of the namespace.
    pub fn settings(&self) -> &NamespaceSettings {
        &self.shared.settings
    }

    /// Adds a holder; the writer is the only one who may change what it holds.
    pub fn register(&self, id: &HolderId) -> Result<HolderWriter, RegisterError> {
        let limits = &self.shared.limits;
        let (workers_max, ranks_max) = (limits.workers_max, limits.ranks_per_worker_max);
        let (slot, record) = self.shared.slots.register(id, workers_max, ranks_max)?;
        let state = Mutex::new(HolderState::new(slot));
        let holder = Arc::new(Holder { record, state });
        self.shared.add(&holder, slot);
        Ok(HolderWriter::new(Arc::clone(&self.shared), holder))
    }

    /// Which holders hold how long a prefix of `query`. Fails only where the query is deeper than 2^24 blocks.
    pub fn find_matches(&self, query: &QueryKey, search: Search<'_>) -> Result<Matches, PositionError> {
        let mut chain = QueryChain::new(query, self.shared.settings.block_size)?;
        Ok(self.find_chain(&mut chain, search))
    }

    /// As [`Self::find_matches`], with a chain that the caller goes on using.
    pub fn find_chain(&self, chain: &mut QueryChain<'_>, search: Search<'_>) -> Matches {
        self.find_in_tiers(chain, search, TierDepth::All)
    }

    /// As [`Self::find_chain`], where only blocks in these tiers count.
    pub fn find_in_tiers(&self, chain: &mut QueryChain<'_>, search: Search<'_>, tiers: TierDepth) -> Matches {
        // Before the first probe, so that what is replaced from now on is noticed.
        let replacements = self.shared.replacements.load(Ordering::Acquire);
        search::find(&self.shared, chain, search, tiers).begun_at(replacements)
    }

    /// Bounds on how long a prefix each holder holds, from blocks chosen from one chain.
    pub fn find_bounds(&self, chain: &SparseChain<'_>, search: Search<'_>) -> BoundedMatches {
        // Before the first probe, so that what is replaced from now on is noticed.
        let replacements = self.shared.replacements.load(Ordering::Acquire);
        search::find_bounds(&self.shared, chain, search).begun_at(replacements)
    }

    /// The block at `position` of a query, and how many holders have it; for explaining where a holder dropped out.
    pub fn block_at(
        &self,
        chain: &mut QueryChain<'_>,
        position: usize,
    ) -> Option<(PositionalLineageHash, usize)> {
        (position < chain.len()).then(|| {
            let matches = search::find(&self.shared, chain, Search::default(), TierDepth::All);
            let holders = matches
                .holders()
                .filter(|found| found.matched_blocks as usize > position);
            (chain.key(position), holders.count())
        })
    }

    /// Whether anybody is registered.
    pub fn has_holders(&self) -> bool {
        self.shared.slots.load().holders().next().is_some()
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
        let (directory, runs) = (self.shared.slots.load(), &self.shared.runs);
        let mut sizes = IndexSizes {
            distinct_blocks: runs.len(),
            workers: directory.workers(),
            foreign_holders: self.foreign_holders(),
            chain_conflicts: runs.doubles(),
            evicted_blocks: runs.evicted(),
            bytes: runs.bytes(),
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
