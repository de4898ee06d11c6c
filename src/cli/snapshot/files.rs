//! Finds and opens snapshot files.

use std::fmt::Display;
use std::fs::File;
use std::io::{Error, ErrorKind};
use std::path::{Path, PathBuf};

use kvatlas_core::snapshot::SnapshotError;
use kvatlas_core::wire::WireLimits;
use kvatlas_process::storage::open_regular;

use super::super::failure::Failure;

/// Extension of the names of snapshot files.
const EXTENSION: &str = "kvs";

pub(super) fn cannot_open(path: &Path, error: &dyn Display) -> Failure {
    Failure::usage(format_args!(
        "cannot open {path:?}: {error}; name a snapshot or a directory of them"
    ))
}

/// Returns the files of a directory that are named like snapshots, newest first.
pub(super) fn snapshots_in(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let unreadable = |error| Failure::usage(format_args!("cannot read the directory {directory:?}: {error}"));
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        if path.extension().is_some_and(|extension| extension == EXTENSION) {
            paths.push(path);
        }
    }
    // Names carry the time in a fixed width.
    paths.sort_unstable_by(|one, other| other.cmp(one));
    Ok(paths)
}

/// Opens a file that [`snapshots_in`] has listed. `None` if the file is gone, because a daemon has removed it since. A
/// link that leads nowhere is not gone, but cannot be opened.
pub(super) fn open_listed(path: &Path) -> Option<Result<File, SnapshotError>> {
    let is_absent = |error: &Error| error.kind() == ErrorKind::NotFound;
    match open_regular(path) {
        Err(error) if is_absent(&error) && path.symlink_metadata().is_err_and(|error| is_absent(&error)) => {
            None
        }
        opened => Some(opened.map_err(SnapshotError::Io)),
    }
}

/// Returns limits that admit every snapshot, even of a daemon with larger limits than the defaults. Only the size of a
/// frame is bounded.
pub(super) fn file_limits() -> WireLimits {
    WireLimits {
        message_bytes_max: usize::MAX,
        events_max: usize::MAX,
        blocks_per_event_max: usize::MAX,
        ..WireLimits::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_a_daemon_has_removed_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let [kept, removed, link] = ["a.kvs", "b.kvs", "c.kvs"].map(|name| folder.path().join(name));
        std::fs::write(&kept, "kept").unwrap();
        std::fs::write(&removed, "removed").unwrap();
        std::os::unix::fs::symlink("nowhere", &link).unwrap();
        let listed = snapshots_in(folder.path()).unwrap();
        std::fs::remove_file(&removed).unwrap();
        let opened = listed
            .iter()
            .filter_map(|path| Some((path, open_listed(path)?.is_ok())));
        assert_eq!(opened.collect::<Vec<_>>(), [(&link, false), (&kept, true)]);
    }
}
