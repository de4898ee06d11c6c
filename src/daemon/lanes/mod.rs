//! Lanes: from a message on an events subject to a change of the index.
//!
//! ```text
//! a source ──▶ LanePool ──▶ queue ──▶ lane 0 ──▶ holders of some workers ──▶ index
//!                      └──▶ queue ──▶ lane 1 ──▶ holders of other workers ──▶ index
//! ```
//!
//! - A lane is a thread that applies events. A worker is assigned to one lane as long as it has a holder or a message
//!   on its way. Its batches are applied in the order in which they came.
//! - A lane next serves the worker on which it has spent the least time: fair queueing by virtual time. One worker
//!   delays the others by one turn at most. A turn is one job, or a few small ones.
//! - A lane's queue is bounded in bytes. While it is full, messages of core NATS are dropped, first those of workers
//!   with more than their share. The holders of these workers are then unverified. Messages of JetStream stay in the
//!   stream (back-pressure).
//! - A holder with a gap holds its batches while its publisher is asked for the missing batches.
//!
//! | file | subject |
//! |---|---|
//! | `pool.rs` | takes messages, starts the lanes |
//! | `line.rs` | which lane a worker has, and its line of jobs |
//! | `payloads.rs` | the payloads of a worker's messages, in one piece |
//! | `queue.rs` | the bounded, fair queue in front of a lane |
//! | `flow.rs`, `freshness.rs`, `clock.rs` | what queries are told: how old the state is, and which batches are half applied |
//! | `job.rs`, `lost.rs` | the jobs of a lane; the marks of messages that a full queue dropped |
//! | `lane.rs` | a lane's thread, and its work |
//! | `holder.rs`, `tally.rs` | one holder: checks on batch numbers, then the index; counts of both |
//! | `standing.rs` | the states of a holder's blocks and of its publisher, with their tables of transitions |
//! | `contest.rs` | two publishers that claim one holder |
//! | `position.rs` | the position up to which the stream has been handed over |
//! | `sequence.rs`, `liveness.rs`, `held.rs` | batch numbers; silence; held batches |
//! | `phase.rs` | the phases of a holder's resync, with their table of transitions |
//! | `unheld.rs`, `missing.rs` | the registry of publishers without a holder, with the reasons; what others ask it |
//! | `snapshot.rs`, `holder_snapshot.rs` | dumping and restoring: the way to the lane, and the holder's part |
//! | `server_clock.rs` | the clock of a NATS server |
//! | `command.rs` | commands of operators |
//! | `resync.rs`, `holder_resync.rs`, `replace.rs` | resyncs: the way to the lane, and the holder's part |
//! | `settings.rs` | settings of the lanes |

mod clock;
mod command;
mod contest;
mod flow;
mod freshness;
mod held;
pub(crate) mod holder;
mod holder_resync;
mod holder_snapshot;
mod job;
pub(crate) mod lane;
pub(crate) mod line;
mod liveness;
mod lost;
mod missing;
mod payloads;
mod phase;
mod pool;
mod position;
pub(crate) mod queue;
mod replace;
mod resync;
pub(crate) mod sequence;
mod server_clock;
mod settings;
mod snapshot;
mod standing;
mod tally;
mod unheld;

#[cfg(test)]
pub(crate) mod tests;

pub(crate) use clock::now_us;
pub(crate) use flow::SeenInParts;
pub(crate) use freshness::{Freshness, FreshnessReading};
pub use holder_resync::ResyncAnswer;
pub(crate) use holder_resync::{ResyncBegun, ResyncOutcome};
pub use holder_snapshot::{HolderDump, Revisited};
pub(crate) use job::HolderCommand;
pub use job::RestoreOrigin;
pub(crate) use line::{HolderKey, WorkerKey};
pub use liveness::LivenessLimits;
pub(crate) use liveness::TICK_INTERVAL;
pub(crate) use pool::{Inbox, log_lane_stopped};
pub use pool::{LanePool, PoolError};
pub use position::StreamPosition;
pub(crate) use server_clock::ServerClock;
pub use settings::{HoldingSettings, LaneSettings, LivenessSettings};
pub(crate) use settings::{LaneLimits, epoch_ahead_s, epoch_max};
pub use snapshot::{DumpPosition, snapshot_limits};
pub(crate) use unheld::{Stray, Strays};
