//! State shared by queries and lanes (threads that apply events) of one index, and state shared by several indexes.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use crossbeam_utils::atomic::AtomicCell;
use parking_lot::{Mutex, RwLock};

use super::directory::{HolderRecord, HolderSlot, RegisterError, Slots};
use super::runs::RunStore;
use super::settings::{Capacity, IndexLimits, NamespaceSettings};
use super::share::Evictable;
use super::usage::Usage;
use crate::stream::HolderStatus;
use crate::wire::HolderId;

/// State of one index, shared by its queries and lanes (threads that apply events). Lanes change the reference counts
/// of this state constantly. The alignment puts the fields, which queries read, on other cache lines than these counts.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct IndexShared {
    pub(crate) settings: NamespaceSettings,
    pub(crate) limits: IndexLimits,
    pub(crate) runs: RunStore,
    pub(crate) slots: Slots,
    pub(super) holders: RwLock<HashMap<HolderSlot, Arc<dyn Evictable>>>,
    /// Lock that a thread holds while it evicts blocks.
    pub(super) evicting: Mutex<()>,
    /// Number of holders whose hashes do not follow the contract's hash chain.
    pub(crate) foreign_holders: AtomicCell<u32>,
    /// Number of holders whose blocks have an unknown number of tokens.
    pub(crate) unsized_holders: AtomicCell<u32>,
    /// Number of times that the whole state of a holder was replaced.
    pub(crate) replacements: AtomicCell<u64>,
    pub(super) total: Arc<TotalUsage>,
}

impl IndexShared {
    /// Makes an empty index whose size also counts in `total`.
    pub(super) fn new(
        settings: NamespaceSettings,
        limits: IndexLimits,
        total: &Arc<TotalUsage>,
    ) -> Arc<Self> {
        let shared = Arc::new(Self {
            settings,
            limits,
            runs: RunStore::new(limits.capacity, Arc::clone(&total.usage)),
            slots: Slots::default(),
            holders: RwLock::default(),
            evicting: Mutex::default(),
            foreign_holders: AtomicCell::new(0),
            unsized_holders: AtomicCell::new(0),
            replacements: AtomicCell::new(0),
            total: Arc::clone(total),
        });
        total.join(&shared);
        shared
    }

    /// Whether, as far as is known, each hash identifies its whole prefix.
    #[inline]
    pub(crate) fn is_chain(&self) -> bool {
        self.runs.is_chain() && self.foreign_holders.load() == 0
    }

    /// Records whether the hashes of the holder with this status differ from the contract's chain.
    pub(crate) fn set_foreign_chain(&self, holder: &HolderStatus, is_foreign: bool) {
        if holder.has_foreign_chain.load() != is_foreign {
            holder.has_foreign_chain.store(is_foreign);
            match is_foreign {
                true => self.foreign_holders.fetch_add(1),
                false => self.foreign_holders.fetch_sub(1),
            };
        }
    }

    /// Registers the holder that `make` makes, under a slot: a small number that no other holder of the index has.
    /// Eviction finds the holder by its slot.
    pub(crate) fn register<H: Evictable + 'static>(
        &self,
        id: &HolderId,
        make: impl FnOnce(Arc<HolderRecord>, HolderSlot) -> H,
    ) -> Result<Arc<H>, RegisterError> {
        let (slot, record) = self.slots.register(id, &self.limits)?;
        self.unsized_holders.fetch_add(1);
        let holder = Arc::new(make(record, slot));
        self.holders.write().insert(slot, Arc::<H>::clone(&holder));
        Ok(holder)
    }

    /// Frees the slot of a holder, which is its number in the index. The holder must have no blocks.
    pub(crate) fn release(&self, slot: HolderSlot) {
        self.holders.write().remove(&slot);
        self.slots.release(slot);
    }
}

/// The usage of several indexes together, and the list of these indexes.
#[derive(Debug)]
pub struct TotalUsage {
    pub(super) usage: Arc<Usage>,
    pub(super) members: Mutex<Vec<Weak<IndexShared>>>,
}

impl TotalUsage {
    /// Makes a total for `capacity`, with nothing used yet.
    pub fn of(capacity: Capacity) -> Self {
        Self {
            usage: Arc::new(Usage::of(capacity)),
            members: Mutex::default(),
        }
    }

    fn join(&self, index: &Arc<IndexShared>) {
        if self.usage.is_bounded() {
            let mut members = self.members.lock();
            members.retain(|member| member.strong_count() > 0);
            members.push(Arc::downgrade(index));
        }
    }
}
