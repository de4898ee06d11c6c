//! Ingest: from messages on events subjects to changes of the index.
//!
//! ```text
//! NATS subscription ──▶ Subscriber ──▶ LanePool ──▶ lane 0 ──▶ holders of some workers
//!                     (one task)     (sticky,   └▶ lane 1 ──▶ holders of others
//!                                     bounded)
//! ```
//!
//! A worker is assigned to one lane for as long as it has a holder or a message on its way, so its batches are applied in
//! the order in which they were received. A lane's queue is bounded in bytes; when it is full the subscriber waits, the client's
//! subscription buffer fills, and what the client then drops shows as gaps in the batch numbers. Where a holder's state is in doubt, the
//! [`Resyncer`] asks its publisher.

mod assignment;
mod held;
mod holder;
mod holder_resync;
mod job;
mod lane;
mod metrics;
mod pool;
mod pool_resync;
mod replace;
mod resync;
mod resyncer;
mod settings;
mod subscriber;

pub use holder::HolderDump;
pub use lane::snapshot_limits;
pub use pool::{DumpPosition, LanePool, PoolError};
pub use resync::{AnswerLimits, ResyncAnswer, RetryPace};
pub use resyncer::{ResyncSettings, Resyncer, ResyncerParts};
pub use settings::{HoldingSettings, IngestSettings, LivenessSettings};
pub use subscriber::{Subscriber, SubscriberError};
