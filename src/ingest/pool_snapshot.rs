//! The lanes' part in snapshots.

use std::sync::Arc;

use tokio::sync::oneshot;

use crate::index::{Namespace, WalkedHolder};
use crate::snapshot::forest::ForestChunk;
use crate::snapshot::{Frame, HolderFrame, SnapshotFormat};
use crate::telemetry::labels::DropReason;
use crate::tracking::StreamGeneration;

use super::assignment::WorkerKey;
use super::dump::{HolderDump, Revisited};
use super::job::{HolderKey, Job, RestoreJob, RestorePart};
use super::pool::{LanePool, PoolError};

impl LanePool {
    /// Brings a frame of a snapshot to its holder's lane. `holder` is the holder frame that it belongs to; where it was not in
    /// doubt, it counts as confirmed in `generation`. Frames of workers of other shards are passed over: the snapshot may have
    /// been written before the workers were divided.
    pub async fn restore(
        &self,
        holder: &HolderFrame,
        frame: Frame,
        generation: StreamGeneration,
    ) -> Result<(), PoolError> {
        if !self.takes(&holder.worker) {
            return Ok(());
        }
        let namespace: Arc<Namespace> = match self.namespaces.get_or_create(&holder.namespace) {
            Ok(namespace) => namespace,
            Err(error) => {
                let name = holder.namespace.as_str();
                self.unattributed
                    .batch_dropped(DropReason::TooManyNamespaces, name, &error);
                return Ok(());
            }
        };
        if !holder.fits(namespace.indexer.settings()) {
            self.metrics.of(&namespace.name).batch_dropped(
                DropReason::OtherSettings,
                holder.worker.as_str(),
                &"hashing or block_size of the namespace is another one than when the snapshot was written",
            );
            return Ok(());
        }
        let (part, bytes) = match frame {
            Frame::Stream(_) | Frame::Forest(_) => return Ok(()),
            Frame::Holder(frame) => (RestorePart::Holder(frame, generation), 0),
            Frame::Batch(payload) => {
                let bytes = payload.len();
                (RestorePart::Batch(holder.rank, payload), bytes)
            }
        };
        self.send_restore(namespace, holder, part, bytes).await
    }

    /// Brings a part of a snapshot's forest to all lanes: each stores what its holders have of it, if their frames came before. Waits while a
    /// lane's queue is full.
    pub async fn restore_forest(&self, chunk: ForestChunk) -> Result<(), PoolError> {
        let bytes = chunk.bytes();
        let chunk = Arc::new(chunk);
        for lane in &self.lanes {
            let job = Job::RestoreForest(Arc::clone(&chunk));
            lane.jobs.send(job, bytes).await?;
        }
        Ok(())
    }

    /// Says that no more of this snapshot follows.
    pub async fn end_restore(&self) -> Result<(), PoolError> {
        for lane in &self.lanes {
            lane.jobs.send(Job::EndRestore, 0).await?;
        }
        Ok(())
    }

    /// Forgets a holder whose frames ended in the middle: with half of its blocks and the cursor of all of them, its next batch
    /// would seem to make it exact.
    pub async fn abandon_restore(&self, holder: &HolderFrame) -> Result<(), PoolError> {
        let Some(namespace) = self.namespaces.get(&holder.namespace) else {
            return Ok(());
        };
        self.send_restore(namespace, holder, RestorePart::Abandon(holder.rank), 0)
            .await
    }

    async fn send_restore(
        &self,
        namespace: Arc<Namespace>,
        holder: &HolderFrame,
        part: RestorePart,
        bytes: usize,
    ) -> Result<(), PoolError> {
        let worker = WorkerKey {
            namespace: holder.namespace.clone(),
            worker: holder.worker.clone(),
        };
        let (lane, in_flight) = self.assignments.assign(&worker);
        let job = Job::Restore(RestoreJob {
            namespace,
            worker,
            part,
            in_flight,
        });
        Ok(self.lane(lane).jobs.send(job, bytes).await?)
    }

    /// Dumps the holder after `after` on lane number `lane`, in the lane's order; none at the end.
    ///
    /// Each holder is dumped at one instant, between two of its batches; different holders at different instants. One that no batch
    /// has confirmed in `generation` is dumped as unverified. In a format with forests, a regular holder is dumped without its blocks, to be
    /// met on a walk.
    pub async fn dump_next(
        &self,
        lane: usize,
        after: Option<DumpPosition>,
        generation: StreamGeneration,
        format: SnapshotFormat,
    ) -> Result<Option<(DumpPosition, HolderDump)>, PoolError> {
        let Some(lane) = self.lanes.get(lane) else {
            return Ok(None);
        };
        let (reply, dumped) = oneshot::channel();
        lane.jobs.send_control(Job::DumpNext {
            after: after.map(|after| after.0),
            generation,
            format,
            reply,
        })?;
        let dumped = dumped.await.map_err(|_| PoolError::LaneStopped)?;
        Ok(dumped.map(|(key, dump)| (DumpPosition(key), dump)))
    }

    /// Looks what has become of a holder that lane number `lane` dumped as `dumped`, after the walk that was to meet it.
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
        let (reply, revisited) = oneshot::channel();
        lane.jobs.send_control(Job::Revisit {
            holder: position.0,
            before: Box::new((walked, dumped)),
            generation,
            reply,
        })?;
        revisited.await.map_err(|_| PoolError::LaneStopped)
    }
}

/// How far a dump of a lane has come.
#[derive(Debug, Clone)]
pub struct DumpPosition(HolderKey);
