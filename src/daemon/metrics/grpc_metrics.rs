//! Counts and log lines about the listener for SGLang's routers.

use std::fmt::Display;

use metrics::{Counter, Gauge};

use super::LogGate;
use super::connection_counts::count_connections;
use super::declare::metric_group;
use super::labels::{GrpcMethod, GrpcOutcome, PerLabel};

static ADDRESS_GATE: LogGate = LogGate::new();

metric_group! {
    /// Requests to a method of the listener for SGLang's routers.
    GrpcMethodMetrics::of_method(method: GrpcMethod) {
        /// Requests to the listener for SGLang's routers, by method and by how they ended.
        requests: PerLabel<GrpcOutcome, Counter> = "kvatlas_grpc_requests_total", Count;
    }
}

metric_group! {
    /// Workers that cannot be told.
    GrpcAddressMetrics::new() {
        /// Workers that were left out of an answer to a router of SGLang, though they had blocks: their address is not known.
        without_address: Counter = "kvatlas_grpc_without_address_total", Count;
    }
}

/// Requests of SGLang's routers.
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
    /// The handles.
    pub fn new() -> Self {
        Self {
            methods: PerLabel::new(GrpcMethodMetrics::of_method),
            addresses: GrpcAddressMetrics::new(),
        }
    }

    /// Counts a request that was answered.
    pub fn answered(&self, method: GrpcMethod, outcome: GrpcOutcome) {
        self.methods.get(method).requests.get(outcome).increment(1);
    }

    /// Counts a worker that no router can be told, and logs it.
    pub fn without_address(&self, worker: &dyn Display) {
        self.addresses.without_address.increment(1);
        if let Some(suppressed) = ADDRESS_GATE.admit() {
            tracing::warn!(
                %worker,
                suppressed,
                "a worker is left out of answers to SGLang's routers: its address is not known; give it with the engine (address=URL)"
            );
        }
    }
}

metric_group! {
    /// Connections of SGLang's routers.
    GrpcConnectionMetrics::new() {
        /// Connections to the listener for SGLang's routers that are open.
        open: Gauge = "kvatlas_grpc_connections", Count;
        /// Connections to the listener for SGLang's routers that were closed because too many were open: new ones, or the oldest that waited.
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
    use super::super::recorder::tests::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            let metrics = GrpcMetrics::new();
            let method = GrpcMethod::of_path("/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix");
            metrics.answered(method, GrpcOutcome::of_code(0));
            metrics.answered(GrpcMethod::of_path("/x/y"), GrpcOutcome::of_code(12));
            metrics.without_address(&"gpu-0");
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
            "kvatlas_grpc_connections 1",
            "kvatlas_grpc_connections_refused_total 1",
        ] {
            assert!(text.lines().any(|found| found == line), "missing: {line}\n{text}");
        }
    }
}
