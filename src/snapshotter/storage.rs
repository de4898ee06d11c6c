//! What the snapshot directory asks of the file system: the seam at which tests let it fail.

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A file that is being written.
pub(super) trait StorageFile: Write + Send {
    /// Brings what was written to the disk.
    fn sync(&mut self) -> io::Result<()>;
}

/// A file system.
pub(super) trait Storage: Debug + Send + Sync {
    /// Makes a file that must not exist yet.
    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>>;
    /// Gives a file another name, in the place of what had it.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// What lies in a directory.
    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>>;
    /// Makes a directory with its parents, unless it is there.
    fn create_directory(&self, path: &Path) -> io::Result<()>;
    /// Brings a directory's names to the disk.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;
}

/// The file system of the machine.
#[derive(Debug, Clone, Copy)]
pub(super) struct Disk;

impl StorageFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

impl Storage for Disk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        Ok(Box::new(file))
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

#[cfg(test)]
pub(super) mod faulty {
    //! A disk that fails when it is told to.

    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::*;

    /// What fails.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(in super::super) enum Fault {
        /// Writing, with the disk full, after so many bytes.
        DiskFull(u64),
        /// Bringing a file's content to the disk.
        Sync,
        /// The rename.
        Rename,
        /// Bringing the directory's names to the disk.
        SyncDirectory,
        /// Removing a file.
        Remove,
        /// The process dies before its operation of this number, from 0: it and all later ones do nothing.
        Crash(u64),
    }

    /// The machine's file system with one fault, which can be mended.
    #[derive(Debug, Clone)]
    pub(in super::super) struct FaultyDisk(Arc<State>);

    #[derive(Debug)]
    struct State {
        fault: Fault,
        is_mended: AtomicBool,
        operations: AtomicU64,
        written: AtomicU64,
    }

    impl FaultyDisk {
        pub(in super::super) fn new(fault: Fault) -> Self {
            Self(Arc::new(State {
                fault,
                is_mended: AtomicBool::new(false),
                operations: AtomicU64::new(0),
                written: AtomicU64::new(0),
            }))
        }

        pub(in super::super) fn mend(&self) {
            self.0.is_mended.store(true, Ordering::SeqCst);
        }

        /// How many operations there were.
        pub(in super::super) fn operations(&self) -> u64 {
            self.0.operations.load(Ordering::SeqCst)
        }

        fn check(&self, fails: impl FnOnce(Fault) -> bool) -> io::Result<()> {
            let number = self.0.operations.fetch_add(1, Ordering::SeqCst);
            if self.0.is_mended.load(Ordering::SeqCst) {
                return Ok(());
            }
            match self.0.fault {
                Fault::Crash(at) if number >= at => Err(io::Error::other("the process is dead")),
                fault if fails(fault) => Err(io::Error::other("told to fail")),
                _ => Ok(()),
            }
        }
    }

    struct FaultyFile(File, FaultyDisk);

    impl Write for FaultyFile {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let FaultyDisk(state) = &self.1;
            self.1.check(|_| false)?;
            if let Fault::DiskFull(room) = state.fault
                && !state.is_mended.load(Ordering::SeqCst)
            {
                let written = state.written.load(Ordering::SeqCst);
                let fits = usize::try_from(room.saturating_sub(written))
                    .unwrap()
                    .min(bytes.len());
                if fits == 0 {
                    return Err(io::Error::from(io::ErrorKind::StorageFull));
                }
                state.written.fetch_add(fits as u64, Ordering::SeqCst);
                return self.0.write(&bytes[..fits]);
            }
            self.0.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            self.0.flush()
        }
    }

    impl StorageFile for FaultyFile {
        fn sync(&mut self) -> io::Result<()> {
            self.1.check(|fault| fault == Fault::Sync)?;
            self.0.sync_all()
        }
    }

    impl Storage for FaultyDisk {
        fn create(&self, path: &Path) -> io::Result<Box<dyn StorageFile>> {
            self.check(|_| false)?;
            Ok(Box::new(FaultyFile(File::create_new(path)?, self.clone())))
        }

        fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
            self.check(|fault| fault == Fault::Rename)?;
            Disk.rename(from, to)
        }

        fn remove(&self, path: &Path) -> io::Result<()> {
            self.check(|fault| fault == Fault::Remove)?;
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
            self.check(|fault| fault == Fault::SyncDirectory)?;
            Disk.sync_directory(path)
        }
    }
}
