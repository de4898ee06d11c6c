//! Tests of the snapshot directory, on a sound disk and on failing ones.

use kvatlas_core::snapshot::verify;
use kvatlas_core::wire::WireLimits;

use super::super::faulty_disk::{DiskFault, FaultyDisk};
use super::*;

fn write(directory: &SnapshotDirectory, created_us: u64) -> PathBuf {
    try_write(directory, created_us).unwrap().path
}

/// Writes a snapshot with enough content that writing it can fail.
fn try_write(directory: &SnapshotDirectory, created_us: u64) -> Result<Written, DirectoryError> {
    directory.write(created_us, |writer| {
        let cursor = kvatlas_core::snapshot::StreamCursor {
            stream: "x".repeat(20_000),
            created_us,
            sequence: 1,
            digest: None,
            intake: None,
            has_all: true,
            server: None,
        };
        writer
            .write_stream(&cursor)
            .map_err(unwritable(Path::new("snapshot")))
    })
}

/// Checks that every file with a snapshot's name is whole. Returns the number of these files.
fn whole_snapshots(path: &Path) -> usize {
    let directory = SnapshotDirectory::open(path, 100).unwrap();
    let snapshots = directory.snapshots().unwrap();
    for path in &snapshots {
        verify(std::fs::File::open(path).unwrap(), &WireLimits::default()).unwrap();
    }
    snapshots.len()
}

#[test]
fn the_newest_come_first_and_old_ones_go() {
    let folder = tempfile::tempdir().unwrap();
    let directory = SnapshotDirectory::open(&folder.path().join("made/on/demand"), 2).unwrap();
    let paths: Vec<PathBuf> = [5, 70, 600]
        .into_iter()
        .map(|time| write(&directory, time))
        .collect();
    std::fs::write(
        folder.path().join("made/on/demand/snapshot-7.kvs"),
        b"not one of ours",
    )
    .unwrap();
    assert_eq!(
        directory.snapshots().unwrap(),
        [paths[2].clone(), paths[1].clone(), paths[0].clone()]
    );
    directory.prune().unwrap();
    assert_eq!(
        directory.snapshots().unwrap(),
        [paths[2].clone(), paths[1].clone()]
    );
}

#[test]
fn a_clock_that_was_set_back_does_not_make_the_last_snapshot_an_old_one() {
    let folder = tempfile::tempdir().unwrap();
    let directory = SnapshotDirectory::open(folder.path(), 2).unwrap();
    write(&directory, 600);
    write(&directory, 700);
    let last = write(&directory, 5);
    directory.prune().unwrap();
    assert_eq!(directory.snapshots().unwrap().first(), Some(&last));
}

#[test]
fn a_snapshot_that_fails_leaves_nothing_under_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let directory = SnapshotDirectory::open(folder.path(), 2).unwrap();
    let failure = unwritable(folder.path())(io::Error::other("the disk is full"));
    assert!(directory.write(5, |_| Err(failure)).is_err());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn what_a_crash_left_behind_is_cleared_away() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(".writing-x1"), b"half").unwrap();
    let directory = SnapshotDirectory::open(folder.path(), 2).unwrap();
    let path = write(&directory, 5);
    directory.prune().unwrap();
    let left: Vec<PathBuf> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(left, [path]);
}

#[test]
fn a_failing_disk_keeps_the_snapshots_before_and_takes_the_next_when_it_is_mended() {
    use kvatlas_telemetry::labels::SnapshotFailure as Failure;
    let whole = {
        let folder = tempfile::tempdir().unwrap();
        let directory = SnapshotDirectory::open(folder.path(), 2).unwrap();
        try_write(&directory, 5).unwrap().bytes
    };
    let full = (0..whole).map(|room| (DiskFault::Full(room), Failure::DiskFull, 1));
    // If only the directory cannot be synced, the file is whole nevertheless.
    let others = [
        (DiskFault::Sync, Failure::Sync, 1),
        (DiskFault::Rename, Failure::Rename, 1),
        (DiskFault::SyncDirectory, Failure::Sync, 2),
    ];
    for (fault, expected, left) in full.chain(others) {
        let folder = tempfile::tempdir().unwrap();
        write(&SnapshotDirectory::open(folder.path(), 2).unwrap(), 5);
        let disk = FaultyDisk::new(fault);
        let directory = SnapshotDirectory::open_on(Arc::new(disk.clone()), folder.path(), 2).unwrap();
        let error = try_write(&directory, 6).unwrap_err();
        assert_eq!(error.failure(), expected, "{fault:?}");
        assert_eq!(whole_snapshots(folder.path()), left, "{fault:?}");
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            left,
            "{fault:?}"
        );
        disk.mend();
        write(&directory, 7);
        assert_eq!(whole_snapshots(folder.path()), left + 1, "{fault:?}");
    }
}

#[test]
fn a_crash_before_any_operation_leaves_whole_snapshots_only() {
    let operations = {
        let folder = tempfile::tempdir().unwrap();
        let disk = FaultyDisk::new(DiskFault::Crash(u64::MAX));
        let directory = SnapshotDirectory::open_on(Arc::new(disk.clone()), folder.path(), 1).unwrap();
        write(&directory, 5);
        directory.prune().unwrap();
        disk.operations()
    };
    assert!(operations >= 8, "{operations} operations");
    for at in 0..operations {
        let folder = tempfile::tempdir().unwrap();
        write(&SnapshotDirectory::open(folder.path(), 1).unwrap(), 5);
        let disk = FaultyDisk::new(DiskFault::Crash(at));
        let directory = SnapshotDirectory::open_on(Arc::new(disk), folder.path(), 1).unwrap();
        let crashed = try_write(&directory, 6).and_then(|_| directory.prune());
        assert!(crashed.is_err(), "operation {at}");
        assert!(whole_snapshots(folder.path()) >= 1, "operation {at}");
        // The next process can use the directory.
        let directory = SnapshotDirectory::open(folder.path(), 1).unwrap();
        write(&directory, 7);
        directory.prune().unwrap();
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            1,
            "operation {at}"
        );
    }
}

#[test]
fn what_cannot_be_removed_does_not_keep_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new(DiskFault::Remove);
    let directory = SnapshotDirectory::open_on(Arc::new(disk.clone()), folder.path(), 1).unwrap();
    write(&directory, 5);
    write(&directory, 6);
    assert!(directory.prune().is_err());
    assert_eq!(whole_snapshots(folder.path()), 2);
    disk.mend();
    directory.prune().unwrap();
    assert_eq!(whole_snapshots(folder.path()), 1);
}
