//! Disk that fails on demand, for tests of snapshots.
//!
//! The unit tests of the daemon's snapshots use this file, too.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use kvatlas_process::storage::{Disk, Storage, StorageFile, create_private_file};

/// Fault of the disk: the operation that fails, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskFault {
    /// Writing fails after this number of bytes, because the disk is full.
    Full(u64),
    /// Flushing a file to the disk fails.
    Sync,
    /// Renaming fails.
    Rename,
    /// Flushing the names of a directory to the disk fails.
    SyncDirectory,
    /// Removing a file fails.
    Remove,
    /// The process dies before the operation with this number, from 0. This operation and all later ones do nothing.
    Crash(u64),
}

/// File system of the machine, with a fault that a test can remove. Clones have the same fault and the same counters.
#[derive(Debug, Clone)]
pub(crate) struct FaultyDisk(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    fault: Option<DiskFault>,
    operations: u64,
    written: u64,
}

impl FaultyDisk {
    /// Makes a disk with `fault`.
    pub(crate) fn new(fault: DiskFault) -> Self {
        Self(Arc::new(Mutex::new(State {
            fault: Some(fault),
            operations: 0,
            written: 0,
        })))
    }

    #[allow(dead_code, reason = "only unit tests mend a disk")]
    /// Removes the fault.
    pub(crate) fn mend(&self) {
        self.0.lock().fault = None;
    }

    /// Returns the number of operations so far.
    pub(crate) fn operations(&self) -> u64 {
        self.0.lock().operations
    }

    fn check(&self, fails: impl FnOnce(DiskFault) -> bool) -> io::Result<()> {
        let mut state = self.0.lock();
        let number = state.operations;
        state.operations += 1;
        match state.fault {
            Some(DiskFault::Crash(at)) if number >= at => Err(io::Error::other("the process is dead")),
            Some(fault) if fails(fault) => Err(io::Error::other("told to fail")),
            _ => Ok(()),
        }
    }

    /// Returns how many of `wanted` bytes the disk has room for.
    fn take_room(&self, wanted: usize) -> usize {
        let mut state = self.0.lock();
        let Some(DiskFault::Full(room)) = state.fault else {
            return wanted;
        };
        let left = usize::try_from(room.saturating_sub(state.written)).unwrap_or(usize::MAX);
        let fits = left.min(wanted);
        state.written += fits as u64;
        fits
    }
}

struct FaultyFile(File, FaultyDisk);

impl Write for FaultyFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.check(|_| false)?;
        match self.1.take_room(bytes.len()) {
            0 if !bytes.is_empty() => Err(io::Error::from(io::ErrorKind::StorageFull)),
            fits => self.0.write(bytes.get(..fits).unwrap_or(bytes)),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl StorageFile for FaultyFile {
    fn sync(&mut self) -> io::Result<()> {
        self.1.check(|fault| fault == DiskFault::Sync)?;
        self.0.sync_all()
    }
}

impl Storage for FaultyDisk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        self.check(|_| false)?;
        Ok(Box::new(FaultyFile(File::create_new(path)?, self.clone())))
    }

    fn create_private(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        self.check(|_| false)?;
        Ok(Box::new(FaultyFile(create_private_file(path)?, self.clone())))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.check(|fault| fault == DiskFault::Rename)?;
        Disk.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.check(|fault| fault == DiskFault::Remove)?;
        Disk.remove(path)
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        self.check(|_| false)?;
        Disk.list(directory)
    }

    fn create_directory(&self, path: &Path) -> io::Result<()> {
        Disk.create_directory(path)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.check(|fault| fault == DiskFault::SyncDirectory)?;
        Disk.sync_directory(path)
    }
}
