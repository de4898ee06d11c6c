//! File operations on a directory, as a trait. Tests replace the machine's file system by one that fails.

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

mod lock;

pub use lock::{DirectoryLock, LockError, shown};

/// Opens a regular file to read it. Pipes and devices are refused: opening a pipe would wait for a writer, and opening
/// a device can have side effects.
///
/// # Errors
///
/// Errors of the system, and [`io::ErrorKind::InvalidInput`] for anything that is no regular file.
pub fn open_regular(path: &Path) -> io::Result<File> {
    regular(OpenOptions::new().read(true), path)
}

/// Opens a regular file as [`open_regular`] does, with `options`.
fn regular(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    // The flag has no effect on a file. For a pipe, it says not to wait for the other end.
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, NONBLOCK);
    let file = options.open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is no regular file",
        )),
    }
}

#[cfg(unix)]
#[allow(
    clippy::cast_possible_wrap,
    reason = "a flag of the system, as the system has it"
)]
const NONBLOCK: i32 = rustix::fs::OFlags::NONBLOCK.bits() as i32;

/// A file that is being written.
pub trait StorageFile: Write + Send {
    /// Flushes the written bytes to the disk.
    fn sync(&mut self) -> io::Result<()>;
}

/// File-system operations that keeping files in a directory needs.
pub trait Storage: Debug + Send + Sync {
    /// Opens a file to read it.
    fn open(&self, path: &Path) -> io::Result<Box<dyn Read>> {
        Ok(Box::new(open_regular(path)?))
    }
    /// Makes a file that must not exist yet.
    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>>;
    /// Makes a file as [`Self::create`] does. Only the file's owner may read it, if the file system has owners.
    fn create_private(&self, path: &Path) -> io::Result<Box<dyn StorageFile>>;
    /// Renames a file. Replaces a file that already has the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Returns the paths in a directory.
    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>>;
    /// Makes a directory, and those of its parents that do not exist yet.
    fn create_directory(&self, path: &Path) -> io::Result<()>;
    /// Flushes the names in a directory to the disk.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;
}

/// The file system of the machine.
#[derive(Debug, Clone, Copy)]
pub struct Disk;

impl StorageFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

/// Makes a file that must not exist yet. Only the file's owner may read it, if the file system has owners.
///
/// # Errors
///
/// The system's error.
pub fn create_private_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

impl Storage for Disk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        Ok(Box::new(file))
    }

    fn create_private(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        Ok(Box::new(create_private_file(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(directory)?;
        entries.map(|entry| Ok(entry?.path())).collect()
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        std::fs::create_dir_all(path)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_is_no_file_and_nobody_waits_for_its_writer() {
        let folder = tempfile::tempdir().unwrap();
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let pipe = folder.path().join(".lock");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
        assert!(open_regular(&pipe).is_err() && open_regular(folder.path()).is_err());
        let taken = DirectoryLock::take(folder.path(), "x");
        assert!(matches!(taken, Err(LockError::Unusable { .. })));
    }
}
