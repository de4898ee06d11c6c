//! Walks over an index, and what regular holders have of it, for snapshots.

mod share;
mod walk;

pub use share::{HolderPart, HolderWalk, RestoredRun, WalkedHolder};
pub use walk::{Walk, WalkedRun};
