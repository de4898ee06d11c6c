//! Metrics and log lines about the history of holders' states.

use std::fmt::Display;

use metrics::Counter;

use super::declare::metric_group;
use super::log_gated;

metric_group! {
    /// Metrics about the history of holders' states.
    HistoryMetrics::new() {
        /// States of holders that the history had no room for.
        dropped: Counter = "kvatlas_history_dropped_total", Count;
        /// Times that the history could not be written to the snapshot directory, or read from it.
        files_failed: Counter = "kvatlas_history_files_failed_total", Count;
    }
}

impl HistoryMetrics {
    /// Counts and logs `states` states of holders that the history could not keep, because it had reached its maximum
    /// size. Does nothing if `states` is 0.
    pub fn dropped(&self, states: u64) {
        if states == 0 {
            return;
        }
        self.dropped.increment(states);
        log_gated!(warn "the history of states has no room for more holders"; states);
    }

    /// Counts and logs a failure to write or read a file of the history.
    pub fn file_failed(&self, error: &dyn Display) {
        self.files_failed.increment(1);
        log_gated!(warn "the history of states was not written to its file, or not read from it"; %error);
    }
}

#[cfg(test)]
mod tests {
    use super::super::recorder::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            let metrics = HistoryMetrics::new();
            metrics.dropped(0);
            metrics.dropped(3);
            metrics.file_failed(&"the disk is full");
        });
        for line in [
            "kvatlas_history_dropped_total 3",
            "kvatlas_history_files_failed_total 1",
        ] {
            assert!(text.lines().any(|found| found == line), "missing: {line}\n{text}");
        }
    }
}
