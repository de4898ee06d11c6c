//! A disk that is full, does not sync, does not rename, or disappears between two operations, while a daemon writes
//! snapshots to it under load.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kvatlas_core::wire::WireLimits;
use kvatlas_daemon::Daemon;

use super::{SHORT_PATIENCE, pause, runs};
use crate::support::eventually;
use crate::support::faulty_disk::{DiskFault, FaultyDisk};
use crate::support::fleet::{Fleet, OneDaemon};
use crate::support::jetstream::Restartable;
use crate::support::truth::Tally;
use crate::support::way::Way;
use crate::support::{PATIENCE, config, daemon, server, snapshots_in};

/// Returns the number of complete snapshots in the folder. Fails if a snapshot is incomplete.
fn whole_snapshots(folder: &Path) -> usize {
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let snapshots = files.filter(|path| path.extension().is_some_and(|suffix| suffix == "kvs"));
    let check = |path: std::path::PathBuf| {
        let bytes = std::fs::read(&path).unwrap();
        let limits = WireLimits {
            message_bytes_max: 64 << 20,
            ..WireLimits::default()
        };
        let summary = kvatlas_core::snapshot::summarise(bytes.as_slice(), &limits);
        assert!(summary.is_ok(), "{}: {summary:?}", path.display());
    };
    snapshots.map(check).count()
}

/// Runs three daemons one after the other on the same directory, under load. The second daemon has a disk with `fault`.
/// It must not destroy a complete snapshot of the first one, and the third daemon must reach the truth.
async fn fails(way: Way, fault: DiskFault, seed: u64) -> Tally {
    let broker = Restartable::start(&server()).await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let given = [(key, directory.as_str()), ("snapshots.interval_seconds", "1")];
    let settings = way.settings(&given);
    let url = broker.url();
    let sound = daemon(url, &settings).await;
    let mut fleet = Fleet::through(url, way.publishers(), 4, seed)
        .await
        .with_patience(SHORT_PATIENCE);
    let mut tally = Box::pin(fleet.under_load(&OneDaemon, pause(100))).await;
    sound.stop().await;
    let before = whole_snapshots(folder.path());
    assert!(before > 0, "the last snapshot of a sound disk is there");

    let disk = FaultyDisk::new(fault);
    let failing = Daemon::start_on(config(url, &settings), Arc::new(disk.clone()))
        .await
        .unwrap();
    tokio::time::timeout(PATIENCE, failing.ready())
        .await
        .expect("ready on a failing disk");
    // The load lasts until a scheduled snapshot is tried. Another snapshot is written at the stop.
    let is_tried = eventually("a snapshot is tried", async || {
        (disk.operations() > 0).then_some(())
    });
    tally.add(Box::pin(fleet.under_load(&OneDaemon, is_tried)).await);
    failing.stop().await;
    assert!(
        whole_snapshots(folder.path()) >= before,
        "{fault:?} took what was there"
    );

    let mended = daemon(url, &settings).await;
    tally.add(Box::pin(fleet.under_load(&OneDaemon, pause(100))).await);
    let mut settled = Tally::default();
    fleet.settle(&mut settled).await;
    tally.time_to_exactness = settled.time_to_exactness;
    tally.add(settled);
    mended.stop().await;
    assert!(whole_snapshots(folder.path()) > 0);
    tally
}

async fn all(way: Way, faults: impl IntoIterator<Item = DiskFault>, name: &str) {
    let (mut tally, mut longest) = (Tally::default(), Duration::ZERO);
    for (seed, fault) in (1..).zip(faults) {
        let one = Box::pin(fails(way, fault, seed)).await;
        assert_eq!(one.wrong, 0, "{fault:?}: answers were wrong: {:#?}", one.examples);
        longest = longest.max(one.time_to_exactness.unwrap());
        tally.add(one);
    }
    tally.time_to_exactness = Some(longest);
    tally.report(&format!("{name} ({way})"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk() {
    let rooms = (0..runs()).map(|run| DiskFault::Full(run * 531 % 4096));
    all(Way::Core, rooms, "disk full").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_does_not_sync_or_rename() {
    let faults = [DiskFault::Sync, DiskFault::SyncDirectory, DiskFault::Rename];
    all(Way::Stream, faults, "failed sync, failed rename").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_between_any_two_operations_of_the_disk() {
    // A snapshot takes about ten operations. The last ones are: sync, rename, sync the directory.
    let crashes = (0..runs() * 2).map(|run| DiskFault::Crash(1 + run * 3 % 14));
    all(
        Way::Stream,
        crashes,
        "crash while a snapshot is synced and renamed",
    )
    .await;
}
