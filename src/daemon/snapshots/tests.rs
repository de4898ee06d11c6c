//! Tests of saving and restoring with real lanes.

mod other_settings;
mod walks;

use std::path::Path;
use std::sync::Arc;

use tokio::runtime::Handle;

use crate::lanes::tests::settings;
use crate::lanes::{HoldingSettings, LanePool, LaneSettings, StreamPosition};
use crate::shared::unbounded;
use kvatlas_client::unix_time_us;
use kvatlas_core::hash::{BlockSize, SequenceHash};
use kvatlas_core::index::{Namespaces, Search, TierDepth};
use kvatlas_core::snapshot::{Frame, SnapshotReader, StreamCursor};
use kvatlas_core::stream::{StreamGeneration, StreamTrust};
use kvatlas_core::wire::{
    DegradedReasons, Event, EventBatch, NamespaceName, RemovedBlocks, StoredBlocks, Tier, WireLimits,
    WorkerName,
};
use kvatlas_telemetry::SnapshotMetrics;

use super::directory::FileWriter;
use super::walked::{Walked, write_dump};
use super::*;

const STREAM: &str = "EVENTS";

/// Lanes of a daemon, with the namespaces, the position in the stream and the state of the stream that they share.
struct World {
    namespaces: Arc<Namespaces>,
    pool: Arc<LanePool>,
    position: Arc<StreamPosition>,
    trust: Arc<StreamTrust>,
}

impl World {
    fn new() -> Self {
        Self::of(unbounded(4))
    }

    fn of(namespaces: Namespaces) -> Self {
        let holding = HoldingSettings {
            bytes_per_holder_max: 1 << 20,
            wait_max: std::time::Duration::from_secs(60),
        };
        Self::holding_back(namespaces, Some(holding))
    }

    fn keeping_back(holding: Option<HoldingSettings>) -> Self {
        Self::holding_back(unbounded(4), holding)
    }

    fn holding_back(namespaces: Namespaces, holding: Option<HoldingSettings>) -> Self {
        let namespaces = Arc::new(namespaces);
        let settings = LaneSettings {
            holding,
            ..settings()
        };
        Self {
            pool: Arc::new(LanePool::start(&settings, Arc::clone(&namespaces)).unwrap()),
            namespaces,
            position: Arc::default(),
            trust: Arc::default(),
        }
    }

    /// Hands message number `sequence` of the stream to the lanes.
    async fn dispatch(&self, sequence: u64) {
        let (worker, payload) = message(sequence);
        self.hand(worker, &payload).await;
        self.position.set(cursor(sequence));
    }

    /// Hands a batch to the lanes that they refuse: its worker has another block size.
    async fn dispatch_refused(&self) {
        let batch = EventBatch {
            block_size: BlockSize::new(32).ok(),
            ..EventBatch::decode(&message(2).1, &WireLimits::default()).unwrap()
        };
        self.hand(WorkerName::new("other").unwrap(), &batch.encode())
            .await;
    }

