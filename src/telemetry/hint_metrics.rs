//! Metrics and log lines about hints: messages in which routers say where they have sent requests.

use std::fmt::Display;

use metrics::{Counter, Gauge};

use super::declare::metric_group;
use super::labels::{HintDrop, PerLabel};
use super::log_gated;

metric_group! {
    /// Metrics about hints of routers.
    HintMetrics::new() {
        /// Hints of routers that were kept.
        pub taken: Counter = "kvatlas_hints_total", Count;
        /// Hints of routers that have come true: all blocks of the hint were known before the hint's time ended.
        pub fulfilled: Counter = "kvatlas_hints_fulfilled_total", Count;
        /// Hints of routers that have not come true: the hint's time ended before all of its blocks were known.
        pub expired: Counter = "kvatlas_hints_expired_total", Count;
        /// Hints of routers that were not kept, or were dropped before their time ended, by reason.
        dropped: PerLabel<HintDrop, Counter> = "kvatlas_hints_dropped_total", Count;
        /// Approximate memory that the hints of routers take.
        pub bytes: Gauge = "kvatlas_hints_bytes", Bytes;
    }
}

impl HintMetrics {
    /// Counts `times` hints (reports of where routers sent requests) that were not kept, or were dropped before their
    /// time ended. Also writes a log line at level debug.
    pub fn dropped(&self, reason: HintDrop, times: u64, detail: &dyn Display) {
        self.dropped.get(reason).increment(times);
        log_gated!(debug "a hint of a router was not kept" per HintDrop(reason); %reason, %detail);
    }
}
