//! The files of a snapshot directory.
//!
//! A snapshot is written to a temporary file in the directory, synced, and renamed to `snapshot-MICROSECONDS.kvs`. Then
//! the directory is synced. So a file with such a name is whole unless the disk damaged it. A crash leaves a temporary
//! file at most, which the next snapshot removes.

use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvatlas_core::snapshot::{SnapshotTotals, SnapshotWriter};
use kvatlas_telemetry::labels::SnapshotFailure;

use kvatlas_process::storage::{Disk, Storage, StorageFile, open_regular};

/// Prefix of the names of snapshots. A name is this prefix, 20 digits, and a suffix. The names sort by time.
const PREFIX: &str = "snapshot-";
const SUFFIX: &str = ".kvs";
/// Prefix of the names of files that are being written.
const TEMPORARY_PREFIX: &str = ".writing-";

/// Error of an operation on a snapshot directory or on a file in it.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct DirectoryError {
    /// Words for the operation that failed.
    action: &'static str,
    /// Word for the operation that failed, in metrics.
    failure: SnapshotFailure,
    /// Path of the file or directory.
    pub path: PathBuf,
    /// Error of the operating system.
    pub source: io::Error,
}

impl DirectoryError {
    /// Returns the word for this error in metrics.
    pub fn failure(&self) -> SnapshotFailure {
        match self.source.kind() {
            io::ErrorKind::StorageFull => SnapshotFailure::DiskFull,
            _ => self.failure,
        }
    }
}

/// Returns a function that makes the error of a failed operation on `path`. `action` is the name of the operation in
/// the error's text, and `failure` its name in metrics.
fn failed(
    action: &'static str,
    failure: SnapshotFailure,
    path: &Path,
) -> impl FnOnce(io::Error) -> DirectoryError {
    move |source| DirectoryError {
        action,
        failure,
        path: path.to_owned(),
        source,
    }
}

/// Returns a function that makes the error of a failed reading of the file at `path`.
pub(super) fn unreadable(path: &Path) -> impl FnOnce(io::Error) -> DirectoryError {
    failed("read", SnapshotFailure::Directory, path)
}

/// Returns a function that makes the error of a failed writing to the file at `path`.
pub(super) fn unwritable(path: &Path) -> impl FnOnce(io::Error) -> DirectoryError {
    failed("write", SnapshotFailure::Write, path)
}

/// Directory of snapshots.
#[derive(Debug, Clone)]
pub struct SnapshotDirectory {
    path: PathBuf,
    keep: usize,
    storage: Arc<dyn Storage>,
}

/// Snapshot that has been written, with its size and totals.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Written {
    pub(super) path: PathBuf,
    pub(super) bytes: u64,
    pub(super) totals: SnapshotTotals,
}

/// Temporary file, which does not have its final name yet. Dropping this value removes the file, unless the file has
/// got its final name.
pub(super) struct Temporary<'a> {
    directory: &'a SnapshotDirectory,
    path: PathBuf,
    file: Box<dyn StorageFile>,
    is_kept: bool,
}

impl Temporary<'_> {
    /// Returns the present path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if !self.is_kept {
            // A file that cannot be removed now is removed after the next snapshot.
            let _ = self.directory.storage.remove(&self.path);
        }
    }
}

impl Write for Temporary<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Writer of a snapshot's frames to a file.
pub(super) type FileWriter<'a, 'b> = SnapshotWriter<BufWriter<&'a mut Temporary<'b>>>;

impl SnapshotDirectory {
    /// Opens the directory at `path`, and makes it if it does not exist. Pruning keeps the newest `keep` snapshots, but
    /// at least one.
    pub fn open(path: &Path, keep: usize) -> Result<Self, DirectoryError> {
        Self::open_on(Arc::new(Disk), path, keep)
    }

    /// Opens a directory as [`Self::open`] does, but on `storage` instead of the machine's file system. Snapshots are
    /// still read from the machine's file system.
    pub fn open_on(storage: Arc<dyn Storage>, path: &Path, keep: usize) -> Result<Self, DirectoryError> {
        storage.create_directory(path).map_err(failed(
            "create the snapshot directory",
            SnapshotFailure::Directory,
            path,
        ))?;
        Ok(Self {
            path: path.to_owned(),
            keep: keep.max(1),
            storage,
        })
    }

    /// Returns the number of snapshots that are kept.
    pub fn keep(&self) -> usize {
        self.keep
    }

    /// Returns the paths of the snapshots in the directory, the newest first.
    pub fn snapshots(&self) -> Result<Vec<PathBuf>, DirectoryError> {
        let mut snapshots = self.files(|name| stamp_of(name).is_some())?;
        snapshots.sort_unstable_by(|one, other| other.cmp(one));
        Ok(snapshots)
    }

    fn files(&self, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>, DirectoryError> {
        let mut paths = self.storage.list(&self.path).map_err(failed(
            "read the snapshot directory",
            SnapshotFailure::Directory,
            &self.path,
        ))?;
        paths.retain(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(&is_wanted)
        });
        Ok(paths)
    }

