//! Needs of a daemon: the requirements of its configuration on NATS and on the disk. A daemon shows its needs on its admin
//! listener. So `kvatlas doctor` can read the needs, and need not guess them.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use kvatlas_config::Config;

/// Minimum number of free bytes that a snapshot directory should have. It applies if the snapshots are so small that
/// they would need less.
const FREE_BYTES_MIN: u64 = 1 << 30;

/// Requirements of a daemon's configuration on NATS and on the disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// Size of the largest query that the daemon takes, in bytes.
    pub max_message_bytes: u64,
    /// Name of the stream that keeps events. `None` if events are not kept.
    pub stream: Option<String>,
    /// Whether snapshots are kept in NATS, too.
    pub has_object_store: bool,
    /// The room for snapshots. `None` if no snapshot directory is configured.
    pub snapshots: Option<SnapshotRoom>,
}

/// Free space on the disk for snapshots, and the space that should be free.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRoom {
    /// Path of the snapshot directory.
    pub directory: String,
    /// Free bytes on the directory's disk. `None` if they cannot be found out; `error` then says why.
    pub free_bytes: Option<u64>,
    /// Number of bytes that should be free. It has room for two snapshots, because the previous snapshot is still there while the
    /// next is written.
    pub wanted_bytes: u64,
    /// Reason why the number of free bytes is not known; `None` if the number is known.
    pub error: Option<String>,
}

impl Setup {
    /// Returns the needs of a daemon with the configuration `config`. Looks up the free space for snapshots.
    pub fn of(config: &Config) -> Self {
        let keeps_events = config.events.transport.keeps_events();
        Self {
            max_message_bytes: config.queries.max_message_bytes as u64,
            stream: keeps_events.then(|| config.events.stream.name.clone()),
            has_object_store: config.snapshots.object_store.is_some(),
            snapshots: config.snapshots.directory.as_deref().map(SnapshotRoom::at),
        }
    }
}

impl SnapshotRoom {
    /// Looks up the free and the wanted space for snapshots in `directory`.
    pub fn at(directory: &Path) -> Self {
        let found = rustix::fs::statvfs(directory);
        Self {
            directory: directory.display().to_string(),
            free_bytes: found
                .as_ref()
                .ok()
                .map(|found| found.f_bavail.saturating_mul(found.f_frsize)),
            wanted_bytes: largest_file(directory).saturating_mul(2).max(FREE_BYTES_MIN),
            error: found.err().map(|error| error.to_string()),
        }
    }
}

fn largest_file(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| entry.metadata().ok());
    sizes.map(|metadata| metadata.len()).max().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_for_two_snapshots_is_wanted() {
        let folder = tempfile::tempdir().unwrap();
        let room = SnapshotRoom::at(folder.path());
        assert_eq!((room.wanted_bytes, &room.error), (FREE_BYTES_MIN, &None));
        assert!(room.free_bytes.is_some());
        let file = fs::File::create(folder.path().join("a")).unwrap();
        // The file is sparse, so it takes no space on the disk.
        file.set_len(FREE_BYTES_MIN).unwrap();
        assert_eq!(SnapshotRoom::at(folder.path()).wanted_bytes, 2 * FREE_BYTES_MIN);
        let nowhere = SnapshotRoom::at(&folder.path().join("nowhere"));
        assert!(nowhere.free_bytes.is_none() && nowhere.error.is_some());
    }
}
