//! Batches whose blocks have another size than those of their namespace.

use std::fmt;

use crate::daemon::metrics::labels::DropReason;
use kvatlas_core::hash::BlockSize;
use kvatlas_core::wire::{EventBatch, NamespaceName};

use super::lane::{Lane, Sender};

/// Why such a batch is dropped: the blocks of its namespace have another size than it tells, or, where it tells none, than the configuration has.
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

impl Lane {
    /// Drops a batch whose blocks have another size than the namespace's. A holder with the blocks of before is forgotten: its process has
    /// ended. Once nobody has blocks of the namespace's size, the publisher's next batch is taken.
    pub(super) fn refuse_block_size(&mut self, sender: &Sender, batch: &EventBatch) {
        let in_force = sender.namespace.indexer.settings().block_size;
        sender.metrics.batch_dropped(
            DropReason::OtherSettings,
            sender.worker.worker.as_str(),
            &OtherSize {
                namespace: &sender.namespace.name,
                in_force,
                told: batch.block_size,
            },
        );
        self.put_back();
        let key = (sender.worker.clone(), batch.rank);
        // Of a publisher that has left.
        let is_late = self.absent.is_over(&key, batch).is_some();
        if let Some(holder) = self.holders.get_mut(&key)
            && holder.high_water.seen.epoch <= batch.epoch
        {
            // A batch of before that comes again makes no holder.
            holder.high_water.note(batch);
            self.take_leave(&key);
        }
        if !is_late && !self.holders.contains_key(&key) {
            self.note_refused(sender, batch);
        }
    }
}
