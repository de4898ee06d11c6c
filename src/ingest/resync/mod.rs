//! Resynchronisation: asking publishers for what is missing, until every holder is exact again. This module has the parts of the
//! [`Resyncer`](super::Resyncer) that do no I/O.
//!
//! ```text
//! Resyncer ──▶ begin ──▶ lane holds the holder's live batches back
//!    │
//!    ├── request ──▶ publisher ──▶ chunks ──▶ Assembly (checks, bounds)
//!    │
//!    └── finish ──▶ lane: the answer, then what was held back, then exact
//!     or abandon ─▶ lane: what was held back, as if nobody had asked
//! ```
//!
//! From the first doubt to the last batch applied the holder has a reason in [`HolderStatus`](crate::tracking::HolderStatus), so no
//! reply calls an intermediate state exact.

mod assembly;
mod pace;

pub use assembly::{AnswerLimits, ResyncAnswer};
pub(super) use assembly::{Assembly, Taken};
pub(super) use pace::Attempts;
pub use pace::RetryPace;
