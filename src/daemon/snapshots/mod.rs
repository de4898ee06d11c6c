//! Snapshots: writing the lanes' dumps to files, restoring the newest good file at start, and exchanging files with the
//! NATS Object Store. The file format is in [`kvatlas_core::snapshot`].
//!
//! | file | subject |
//! |---|---|
//! | `keeper.rs` | when snapshots are loaded and written: at the start, at regular intervals, at the stop |
//! | `failing.rs` | the error while snapshots cannot be written, and the time since which they fail |
//! | `save.rs`, `walked.rs` | writing a file; the holders whose blocks a walk over the index finds |
//! | `restore.rs` | loading a file |
//! | `directory.rs` | the files of a directory |
//! | `object_store.rs` | sending and fetching files |
//! | `claim.rs` | the claim of one deployment to a bucket |
//!
//! # Why a snapshot and the stream after it are complete
//!
//! 1. The position in the stream is read before the first holder is dumped.
//! 2. Each holder is dumped between two of its batches, together with its cursor.
//! 3. So every message up to the position is part of the snapshot. Some of the later messages are, too.
//! 4. The stream is replayed from the position. Batch numbers show which batches are in the snapshot already (delivery
//!    is at least once).
//!
//! A batch that cannot be decoded has no number. Replaying it degrades the holder again, which is safe.
//!
//! Without a stream nothing is replayed. The holder's next batch shows a gap, as after every pause of the daemon, and
//! the holder is in doubt until it is resynced.
//!
//! # Holders in a forest
//!
//! A holder is *regular* if a walk over the index ([`kvatlas_core::index::Walk`]) can find its blocks. It is then
//! dumped without its blocks. The walk finds them later, run by run (consecutive blocks), at different instants. The
//! blocks of all regular holders of a namespace are written together, as a *forest*. The result is a fuzzy checkpoint:
//! a holder's blocks at its cursor, changed by some of the batches after the cursor. Replaying the stream corrects it:
//!
//! - If a later batch names the block, the replay of that batch makes the block right, because the replay is in order.
//! - If no later batch names the block, it has not changed since the cursor, and the walk has found it.
//!
//! Some changes are not in any batch: the holder left, was cleared, was resynced, became irregular, or lost blocks to
//! eviction. After the walk the lanes compare each holder with its dump. A holder that changed in such a way is written
//! again, as events, with its new cursor. The later frame replaces the earlier one.

mod claim;
mod directory;
mod failing;
mod keeper;
mod object_store;
mod restore;
mod save;
mod walked;

#[cfg(test)]
#[path = "../../../tests/integration/support/faulty_disk.rs"]
mod faulty_disk;
#[cfg(test)]
mod tests;

pub use claim::Deployment;
pub use directory::{DirectoryError, SnapshotDirectory};
pub(crate) use failing::{FailingSnapshots, SnapshotFailing};
pub use keeper::SnapshotStartError;
pub(crate) use keeper::{SnapshotKeeper, start_snapshots};
pub use object_store::{ObjectStoreError, SnapshotStore};
pub use restore::{RestoreError, Restored, Restorer};
pub use save::{SaveError, Saved, Snapshotter};
