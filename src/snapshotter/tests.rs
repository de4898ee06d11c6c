//! Tests of saving and restoring with real lanes.

use std::path::Path;
use std::sync::Arc;

use tokio::runtime::Handle;

use crate::hash::SequenceHash;
use crate::index::{IndexLimits, NamespaceSettings, Namespaces};
use crate::ingest::{HoldingSettings, IngestSettings, LanePool, LivenessSettings, StreamPosition};
use crate::snapshot::{Frame, SnapshotReader, StreamCursor};
use crate::telemetry::SnapshotMetrics;
use crate::tracking::{DegradedReasons, StreamGeneration, StreamTrust};
use crate::wire::{
    Event, EventBatch, NamespaceName, RemovedBlocks, StoredBlocks, Tier, WireLimits, WorkerName,
};

use super::*;

const STREAM: &str = "EVENTS";

/// A daemon's lanes, and what goes with them.
struct World {
    namespaces: Arc<Namespaces>,
    pool: Arc<LanePool>,
    position: Arc<StreamPosition>,
    trust: Arc<StreamTrust>,
}

impl World {
    fn new() -> Self {
        let namespaces = Arc::new(Namespaces::new(
            NamespaceSettings::default(),
            Vec::new(),
            IndexLimits::default(),
            4,
        ));
        let settings = IngestSettings {
            lanes: 2,
            lane_queue_bytes: 1 << 20,
            limits: WireLimits::default(),
            shard: None,
            holding: Some(HoldingSettings {
                bytes_per_holder_max: 1 << 20,
                wait_max: std::time::Duration::from_secs(60),
            }),
            liveness: LivenessSettings::default(),
        };
        Self {
            pool: Arc::new(LanePool::start(&settings, Arc::clone(&namespaces)).unwrap()),
            namespaces,
            position: Arc::default(),
            trust: Arc::default(),
        }
    }

    /// Hands over the message `sequence` of the stream.
    async fn dispatch(&self, sequence: u64) {
        let (worker, payload) = message(sequence);
        let generation = self.trust.generation();
        self.pool
            .dispatch(&namespace(), worker, payload.into(), generation)
            .await
            .unwrap();
        self.position.set(cursor(sequence));
    }

    fn snapshotter(&self, folder: &Path) -> Arc<Snapshotter> {
        Arc::new(Snapshotter::new(
            Arc::clone(&self.pool),
            SnapshotDirectory::open(folder, 3).unwrap(),
            Arc::clone(&self.position),
            Arc::clone(&self.trust),
        ))
    }

    async fn restore(&self, folder: &Path, stream: Option<&str>) -> Option<Restored> {
        let restorer = Restorer {
            pool: Arc::clone(&self.pool),
            limits: crate::ingest::snapshot_limits(),
            stream: stream.map(str::to_owned),
            position: Arc::clone(&self.position),
            trust: Arc::clone(&self.trust),
            metrics: Arc::new(SnapshotMetrics::new()),
        };
        let (directory, runtime) = (SnapshotDirectory::open(folder, 3).unwrap(), Handle::current());
        blocking(move || restorer.restore_newest(&directory, &runtime).unwrap()).await
    }

