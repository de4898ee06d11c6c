//! The holders of an index: each by a small number, and sets of them.
//!
//! | file | what |
//! |---|---|
//! | `slots.rs` | the directory: from a number to a holder, in versions |
//! | `holder_set.rs` | numbers of holders, and sets of them |

mod holder_set;
mod slots;

pub(crate) use holder_set::{HolderSlot, SlotBits, SlotGatherer, SlotSet};
pub(crate) use slots::{Directory, Slots};
pub use slots::{HolderRecord, RegisterError};
