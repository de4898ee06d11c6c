//! Batches that no holder takes: their blocks have another size, there is no room for a holder, or its publisher has left.

use std::fmt;

use kvatlas_core::hash::BlockSize;
use kvatlas_core::index::{Namespace, RegisterError};
use kvatlas_core::stream::RefusedAt;
use kvatlas_core::wire::{Event, EventBatch, HolderId, NamespaceName};
use kvatlas_telemetry::labels::{DropReason, LabelValue};

use super::absent::ranks_of;
use super::contest::is_fresh;
use super::lane::{Lane, Sender};
use super::line::WorkerKey;

/// Detail of a drop for the block size: the batch tells another size than its namespace has. A batch that tells no size is taken to have
/// the configured size.
struct OtherSize<'a> {
    namespace: &'a NamespaceName,
    in_force: BlockSize,
    told: Option<BlockSize>,
}

impl fmt::Display for OtherSize<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            namespace,
            in_force,
            told,
        } = self;
        match told {
            Some(told) => write!(formatter, "its blocks have {told} tokens")?,
            None => formatter.write_str("it does not say how many tokens its blocks have")?,
        }
        write!(
            formatter,
            ", and the namespace's have {in_force}; set namespaces.{namespace}.block_size, or end those that use the other"
        )
    }
}

/// Why no holder takes a batch.
pub(super) enum NoHolder {
    /// The index has no room for one.
    NoRoom(RegisterError),
    /// Its publisher has said goodbye after the batch.
    Left(DropReason),
}

/// The word in metrics for a holder that the index has no room for.
pub(super) fn drop_reason(error: &RegisterError) -> DropReason {
    match error {
        RegisterError::TooManyRanks { .. } => DropReason::TooManyRanks,
        RegisterError::TooManyWorkers { .. }
        | RegisterError::NoSlot { .. }
        | RegisterError::Registered(_) => DropReason::TooManyWorkers,
    }
}

impl Lane {
    /// Drops a batch that is for no holder.
    pub(super) fn refuse(&self, sender: &Sender, batch: &EventBatch, why: &NoHolder) {
        let worker = sender.worker.worker.as_str();
        match why {
            NoHolder::NoRoom(error) => {
                let reason = drop_reason(error);
                sender.metrics.batch_dropped(reason, worker, error);
                self.note_refused(sender, batch, reason);
            }
            NoHolder::Left(reason) => {
                let detail = "its publisher has said goodbye";
                sender.metrics.batch_dropped(*reason, worker, &detail);
                // A fresh batch with a lower epoch comes from another publisher. An old one may be a redelivery.
                if *reason == DropReason::StaleEpoch && is_fresh(batch, self.clocks().unix_us) {
                    self.note_refused(sender, batch, *reason);
                }
            }
        }
    }

    /// Notes that a batch of a holder that is not registered was dropped. Answers then say that this holder may have blocks that are not
    /// known. A batch that ends in a goodbye withdraws the note. Returns whether it is the first batch that was dropped of the holder.
    pub(super) fn note_refused(&self, sender: &Sender, batch: &EventBatch, reason: DropReason) -> bool {
        let id = HolderId {
            worker: sender.worker.worker.clone(),
            rank: batch.rank,
        };
        let indexer = &sender.namespace.indexer;
        match batch.events.last() {
            Some(Event::Goodbye) => {
                indexer.forget_refused(&id);
                false
            }
            _ => indexer.note_refused(&id.worker, Some(id.rank), reason.as_str(), self.refused_at()),
        }
    }

    /// Returns the times of a batch that is dropped now.
    pub(super) fn refused_at(&self) -> RefusedAt {
        RefusedAt {
            listened_us: self.absent.listened_us(),
            unix_us: self.clocks().unix_us,
        }
    }

    /// Notes a worker without a holder as [`Self::note_refused`] does, for a message that cannot be read. If the worker has holders, does
    /// nothing: those holders are in doubt.
    pub(super) fn note_unread(&self, namespace: &Namespace, worker: &WorkerKey, reason: DropReason) {
        if self.holders.range(ranks_of(worker)).next().is_none() {
            let indexer = &namespace.indexer;
            indexer.note_refused(&worker.worker, None, reason.as_str(), self.refused_at());
        }
    }

    /// Drops a batch whose blocks have another size than the namespace's. A holder that still has blocks of the namespace's size is
    /// removed: its process has ended. Once no holder has blocks of that size, the publisher's next batch is taken.
    pub(super) fn refuse_block_size(&mut self, sender: &Sender, batch: &EventBatch) {
        let other_size = OtherSize {
            namespace: &sender.namespace.name,
            in_force: sender.namespace.indexer.settings().block_size,
            told: batch.block_size,
        };
        let (metrics, worker) = (&sender.metrics, sender.worker.worker.as_str());
        self.put_back();
        let key = (sender.worker.clone(), batch.rank);
        // The batch is from before its publisher's goodbye.
        let is_late = self.absent.is_over(&key, batch).is_some();
        if let Some(holder) = self.holders.get_mut(&key)
            && holder.high_water.seen.epoch <= batch.epoch
        {
            // Noted, so that a redelivered batch of the old process makes no holder.
            holder.high_water.note(batch);
            self.take_leave(&key);
        }
        let is_first = !is_late
            && !self.holders.contains_key(&key)
            && self.note_refused(sender, batch, DropReason::OtherSettings);
        metrics.settings_refused(is_first, worker, batch.rank, &other_size);
    }
}
