//! Ingest: from messages on events subjects to changes of the index.
//!
//! ```text
//! NATS subscription ─▶ Subscriber ──────┐
//!                       (one of them)   ├▶ Dispatcher ─▶ LanePool ──▶ lane 0 ──▶ holders of some workers
//! JetStream stream ──▶ StreamSubscriber ┘               (sticky,   └▶ lane 1 ──▶ holders of others
//!                                                        bounded)
//! ```
//!
//! A worker is assigned to one lane for as long as it has a holder or a message on its way, so its batches are applied in
//! the order in which they were received. A lane's queue is bounded in bytes; when it is full the subscriber waits. With core NATS
//! the client's subscription buffer fills then, and what the client drops shows as gaps in the batch numbers; with JetStream the
//! messages stay in the stream. Where a holder's state is in doubt, the [`Resyncer`] asks its publisher.

mod assignment;
mod dispatch;
mod dump;
mod held;
mod holder;
mod holder_resync;
mod job;
mod lane;
mod metrics;
mod pool;
mod pool_resync;
mod pool_snapshot;
mod position;
mod replace;
mod resync;
mod resyncer;
mod settings;
mod stream;
mod stream_subscriber;
mod subscriber;

pub use dispatch::Dispatcher;
pub use dump::{HolderDump, Revisited};
pub use lane::snapshot_limits;
pub use pool::{LanePool, PoolError};
pub use pool_snapshot::DumpPosition;
pub use position::StreamPosition;
pub use resync::{AnswerLimits, ResyncAnswer, RetryPace};
pub use resyncer::{ResyncSettings, Resyncer, ResyncerParts};
pub use settings::{HoldingSettings, IngestSettings, LivenessSettings};
pub use stream_subscriber::{StreamSubscriber, StreamSubscriberParts};
pub use subscriber::{Subscriber, SubscriberError};
