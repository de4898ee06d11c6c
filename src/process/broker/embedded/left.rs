//! Removes the directories of embedded servers that were left on the disk because the process that ran the server was
//! killed.

use std::path::Path;

use super::CONFIG_FILE;
use crate::storage::DirectoryLock;

/// Prefix of the names of servers' directories.
pub(super) const PREFIX: &str = "kvatlas-nats-";
/// Name in the lock of a server's directory.
pub(super) const OWNER: &str = "kvatlas";

/// Removes each directory of a server in `folder` that no process uses any more. A process locks its directory while it
/// uses it. If the process is killed, the operating system ends the lock.
pub(super) fn sweep(folder: &Path) {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let name = path.file_name().map(|name| name.to_string_lossy());
        if !name.is_some_and(|name| name.starts_with(PREFIX)) || !path.join(CONFIG_FILE).is_file() {
            continue;
        }
        // A directory of another user, or of an older version, stays.
        if DirectoryLock::has_been_taken(&path)
            && let Ok(_lock) = DirectoryLock::take(&path, OWNER)
            && let Err(error) = std::fs::remove_dir_all(&path)
        {
            tracing::warn!(%error, ?path, "the directory of an embedded NATS server that was killed stays");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_nobody_locks_any_more_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let made = |name: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir(&path).unwrap();
            std::fs::write(path.join(CONFIG_FILE), "").unwrap();
            path
        };
        let [left, used, older, other] =
            ["kvatlas-nats-1", "kvatlas-nats-2", "kvatlas-nats-3", "other"].map(made);
        drop(DirectoryLock::take(&left, OWNER).unwrap());
        drop(DirectoryLock::take(&other, OWNER).unwrap());
        let lock = DirectoryLock::take(&used, OWNER).unwrap();
        sweep(folder.path());
        assert!(!left.exists());
        assert!(used.exists() && older.exists() && other.exists());
        drop(lock);
    }
}
