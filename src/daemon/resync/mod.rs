//! Resynchronisation: asking publishers for missing batches, or for the full state, until every holder is exact again.
//!
//! ```text
//! Resyncer ──▶ begin ──▶ lane: holds the holder's batches from now on
//!    │
//!    ├── request ──▶ publisher ──▶ chunks ──▶ Answers ──▶ Assembly (checks, bounds)
//!    │
//!    └── finish ──▶ lane: applies the answer, then the held batches; the holder is exact
//!     or abandon ─▶ lane: applies the held batches; the holder stays degraded
//! ```
//!
//! From the first doubt to the last applied batch, the holder has a reason for doubt in
//! [`HolderStatus`](kvatlas_core::stream::HolderStatus). So no reply calls an intermediate state exact.

mod answers;
mod assembly;
mod attempt;
mod pace;
mod queue;
mod resyncer;
mod slots;

pub(crate) use resyncer::start_resyncer;
