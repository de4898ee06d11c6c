//! Tests of the pool of lanes, with real lanes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use kvatlas_core::hash::{BlockSize, SequenceHash};
use kvatlas_core::index::{Capacity, Hashing, IndexLimits, NamespaceSettings, Namespaces};
use kvatlas_core::snapshot::{Frame, HolderFrame};
use kvatlas_core::stream::StreamGeneration;
use kvatlas_core::wire::{
    DegradedReason, DegradedReasons, Event, EventBatch, Labels, NamespaceName, QueryKey, RemovedBlocks,
    Shard, StoredBlocks, Subjects, Tier, WireLimits, WorkerName,
};
use kvatlas_telemetry::labels::LaneWork;

use super::job::Job;
use super::lane::Lane;
use super::pool::LaneHandle;
use super::*;

mod answers;
mod doubts;
mod outlived;
mod random;
mod refused;
mod restarts;
mod sizes;

impl LanePool {
    /// Has every lane stand still until the returned senders are dropped. Each lane has then ended its earlier jobs.
    pub(crate) fn stand_still(&self) -> Vec<std::sync::mpsc::Sender<()>> {
        let hold = |lane: &LaneHandle| {
            let (release, released) = std::sync::mpsc::channel();
            let (begin, begun) = std::sync::mpsc::channel();
            let wait = move |_: &mut Lane| {
                begin.send(()).unwrap();
                // The error means that the sender has been dropped.
                _ = released.recv();
            };
            let job = Job::Run(LaneWork::Upkeep, Box::new(wait));
            lane.jobs.send_control(job).unwrap();
            begun.recv().unwrap();
            release
        };
        self.lanes.iter().map(hold).collect()
    }
}

fn pool() -> LanePool {
    pool_with(LivenessLimits::default(), None)
}

fn pool_of(shard: Option<Shard>) -> LanePool {
    pool_with(LivenessLimits::default(), shard)
}

fn pool_with(limits: LivenessLimits, shard: Option<Shard>) -> LanePool {
    let liveness = LivenessSettings {
        default: limits,
        overrides: HashMap::new(),
    };
    let settings = LaneSettings {
        shard,
        liveness,
        ..settings()
    };
    LanePool::start(&settings, Arc::new(namespaces())).unwrap()
}

/// Returns a pool whose namespaces have blocks of this size where nothing else is told.
fn pool_with_default_size(tokens: u32) -> LanePool {
    let defaults = NamespaceSettings {
        block_size: BlockSize::new(tokens).unwrap(),
        ..NamespaceSettings::default()
    };
    let (capacity, limits) = (Capacity::UNBOUNDED, IndexLimits::default());
    let namespaces = Namespaces::new(capacity, defaults, Vec::new(), limits, 16);
    LanePool::start(&settings(), Arc::new(namespaces)).unwrap()
}

/// Returns no namespaces yet, without bounds on their indexes.
pub(crate) fn namespaces() -> Namespaces {
    namespaces_within(IndexLimits::default())
}

fn namespaces_within(limits: IndexLimits) -> Namespaces {
    let settings = NamespaceSettings {
        block_size: BlockSize::DEFAULT,
        ..NamespaceSettings::default()
    };
    Namespaces::new(Capacity::UNBOUNDED, settings, Vec::new(), limits, 16)
}

/// Returns the settings of two lanes without a shard, that hold no batches back.
pub(crate) fn settings() -> LaneSettings {
    LaneSettings {
        subjects: Subjects::new("kvatlas").unwrap(),
        lanes: 2,
        lane_queue_bytes: 1 << 20,
        behind_after: None,
        limits: WireLimits::default(),
        shard: None,
        holding: None,
        liveness: LivenessSettings::default(),
        epoch_ahead_max: None,
    }
}

/// Returns the origin of a snapshot in which no holder has been confirmed by a batch.
fn unconfirmed() -> RestoreOrigin {
    RestoreOrigin::new(never(), Duration::ZERO)
}

/// Returns a stream generation in which no batch confirms a holder.
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
        is_size_told: false,
        foreign_chain: false,
        made_us: Some(0),
        seen_us: None,
        address: None,
        labels: Labels::NONE,
        forest: None,
    }
}

