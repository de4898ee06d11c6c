//! The snapshotter: writes what the lanes dump to files, and brings the newest good file back to the lanes at start.

mod directory;
mod restore;
mod save;

pub use directory::{DirectoryError, SnapshotDirectory};
pub use restore::{RestoreError, Restored, restore_newest};
pub use save::{SaveError, Saved, save};
