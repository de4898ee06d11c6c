//! What is counted, and logged, about snapshots.

use std::fmt::Display;
use std::time::{Duration, SystemTime};

use metrics::{Counter, Gauge, Histogram};

use super::names;
use super::process_metrics::unix_seconds;

/// The handles for snapshots. Snapshots are minutes apart, so each is logged.
pub struct SnapshotMetrics {
    written: Counter,
    failed: Counter,
    rejected: Counter,
    last_timestamp: Gauge,
    last_bytes: Gauge,
    write_duration: Histogram,
}

impl SnapshotMetrics {
    /// Looks the handles up.
    #[expect(
        clippy::new_without_default,
        reason = "it registers series with the recorder, which a default should not"
    )]
    pub fn new() -> Self {
        Self {
            written: names::SNAPSHOTS_WRITTEN.with([]),
            failed: names::SNAPSHOTS_FAILED.with([]),
            rejected: names::SNAPSHOTS_REJECTED.with([]),
            last_timestamp: names::LAST_SNAPSHOT_TIMESTAMP.with([]),
            last_bytes: names::LAST_SNAPSHOT_BYTES.with([]),
            write_duration: names::SNAPSHOT_WRITE_DURATION.with([]),
        }
    }

    /// Counts a snapshot that is complete and durable since `written_at`, and logs it.
    pub fn written(&self, bytes: u64, elapsed: Duration, written_at: SystemTime) {
        self.written.increment(1);
        self.last_bytes.set(bytes as f64);
        self.last_timestamp.set(unix_seconds(written_at));
        self.write_duration.record(elapsed);
        tracing::info!(bytes, elapsed_seconds = elapsed.as_secs_f64(), "snapshot written");
    }

    /// Counts a snapshot that could not be written, and logs why. The one before it is still there.
    pub fn failed(&self, error: &dyn Display) {
        self.failed.increment(1);
        tracing::error!(%error, "snapshot not written; the previous one is kept");
    }

    /// Counts a snapshot that was found but not loaded, and logs why.
    pub fn rejected(&self, location: &dyn Display, error: &dyn Display) {
        self.rejected.increment(1);
        tracing::error!(%location, %error, "snapshot not loaded");
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::super::metrics::tests::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            let metrics = SnapshotMetrics::new();
            metrics.written(
                77,
                Duration::from_millis(200),
                UNIX_EPOCH + Duration::from_millis(2500),
            );
            metrics.failed(&"disk full");
            metrics.failed(&"disk full");
            metrics.rejected(&"a.snapshot", &"checksum");
        });
        for line in [
            "kvatlas_snapshots_written_total 1",
            "kvatlas_snapshots_failed_total 2",
            "kvatlas_snapshots_rejected_total 1",
            "kvatlas_last_snapshot_bytes 77",
            "kvatlas_last_snapshot_timestamp_seconds 2.5",
            "kvatlas_snapshot_write_duration_seconds_bucket{le=\"0.1\"} 0",
            "kvatlas_snapshot_write_duration_seconds_bucket{le=\"0.25\"} 1",
        ] {
            assert!(
                text.lines().any(|candidate| candidate == line),
                "missing: {line}\n{text}"
            );
        }
    }
}
