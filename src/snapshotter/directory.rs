//! The files of a snapshot directory.
//!
//! A snapshot is written to a temporary file beside the others, synced, and renamed to `snapshot-MICROSECONDS.kvs`; then
//! the directory is synced. So a file of that name is whole unless the disk damaged it, and a crash leaves at most a temporary
//! file, which the next snapshot clears away.

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::{Path, PathBuf};

use crate::snapshot::{SnapshotTotals, SnapshotWriter};

/// Names of snapshots: prefix, 20 digits, suffix. They sort by time.
const PREFIX: &str = "snapshot-";
const SUFFIX: &str = ".kvs";
/// Names of files that are being written.
const TEMPORARY_PREFIX: &str = ".writing-";

/// What went wrong with a file, and with which.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct DirectoryError {
    /// What was attempted.
    pub action: &'static str,
    /// On which path.
    pub path: PathBuf,
    /// The system's error.
    pub source: io::Error,
}

fn failed<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(io::Error) -> DirectoryError + use<'a> {
    move |source| DirectoryError {
        action,
        path: path.to_owned(),
        source,
    }
}

/// A directory of snapshots.
#[derive(Debug, Clone)]
pub struct SnapshotDirectory {
    path: PathBuf,
    keep: usize,
}

/// A snapshot that has been written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) totals: SnapshotTotals,
}

impl SnapshotDirectory {
    /// The directory at `path`, made if it does not exist, in which the newest `keep` snapshots are kept.
    pub fn open(path: &Path, keep: usize) -> Result<Self, DirectoryError> {
        std::fs::create_dir_all(path).map_err(failed("create the snapshot directory", path))?;
        Ok(Self {
            path: path.to_owned(),
            keep: keep.max(1),
        })
    }

    /// The snapshots in it, newest first.
    pub fn snapshots(&self) -> Result<Vec<PathBuf>, DirectoryError> {
        let mut snapshots = self.files(|name| {
            let digits = name
                .strip_prefix(PREFIX)
                .and_then(|rest| rest.strip_suffix(SUFFIX));
            digits
                .is_some_and(|digits| digits.len() == 20 && digits.bytes().all(|byte| byte.is_ascii_digit()))
        })?;
        snapshots.sort_unstable_by(|one, other| other.cmp(one));
        Ok(snapshots)
    }

    fn files(&self, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>, DirectoryError> {
        let entries =
            std::fs::read_dir(&self.path).map_err(failed("read the snapshot directory", &self.path))?;
        let paths = entries.filter_map(Result::ok).map(|entry| entry.path());
        Ok(paths
            .filter(|path| {
                path.file_name()
                    .and_then(|name| name.to_str())
                    .is_some_and(&is_wanted)
            })
            .collect())
    }

    /// Writes a snapshot with `fill`: it appears under its name only when it is whole and on disk.
    pub(super) fn write<E>(
        &self,
        created_us: u64,
        fill: impl FnOnce(&mut SnapshotWriter<BufWriter<&File>>) -> Result<(), E>,
    ) -> Result<Written, E>
    where
        E: From<DirectoryError>,
    {
        let temporary = tempfile::Builder::new()
            .prefix(TEMPORARY_PREFIX)
            .tempfile_in(&self.path);
        let temporary = temporary.map_err(failed("create a file in", &self.path))?;
        let (file, path) = (temporary.as_file(), temporary.path());
        let mut writer =
            SnapshotWriter::new(BufWriter::new(file), created_us).map_err(failed("write", path))?;
        fill(&mut writer)?;
        let (_, totals, bytes) = writer.finish().map_err(failed("write", path))?;
        file.sync_all().map_err(failed("sync", path))?;
        let stamp = created_us.max(self.newest_stamp()?.map_or(0, |newest| newest.saturating_add(1)));
        let name = self.path.join(format!("{PREFIX}{stamp:020}{SUFFIX}"));
        temporary
            .persist(&name)
            .map_err(|error| failed("rename a snapshot to", &name)(error.error))?;
        self.sync()?;
        Ok(Written {
            path: name,
            bytes,
            totals,
        })
    }

    /// The time in the newest snapshot's name. A clock that was set back must not make the next one look older: it would be the
    /// first to be removed, and not the one to start from.
    fn newest_stamp(&self) -> Result<Option<u64>, DirectoryError> {
        let newest = self.snapshots()?.into_iter().next();
        Ok(newest.and_then(|path| {
            let name = path.file_name()?.to_str()?;
            name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?.parse().ok()
        }))
    }

    /// Syncs the directory itself, so that a rename survives a crash.
    fn sync(&self) -> Result<(), DirectoryError> {
        let directory = File::open(&self.path).map_err(failed("open", &self.path))?;
        directory.sync_all().map_err(failed("sync", &self.path))
    }

    /// Removes all but the newest snapshots, and what crashes left behind. Only one process may write to the directory.
    pub(super) fn prune(&self) -> Result<(), DirectoryError> {
        let outdated = self.snapshots()?.into_iter().skip(self.keep);
        let left_behind = self.files(|name| name.starts_with(TEMPORARY_PREFIX))?;
        for path in outdated.chain(left_behind) {
            std::fs::remove_file(&path).map_err(failed("remove", &path))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &SnapshotDirectory, created_us: u64) -> PathBuf {
        directory
            .write(created_us, |_| Ok::<(), DirectoryError>(()))
            .unwrap()
            .path
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
        let failure = failed("write", folder.path())(io::Error::other("the disk is full"));
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
}
