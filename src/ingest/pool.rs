//! The lanes together.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use tokio::sync::{Notify, oneshot};

use crate::index::{Namespace, Namespaces};
use crate::telemetry::labels::DropReason;
use crate::telemetry::{EventMetrics, LaneMetrics, ShardMetrics};
use crate::tracking::StreamGeneration;
use crate::wire::{DecodeError, EventBatch, NamespaceName, Shard, WireLimits, WorkerName};

use super::assignment::{Assignments, LaneId, WorkerKey};
use super::job::{BatchJob, Job, JobSender, LaneStopped, job_queue};
use super::lane::Lane;
use super::metrics::MetricsByNamespace;
use super::settings::IngestSettings;

/// Why the pool cannot do something.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A lane's thread could not be started.
    #[error("cannot start a lane: {0}")]
    Spawn(#[from] std::io::Error),
    /// A lane has stopped.
    #[error("a lane has stopped")]
    LaneStopped,
}

impl From<LaneStopped> for PoolError {
    fn from(_: LaneStopped) -> Self {
        Self::LaneStopped
    }
}

pub(super) struct LaneHandle {
    pub(super) jobs: JobSender,
    metrics: LaneMetrics,
}

/// A pool of lanes. Dropping it lets the lanes finish their queues.
pub struct LanePool {
    pub(super) lanes: Box<[LaneHandle]>,
    pub(super) assignments: Arc<Assignments>,
    pub(super) namespaces: Arc<Namespaces>,
    pub(super) metrics: Arc<MetricsByNamespace>,
    pub(super) unattributed: EventMetrics,
    limits: WireLimits,
    doubts: Arc<Notify>,
    shard: Option<(Shard, ShardMetrics)>,
}

impl LanePool {
    /// Starts the lanes' threads.
    pub fn start(settings: &IngestSettings, namespaces: Arc<Namespaces>) -> Result<Self, PoolError> {
        let lane_count = settings.lanes.max(1);
        let assignments = Arc::new(Assignments::new(lane_count));
        let metrics = Arc::new(MetricsByNamespace::default());
        let liveness = Arc::new(settings.liveness.clone());
        let doubts = Arc::new(Notify::new());
        let mut lanes = Vec::with_capacity(lane_count);
        for number in 0..lane_count {
            let (jobs, receiver) = job_queue(settings.lane_queue_bytes);
            let lane = Lane::new(
                Arc::clone(&assignments),
                Arc::clone(&metrics),
                settings,
                Arc::clone(&liveness),
                Arc::clone(&doubts),
            );
            let thread = std::thread::Builder::new().name(format!("lane-{number}"));
            // Detached: it ends when the pool is dropped and its queue is empty.
            thread.spawn(move || lane.run(receiver))?;
            lanes.push(LaneHandle {
                jobs,
                metrics: LaneMetrics::for_lane(number),
            });
        }
        Ok(Self {
            lanes: lanes.into(),
            assignments,
            namespaces,
            metrics,
            unattributed: EventMetrics::unattributed(),
            limits: settings.limits.clone(),
            doubts,
            shard: settings.shard.map(|shard| (shard, ShardMetrics::new())),
        })
    }

    /// Waits until a holder begins to wait for what it has missed.
    pub(super) async fn doubted(&self) {
        self.doubts.notified().await;
    }

    /// Whether `worker` belongs to the shard that is taken.
    pub(super) fn takes(&self, worker: &WorkerName) -> bool {
        self.shard.as_ref().is_none_or(|(shard, _)| shard.owns(worker))
    }

