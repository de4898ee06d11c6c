//! The lanes' part in snapshots: dumping holders, and restoring them from a file.
//!
//! The pool sends each frame of a file to the lane of the frame's holder. It sends a request for a dump to the lane
//! whose holders are wanted. The lane does this work between two batches of the holder.

use std::ops::Bound;
use std::sync::Arc;

use futures_util::future::try_join_all;
use kvatlas_core::index::{Namespace, WalkedHolder};
use kvatlas_core::snapshot::forest::ForestChunk;
use kvatlas_core::snapshot::{FRAME_BYTES_MAX, Frame, HolderFrame, InForest};
use kvatlas_core::stream::StreamGeneration;
use kvatlas_core::wire::{EventBatch, NamespaceName, WireLimits, WorkerName};
use kvatlas_telemetry::EventMetrics;
use kvatlas_telemetry::labels::{DropReason, LaneWork};

use super::holder::Holder;
use super::holder_snapshot::{HolderDump, Revisited};
use super::job::RestoreOrigin;
use super::lane::Lane;
use super::line::{HolderKey, WorkerKey};
use super::pool::{LanePool, PoolError};
use super::server_clock::ServerClock;
use super::unheld::NoHolder;

/// Returns the limits on the batches in a snapshot. They only protect against a file that was made to do harm:
/// checksums have already shown any other damage.
pub fn snapshot_limits() -> WireLimits {
    WireLimits {
        message_bytes_max: FRAME_BYTES_MAX,
        ..WireLimits::default()
    }
}

/// Progress of a lane's dump: the key of the holder that was dumped last.
#[derive(Debug, Clone)]
pub struct DumpPosition(HolderKey);

/// Holder that a snapshot restores.
struct RestoredHolder {
    namespace: Arc<Namespace>,
    metrics: Arc<EventMetrics>,
    key: HolderKey,
}

impl LanePool {
    /// Sends a frame (one record) of a snapshot to the lane of its holder. `holder` is the holder frame to which the
    /// frame belongs. A holder that was not in doubt in the snapshot counts as confirmed in the stream generation of
    /// `origin`.
    ///
    /// Skips frames of workers that belong to other shards. A snapshot has such workers if it is older than the
    /// division into shards. Also skips frames of workers with names that are longer than is allowed by now: none of
    /// their messages is taken, so their blocks would never change again.
    pub async fn restore(
        &self,
        holder: &HolderFrame,
        frame: Frame,
        origin: RestoreOrigin,
    ) -> Result<(), PoolError> {
        if !self.takes(&holder.worker) || self.is_misnamed(holder, &frame) {
            return Ok(());
        }
        let namespace: Arc<Namespace> = match self
            .namespaces
            .get_or_create(&holder.namespace, holder.told_block_size())
        {
            Ok(namespace) => namespace,
            Err(error) => {
                self.note_stray(&holder.namespace, &(&holder.worker).into(), error);
                return Ok(());
            }
        };
        if !holder.fits(namespace.indexer.settings()) {
            return self.refuse(namespace, holder, frame, origin).await;
        }
        match frame {
            Frame::Stream(_) | Frame::Forest(_) => Ok(()),
            Frame::Holder(frame) => {
                let restore =
                    move |lane: &mut Lane, of: &RestoredHolder| lane.restore_holder(of, &frame, origin);
                self.send_restore(namespace, holder, 0, restore).await
            }
            Frame::Batch(payload) => {
                let bytes = payload.len();
                let restore = move |lane: &mut Lane, of: &RestoredHolder| lane.restore_batch(of, &payload);
                self.send_restore(namespace, holder, bytes, restore).await
            }
        }
    }

    /// Sends a part of a snapshot's forest (the blocks of many holders together) to all lanes. Each lane stores the
    /// blocks of its own holders, whose holder frames must have come before. Waits until the blocks are stored.
    pub async fn restore_forest(&self, chunk: ForestChunk) -> Result<(), PoolError> {
        let chunk = Arc::new(chunk);
        let stored = self.lanes.iter().map(|lane| {
            let chunk = Arc::clone(&chunk);
            lane.run(LaneWork::Snapshot, move |lane| lane.restore_forest(&chunk))
        });
        try_join_all(stored).await.map(drop)
    }

    /// Tells the lanes that the snapshot has ended, and waits until they have applied it.
    pub async fn end_restore(&self) -> Result<(), PoolError> {
        for lane in &self.lanes {
            lane.run(LaneWork::Snapshot, |lane| lane.in_forest.clear())
                .await?;
        }
        Ok(())
    }