    async fn hand(&self, worker: WorkerName, payload: &[u8]) {
        let generation = self.trust.generation();
        self.pool
            .dispatch(&namespace(), worker, payload, generation)
            .await
            .unwrap();
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
            limits: crate::lanes::snapshot_limits(),
            stream: stream.map(str::to_owned),
            position: Arc::clone(&self.position),
            trust: Arc::clone(&self.trust),
            metrics: Arc::new(SnapshotMetrics::new()),
        };
        let (directory, runtime) = (SnapshotDirectory::open(folder, 3).unwrap(), Handle::current());
        blocking(move || restorer.restore_newest(&directory, &runtime).unwrap()).await
    }

    /// Returns, for each holder, its worker, the number of its last batch, its number of blocks, and its reasons for
    /// doubt.
    fn holders(&self) -> Vec<(String, u64, u64, DegradedReasons)> {
        let Some(namespace) = self.namespaces.get(&namespace()) else {
            return Vec::new();
        };
        let describe = |holder: &Arc<kvatlas_core::index::HolderRecord>| {
            let status = &holder.status;
            (
                holder.id.worker.to_string(),
                status.cursor.load().seq,
                status.blocks.load(),
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
    blocking(move || snapshotter.save(unix_time_us(), &runtime).unwrap()).await
}

fn namespace() -> NamespaceName {
    NamespaceName::new("llama").unwrap()
}

fn cursor(sequence: u64) -> StreamCursor {
    StreamCursor {
        stream: STREAM.to_owned(),
        created_us: 7,
        sequence,
        digest: None,
        intake: Some(0),
        has_all: true,
        server: None,
    }
}

/// Makes the stream's message number `sequence`, counted from 1. Four workers take turns. A worker stores eight blocks, and in
/// its next turn removes the last three of them.
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
        // Batches have times, as those of publishers do. A batch of the snapshot that the stream brings again is still
        // a duplicate.
        time_us: Some(sequence),
        tier: Tier::DEVICE,
        block_size: None,
        profile: None,
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
    // A message comes before the first snapshot, so that every snapshot has a position in the stream.
    world.dispatch(1).await;
    let loading = {
        let world = Arc::clone(&world);
        tokio::spawn(async move {
            for sequence in 2..=MESSAGES {
                world.dispatch(sequence).await;
            }
            world.pool.drain().await.unwrap();
        })
    };
    while !loading.is_finished() {
        save(&snapshotter).await;
    }
    loading.await.unwrap();
    // The newest three snapshots are checked, because the newest may have been begun after the last message.
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
    // Messages may have been lost. After that, only the first worker sends a batch.
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

/// A test that a snapshot does not count all publishers as known if the batch of a refused one waits for its lane while
/// the snapshot begins.
#[tokio::test(flavor = "multi_thread")]
async fn not_everybody_is_known_after_a_snapshot_that_was_written_while_a_refused_batch_waited() {
    let folder = tempfile::tempdir().unwrap();
    let world = World::new();
    world.dispatch(1).await;
    world.pool.drain().await.unwrap();
    let standing = world.pool.stand_still();
    world.dispatch_refused().await;
    let waiting = world.pool.messages_waiting();
    let snapshotter = world.snapshotter(folder.path());
    let saving = tokio::spawn(async move { save(&snapshotter).await });
    while world.pool.messages_waiting() == waiting {
        tokio::task::yield_now().await;
    }
    // The snapshot now waits for a lane.
    drop(standing);
    saving.await.unwrap();
    let restored = World::new().restore(folder.path(), Some(STREAM)).await.unwrap();
    assert!(!restored.cursor.unwrap().has_all);
}

/// A test that a daemon does not count all publishers as known after it has loaded a snapshot, if batches of a
/// publisher without a holder were dropped before. Such a publisher is not part of the snapshot.
#[tokio::test(flavor = "multi_thread")]
async fn not_everybody_is_known_after_a_snapshot_that_was_written_while_batches_were_dropped() {
    for is_dropped in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let world = World::new();
        world.dispatch(1).await;
        if is_dropped {
            world.dispatch_refused().await;
        }
        world.pool.drain().await.unwrap();
        assert_eq!(world.pool.drops_some(), is_dropped);
        save(&world.snapshotter(folder.path())).await;
        let restarted = World::new();
        let restored = restarted.restore(folder.path(), Some(STREAM)).await.unwrap();
        assert_eq!(restored.cursor.unwrap().has_all, !is_dropped);
        assert_eq!(restarted.trust.is_listed(), !is_dropped);
        assert!(
            restarted.holders()[0].3.is_empty(),
            "the holder is known for certain"
        );
    }
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
        blocking(move || snapshotter.while_saving(|| snapshotter.save(unix_time_us(), &runtime).unwrap_err()))
            .await
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

/// Moment while a snapshot is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moment {
    /// Holders have been dumped. The present holders are dumped again after this moment.
    BeforeLastDump,
    BeforeWalk,
    AfterWalk,
}

/// Writes a snapshot, during which something `happens` at the moment `meanwhile`.
async fn save_with(
    world: &Arc<World>,
    folder: &Path,
    meanwhile: Moment,
    happens: impl AsyncFnOnce(&World) + Send + 'static,
) {
    let (world, folder, runtime) = (Arc::clone(world), folder.to_owned(), Handle::current());
    blocking(move || {
        let directory = SnapshotDirectory::open(&folder, 3).unwrap();
        let generation = world.trust.generation();
        let written = directory.write::<SaveError>(1, |writer| {
            let mut walked = Walked::default();
            writer.write_stream(&world.position.get().unwrap())?;
            world.dump_all(&mut walked, writer, &runtime)?;
            match meanwhile {
                Moment::BeforeLastDump => {
                    runtime.block_on(happens(&world));
                    world.dump_all(&mut walked, writer, &runtime)?;
                    walked.write_forests(writer)?;
                }
                Moment::BeforeWalk => {
                    runtime.block_on(happens(&world));
                    walked.write_forests(writer)?;
                }
                Moment::AfterWalk => {
                    walked.write_forests(writer)?;
                    runtime.block_on(happens(&world));
                }
            }
            walked.write_changed(writer, &world.pool, generation, &runtime)
        });
        written.unwrap();
    })
    .await;
}

impl World {
    /// Dumps the holders of all lanes.
    fn dump_all(
        &self,
        walked: &mut Walked,
        writer: &mut FileWriter<'_, '_>,
        runtime: &Handle,
    ) -> Result<(), SaveError> {
        for lane in 0..self.pool.lane_count() {
            let mut position = None;
            loop {
                let generation = self.trust.generation();
                let dumping = self.pool.dump_next(lane, position.take(), false, generation);
                let Some((next, mut dump)) = runtime.block_on(dumping)? else {
                    break;
                };
                walked.note(lane, &next, &mut dump);
                write_dump(writer, dump)?;
                position = Some(next);
            }
        }
        Ok(())
    }

    /// Sends a batch of one worker to its lane.
    async fn tell(&self, worker: &str, epoch: u64, seq: u64, events: Vec<Event>) {
        self.tell_of(Tier::DEVICE, worker, epoch, seq, events).await;
    }

    /// Sends a batch of one worker about blocks in `tier` to its lane.
    async fn tell_of(&self, tier: Tier, worker: &str, epoch: u64, seq: u64, events: Vec<Event>) {
        let batch = EventBatch {
            epoch,
            seq,
            rank: 0,
            time_us: None,
            tier,
            block_size: None,
            profile: None,
            events,
        };
        let worker = WorkerName::new(worker).unwrap();
        self.pool
            .dispatch(&namespace(), worker, &batch.encode(), self.trust.generation())
            .await
            .unwrap();
        self.pool.drain().await.unwrap();
    }
}

fn stored(hashes: std::ops::Range<u64>) -> Event {
    Event::Stored(StoredBlocks::by_sequence(
        None,
        None,
        hashes.map(SequenceHash).collect(),
    ))
}

fn removed(hashes: std::ops::Range<u64>) -> Event {
    Event::Removed(RemovedBlocks::by_sequence(hashes.map(SequenceHash).collect()))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_brings_back_what_queries_found() {
    let world = World::new();
    for sequence in 1..=400 {
        world.dispatch(sequence).await;
    }
    world.pool.drain().await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let saved = save(&world.snapshotter(folder.path())).await;
    assert!(saved.totals.forest_blocks > 0);
    let restarted = World::new();
    restarted.restore(folder.path(), Some(STREAM)).await.unwrap();
    assert_eq!(restarted.holders(), world.holders());
    // Checks each chain of a hundred blocks, and some chains that no holder has.
    for chain in 1..60 {
        let depths = world.depths(chain * 100);
        assert_eq!(depths.is_empty(), chain > 50);
        assert_eq!(restarted.depths(chain * 100), depths);
    }
}

/// Returns three depths of the only holder for the blocks from 10 on: on the device, on device and host together, and
/// in all tiers.
fn depths_of_tiers(world: &World) -> [u32; 3] {
    let namespace = world.namespaces.get(&namespace()).unwrap();
    let query = kvatlas_core::wire::QueryKey::SequenceHashes((10..20).map(SequenceHash).collect());
    [TierDepth::Device, TierDepth::Host, TierDepth::All].map(|tiers| {
        let search = Search {
            tiers,
            ..Search::default()
        };
        let matches = namespace.indexer.find_matches(&query, search).unwrap();
        matches.holders().next().map_or(0, |found| found.matched_blocks)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn names_tiers_copies_and_holes_are_kept_over_a_restart() {
    let host = Tier::new(1).unwrap();
    // The engine's name of block b is b + 100. The name of its second copy is b + 500.
    let named = |parent: Option<u64>, hashes: std::ops::Range<u64>, add: u64| {
        let mut stored = StoredBlocks::by_sequence(
            parent.map(SequenceHash),
            None,
            hashes.clone().map(SequenceHash).collect(),
        );
        stored.engine_hashes = Some(hashes.map(|hash| hash + add).collect());
        vec![Event::Stored(stored)]
    };
    let world = World::new();
    world.tell("gpu", 1, 1, named(None, 10..20, 100)).await;
    world.tell_of(host, "gpu", 1, 2, named(None, 10..14, 100)).await;
    world.tell("gpu", 1, 3, named(Some(111), 12..13, 500)).await;
    world.tell("gpu", 1, 4, vec![removed(116..117)]).await;
    let folder = tempfile::tempdir().unwrap();
    save(&world.snapshotter(folder.path())).await;
    let restarted = World::new();
    restarted.restore(folder.path(), None).await.unwrap();
    let expected = [
        // Before any change.
        [6, 6, 6],
        // The first copy on the device is removed. The second copy is left, and the block on the host.
        [6, 6, 6],
        // The last copy on the device is removed. The block is left on the host only.
        [2, 6, 6],
        // The block on the host is removed, too.
        [2, 2, 2],
        // The first hole is filled. The second hole is left.
        [6, 6, 6],
        // The second hole is filled.
        [10, 10, 10],
    ];
    let changes = [
        (Tier::DEVICE, vec![removed(112..113)]),
        (Tier::DEVICE, vec![removed(512..513)]),
        (host, vec![removed(112..113)]),
        (Tier::DEVICE, named(Some(111), 12..13, 100)),
        (Tier::DEVICE, named(Some(115), 16..17, 100)),
    ];
    for world in [&world, &restarted] {
        assert_eq!(depths_of_tiers(world), expected[0]);
        for ((seq, (tier, events)), expected) in (5..).zip(changes.clone()).zip(&expected[1..]) {
            world.tell_of(tier, "gpu", 1, seq, events).await;
            assert_eq!(depths_of_tiers(world), *expected, "batch {seq}");
        }
        assert_eq!(world.holders()[0].2, 10);
    }
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread")]
async fn a_pipe_under_the_name_of_a_snapshot_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    let world = World::new();
    let snapshotter = world.snapshotter(folder.path());
    world.dispatch(1).await;
    let old = save(&snapshotter).await;
    world.dispatch(2).await;
    let new = save(&snapshotter).await;
    std::fs::remove_file(&new.path).unwrap();
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &new.path, mode).unwrap();
    // Opening the pipe as a file would wait for a writer for ever.
    let restored = World::new().restore(folder.path(), Some(STREAM)).await.unwrap();
    assert_eq!(restored.path, old.path);
}
