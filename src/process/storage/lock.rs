//! A lock on a directory. Only one process may use a daemon's snapshot directory, or a bridge's state directory: it
//! holds an advisory lock on a file there.
//!
//! The system releases the lock when the process ends, however it ends. The file stays, with the name of the last
//! process that had the lock.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::regular;

/// Name of the file that is locked.
const LOCK_FILE: &str = ".lock";
/// Maximum number of bytes of an owner's name that are read, and maximum number of its characters that are shown.
const OWNER_BYTES_MAX: usize = 256;

/// Error of locking a directory.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process has the lock.
    #[error(
        "the snapshot directory {} is in use by {owner}; stop that daemon, or give this one a directory of its own \
         (snapshots.directory)",
        path.display()
    )]
    Taken {
        /// Path of the directory.
        path: PathBuf,
        /// Name that the other process gives itself.
        owner: String,
    },
    /// The lock file cannot be opened or locked.
    #[error("cannot lock the snapshot directory {}: {source}", path.display())]
    Unusable {
        /// Path of the directory.
        path: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
}

/// The exclusive right to use a directory. Dropping this value gives the right up.
#[derive(Debug)]
pub struct DirectoryLock {
    file: File,
}

impl DirectoryLock {
    /// Locks the directory at `path` for a process that calls itself `owner`.
    pub fn take(path: &Path, owner: &str) -> Result<Self, LockError> {
        let unusable = |source| LockError::Unusable {
            path: path.to_owned(),
            source,
        };
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false);
        let mut file = regular(options, &path.join(LOCK_FILE)).map_err(unusable)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(LockError::Taken {
                    path: path.to_owned(),
                    owner: owner_in(&mut file),
                });
            }
            Err(TryLockError::Error(source)) => return Err(unusable(source)),
        }
        // The name in the file is only for people. A full disk, which has no room for it, does not stop the start.
        let _ = file
            .set_len(0)
            .and_then(|()| file.seek(SeekFrom::Start(0)))
            .and_then(|_| file.write_all(owner.as_bytes()));
        Ok(Self { file })
    }
}

/// Unlocks the file explicitly, because closing it does not always unlock it. If another thread is just starting a
/// child process, the child also has the file open until the child's own program begins.
impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // Unlocking fails only if there is no lock any more.
        let _ = self.file.unlock();
    }
}

fn owner_in(file: &mut File) -> String {
    let mut owner = Vec::new();
    // If the name cannot be read, it is left out.
    let _ = file.take(OWNER_BYTES_MAX as u64).read_to_end(&mut owner);
    match shown(&String::from_utf8_lossy(&owner)) {
        owner if owner.is_empty() => "another daemon".to_owned(),
        owner => owner,
    }
}

/// Returns a name from another process in a form that is safe to show: cut to a maximum length, and without control characters.
pub fn shown(name: &str) -> String {
    let characters = name.chars().filter(|character| !character.is_control());
    characters.take(OWNER_BYTES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_is_told_who_has_the_directory_until_the_first_has_gone() {
        let folder = tempfile::tempdir().unwrap();
        let first = DirectoryLock::take(folder.path(), "first@host:1").unwrap();
        let refused = DirectoryLock::take(folder.path(), "second@host:2").unwrap_err();
        assert!(
            matches!(&refused, LockError::Taken { path, owner } if path == folder.path() && owner == "first@host:1"),
            "{refused}"
        );
        drop(first);
        DirectoryLock::take(folder.path(), "second@host:2").unwrap();
        let missing = DirectoryLock::take(&folder.path().join("missing"), "x").unwrap_err();
        assert!(matches!(missing, LockError::Unusable { .. }));
    }

    #[test]
    fn a_child_process_that_has_the_file_does_not_keep_the_directory() {
        let folder = tempfile::tempdir().unwrap();
        let first = DirectoryLock::take(folder.path(), "first@host:1").unwrap();
        let of_a_child = first.file.try_clone().unwrap();
        drop(first);
        DirectoryLock::take(folder.path(), "second@host:2").unwrap();
        drop(of_a_child);
    }
}
