//! The snapshotter: writes what the lanes dump to files, brings the newest good file back to the lanes at start, and exchanges
//! files with the NATS Object Store.
//!
//! What makes a snapshot and the stream behind it complete: the position in the stream is read *before* the first holder is
//! dumped, and each holder is dumped between two of its batches, together with its cursor. So every message up to the position is
//! part of the snapshot; of the later ones some are, and the batch numbers tell which when they are applied again. (What has no
//! number, a batch that cannot be decoded, is noted twice: on the side of doubt.)

mod directory;
mod faulty_disk;
mod object_store;
mod restore;
mod save;
mod storage;

#[cfg(test)]
mod tests;

pub use directory::{DirectoryAction, DirectoryError, SnapshotDirectory};
pub use faulty_disk::{DiskFault, FaultyDisk};
pub use object_store::{ObjectStoreError, SnapshotStore};
pub use restore::{RestoreError, Restored, Restorer};
pub use save::{SaveError, Saved, Snapshotter};
pub use storage::{Disk, Storage, StorageFile};
