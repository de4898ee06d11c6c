//! What is counted, and logged, about resyncs.

use std::fmt::Display;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram};

use super::labels::{LabelValue, PerLabel, ResyncFailure};
use super::{LogGate, names};

/// One gate a reason for the whole process.
static FAILURE_GATES: [LogGate; ResyncFailure::COUNT] = [const { LogGate::new() }; ResyncFailure::COUNT];

/// The handles for the resyncs of one namespace.
pub struct ResyncMetrics {
    namespace: Box<str>,
    started: Counter,
    succeeded: Counter,
    failed: PerLabel<ResyncFailure, Counter>,
    duration: Histogram,
}

impl ResyncMetrics {
    /// The handles of a namespace that was admitted: the caller bounds how many there are.
    pub fn for_namespace(namespace: &str) -> Self {
        Self {
            namespace: namespace.into(),
            started: names::RESYNCS_STARTED.with([namespace]),
            succeeded: names::RESYNCS_SUCCEEDED.with([namespace]),
            failed: PerLabel::new(|reason: ResyncFailure| {
                names::RESYNCS_FAILED.with([namespace, reason.as_str()])
            }),
            duration: names::RESYNC_DURATION.with([namespace]),
        }
    }

    /// Counts a publisher that is asked.
    pub fn started(&self) {
        self.started.increment(1);
    }

    /// Counts a holder that is exact again, and logs it.
    pub fn succeeded(&self, holder: &dyn Display, batches: usize, elapsed: Duration) {
        self.succeeded.increment(1);
        self.duration.record(elapsed);
        let namespace = &*self.namespace;
        tracing::debug!(namespace, %holder, batches, ?elapsed, "holder resynchronised");
    }

    /// Counts a resync that failed, and logs it. A publisher that does not know the protocol is no news: that line is at level
    /// debug.
    pub fn failed(&self, reason: ResyncFailure, holder: &dyn Display) {
        self.failed.get(reason).increment(1);
        let Some(suppressed) = FAILURE_GATES[reason.index()].admit() else {
            return;
        };
        let namespace = &*self.namespace;
        match reason {
            ResyncFailure::NoResponder | ResyncFailure::Superseded => {
                tracing::debug!(namespace, %holder, %reason, suppressed, "resync failed");
            }
            _ => tracing::warn!(namespace, %holder, %reason, suppressed, "resync failed; it is tried again"),
        }
    }
}

/// How many resyncs there are just now.
pub struct ResyncGauges {
    running: Gauge,
    waiting: Gauge,
}

impl ResyncGauges {
    /// Looks the handles up.
    #[expect(
        clippy::new_without_default,
        reason = "it registers series with the recorder, which a default should not"
    )]
    pub fn new() -> Self {
        Self {
            running: names::RESYNCS_RUNNING.with([]),
            waiting: names::RESYNCS_WAITING.with([]),
        }
    }

    /// Sets both.
    pub fn set(&self, running: usize, waiting: usize) {
        self.running.set(running as f64);
        self.waiting.set(waiting as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::super::metrics::tests::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            let metrics = ResyncMetrics::for_namespace("a");
            metrics.started();
            metrics.started();
            metrics.succeeded(&"w/0", 3, Duration::from_millis(20));
            metrics.failed(ResyncFailure::CursorBehind, &"w/0");
            ResyncGauges::new().set(4, 5);
        });
        for line in [
            "kvatlas_resyncs_started_total{namespace=\"a\"} 2",
            "kvatlas_resyncs_succeeded_total{namespace=\"a\"} 1",
            "kvatlas_resyncs_failed_total{namespace=\"a\",reason=\"cursor_behind\"} 1",
            "kvatlas_resyncs_failed_total{namespace=\"a\",reason=\"timed_out\"} 0",
            "kvatlas_resync_duration_seconds_bucket{namespace=\"a\",le=\"0.025\"} 1",
            "kvatlas_resyncs_running 4",
            "kvatlas_resyncs_waiting 5",
        ] {
            assert!(
                text.lines().any(|candidate| candidate == line),
                "missing: {line}\n{text}"
            );
        }
    }
}
