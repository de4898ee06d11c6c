//! Finds and opens snapshot files.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use kvatlas_core::wire::WireLimits;

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

/// Returns limits that admit every snapshot, even of a daemon with larger limits than the defaults. Only the size of a frame is
/// bounded.
pub(super) fn file_limits() -> WireLimits {
    WireLimits {
        message_bytes_max: usize::MAX,
        events_max: usize::MAX,
        blocks_per_event_max: usize::MAX,
        ..WireLimits::default()
    }
}
