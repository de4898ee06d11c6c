//! Walks over the blocks of an index, for snapshots. A walk also tells which regular holders have each block. A
//! holder is regular if its numbers of leading blocks describe it completely; see `share`.

mod share;
mod walk;

pub use share::{HolderPart, HolderWalk, WalkedHolder};
pub use walk::{Walk, WalkedRun};
