//! Metrics and log lines about the gRPC listener for SGLang's routers.

use std::fmt::Display;

use metrics::{Counter, Gauge};

use super::connection_counts::count_connections;
use super::declare::metric_group;
use super::labels::{GrpcMethod, GrpcOutcome, PerLabel, ReportLoss, ReportState};
use super::log_gated;

metric_group! {
    /// Metrics about requests to a method of the listener for SGLang's routers.
    GrpcMethodMetrics::of_method(method: GrpcMethod) {
        /// Requests to the listener for SGLang's routers, by method and outcome.
        requests: PerLabel<GrpcOutcome, Counter> = "kvatlas_grpc_requests_total", Count;
    }
}

metric_group! {
    /// Metrics about workers that answers over gRPC leave out.
    GrpcAddressMetrics::new() {
        /// Workers with blocks that were left out of an answer to a router of SGLang, because their address is not known.
        without_address: Counter = "kvatlas_grpc_without_address_total", Count;
    }
}

/// Metrics of the requests of SGLang's routers.
pub struct GrpcMetrics {
    methods: PerLabel<GrpcMethod, GrpcMethodMetrics>,
    addresses: GrpcAddressMetrics,
}

impl Default for GrpcMetrics {
    fn default() -> Self {
        Self::new()
    }
}

impl GrpcMetrics {
    /// Makes the metric handles of every gRPC method.
    pub fn new() -> Self {
        Self {
            methods: PerLabel::new(GrpcMethodMetrics::of_method),
            addresses: GrpcAddressMetrics::new(),
        }
    }

    /// Counts a request that was answered, by method and outcome.
    pub fn answered(&self, method: GrpcMethod, outcome: GrpcOutcome) {
        self.methods.get(method).requests.get(outcome).increment(1);
    }

    /// Counts and logs a worker that is left out of an answer because its address is not known.
    pub fn without_address(&self, worker: &dyn Display) {
        self.addresses.without_address.increment(1);
        log_gated!(
            warn "a worker is left out of answers to SGLang's routers: its address is not known; give it with the engine (address=URL)";
            %worker
        );
    }
}

metric_group! {
    /// Metrics about blocks that are reported over gRPC.
    GrpcReportMetrics::new() {
        /// Workers that are reported over gRPC, by whether all of their blocks are known.
        pub workers: PerLabel<ReportState, Gauge> = "kvatlas_grpc_reported_workers", Count;
        /// Memory of all blocks that are reported over gRPC.
        pub bytes: Gauge = "kvatlas_grpc_reported_bytes", Bytes;
        /// Times that the reported blocks of a worker were forgotten, by reason; the worker then has to send a snapshot
        /// of its blocks.
        lost: PerLabel<ReportLoss, Counter> = "kvatlas_grpc_reports_lost_total", Count;
    }
}

impl GrpcReportMetrics {
    /// Counts and logs that the reported blocks of a worker were forgotten. The worker's blocks stay unknown until the
    /// worker sends a snapshot.
    pub fn lost(&self, reason: ReportLoss, worker: &str) {
        self.lost.get(reason).increment(1);
        log_gated!(
            warn "a worker that is reported over gRPC is forgotten until its next snapshot" per ReportLoss(reason);
            %reason, worker
        );
    }
}

metric_group! {
    /// Metrics about connections of SGLang's routers.
    GrpcConnectionMetrics::new() {
        /// Connections to the listener for SGLang's routers that are open.
        open: Gauge = "kvatlas_grpc_connections", Count;
        /// Connections to the listener for SGLang's routers that were closed because too many were open: the new connection, or
        /// the oldest one that waited for its client.
        refused: Counter = "kvatlas_grpc_connections_refused_total", Count;
    }
}

count_connections!(
    GrpcConnectionMetrics,
    "connection of a router of SGLang refused: too many are open"
);

#[cfg(test)]
mod tests {
    use super::super::ConnectionCounts;
    use super::super::recorder::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            let metrics = GrpcMetrics::new();
            let method = GrpcMethod::of_path("/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix");
            metrics.answered(method, GrpcOutcome::of_code(0));
            metrics.answered(GrpcMethod::of_path("/x/y"), GrpcOutcome::of_code(12));
            metrics.without_address(&"gpu-0");
            let reports = GrpcReportMetrics::new();
            reports.workers.get(ReportState::Told).set(2.0);
            reports.workers.get(ReportState::Awaited).set(1.0);
            reports.bytes.set(640.0);
            reports.lost(ReportLoss::Gap, "gpu-0");
            let connections = GrpcConnectionMetrics::new();
            connections.opened();
            connections.opened();
            connections.closed();
            connections.refused(7);
        });
        for line in [
            "kvatlas_grpc_requests_total{method=\"match_prefix\",outcome=\"ok\"} 1",
            "kvatlas_grpc_requests_total{method=\"match_prefix\",outcome=\"unavailable\"} 0",
            "kvatlas_grpc_requests_total{method=\"other\",outcome=\"unimplemented\"} 1",
            "kvatlas_grpc_without_address_total 1",
            "kvatlas_grpc_reported_workers{state=\"told\"} 2",
            "kvatlas_grpc_reported_workers{state=\"awaited\"} 1",
            "kvatlas_grpc_reported_bytes 640",
            "kvatlas_grpc_reports_lost_total{reason=\"gap\"} 1",
            "kvatlas_grpc_connections 1",
            "kvatlas_grpc_connections_refused_total 1",
        ] {
            assert!(text.lines().any(|found| found == line), "missing: {line}\n{text}");
        }
    }
}
