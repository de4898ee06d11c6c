//! Metrics and log lines about resyncs. In a resync, the daemon asks a holder's publisher for the batches or blocks that the
//! daemon lacks.

use std::fmt::Display;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram};

use super::declare::{LONG_TIMES, metric_group};
use super::labels::{PerLabel, ResyncFailure};
use super::log_gated;

metric_group! {
    /// Metrics about resyncs of a namespace.
    ResyncMetrics::for_namespace(namespace: &str) keeping {
        /// Name of the namespace, for the log lines.
        namespace: Box<str> = namespace.into()
    } {
        /// Times that the daemon began to ask a publisher for missing batches or blocks.
        pub started: Counter = "kvatlas_resyncs_started_total", Count;
        /// Resyncs that made a holder exact again.
        succeeded: Counter = "kvatlas_resyncs_succeeded_total", Count;
        /// Resyncs that did not make a holder exact, by reason.
        failed: PerLabel<ResyncFailure, Counter> = "kvatlas_resyncs_failed_total", Count;
        /// Time from asking a publisher until its answer was applied.
        duration: Histogram = "kvatlas_resync_duration_seconds", Seconds, LONG_TIMES;
    }
}

impl ResyncMetrics {
    /// Counts a resync after which its holder is exact, and records how long the resync took. Also writes a log line at
    /// level debug.
    pub fn succeeded(&self, holder: &dyn Display, batches: usize, elapsed: Duration) {
        self.succeeded.increment(1);
        self.duration.record(elapsed);
        let namespace = &*self.namespace;
        tracing::debug!(namespace, %holder, batches, ?elapsed, "holder resynchronised");
    }

    /// Logs that no publisher answers the daemon's requests for a holder's batches. The daemon repeats such requests
    /// again and again. So call this once for each period in which the holder is in doubt, not for each request.
    pub fn unanswered(&self, holder: &dyn Display) {
        log_gated!(
            warn "nobody answers for the holder; it is asked for again and again";
            namespace = &*self.namespace, %holder, reason = %ResyncFailure::NoResponder
        );
    }

    /// Counts and logs a resync that failed. The lines for `NoResponder` and `Superseded` are at level debug. For `NoResponder`,
    /// see also [`Self::unanswered`].
    pub fn failed(&self, reason: ResyncFailure, holder: &dyn Display) {
        self.failed.get(reason).increment(1);
        let namespace = &*self.namespace;
        match reason {
            ResyncFailure::NoResponder | ResyncFailure::Superseded => {
                log_gated!(debug "resync failed" per ResyncFailure(reason); namespace, %holder, %reason);
            }
            _ => log_gated!(
                warn "resync failed; it is tried again" per ResyncFailure(reason);
                namespace, %holder, %reason
            ),
        }
    }
}

metric_group! {
    /// Metrics about resyncs of all namespaces.
    ResyncGauges::new() {
        /// Publishers that the daemon is asking for missing batches or blocks.
        pub running: Gauge = "kvatlas_resyncs_running", Count;
        /// Holders that wait until the daemon asks their publisher for missing batches or blocks.
        pub waiting: Gauge = "kvatlas_resyncs_waiting", Count;
    }
}

#[cfg(test)]
mod tests {
    use super::super::LogFormat;
    use super::super::logging::tests::capture;
    use super::super::recorder::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            let metrics = ResyncMetrics::for_namespace("a");
            metrics.started.increment(2);
            metrics.succeeded(&"w/0", 3, Duration::from_millis(20));
            metrics.failed(ResyncFailure::CursorBehind, &"w/0");
        });
        for line in [
            "kvatlas_resyncs_started_total{namespace=\"a\"} 2",
            "kvatlas_resyncs_succeeded_total{namespace=\"a\"} 1",
            "kvatlas_resyncs_failed_total{namespace=\"a\",reason=\"cursor_behind\"} 1",
            "kvatlas_resyncs_failed_total{namespace=\"a\",reason=\"timed_out\"} 0",
            "kvatlas_resync_duration_seconds_bucket{namespace=\"a\",le=\"0.025\"} 1",
        ] {
            assert!(
                text.lines().any(|candidate| candidate == line),
                "missing: {line}\n{text}"
            );
        }
    }

    #[test]
    fn that_nobody_answers_is_a_warning_and_its_repetitions_are_not() {
        let log = capture(LogFormat::Text, "info", false, || {
            let metrics = ResyncMetrics::for_namespace("a");
            metrics.unanswered(&"gpu-0/0");
            for _ in 0..3 {
                metrics.failed(ResyncFailure::NoResponder, &"gpu-0/0");
            }
        });
        // No other unit test passes this gate.
        assert_eq!(log.lines().count(), 1, "{log}");
        let is_sound =
            |line: &str| line.contains("WARN") && line.contains("no_responder") && line.contains("gpu-0/0");
        assert!(log.lines().all(is_sound), "{log}");
    }
}