    /// Every holder: who, up to which batch, with how many blocks, and why it is not certain.
    fn holders(&self) -> Vec<(String, u64, u64, DegradedReasons)> {
        let Some(namespace) = self.namespaces.get(&namespace()) else {
            return Vec::new();
        };
        let describe = |holder: &Arc<crate::index::HolderRecord>| {
            let status = &holder.status;
            (
                holder.id.worker.to_string(),
                status.cursor().seq,
                status.blocks(),
                status.reasons(&self.trust),
            )
        };
        let mut holders: Vec<_> = namespace.indexer.holders().iter().map(describe).collect();
        holders.sort_by(|one, other| one.0.cmp(&other.0));
        holders
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.unwrap()
}

async fn save(snapshotter: &Arc<Snapshotter>) -> Saved {
    let (snapshotter, runtime) = (Arc::clone(snapshotter), Handle::current());
    blocking(move || snapshotter.save(&runtime).unwrap()).await
}

fn namespace() -> NamespaceName {
    NamespaceName::new("llama").unwrap()
}

fn cursor(sequence: u64) -> StreamCursor {
    StreamCursor {
        stream: STREAM.to_owned(),
        created_us: 7,
        sequence,
    }
}

/// The message `sequence`, from 1: four workers take turns to store eight blocks, and to remove the last three of them the time after.
fn message(sequence: u64) -> (WorkerName, Vec<u8>) {
    let (worker, seq) = ((sequence - 1) % 4, (sequence - 1) / 4 + 1);
    let first = seq.div_ceil(2) * 100;
    let hashes = |range: std::ops::Range<u64>| range.map(|block| SequenceHash(first + block)).collect();
    let event = if seq % 2 == 1 {
        Event::Stored(StoredBlocks::by_sequence(None, None, hashes(0..8)))
    } else {
        Event::Removed(RemovedBlocks::by_sequence(hashes(5..8)))
    };
    let batch = EventBatch {
        epoch: 1,
        seq,
        rank: 0,
        // As publishers say it: a batch that is part of the snapshot and comes again from the stream is a duplicate all the same.
        time_us: Some(sequence),
        tier: Tier::DEVICE,
        events: vec![event],
    };
    (WorkerName::new(&format!("gpu-{worker}")).unwrap(), batch.encode())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_under_load_and_the_stream_behind_it_are_the_whole_state() {
    const MESSAGES: u64 = 4000;
    let folder = tempfile::tempdir().unwrap();
    let world = Arc::new(World::new());
    let snapshotter = world.snapshotter(folder.path());
    let loading = {
        let world = Arc::clone(&world);
        tokio::spawn(async move {
            for sequence in 1..=MESSAGES {
                world.dispatch(sequence).await;
            }
            world.pool.drain().await.unwrap();
        })
    };
    while !loading.is_finished() {
        save(&snapshotter).await;
    }
    loading.await.unwrap();
    // The newest three: one may have been begun when all was over.
    for path in SnapshotDirectory::open(folder.path(), 3)
        .unwrap()
        .snapshots()
        .unwrap()
    {
        let alone = tempfile::tempdir().unwrap();
        std::fs::copy(&path, alone.path().join(path.file_name().unwrap())).unwrap();
        let restarted = World::new();
        let restored = restarted.restore(alone.path(), Some(STREAM)).await.unwrap();
        let position = restored.cursor.map_or(0, |cursor| cursor.sequence);
        for sequence in position + 1..=MESSAGES {
            restarted.dispatch(sequence).await;
        }
        restarted.pool.drain().await.unwrap();
        assert_eq!(restarted.holders(), world.holders(), "from message {position}");
        assert!(restarted.holders().iter().all(|holder| holder.3.is_empty()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_stream_makes_restored_holders_certain_and_only_those_that_were() {
    let folder = tempfile::tempdir().unwrap();
    let world = World::new();
    for sequence in 1..=4 {
        world.dispatch(sequence).await;
    }
    // The stream lost something: only the first worker's next batch comes after that.
    world.pool.drain().await.unwrap();
    world.trust.doubt();
    world.dispatch(5).await;
    save(&world.snapshotter(folder.path())).await;

    let (with, without, other) = (World::new(), World::new(), World::new());
    with.restore(folder.path(), Some(STREAM)).await.unwrap();
    without.restore(folder.path(), None).await.unwrap();
    other.restore(folder.path(), Some("OTHERS")).await.unwrap();
    let certain =
        |world: &World| -> Vec<bool> { world.holders().iter().map(|holder| holder.3.is_empty()).collect() };
    assert_eq!(certain(&with), [true, false, false, false]);
    assert_eq!(certain(&without), [false; 4]);
    assert_eq!(certain(&other), [false; 4]);
    assert_eq!(
        (with.position.get(), other.position.get()),
        (Some(cursor(5)), None)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_snapshot_gives_way_to_the_one_before_it() {
    let folder = tempfile::tempdir().unwrap();
    let world = World::new();
    let snapshotter = world.snapshotter(folder.path());
    world.dispatch(1).await;
    let old = save(&snapshotter).await;
    for sequence in 2..=400 {
        world.dispatch(sequence).await;
    }
    let new = save(&snapshotter).await;
    let whole = std::fs::read(&new.path).unwrap();
    // Every length of the header, and a spread of lengths of the body.
    let lengths = (0..64).chain((64..whole.len()).step_by(whole.len() / 40));
    for length in lengths {
        std::fs::write(&new.path, &whole[..length]).unwrap();
        let restarted = World::new();
        let restored = restarted.restore(folder.path(), Some(STREAM)).await.unwrap();
        assert_eq!(restored.path, old.path, "cut at {length}");
        assert_eq!(restarted.position.get(), Some(cursor(1)));
        assert_eq!(restarted.holders().len(), 1);
    }
    std::fs::write(&old.path, b"").unwrap();
    assert_eq!(World::new().restore(folder.path(), None).await, None);
    std::fs::write(&new.path, &whole).unwrap();
    assert_eq!(
        World::new().restore(folder.path(), None).await.unwrap().path,
        new.path
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn two_snapshots_are_not_written_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let world = World::new();
    let snapshotter = world.snapshotter(folder.path());
    let runtime = Handle::current();
    let refused = {
        let snapshotter = Arc::clone(&snapshotter);
        blocking(move || snapshotter.while_saving(|| snapshotter.save(&runtime).unwrap_err())).await
    };
    assert!(matches!(refused, SaveError::Busy));
    save(&snapshotter).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_cannot_be_pruned_is_a_snapshot() {
    use super::faulty_disk::{DiskFault, FaultyDisk};
    let folder = tempfile::tempdir().unwrap();
    let world = World::new();
    let disk = Arc::new(FaultyDisk::new(DiskFault::Remove));
    let snapshotter = Arc::new(Snapshotter::new(
        Arc::clone(&world.pool),
        SnapshotDirectory::open_on(disk, folder.path(), 1).unwrap(),
        Arc::clone(&world.position),
        Arc::clone(&world.trust),
    ));
    assert!(save(&snapshotter).await.prune_error.is_none());
    let saved = save(&snapshotter).await;
    assert!(saved.prune_error.is_some());
    let mut reader = SnapshotReader::new(std::fs::File::open(saved.path).unwrap()).unwrap();
    assert_eq!(reader.next_frame().unwrap(), None::<Frame>);
}

#[test]
fn the_default_generation_confirms_nothing() {
    assert!(StreamGeneration::default() < StreamTrust::default().generation());
}
