//! Sequence tracking: what the numbers on batches prove about a holder's state.
//!
//! A publisher numbers the batches of one epoch 1, 2, 3, … without a gap. So a batch that continues the count proves
//! that nothing before it was lost, and one that does not proves the opposite. Nothing here does I/O or knows the time.

mod liveness;
mod sequence;
mod status;

pub use liveness::{ListeningClock, Liveness, LivenessLimits, Silence};
pub use sequence::{Admission, BatchCursor, SequenceTracker};
pub use status::{DegradedReason, DegradedReasons, HolderStatus, StreamGeneration, StreamStall, StreamTrust};
