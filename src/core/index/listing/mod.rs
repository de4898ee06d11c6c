//! Walks over the blocks of an index, for snapshots. A walk also tells which regular holders have each block. A holder
//! is regular if it is described completely by how many leading blocks of each run it has; see `share`.

mod share;
mod walk;

pub use share::{HolderPart, HolderWalk, WalkedHolder};
pub use walk::{Walk, WalkedRun};
