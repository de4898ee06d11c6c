//! Only one daemon may use a snapshot directory: it holds an advisory lock on a file there.
//!
//! The system gives the lock back when the process ends, however it ends. The file stays, with the name of the last one that had it.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::regular;

/// The name of the file.
const LOCK_FILE: &str = ".lock";
/// Most bytes of a name that are read, and most of its characters that are shown.
const OWNER_BYTES_MAX: usize = 256;

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another daemon has it.
    #[error(
        "the snapshot directory {} is in use by {owner}; stop that daemon, or give this one a directory of its own \
         (snapshots.directory)",
        path.display()
    )]
    Taken {
        /// The directory.
        path: PathBuf,
        /// The name that the other daemon gives itself.
        owner: String,
    },
    /// The file cannot be locked.
    #[error("cannot lock the snapshot directory {}: {source}", path.display())]
    Unusable {
        /// The directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The right to use a directory, until it is dropped.
#[derive(Debug)]
pub struct DirectoryLock {
    file: File,
}

impl DirectoryLock {
    /// Takes the directory at `path` for a daemon that calls itself `owner`.
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
        // The name is for people: a disk without room for it is no reason not to start.
        let _ = file
            .set_len(0)
            .and_then(|()| file.seek(SeekFrom::Start(0)))
            .and_then(|_| file.write_all(owner.as_bytes()));
        Ok(Self { file })
    }
}

/// Closing the file is not enough: a child process that another thread starts just now has the file, too, until its program begins.
impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // It fails only where there is no lock any more.
        let _ = self.file.unlock();
    }
}

fn owner_in(file: &mut File) -> String {
    let mut owner = Vec::new();
    // What cannot be read is not named.
    let _ = file.take(OWNER_BYTES_MAX as u64).read_to_end(&mut owner);
    match shown(&String::from_utf8_lossy(&owner)) {
        owner if owner.is_empty() => "another daemon".to_owned(),
        owner => owner,
    }
}

/// A name that others have written, as people may see it.
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
        assert!(refused.to_string().contains("first@host:1"), "{refused}");
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
