//! The holders of an index. Each holder has a *slot*: a small number that no other holder has at the same time. A set
//! of holders is stored as a set of slots.
//!
//! | file | what |
//! |---|---|
//! | `slots.rs` | the directory, a table from slots to holders, replaced as a whole at each change |
//! | `holder_set.rs` | slots, and sets of them |

mod holder_set;
mod slots;

pub(crate) use holder_set::{HolderSlot, SlotBits, SlotGatherer, SlotSet};
pub(crate) use slots::{Directory, Slots};
pub use slots::{HolderRecord, RegisterError};
