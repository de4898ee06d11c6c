//! The holders of an index: each by a small number, its slot, and sets of slots.
//!
//! | file | what |
//! |---|---|
//! | `slots.rs` | the directory: from a slot to a holder, in versions |
//! | `holder_set.rs` | slots, and sets of them |

mod holder_set;
mod slots;

pub(crate) use holder_set::{HolderSlot, SlotBits, SlotGatherer, SlotSet};
pub(crate) use slots::{Directory, Slots};
pub use slots::{HolderRecord, RegisterError};