/// Returns the key of the worker number `number` of a namespace.
pub(super) fn worker(number: usize) -> WorkerKey {
    WorkerKey {
        namespace: NamespaceName::new("n").unwrap(),
        worker: WorkerName::new(&format!("w{number}")).unwrap(),
    }
}

/// Returns a batch of the epoch 1 about the device.
pub(crate) fn batch(seq: u64, events: Vec<Event>) -> EventBatch {
    EventBatch {
        epoch: 1,
        seq,
        rank: 0,
        time_us: None,
        tier: Tier::DEVICE,
        block_size: None,
        profile: None,
        events,
    }
}

fn stored(first: u64, seq: u64) -> Frame {
    let hashes = (first..first + 3).map(SequenceHash).collect();
    let event = Event::Stored(StoredBlocks::by_sequence(None, None, hashes));
    Frame::Batch(batch(seq, vec![event]).encode())
}

/// Returns the number of leading blocks of the chain `first`, `first` + 1, `first` + 2 that the deepest holder has.
/// `None` if no holder has the block `first`.
fn depth(pool: &LanePool, first: u64) -> Option<u32> {
    let namespace = pool.namespaces.get(&frame(1).namespace).unwrap();
    let query = QueryKey::SequenceHashes((first..first + 3).map(SequenceHash).collect());
    let matches = namespace
        .indexer
        .find_matches(&query, kvatlas_core::index::Search::default());
    matches.unwrap().holders().map(|found| found.matched_blocks).max()
}

#[tokio::test]
async fn a_holder_that_a_snapshot_has_twice_is_what_it_was_last() {
    let pool = pool();
    for (first, seq) in [(10, 7), (20, 9)] {
        let holder = frame(seq);
        pool.restore(&holder, Frame::Holder(holder.clone()), unconfirmed())
            .await
            .unwrap();
        pool.restore(&holder, stored(first, seq), unconfirmed())
            .await
            .unwrap();
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
        pool.restore(&holder, Frame::Holder(holder.clone()), unconfirmed())
            .await
            .unwrap();
        pool.drain().await.unwrap();
        assert_eq!(pool.assigned_workers(), expected);
        let (pool, generation) = (
            pool_of(Some(shard)),
            kvatlas_core::stream::StreamTrust::default().generation(),
        );
        let Frame::Batch(payload) = stored(10, 1) else {
            unreachable!("a batch")
        };
        let (namespace, worker) = (holder.namespace.clone(), holder.worker.clone());
        pool.dispatch(&namespace, worker, &payload, generation)
            .await
            .unwrap();
        pool.drain().await.unwrap();
        assert_eq!(pool.assigned_workers(), expected);
        assert_eq!(pool.namespaces.get(&namespace).is_some(), expected == 1);
    }
}

#[tokio::test]
async fn workers_and_namespaces_with_names_that_are_too_long_by_now_are_not_restored() {
    for (namespace, worker, expected) in [
        ("llama", "gpu-0", 1),
        ("llama", "gpu-01", 0),
        ("llama3", "gpu-0", 0),
    ] {
        let limits = WireLimits {
            name_bytes_max: 5,
            ..WireLimits::default()
        };
        let pool = LanePool::start(&LaneSettings { limits, ..settings() }, Arc::new(namespaces())).unwrap();
        let holder = HolderFrame {
            namespace: NamespaceName::new(namespace).unwrap(),
            worker: WorkerName::new(worker).unwrap(),
            ..frame(7)
        };
        for part in [Frame::Holder(holder.clone()), stored(10, 7)] {
            pool.restore(&holder, part, unconfirmed()).await.unwrap();
        }
        pool.drain().await.unwrap();
        assert_eq!(pool.assigned_workers(), expected, "{namespace} {worker}");
    }
}