    /// Writes a snapshot, whose frames `fill` writes. The file gets its final name only when it is whole and on disk.
    pub(super) fn write<E>(
        &self,
        created_us: u64,
        fill: impl FnOnce(&mut FileWriter<'_, '_>) -> Result<(), E>,
    ) -> Result<Written, E>
    where
        E: From<DirectoryError>,
    {
        let mut temporary = self.temporary()?;
        let path = temporary.path.clone();
        let mut writer =
            SnapshotWriter::new(BufWriter::new(&mut temporary), created_us).map_err(unwritable(&path))?;
        fill(&mut writer)?;
        let (file, totals, bytes) = writer.finish().map_err(unwritable(&path))?;
        // `finish` has flushed the file. Dropping the buffered writer itself would flush again, and swallow the error.
        drop(file.into_parts());
        let stamp = created_us.max(self.newest_stamp()?.map_or(0, |newest| newest.saturating_add(1)));
        let path = self.persist(temporary, &snapshot_name(stamp))?;
        Ok(Written { path, bytes, totals })
    }

    /// Makes a temporary file, which does not have the name of a snapshot.
    pub(super) fn temporary(&self) -> Result<Temporary<'_>, DirectoryError> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = self
            .path
            .join(format!("{TEMPORARY_PREFIX}{}-{number}", std::process::id()));
        let created = self.storage.create(&path);
        let file = created.map_err(failed("create", SnapshotFailure::Directory, &path))?;
        Ok(Temporary {
            directory: self,
            path,
            file,
            is_kept: false,
        })
    }

    /// Reads a file that is not a snapshot, up to `bytes_max` bytes. Returns `None` if there is no such file.
    pub(super) fn read(&self, name: &str, bytes_max: u64) -> Result<Option<Vec<u8>>, DirectoryError> {
        let path = self.path.join(name);
        let read = || -> io::Result<Vec<u8>> {
            let mut bytes = Vec::new();
            open_regular(&path)?.take(bytes_max).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        match read() {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(unreadable(&path)(error)),
        }
    }

    /// Replaces a file that is not a snapshot. Readers find the whole old file or the whole new one, even after a
    /// crash.
    pub(super) fn replace(&self, name: &str, content: &[u8]) -> Result<(), DirectoryError> {
        let mut temporary = self.temporary()?;
        let path = temporary.path.clone();
        temporary.write_all(content).map_err(unwritable(&path))?;
        self.persist(temporary, name).map(drop)
    }

    /// Syncs a file, then gives it its final name. Afterwards content and name survive a crash.
    pub(super) fn persist(
        &self,
        mut temporary: Temporary<'_>,
        name: &str,
    ) -> Result<PathBuf, DirectoryError> {
        temporary
            .file
            .sync()
            .map_err(failed("sync", SnapshotFailure::Sync, &temporary.path))?;
        let path = self.path.join(name);
        self.storage.rename(&temporary.path, &path).map_err(failed(
            "rename a snapshot to",
            SnapshotFailure::Rename,
            &path,
        ))?;
        temporary.is_kept = true;
        self.storage.sync_directory(&self.path).map_err(failed(
            "sync the snapshot directory",
            SnapshotFailure::Sync,
            &self.path,
        ))?;
        Ok(path)
    }

    /// Returns the time in the newest snapshot's name. The next snapshot must get a later time, even if the clock was
    /// set back. Otherwise the older snapshot would be loaded in its place, and would be kept for longer.
    pub(super) fn newest_stamp(&self) -> Result<Option<u64>, DirectoryError> {
        let newest = self.snapshots()?.into_iter().next();
        Ok(newest.and_then(|path| stamp_of(path.file_name()?.to_str()?)))
    }

    /// Removes all but the newest snapshots, and temporary files that crashes have left. Only one process may write to
    /// the directory.
    pub(super) fn prune(&self) -> Result<(), DirectoryError> {
        let outdated = self.snapshots()?.into_iter().skip(self.keep);
        let left_behind = self.files(|name| name.starts_with(TEMPORARY_PREFIX))?;
        let mut first_error = None;
        for path in outdated.chain(left_behind) {
            let removed = self.storage.remove(&path);
            if let Err(error) = removed.map_err(failed("remove", SnapshotFailure::Directory, &path)) {
                // After an error, the other files are still removed.
                first_error.get_or_insert(error);
            }
        }
        first_error.map_or(Ok(()), Err)
    }
}

/// Returns the name of a snapshot made at the time `stamp`, in microseconds since the Unix epoch.
pub(super) fn snapshot_name(stamp: u64) -> String {
    format!("{PREFIX}{stamp:020}{SUFFIX}")
}

/// Returns the time in a snapshot's name, in microseconds since the Unix epoch. `None` if `name` is not a snapshot's name.
pub(super) fn stamp_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    let is_stamp = digits.len() == 20 && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_stamp.then(|| digits.parse().ok())?
}

#[cfg(test)]
mod tests;