    /// Brings a message to its worker's lane; waits while that lane's queue is full. A message for a worker of another shard is
    /// only counted: nothing of it is read.
    pub async fn dispatch(
        &self,
        namespace: &NamespaceName,
        worker: WorkerName,
        payload: Bytes,
        generation: StreamGeneration,
    ) -> Result<(), PoolError> {
        if let Some((shard, metrics)) = &self.shard
            && !shard.owns(&worker)
        {
            metrics.message_passed_over();
            return Ok(());
        }
        let Some(namespace) = self.admit_namespace(namespace, &payload) else {
            return Ok(());
        };
        let metrics = self.metrics.of(&namespace.name);
        metrics.message_received(payload.len() as u64);
        let key = WorkerKey {
            namespace: namespace.name.clone(),
            worker,
        };
        let payload = self.trim(payload);
        let bytes = payload.len();
        let (lane, in_flight) = self.assignments.assign(&key);
        let job = Job::Batch(BatchJob {
            namespace,
            worker: key,
            payload,
            generation,
            in_flight,
        });
        let sent = self.lane(lane).jobs.send(job, bytes).await;
        if sent.is_err() {
            metrics.batch_dropped(DropReason::LaneStopped, "", &"the daemon is stopping");
        }
        Ok(sent?)
    }

    /// The namespace of a message. It comes into being only with a batch that can be decoded: garbage on invented subjects must not
    /// use up the namespaces.
    fn admit_namespace(&self, name: &NamespaceName, payload: &[u8]) -> Option<Arc<Namespace>> {
        if let Some(namespace) = self.namespaces.get(name) {
            return Some(namespace);
        }
        if let Err(error) = EventBatch::decode(payload, &self.limits) {
            let reason = match error {
                DecodeError::Oversized { .. } => DropReason::Oversized,
                _ => DropReason::Undecodable,
            };
            self.unattributed.batch_dropped(reason, name.as_str(), &error);
            return None;
        }
        let created = self.namespaces.get_or_create(name);
        let too_many = |error| {
            self.unattributed
                .batch_dropped(DropReason::TooManyNamespaces, name.as_str(), &error)
        };
        created.map_err(too_many).ok()
    }

    /// An oversized payload goes to its lane cut to one byte over the limit: the lane marks the worker's holders, and the
    /// queue does not have to hold the rest. A copy: a slice would keep all of it in memory.
    fn trim(&self, payload: Bytes) -> Bytes {
        let bytes_max = self.limits.message_bytes_max;
        if payload.len() > bytes_max {
            Bytes::copy_from_slice(&payload[..=bytes_max])
        } else {
            payload
        }
    }

    /// Counts a message whose subject names no worker.
    pub fn drop_bad_subject(&self, subject: &str, error: &dyn std::fmt::Display) {
        self.unattributed
            .batch_dropped(DropReason::BadSubject, subject, error);
    }

    pub(super) fn lane(&self, lane: LaneId) -> &LaneHandle {
        &self.lanes[lane.0]
    }

    /// Waits until all that was dispatched before has been applied.
    pub async fn drain(&self) -> Result<(), PoolError> {
        for lane in &self.lanes {
            let (reply, done) = oneshot::channel();
            lane.jobs.send_control(Job::Barrier(reply))?;
            done.await.map_err(|_| PoolError::LaneStopped)?;
        }
        Ok(())
    }

    /// Times out what waits, and looks who is silent, on every lane. `is_listening` says whether events can be heard now: while
    /// they cannot, nobody counts as silent. To be called about once a second.
    pub fn tick(&self, is_listening: bool) {
        for lane in &self.lanes {
            // A stopped lane has nothing to time out.
            let _ = lane.jobs.send_control(Job::Tick { is_listening });
        }
    }

    /// Publishes the lanes' backlogs as metrics.
    pub fn publish_backlogs(&self) {
        for lane in &self.lanes {
            let backlog = lane.jobs.backlog();
            let messages = backlog.messages.load(Ordering::Relaxed) as u64;
            lane.metrics
                .set_queue(messages, backlog.bytes.load(Ordering::Relaxed) as u64);
        }
    }

    /// Messages that wait for a lane.
    pub fn messages_waiting(&self) -> u64 {
        self.lanes
            .iter()
            .map(|lane| lane.jobs.backlog().messages.load(Ordering::Relaxed) as u64)
            .sum()
    }

    /// Workers that have a lane.
    pub fn assigned_workers(&self) -> usize {
        self.assignments.len()
    }

