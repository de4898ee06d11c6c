//! The snapshotter: writes what the lanes dump to files, brings the newest good file back to the lanes at start, and exchanges
//! files with the NATS Object Store.
//!
//! What makes a snapshot and the stream behind it complete: the position in the stream is read *before* the first holder is
//! dumped, and each holder is dumped between two of its batches, together with its cursor. So every message up to the position is
//! part of the snapshot; of the later ones some are, and the batch numbers tell which when they are applied again. (What has no
//! number, a batch that cannot be decoded, is noted twice: on the side of doubt.)
//!
//! # Holders in a forest
//!
//! A regular holder is dumped without its blocks; they follow from a walk over the index ([`crate::index::Walk`]), which meets the holder's
//! runs later, at different instants. So what is written of it is not what it had at its cursor, but that, changed by some of the batches
//! after the cursor. Those are applied again all the same, in order, and each says what becomes of the blocks that it names. So
//! whatever block one of them names is right in the end; what none of them names has not changed since the cursor, and was found.
//! Whatever cannot be said so is found out when the walk is over, by asking the lanes once more: a holder that has left, was cleared,
//! resynced, became irregular, or lost blocks to eviction without having been marked before, is written again, as events and with the
//! cursor of then. What comes later in a file replaces what came before.
//!
//! Without a stream nothing is applied again, and with the next batch there is a gap, as for every batch that came while no daemon was
//! there: the holder is in doubt until it is resynced.

mod directory;
mod faulty_disk;
mod forest;
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
