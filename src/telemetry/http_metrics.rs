//! Metrics and log lines about the query listener.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram};

use super::connection_counts::count_connections;
use super::declare::{LATENCIES, metric_group};
use super::labels::{HttpOutcome, HttpRoute, PerLabel};
use super::log_gated;

metric_group! {
    /// Metrics about requests to a route of the query listener.
    HttpMetrics::of_route(route: HttpRoute) {
        /// Requests to the query listener, by outcome.
        requests: PerLabel<HttpOutcome, Counter> = "kvatlas_http_requests_total", Count;
        /// Time from the head of a request to the query listener until its answer is made.
        duration: Histogram = "kvatlas_http_request_duration_seconds", Seconds, LATENCIES;
    }
}

impl HttpMetrics {
    /// Counts a request that was answered with `status`, and records how long it took.
    pub fn answered(&self, status: u16, elapsed: Duration) {
        self.requests.get(HttpOutcome::of_status(status)).increment(1);
        self.duration.record(elapsed);
    }
}

metric_group! {
    /// Metrics about connections to the query listener.
    HttpConnectionMetrics::new() {
        /// Connections to the query listener that are open.
        open: Gauge = "kvatlas_http_connections", Count;
        /// Connections to the query listener that were closed because too many were open: the new connection, or the oldest one
        /// that waited for its client.
        refused: Counter = "kvatlas_http_connections_refused_total", Count;
    }
}

metric_group! {
    /// Metrics about bodies of requests to the query listener, and questions over gRPC.
    HttpBodyMetrics::new() {
        /// Bodies of requests to the query listener, and questions over gRPC, that were dropped because all bodies and
        /// questions together took too much room.
        refused: Counter = "kvatlas_http_bodies_refused_total", Count;
    }
}

impl HttpBodyMetrics {
    /// Counts and logs a request's body that was given up because all bodies together exceed the limit in `setting`.
    pub fn refused(&self, setting: &'static str) {
        self.refused.increment(1);
        log_gated!(warn "the body of a query was given up: all of them take too much room"; setting);
    }
}

metric_group! {
    /// Metrics about answers of the query listener.
    HttpAnswerMetrics::new() {
        /// Answers of the query listener that were replaced by an error because all answers that clients have not read
        /// took too much room.
        refused: Counter = "kvatlas_http_answers_refused_total", Count;
    }
}

impl HttpAnswerMetrics {
    /// Counts and logs an answer for which there was no room.
    pub fn refused(&self) {
        self.refused.increment(1);
        log_gated!(warn "an answer was refused: clients do not read theirs, which take too much room (http.max_receiving_bytes)");
    }
}

count_connections!(
    HttpConnectionMetrics,
    "connection for queries refused: too many are open"
);

#[cfg(test)]
mod tests {
    use super::super::ConnectionCounts;
    use super::super::recorder::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            HttpMetrics::of_route(HttpRoute::Query).answered(200, Duration::from_millis(2));
            let other = HttpMetrics::of_route(HttpRoute::of_path("/nowhere"));
            other.answered(404, Duration::from_millis(2));
            let connections = HttpConnectionMetrics::new();
            connections.opened();
            connections.opened();
            connections.closed();
            connections.refused(7);
        });
        for line in [
            "kvatlas_http_requests_total{route=\"query\",outcome=\"ok\"} 1",
            "kvatlas_http_requests_total{route=\"query\",outcome=\"too_large\"} 0",
            "kvatlas_http_requests_total{route=\"other\",outcome=\"not_found\"} 1",
            "kvatlas_http_request_duration_seconds_count{route=\"query\"} 1",
            "kvatlas_http_connections 1",
            "kvatlas_http_connections_refused_total 1",
        ] {
            assert!(text.lines().any(|found| found == line), "missing: {line}\n{text}");
        }
    }
}
