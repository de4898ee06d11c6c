//! What the daemon tells its operators: log lines and metrics.
//!
//! The contract:
//!
//! * Every metric is declared once, in [`names`], with its type, unit, help text and label keys.
//! * Every label value is either a variant of an enum in [`labels`], a lane's or a shard's number, the version of the program, or
//!   the name of a namespace. So no text that a client chose becomes a label, with one exception: the namespace. The
//!   number of namespaces is bounded by the caller, which creates the handles of a namespace only after it has
//!   admitted the namespace under its configured limit. Whatever can't be attributed to an admitted namespace is
//!   counted under [`labels::UNATTRIBUTED_NAMESPACE`].
//! * Handles such as [`EventMetrics`] are looked up once and then held, so that counting a message costs an atomic
//!   addition and no lookup. Creating the handle creates all its series, at zero, so that a rate over the
//!   first drop is right.
//! * Something that deserves both a line in the log and a count is one method call that does both. Lines that a client
//!   can provoke at will pass a [`LogGate`]: one line per reason and second, with the number of those left out.
//!
//! A series lives until the process ends, also when its namespace is forgotten; set the gauges of a
//! namespace to their defaults before dropping it.
//!
//! Handles bind to the recorder that is installed when they are created: call [`install`] first.

mod event_metrics;
mod gather_metrics;
pub mod labels;
mod log_gate;
mod logging;
mod metrics;
pub mod names;
mod namespace_gauges;
mod process_metrics;
mod query_metrics;
mod resync_metrics;
mod snapshot_metrics;
mod stream_metrics;

pub use event_metrics::{AppliedBatch, EventMetrics};
pub use gather_metrics::{GatherMetrics, ShardMetrics};
pub use log_gate::LogGate;
pub use logging::{LogFormat, LoggingError, init};
pub use metrics::{MetricsError, MetricsHandle, install, install_shared};
pub use namespace_gauges::{NamespaceGauges, NamespaceSizes};
pub use process_metrics::{AdminMetrics, ConnectionMetrics, LaneMetrics, ProcessMetrics};
pub use query_metrics::{QueryErrorMetrics, QueryMetrics};
pub use resync_metrics::{ResyncGauges, ResyncMetrics};
pub use snapshot_metrics::{RestoredSnapshot, SnapshotMetrics};
pub use stream_metrics::StreamMetrics;
