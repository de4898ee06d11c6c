//! Metrics and log lines about hints: messages in which routers say where they have sent requests.

use std::fmt::Display;

use metrics::{Counter, Gauge};

use super::LogGate;
use super::declare::metric_group;
use super::labels::{HintDrop, LabelValue, PerLabel};

static DROP_GATES: [LogGate; HintDrop::COUNT] = [const { LogGate::new() }; HintDrop::COUNT];

metric_group! {
    /// Hints of routers.
    HintMetrics::new() {
        /// Hints of routers that were kept.
        taken: Counter = "kvatlas_hints_total", Count;
        /// Hints of routers that have come true: all their blocks were known before their time ended.
        fulfilled: Counter = "kvatlas_hints_fulfilled_total", Count;
        /// Hints of routers whose time has ended before all their blocks were known.
        expired: Counter = "kvatlas_hints_expired_total", Count;
        /// Hints of routers that were not kept, or went before their time, by reason.
        dropped: PerLabel<HintDrop, Counter> = "kvatlas_hints_dropped_total", Count;
        /// Memory that the hints of routers take, about.
        bytes: Gauge = "kvatlas_hints_bytes", Bytes;
    }
}

impl HintMetrics {
    /// Counts a hint that was kept.
    pub fn taken(&self) {
        self.taken.increment(1);
    }

    /// Counts a hint that has come true.
    pub fn fulfilled(&self) {
        self.fulfilled.increment(1);
    }

    /// Counts hints whose time has ended, and which have not come true.
    pub fn expired(&self, hints: u64) {
        self.expired.increment(hints);
    }

    /// Sets how many bytes of memory all hints take.
    pub fn show_bytes(&self, bytes: usize) {
        self.bytes.set(bytes as f64);
    }

    /// Counts `times` hints that were not kept, or went before their time, and logs it at level debug.
    pub fn dropped(&self, reason: HintDrop, times: u64, detail: &dyn Display) {
        self.dropped.get(reason).increment(times);
        if let Some(suppressed) = DROP_GATES[reason.index()].admit() {
            tracing::debug!(%reason, %detail, suppressed, "a hint of a router was not kept");
        }
    }
}
