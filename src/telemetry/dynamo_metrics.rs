//! Counts about Dynamo's routers.

use std::fmt::Display;

use metrics::{Counter, Gauge};

use super::connection_counts::count_connections;
use super::declare::metric_group;
use super::labels::{DynamoOutcome, PerLabel};
use super::log_gated;

metric_group! {
    /// Metrics about requests of Dynamo's routers.
    DynamoMetrics::new() {
        /// Requests of Dynamo's routers, by outcome.
        pub requests: PerLabel<DynamoOutcome, Counter> = "kvatlas_dynamo_requests_total", Count;
    }
}

metric_group! {
    /// Metrics about answers to Dynamo's routers.
    DynamoAnswerMetrics::new() {
        /// Workers that were left out of answers to Dynamo's routers because their names are not numbers.
        without_number: Counter = "kvatlas_dynamo_without_number_total", Count;
    }
}

impl DynamoAnswerMetrics {
    /// Counts and logs a worker that is left out of an answer because Dynamo's routers know workers by numbers.
    pub fn without_number(&self, worker: &dyn Display) {
        self.without_number.increment(1);
        log_gated!(
            warn "a worker is left out of answers to Dynamo's routers: its name is not a number; name the engine by Dynamo's worker id";
            %worker
        );
    }
}

metric_group! {
    /// Metrics about connections of Dynamo's routers.
    DynamoConnectionMetrics::new() {
        /// Connections to the listener for Dynamo's routers that are open.
        open: Gauge = "kvatlas_dynamo_connections", Count;
        /// Connections to the listener for Dynamo's routers that were closed because too many were open: the new connection, or
        /// the oldest one that waited for its client.
        refused: Counter = "kvatlas_dynamo_connections_refused_total", Count;
    }
}

count_connections!(
    DynamoConnectionMetrics,
    "connection of a router of Dynamo refused: too many are open"
);

#[cfg(test)]
mod tests {
    use super::super::ConnectionCounts;
    use super::super::recorder::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            DynamoMetrics::new()
                .requests
                .get(DynamoOutcome::NotTaken)
                .increment(1);
            DynamoAnswerMetrics::new().without_number(&"gpu-0");
            let connections = DynamoConnectionMetrics::new();
            connections.opened();
            connections.refused(7);
        });
        for line in [
            "kvatlas_dynamo_requests_total{outcome=\"not_taken\"} 1",
            "kvatlas_dynamo_requests_total{outcome=\"answered\"} 0",
            "kvatlas_dynamo_without_number_total 1",
            "kvatlas_dynamo_connections 1",
            "kvatlas_dynamo_connections_refused_total 1",
        ] {
            assert!(text.lines().any(|found| found == line), "missing: {line}\n{text}");
        }
    }
}
