//! Resynchronisation: asking publishers for what is missing, until every holder is exact again.
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
mod resyncer;

pub use assembly::{AnswerLimits, ResyncAnswer};
pub use pace::RetryPace;
pub use resyncer::{ResyncSettings, Resyncer, ResyncerParts};