    /// Forgets a holder whose frames ended in the middle. Such a holder has a part of its blocks, but the cursor of the
    /// whole state. So its next batch would make it seem exact.
    pub async fn abandon_restore(&self, holder: &HolderFrame) -> Result<(), PoolError> {
        let Some(namespace) = self.namespaces.get(&holder.namespace) else {
            return Ok(());
        };
        let abandon = |lane: &mut Lane, of: &RestoredHolder| lane.forget(&of.key);
        self.send_restore(namespace, holder, 0, abandon).await
    }

    /// Whether the name of a holder's worker or namespace is longer than is allowed. Counts the holder if so.
    fn is_misnamed(&self, holder: &HolderFrame, frame: &Frame) -> bool {
        let bytes_max = self.limits().now().wire.name_bytes_max;
        let (namespace, worker) = (holder.namespace.as_str(), holder.worker.as_str());
        let named = NamespaceName::bounded(namespace, bytes_max)
            .and_then(|_| WorkerName::bounded(worker, bytes_max).map(|_| ()));
        if let (Err(error), Frame::Holder(_)) = (&named, frame) {
            self.unattributed
                .batch_dropped(DropReason::BadSubject, worker, error);
        }
        named.is_err()
    }

    /// Restores a holder without its blocks, because they were stored under another hashing or block size than the
    /// namespace has now. Its publisher is asked for the full state.
    ///
    /// If the stream is read from its beginning, leaves the holder out. The stream brings the holder back, with its
    /// blocks. To a restored holder, these batches would be duplicates.
    async fn refuse(
        &self,
        namespace: Arc<Namespace>,
        holder: &HolderFrame,
        frame: Frame,
        origin: RestoreOrigin,
    ) -> Result<(), PoolError> {
        let Frame::Holder(frame) = frame else {
            return Ok(());
        };
        let settings = *namespace.indexer.settings();
        let then = match origin.has_whole_stream {
            true => "the stream is read for the holder's batches",
            false => "the publisher is asked for its full state",
        };
        self.metrics_of(&namespace.name).batch_dropped(
            DropReason::OtherSettings,
            holder.worker.as_str(),
            &format_args!(
                "the snapshot has hashing {} and block_size {}, the namespace {} and {}; {then}",
                holder.hashing.as_str(),
                holder.block_size,
                settings.hashing.as_str(),
                settings.block_size.as_u32()
            ),
        );
        if origin.has_whole_stream {
            return Ok(());
        }
        let restore = move |lane: &mut Lane, of: &RestoredHolder| {
            if let Some(holder) = lane.restored_holder(of) {
                holder.refuse_blocks(&frame);
            }
        };
        self.send_restore(namespace, holder, 0, restore).await
    }

    /// Lets the lane of a holder do one step of restoring that holder.
    async fn send_restore(
        &self,
        namespace: Arc<Namespace>,
        holder: &HolderFrame,
        bytes: usize,
        restore: impl FnOnce(&mut Lane, &RestoredHolder) + Send + 'static,
    ) -> Result<(), PoolError> {
        let worker = WorkerKey {
            namespace: holder.namespace.clone(),
            worker: holder.worker.clone(),
        };
        let of = RestoredHolder {
            metrics: self.metrics_of(&namespace.name),
            namespace,
            key: (worker.clone(), holder.rank),
        };
        let task = move |lane: &mut Lane, _: &WorkerKey| restore(lane, &of);
        let sent = self.on_worker(worker, LaneWork::Snapshot, bytes, task).await;
        sent.map(drop)
    }

    /// Dumps the first holder after `after`, in the order of keys, on lane number `lane`. Returns `None` if there is no
    /// further holder.
    ///
    /// - Each holder is dumped at one instant, between two of its batches. Different holders are dumped at different
    ///   instants.
    /// - A holder that no batch has confirmed in `generation` of the event stream is dumped as unverified.
    /// - Unless `with_blocks` is set, a holder whose blocks a walk over the index can find later is dumped without its
    ///   blocks.
    pub async fn dump_next(
        &self,
        lane: usize,
        after: Option<DumpPosition>,
        with_blocks: bool,
        generation: StreamGeneration,
    ) -> Result<Option<(DumpPosition, HolderDump)>, PoolError> {
        let Some(lane) = self.lanes.get(lane) else {
            return Ok(None);
        };
        let after = after.map(|after| after.0);
        let freshness = self.freshness();
        let dump =
            move |lane: &mut Lane| lane.dump_next(after, with_blocks, generation, &freshness.stream_clock);
        let dumped = lane.run(LaneWork::Snapshot, dump).await?;
        Ok(dumped.map(|(key, dump)| (DumpPosition(key), dump)))
    }

