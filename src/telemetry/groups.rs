//! The list of all groups of metrics.

use super::declare::{GroupDescription, MetricDescription, MetricGroup};
use super::{
    AdminMetrics, BridgeMetrics, BuildMetrics, ConnectionMetrics, DynamoAnswerMetrics,
    DynamoConnectionMetrics, DynamoMetrics, EngineMetrics, EventMetrics, GatherMetrics, GrpcAddressMetrics,
    GrpcConnectionMetrics, GrpcMethodMetrics, GrpcReportMetrics, HintMetrics, HistoryMetrics,
    HolderOutcomeMetrics, HttpAnswerMetrics, HttpBodyMetrics, HttpConnectionMetrics, HttpMetrics,
    LaneMetrics, MissingShardMetrics, NamespaceGauges, OutcomeErrorMetrics, OutcomeMetrics, ProcessMetrics,
    QueryErrorMetrics, QueryMetrics, RedisConnectionMetrics, RedisGuessMetrics, RedisMetrics, ResyncGauges,
    ResyncMetrics, ShardMetrics, SnapshotMetrics, StreamMetrics, TraceMetrics,
};

/// Lists every group of metrics. Each new group is added to the call below.
macro_rules! groups {
    ($($group:ident,)+) => {
        /// Returns the description of every metric, by group.
        pub fn groups() -> Vec<GroupDescription> {
            vec![$(<$group as MetricGroup>::describe()),+]
        }

        /// Records a value in every series that a process can have. For a label with an open set of values, uses one example
        /// value.
        #[cfg(test)]
        pub(super) fn touch_every_series() {
            $(<$group as MetricGroup>::touch_example();)+
        }
    };
}

groups! {
    EventMetrics,
    NamespaceGauges,
    ResyncMetrics,
    ResyncGauges,
    QueryMetrics,
    QueryErrorMetrics,
    OutcomeMetrics,
    HolderOutcomeMetrics,
    OutcomeErrorMetrics,
    HintMetrics,
    ShardMetrics,
    GatherMetrics,
    MissingShardMetrics,
    SnapshotMetrics,
    HistoryMetrics,
    StreamMetrics,
    LaneMetrics,
    ConnectionMetrics,
    AdminMetrics,
    HttpMetrics,
    HttpConnectionMetrics,
    HttpAnswerMetrics,
    HttpBodyMetrics,
    DynamoAnswerMetrics,
    DynamoMetrics,
    DynamoConnectionMetrics,
    RedisMetrics,
    RedisConnectionMetrics,
    RedisGuessMetrics,
    GrpcMethodMetrics,
    GrpcAddressMetrics,
    GrpcConnectionMetrics,
    GrpcReportMetrics,
    BridgeMetrics,
    EngineMetrics,
    TraceMetrics,
    ProcessMetrics,
    BuildMetrics,
}

/// The description of every metric.
pub fn all() -> Vec<MetricDescription> {
    groups().into_iter().flat_map(|group| group.metrics).collect()
}
