//! The writer of one holder, by which a lane applies events to the holder.

use std::sync::Arc;

use crate::index::directory::{HolderRecord, RegisterError};
use crate::index::indexer::PositionalIndexer;
use crate::index::settings::NamespaceSettings;
use crate::index::shared::IndexShared;
use crate::stream::{HolderStatus, RefusedHolders};
use crate::wire::{BlockNames, DegradedReasons, Event, HolderId, Tier};

use super::applied::Applied;
use super::holder::SharedHolder;
use super::turn::HolderTurn;

impl PositionalIndexer {
    /// Adds a holder, and returns its writer. Apart from eviction, only the writer may change the holder's blocks.
    pub fn register(&self, id: &HolderId) -> Result<HolderWriter, RegisterError> {
        let shared = Arc::clone(&self.shared);
        let holder = shared.register(id, SharedHolder::new)?;
        Ok(HolderWriter { shared, holder })
    }
}

/// Writer of one holder, owned by the holder's lane, the thread that applies its events. Apart from eviction, only this
/// writer may change the holder's blocks.
#[derive(Debug)]
pub struct HolderWriter {
    pub(super) shared: Arc<IndexShared>,
    pub(super) holder: Arc<SharedHolder>,
}

impl HolderWriter {
    /// Returns the holder's record, which queries use.
    pub fn record(&self) -> &Arc<HolderRecord> {
        &self.holder.record
    }

    /// Returns the unregistered holders of the holder's namespace whose batches are dropped.
    pub fn refused(&self) -> &RefusedHolders {
        self.shared.slots.refused()
    }

    /// Returns the holder's status: whether queries can trust its state, and the reasons if they cannot.
    pub fn status(&self) -> &HolderStatus {
        &self.holder.record.status
    }

    /// Keeps only the reasons for doubt that are in `kept`, because the holder's whole state has been replaced. Returns
    /// the remaining reasons. Searches that began earlier notice the replacement.
    pub fn replace_reasons(&self, kept: DegradedReasons) -> DegradedReasons {
        // The replacement is recorded before the reasons go: a reader that no longer sees the reasons sees the
        // replacement.
        self.status()
            .replacement
            .store(self.shared.replacements.fetch_add(1) + 1);
        self.status().retain_reasons(kept)
    }

    /// Block size and hashing of the namespace.
    pub fn settings(&self) -> &NamespaceSettings {
        &self.shared.settings
    }

    /// Number of blocks that the holder has, including orphans (blocks whose parent is unknown).
    pub fn blocks(&self) -> usize {
        self.holder.state.lock().blocks()
    }

    /// Applies one event. `now_us` is the time in microseconds, of any clock that does not run backwards. It is only
    /// used to drop events that have waited too long for a parent.
    pub fn apply(&mut self, event: Event, tier: Tier, now_us: u64) -> Applied {
        let mut applied = Applied::default();
        match event {
            Event::Stored(stored) => {
                let uses_names =
                    matches!(stored.names, BlockNames::Sequence { .. }) || stored.engine_hashes.is_some();
                self.change(&mut applied, uses_names, |turn| turn.stored(stored, tier, now_us));
                self.shared.make_room(applied.stored);
            }
            Event::Removed(removed) => {
                let uses_names = !removed.hashes.is_empty();
                self.change(&mut applied, uses_names, |turn| turn.remove(&removed, tier));
            }
            Event::Resumable(blocks) => {
                let uses_names = !blocks.hashes.is_empty();
                self.change(&mut applied, uses_names, |turn| turn.mark(&blocks, tier));
            }
            Event::Cleared => {
                self.clear();
                applied.cleared = true;
            }
            Event::Doubted(reasons) => applied.doubted = Some(reasons),
            Event::Goodbye => {
                self.clear();
                applied.goodbye = true;
            }
        }
        applied
    }

    /// Runs `change` with the locks of the holder and of the runs, publishes the result, and adds the outcome to
    /// `applied`. `uses_names` tells whether the engine names blocks.
    pub(super) fn change(
        &mut self,
        applied: &mut Applied,
        uses_names: bool,
        change: impl FnOnce(&mut HolderTurn<'_>),
    ) {
        self.holder.change(&self.shared, applied, uses_names, change);
    }

    /// Adapts the holder's state to evictions since the last event. Returns which blocks were dropped for that. Each
    /// event and each dump begin with the same work.
    pub fn catch_up(&mut self) -> Applied {
        let mut applied = Applied::default();
        self.change(&mut applied, false, |_| {});
        applied
    }

    /// Drops the stored events whose parent did not arrive in time.
    pub fn expire_parked(&mut self, now_us: u64) -> Applied {
        self.holder.expire_parked(now_us, &self.shared.runs)
    }

    /// Removes all blocks of the holder, and forgets the events that wait for a parent.
    pub fn clear(&mut self) {
        self.holder.clear(&self.shared.runs);
        self.set_foreign_chain(false);
    }

    /// Removes all blocks, and frees the holder's slot: its number in the index.
    pub fn retire(mut self) {
        self.clear();
        self.set_size_known(true);
        let slot = self.record().slot();
        self.shared.release(slot);
    }

    /// Records whether the number of tokens in the holder's blocks is known.
    pub fn set_size_known(&self, is_known: bool) {
        // Every batch comes here, and mostly nothing has changed.
        if self.status().is_size_known.load() != is_known {
            self.status().is_size_known.store(is_known);
            let unsized_holders = &self.shared.unsized_holders;
            match is_known {
                true => unsized_holders.fetch_sub(1),
                false => unsized_holders.fetch_add(1),
            };
        }
    }

    /// Records whether the holder's hashes differ from the contract's chain.
    pub fn set_foreign_chain(&mut self, is_foreign: bool) {
        self.shared.set_foreign_chain(self.status(), is_foreign);
    }

    /// Returns events that, applied in this order, make an empty holder equal to this holder: same blocks, names,
    /// tiers and holes. Parents come before children. Stored events that wait for their parent are left out.
    ///
    /// `blocks_per_event_max` is the maximum number of blocks in each event.
    ///
    /// This is the public way to get an index as events. A snapshot file ([`crate::snapshot`]) has the same content,
    /// in compact form, for all holders.
    pub fn dump_events(&mut self, blocks_per_event_max: usize) -> impl Iterator<Item = (Tier, Event)> + '_ {
        self.catch_up();
        self.holder.dump_events(&self.shared, blocks_per_event_max)
    }
}
