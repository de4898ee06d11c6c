//! Log lines and metrics for operators.
//!
//! The contract:
//!
//! * Each metric is one row of a `metric_group!` (`declare`), in the file of its subject: handle, name, unit, buckets
//!   and help. Its type, its labels, its description, the page `deploy/metrics.md` and the tests follow from the row.
//! * No text that a client chose becomes a label, with three exceptions: the name of a namespace, of an engine that a
//!   bridge follows, and of a known holder. All other label values are variants of an enum in [`labels`], numbers of
//!   lanes or shards, and the version and commit of the program.
//! * The caller bounds the number of namespaces. The caller creates the handles of a namespace only after it has
//!   admitted the namespace under its configured limit. Events and queries without an admitted namespace are counted
//!   under [`labels::UNATTRIBUTED_NAMESPACE`].
//! * Handles such as [`EventMetrics`] are looked up once and then held. Counting a message costs an atomic addition and
//!   no lookup. Creating the handle creates all its series at zero, so a rate includes the first event that is counted.
//! * One method call both counts an event and logs it. A line that a client can provoke at will is written by
//!   [`log_gated!`]: its gate lets one line per reason and second through, with the number of suppressed lines.
//!
//! A series lives until the process ends, even when its namespace is forgotten. Set the gauges of a namespace to their
//! defaults before dropping it. Only the series of an engine that a bridge follows, and of a holder's outcomes, end
//! with their handles: [`EngineMetrics`] and [`HolderOutcomeMetrics`].
//!
//! Handles bind to the recorder that is installed when they are created: call [`install`] first.

mod bridge_metrics;
mod commit;
mod connection_counts;
mod declare;
mod dynamo_metrics;
mod event_metrics;
mod gather_metrics;
mod groups;
mod grpc_metrics;
mod hint_metrics;
mod histograms;
mod history_metrics;
mod http_metrics;
pub mod labels;
mod log_fields;
mod log_gate;
mod logging;
mod namespace_gauges;
mod outcome_metrics;
mod process_metrics;
mod query_metrics;
mod recorder;
mod redis_metrics;
#[cfg(test)]
mod reference_tests;
mod resync_metrics;
mod series;
mod shared_gauge;
mod snapshot_metrics;
mod stream_metrics;
mod told;
mod trace_metrics;

pub use bridge_metrics::{BridgeMetrics, EngineMetrics};
pub use commit::{commit, set_commit};
pub use connection_counts::ConnectionCounts;
pub use declare::{GroupDescription, LabelDescription, LabelWord, MetricDescription, MetricKind};
pub use dynamo_metrics::{DynamoAnswerMetrics, DynamoConnectionMetrics, DynamoMetrics};
pub use event_metrics::{AppliedBatch, AppliedBatches, EventMetrics};
pub use gather_metrics::{GatherMetrics, MissingShardMetrics, ShardMetrics};
pub use groups::{all, groups};
pub use grpc_metrics::{
    GrpcAddressMetrics, GrpcConnectionMetrics, GrpcMethodMetrics, GrpcMetrics, GrpcReportMetrics,
};
pub use hint_metrics::HintMetrics;
pub use history_metrics::HistoryMetrics;
pub use http_metrics::{HttpAnswerMetrics, HttpBodyMetrics, HttpConnectionMetrics, HttpMetrics};
pub use log_gate::LogGate;
pub use logging::{LogFormat, LoggingError, init, set_filter, wants_colour};
pub use namespace_gauges::NamespaceGauges;
pub use outcome_metrics::{CountedOutcome, HolderOutcomeMetrics, OutcomeErrorMetrics, OutcomeMetrics};
pub use process_metrics::{AdminMetrics, BuildMetrics, ConnectionMetrics, LaneMetrics, ProcessMetrics};
pub use query_metrics::QueryMetricsByNamespace;
pub use query_metrics::{AnsweredPrompt, QueryErrorMetrics, QueryMetrics};
pub use recorder::{MetricsError, MetricsHandle, install, install_shared, rendered};
pub use redis_metrics::{RedisConnectionMetrics, RedisGuessMetrics, RedisMetrics};
pub use resync_metrics::{ResyncGauges, ResyncMetrics};
pub use shared_gauge::SharedGauge;
pub use snapshot_metrics::{RestoredSnapshot, SnapshotMetrics};
pub use stream_metrics::StreamMetrics;
pub use trace_metrics::TraceMetrics;