    /// How many lanes there are.
    pub fn lane_count(&self) -> usize {
        self.lanes.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use crate::hash::{BlockSize, SequenceHash};
    use crate::index::{Hashing, IndexLimits, NamespaceSettings};
    use crate::snapshot::{Frame, HolderFrame, SnapshotFormat};
    use crate::wire::{Event, EventBatch, QueryKey, StoredBlocks, Tier};

    use crate::tracking::LivenessLimits;

    use super::super::settings::LivenessSettings;
    use super::*;

    fn pool() -> LanePool {
        pool_with(LivenessLimits::default(), None)
    }

    fn pool_of(shard: Option<Shard>) -> LanePool {
        pool_with(LivenessLimits::default(), shard)
    }

    fn pool_with(limits: LivenessLimits, shard: Option<Shard>) -> LanePool {
        let settings = NamespaceSettings {
            block_size: BlockSize::DEFAULT,
            ..NamespaceSettings::default()
        };
        let namespaces = Namespaces::new(settings, Vec::new(), IndexLimits::default(), 16);
        let settings = IngestSettings {
            lanes: 2,
            lane_queue_bytes: 1 << 20,
            limits: WireLimits::default(),
            shard,
            holding: None,
            liveness: LivenessSettings {
                default: limits,
                overrides: HashMap::new(),
            },
        };
        LanePool::start(&settings, Arc::new(namespaces)).unwrap()
    }

    /// A generation that confirms nothing.
    fn never() -> StreamGeneration {
        StreamGeneration::default()
    }

    fn frame(seq: u64) -> HolderFrame {
        HolderFrame {
            namespace: NamespaceName::new("llama").unwrap(),
            worker: WorkerName::new("gpu-0").unwrap(),
            rank: 0,
            epoch: 1,
            seq,
            degraded_bits: 0,
            blocks: 3,
            hashing: Hashing::Engine,
            block_size: 16,
            foreign_chain: false,
            made_us: Some(0),
            forest: None,
        }
    }

    fn stored(first: u64, seq: u64) -> Frame {
        let hashes = (first..first + 3).map(SequenceHash).collect();
        let batch = EventBatch {
            epoch: 1,
            seq,
            rank: 0,
            time_us: None,
            tier: Tier::DEVICE,
            events: vec![Event::Stored(StoredBlocks::by_sequence(None, None, hashes))],
        };
        Frame::Batch(batch.encode())
    }

    /// How many of the blocks `first`, `first` + 1, … some holder has.
    fn depth(pool: &LanePool, first: u64) -> Option<u32> {
        let namespace = pool.namespaces.get(&frame(1).namespace).unwrap();
        let query = QueryKey::SequenceHashes((first..first + 3).map(SequenceHash).collect());
        let matches = namespace
            .indexer
            .find_matches(&query, crate::index::Search::default());
        matches.unwrap().holders().map(|found| found.matched_blocks).max()
    }

    #[tokio::test]
    async fn a_holder_that_a_snapshot_has_twice_is_what_it_was_last() {
        let pool = pool();
        for (first, seq) in [(10, 7), (20, 9)] {
            let holder = frame(seq);
            pool.restore(&holder, Frame::Holder(holder.clone()), never())
                .await
                .unwrap();
            pool.restore(&holder, stored(first, seq), never()).await.unwrap();
        }
        pool.drain().await.unwrap();
        assert_eq!((depth(&pool, 10), depth(&pool, 20)), (None, Some(3)));
    }

    #[tokio::test]
    async fn only_the_workers_of_the_shard_are_taken() {
        let holder = frame(7);
        for index in 0..2 {
            let shard = Shard::new(index, 2).unwrap();
            let pool = pool_of(Some(shard));
            let expected = usize::from(shard.owns(&holder.worker));
            pool.restore(&holder, Frame::Holder(holder.clone()), never())
                .await
                .unwrap();
            pool.drain().await.unwrap();
            assert_eq!(pool.assigned_workers(), expected);
            let (pool, generation) = (
                pool_of(Some(shard)),
                crate::tracking::StreamTrust::default().generation(),
            );
            let Frame::Batch(payload) = stored(10, 1) else {
                unreachable!("a batch")
            };
            let (namespace, worker) = (holder.namespace.clone(), holder.worker.clone());
            pool.dispatch(&namespace, worker, payload.into(), generation)
                .await
                .unwrap();
            pool.drain().await.unwrap();
            assert_eq!(pool.assigned_workers(), expected);
            assert_eq!(pool.namespaces.get(&namespace).is_some(), expected == 1);
        }
    }

    #[tokio::test]
    async fn blocks_that_are_keyed_by_another_chain_are_not_restored() {
        let pool = pool();
        let holder = HolderFrame {
            hashing: Hashing::Recompute,
            ..frame(7)
        };
        pool.restore(&holder, Frame::Holder(holder.clone()), never())
            .await
            .unwrap();
        pool.restore(&holder, stored(10, 7), never()).await.unwrap();
        pool.drain().await.unwrap();
        assert_eq!((depth(&pool, 10), pool.assigned_workers()), (None, 0));
    }

    #[tokio::test]
    async fn a_foreign_chain_is_still_known_after_a_restart() {
        let (pool, restarted) = (pool(), pool());
        let holder = HolderFrame {
            foreign_chain: true,
            ..frame(7)
        };
        pool.restore(&holder, Frame::Holder(holder.clone()), never())
            .await
            .unwrap();
        pool.drain().await.unwrap();
        for lane in 0..pool.lane_count() {
            if let Some((_, dump)) = pool
                .dump_next(lane, None, never(), SnapshotFormat::default())
                .await
                .unwrap()
            {
                assert_eq!((dump.frame.hashing, dump.frame.block_size), (Hashing::Engine, 16));
                restarted
                    .restore(&dump.frame, Frame::Holder(dump.frame.clone()), never())
                    .await
                    .unwrap();
            }
        }
        restarted.drain().await.unwrap();
        let namespace = restarted.namespaces.get(&holder.namespace).unwrap();
        assert_eq!(namespace.indexer.foreign_holders(), 1);
    }

    #[tokio::test]
    async fn only_where_a_snapshot_knows_the_time_its_holders_can_be_certain() {
        let trust = crate::tracking::StreamTrust::default();
        for (made_us, is_certain) in [(Some(5), true), (None, false)] {
            let pool = pool();
            let holder = HolderFrame { made_us, ..frame(7) };
            pool.restore(&holder, Frame::Holder(holder.clone()), trust.generation())
                .await
                .unwrap();
            pool.drain().await.unwrap();
            let namespace = pool.namespaces.get(&holder.namespace).unwrap();
            let holders = namespace.indexer.holders();
            let mut reasons = holders.iter().map(|holder| holder.status.reasons(&trust));
            assert!(reasons.all(|reasons| reasons.is_empty() == is_certain));
        }
    }

    #[tokio::test]
    async fn a_holder_whose_frames_end_in_the_middle_is_forgotten() {
        let pool = pool();
        let holder = frame(7);
        pool.restore(&holder, Frame::Holder(holder.clone()), never())
            .await
            .unwrap();
        pool.restore(&holder, stored(10, 7), never()).await.unwrap();
        pool.abandon_restore(&holder).await.unwrap();
        pool.drain().await.unwrap();
        assert_eq!(depth(&pool, 10), None);
        assert_eq!(pool.assigned_workers(), 0);
    }

    #[tokio::test]
    async fn nobody_counts_as_silent_while_nothing_can_be_heard() {
        let limits = LivenessLimits {
            stale_after: Some(Duration::from_micros(1)),
            remove_after: Some(Duration::from_micros(2)),
        };
        let pool = pool_with(limits, None);
        let holder = frame(7);
        pool.restore(&holder, Frame::Holder(holder.clone()), never())
            .await
            .unwrap();
        for _ in 0..100 {
            pool.tick(false);
            pool.drain().await.unwrap();
        }
        assert_eq!(pool.assigned_workers(), 1);
        // As soon as it could be heard, and is not, it is gone.
        while pool.assigned_workers() > 0 {
            pool.tick(true);
            pool.drain().await.unwrap();
        }
    }
}
