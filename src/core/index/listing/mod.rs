//! Walks over an index, and the blocks of regular holders on them, for snapshots.

mod share;
mod walk;

pub use share::{HolderPart, HolderWalk, WalkedHolder};
pub use walk::{Walk, WalkedRun};
