//! Who is there: holders by a small number, sets of them, and whether queries can trust them.
//!
//! | file | what |
//! |---|---|
//! | `slots.rs` | the directory: from a number to a holder, in versions |
//! | `holder_set.rs` | numbers of holders, and sets of them |
//! | `doubtful.rs` | how many holders' states are not certain |
//! | `status.rs` | whether a holder's state is certain, and how large it is |

mod doubtful;
mod holder_set;
mod slots;
mod status;

pub use doubtful::DoubtfulHolders;
pub(crate) use holder_set::{HolderSlot, SlotBits, SlotGatherer, SlotSet};
pub(crate) use slots::{Directory, Slots};
pub use slots::{HolderRecord, RegisterError};
pub use status::HolderStatus;