    /// Compares a holder with its dump, after a walk over the index has looked for the holder's blocks. The dump came
    /// from lane number `lane`. It had the frame `dumped` and the record `walked`.
    pub async fn revisit(
        &self,
        lane: usize,
        position: DumpPosition,
        walked: WalkedHolder,
        dumped: HolderFrame,
        generation: StreamGeneration,
    ) -> Result<Revisited, PoolError> {
        let Some(lane) = self.lanes.get(lane) else {
            return Ok(Revisited::Gone);
        };
        let freshness = self.freshness();
        let revisit = move |lane: &mut Lane| {
            let holder = lane.holders.get_mut(&position.0);
            holder.map_or(Revisited::Gone, |holder| {
                holder.revisit(&walked, &dumped, generation, &freshness.stream_clock)
            })
        };
        lane.run(LaneWork::Snapshot, revisit).await
    }
}

impl Lane {
    /// Restores a holder's cursor, profile and reasons for doubt. Its blocks come in later frames.
    fn restore_holder(&mut self, of: &RestoredHolder, frame: &HolderFrame, origin: RestoreOrigin) {
        if self.holders.contains_key(&of.key) {
            // The snapshot has the holder a second time. Forest blocks of its first time are outdated.
            self.in_forest.retain(|_, (other, _)| *other != of.key);
        }
        let Some(holder) = self.restored_holder(of) else {
            return;
        };
        holder.restore_cursor(frame, origin);
        if let Some(InForest { number, tier }) = frame.forest {
            self.in_forest.insert(number, (of.key.clone(), tier));
        }
    }

    /// Restores blocks of a holder from an encoded event batch.
    fn restore_batch(&mut self, of: &RestoredHolder, payload: &[u8]) {
        let now_us = self.clocks().monotonic_us;
        let Some(holder) = self.restored_holder(of) else {
            return;
        };
        match EventBatch::decode(payload, &snapshot_limits()) {
            Ok(batch) => holder.restore_blocks(batch, now_us),
            Err(error) => {
                self.note_undecodable(&of.namespace, &of.metrics, &of.key.0, error, self.clocks());
            }
        }
    }

    /// Returns a holder of a snapshot. If the index has no room for the holder, counts that and returns `None`.
    fn restored_holder(&mut self, of: &RestoredHolder) -> Option<&mut Holder> {
        let (unheld, unix_us) = (Arc::clone(&self.unheld), self.clocks().unix_us);
        let refuse = |error| {
            let (why, worker) = (NoHolder::NoRoom(error), &of.key.0.worker);
            of.metrics.batch_dropped(why.reason(), worker.as_str(), &why);
            let refused = of.namespace.indexer.refused();
            unheld.note(refused, &worker.into(), of.key.1, why.reason(), unix_us);
        };
        self.holder(&of.namespace, &of.metrics, &of.key)
            .map_err(refuse)
            .ok()
    }

    /// Stores the blocks of this lane's holders from one part of a snapshot's forest (the blocks of many holders
    /// together).
    fn restore_forest(&mut self, chunk: &ForestChunk) {
        for (number, runs) in chunk.holders() {
            let Some((key, tier)) = self.in_forest.get(&number) else {
                continue;
            };
            if let Some(holder) = self.holders.get_mut(key) {
                holder.restore_runs(*tier, runs);
            }
        }
    }

    /// Dumps the first holder after `after`, in the order of keys.
    fn dump_next(
        &mut self,
        after: Option<HolderKey>,
        with_blocks: bool,
        generation: StreamGeneration,
        stream_clock: &ServerClock,
    ) -> Option<(HolderKey, HolderDump)> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let (key, holder) = self.holders.range_mut((start, Bound::Unbounded)).next()?;
        let dump = match with_blocks {
            true => holder.dump_as_events(&key.0.namespace, generation, stream_clock),
            false => holder.dump(&key.0.namespace, generation, stream_clock),
        };
        Some((key.clone(), dump))
    }
}