#[tokio::test]
async fn blocks_of_other_settings_are_not_restored_and_their_publisher_is_asked() {
    let other_hashing = HolderFrame {
        hashing: Hashing::Recompute,
        ..frame(7)
    };
    let other_size = HolderFrame {
        block_size: 32,
        ..frame(7)
    };
    for holder in [other_hashing, other_size] {
        let pool = pool();
        pool.restore(&holder, Frame::Holder(holder.clone()), unconfirmed())
            .await
            .unwrap();
        pool.restore(&holder, stored(10, 7), unconfirmed()).await.unwrap();
        pool.drain().await.unwrap();
        assert_eq!(depth(&pool, 10), None);
        let namespace = pool.namespaces.get(&holder.namespace).unwrap();
        let [known] = &namespace.indexer.holders()[..] else {
            panic!("the holder is known by name")
        };
        let reasons = known.status.own_reasons();
        assert!(reasons.contains(DegradedReason::Rejected));
        assert_eq!(
            (known.status.cursor.load().epoch, known.status.cursor.load().seq),
            (1, 7)
        );
    }
}

#[tokio::test]
async fn a_foreign_chain_is_still_known_after_a_restart() {
    let (pool, restarted) = (pool(), pool());
    let holder = HolderFrame {
        foreign_chain: true,
        ..frame(7)
    };
    pool.restore(&holder, Frame::Holder(holder.clone()), unconfirmed())
        .await
        .unwrap();
    pool.drain().await.unwrap();
    for lane in 0..pool.lane_count() {
        if let Some((_, dump)) = pool.dump_next(lane, None, false, never()).await.unwrap() {
            assert_eq!((dump.frame.hashing, dump.frame.block_size), (Hashing::Engine, 16));
            restarted
                .restore(&dump.frame, Frame::Holder(dump.frame.clone()), unconfirmed())
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
    let trust = kvatlas_core::stream::StreamTrust::default();
    for (made_us, is_certain) in [(Some(5), true), (None, false)] {
        let pool = pool();
        let holder = HolderFrame { made_us, ..frame(7) };
        pool.restore(
            &holder,
            Frame::Holder(holder.clone()),
            RestoreOrigin::new(trust.generation(), Duration::ZERO),
        )
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
async fn a_holder_that_was_certain_in_its_first_frame_only_is_unverified() {
    let trust = kvatlas_core::stream::StreamTrust::default();
    let pool = pool();
    for degraded_bits in [0, DegradedReason::Unverified as u32] {
        let holder = HolderFrame {
            degraded_bits,
            ..frame(7)
        };
        let origin = RestoreOrigin::new(trust.generation(), Duration::ZERO);
        pool.restore(&holder, Frame::Holder(holder.clone()), origin)
            .await
            .unwrap();
        pool.drain().await.unwrap();
        let namespace = pool.namespaces.get(&holder.namespace).unwrap();
        let reasons = namespace.indexer.holders()[0].status.reasons(&trust);
        assert_eq!(reasons.bits(), degraded_bits);
    }
}

#[tokio::test]
async fn a_doubt_of_a_later_version_stays_until_the_publisher_has_sent_its_full_state() {
    let pool = pool();
    let holder = HolderFrame {
        degraded_bits: 1 << 28,
        ..frame(7)
    };
    pool.restore(&holder, Frame::Holder(holder.clone()), unconfirmed())
        .await
        .unwrap();
    pool.drain().await.unwrap();
    let namespace = pool.namespaces.get(&holder.namespace).unwrap();
    let reasons = namespace.indexer.holders()[0].status.own_reasons();
    assert_eq!(reasons, DegradedReasons::of(DegradedReason::Unknown));
    let worker = WorkerKey {
        namespace: holder.namespace,
        worker: holder.worker,
    };
    let asked = pool.begin_resync(&(worker, 0)).await.unwrap().unwrap();
    assert!(asked.full);
}

#[tokio::test]
async fn a_holder_whose_frames_end_in_the_middle_is_forgotten() {
    let pool = pool();
    let holder = frame(7);
    pool.restore(&holder, Frame::Holder(holder.clone()), unconfirmed())
        .await
        .unwrap();
    pool.restore(&holder, stored(10, 7), unconfirmed()).await.unwrap();
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
    pool.restore(&holder, Frame::Holder(holder.clone()), unconfirmed())
        .await
        .unwrap();
    for _ in 0..100 {
        pool.tick(false);
        pool.drain().await.unwrap();
    }
    assert_eq!(pool.assigned_workers(), 1);
    // Once messages can be received, the silent holder counts as gone.
    while pool.assigned_workers() > 0 {
        pool.tick(true);
        pool.drain().await.unwrap();
    }
}

#[tokio::test]
async fn messages_that_are_sorted_together_are_applied_in_the_order_of_each_worker() {
    let pool = pool();
    let trust = kvatlas_core::stream::StreamTrust::default();
    let generation = trust.generation();
    let heartbeat = |seq| batch(seq, Vec::new()).encode();
    let mut inbox = pool.inbox();
    // The workers take turns with short and long stretches of messages.
    let (mut seqs, mut turn) = ([0; 3], 0);
    for stretch in [1, 2, 40, 3, 70, 1, 1, 5, 33] {
        for _ in 0..stretch {
            seqs[turn] += 1;
            let subject = format!("kvatlas.v1.events.llama.gpu-{turn}");
            pool.sort(&mut inbox, &subject, &heartbeat(seqs[turn]), generation, None);
        }
        turn = (turn + 1) % seqs.len();
    }
    pool.hand_over(&mut inbox);
    pool.drain().await.unwrap();
    let namespace = pool.namespaces.get(&frame(1).namespace).unwrap();
    let mut holders = namespace.indexer.holders();
    holders.sort_by(|one, other| one.id.cmp(&other.id));
    // A message that is lost or out of order would be a gap.
    let reasons: Vec<_> = holders.iter().map(|holder| holder.status.own_reasons()).collect();
    assert!(reasons.iter().all(|reasons| reasons.is_empty()), "{reasons:?}");
    let reached: Vec<u64> = holders
        .iter()
        .map(|holder| holder.status.cursor.load().seq)
        .collect();
    assert_eq!(reached, seqs);
}

#[tokio::test]
async fn one_message_that_cannot_be_read_spoils_none_beside_it() {
    let pool = pool();
    let generation = kvatlas_core::stream::StreamTrust::default().generation();
    let mut inbox = pool.inbox();
    let subject = "kvatlas.v1.events.llama.gpu-0";
    let Frame::Batch(first) = stored(10, 1) else {
        unreachable!("a batch")
    };
    let Frame::Batch(second) = stored(20, 2) else {
        unreachable!("a batch")
    };
    for payload in [first.as_slice(), b"\xc1", &second] {
        pool.sort(&mut inbox, subject, payload, generation, None);
    }
    pool.hand_over(&mut inbox);
    pool.drain().await.unwrap();
    assert_eq!((depth(&pool, 10), depth(&pool, 20)), (Some(3), Some(3)));
    let namespace = pool.namespaces.get(&frame(1).namespace).unwrap();
    let reasons = namespace.indexer.holders()[0].status.own_reasons();
    assert!(reasons.contains(DegradedReason::Undecodable));
}

#[test]
fn blocks_that_are_dropped_after_an_eviction_are_counted_when_the_holder_is_dumped() {
    let limits = IndexLimits {
        capacity: Capacity {
            blocks_max: 8,
            ..Capacity::UNBOUNDED
        },
        ..IndexLimits::default()
    };
    let chain = |parent: Option<u64>, hashes: std::ops::Range<u64>| {
        let hashes = hashes.map(SequenceHash).collect();
        Event::Stored(StoredBlocks::by_sequence(parent.map(SequenceHash), None, hashes))
    };
    let run = async {
        let settings = LaneSettings {
            lanes: 1,
            ..settings()
        };
        let pool = LanePool::start(&settings, Arc::new(namespaces_within(limits))).unwrap();
        let (namespace, waiting) = (frame(1).namespace, chain(Some(100), 101..104));
        for (worker, events) in [
            ("gpu-0", vec![chain(None, 1..7), waiting]),
            ("gpu-1", vec![chain(None, 11..15)]),
        ] {
            let (payload, worker) = (batch(1, events).encode(), WorkerName::new(worker).unwrap());
            let dispatched = pool.dispatch(&namespace, worker, &payload, never());
            dispatched.await.unwrap();
            pool.drain().await.unwrap();
        }
        pool.dump_next(0, None, false, never()).await.unwrap();
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let text = kvatlas_telemetry::rendered(|| runtime.block_on(run));
    let rejected = "kvatlas_blocks_rejected_total{namespace=\"llama\",reason=\"capacity\"} 3";
    assert!(text.contains(rejected), "{text}");
}
