//! Metrics and log lines about traces.

use std::fmt::Display;

use metrics::Counter;

use super::declare::metric_group;
use super::labels::{PerLabel, SpanDropReason};
use super::log_gated;

metric_group! {
    /// Metrics about traces.
    TraceMetrics::new() {
        /// Spans that a collector has taken.
        pub exported: Counter = "kvatlas_spans_exported_total", Count;
        /// Spans that did not reach a collector, by reason.
        pub dropped: PerLabel<SpanDropReason, Counter> = "kvatlas_spans_dropped_total", Count;
    }
}

impl TraceMetrics {
    /// Counts and logs spans that a collector has not taken.
    pub fn export_failed(&self, spans: u64, error: &dyn Display) {
        self.dropped.get(SpanDropReason::ExportFailed).increment(spans);
        log_gated!(warn "spans are not exported (traces.endpoint)"; spans, %error);
    }
}
