//! Metrics and log lines about snapshots. Snapshots are minutes apart, so each one is logged.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use kvatlas_client::unix_us_of;
use metrics::{Counter, Gauge, Histogram};

use super::declare::{LONG_TIMES, metric_group};
use super::labels::{PerLabel, SnapshotFailure, SnapshotRejection};
use super::log_gated;
use super::process_metrics::unix_seconds;

metric_group! {
    /// Metrics about snapshots.
    SnapshotMetrics::new() keeping {
        /// Time at which the newest snapshot was begun, in microseconds since the Unix epoch; 0 while there is none.
        newest_us: AtomicU64 = AtomicU64::new(0)
    } {
        /// Snapshots written completely.
        written: Counter = "kvatlas_snapshots_written_total", Count;
        /// Snapshots that could not be written, by reason.
        failed: PerLabel<SnapshotFailure, Counter> = "kvatlas_snapshots_failed_total", Count;
        /// Snapshots that were found at start but not loaded, by reason.
        rejected: PerLabel<SnapshotRejection, Counter> = "kvatlas_snapshots_rejected_total", Count;
        /// Times that outdated snapshots could not be removed.
        prunes_failed: Counter = "kvatlas_snapshot_prunes_failed_total", Count;
        /// Snapshots sent to the Object Store completely.
        uploaded: Counter = "kvatlas_snapshots_uploaded_total", Count;
        /// Snapshots that could not be sent to the Object Store.
        uploads_failed: Counter = "kvatlas_snapshot_uploads_failed_total", Count;
        /// Snapshots fetched from the Object Store at start.
        fetched: Counter = "kvatlas_snapshots_fetched_total", Count;
        /// Snapshots that could not be fetched from the Object Store at start.
        fetches_failed: Counter = "kvatlas_snapshot_fetches_failed_total", Count;
        /// Times that an object of the Object Store was passed over, because its metadata cannot be read or it is a link.
        objects_passed_over: Counter = "kvatlas_snapshot_objects_passed_over_total", Count;
        /// Time of the last snapshot that was written completely, in seconds since the Unix epoch.
        last_timestamp: Gauge = "kvatlas_last_snapshot_timestamp_seconds", Seconds;
        /// Size of the last snapshot that was written completely.
        last_bytes: Gauge = "kvatlas_last_snapshot_bytes", Bytes;
        /// Time since the newest snapshot was begun; 0 while there is none.
        age: Gauge = "kvatlas_snapshot_age_seconds", Seconds;
        /// Holders in the snapshot that the process started from.
        restored_holders: Gauge = "kvatlas_restored_holders", Count;
        /// Blocks in the snapshot that the process started from, summed over its holders.
        restored_blocks: Gauge = "kvatlas_restored_blocks", Count;
        /// Time in which the process loaded the snapshot that it started from.
        restore_duration: Gauge = "kvatlas_restore_duration_seconds", Seconds;
        /// Time in which a snapshot was written, from the first byte to the durable file.
        write_duration: Histogram = "kvatlas_snapshot_write_duration_seconds", Seconds, LONG_TIMES;
    }
}

/// Figures about the snapshot that the process started from.
#[derive(Debug, Clone, Copy)]
pub struct RestoredSnapshot {
    /// Holders in the snapshot.
    pub holders: u64,
    /// Blocks in the snapshot, summed over its holders.
    pub blocks: u64,
    /// Time at which the snapshot was begun, in microseconds since the Unix epoch.
    pub created_us: u64,
    /// Time that loading the snapshot took.
    pub elapsed: Duration,
}

impl SnapshotMetrics {
    /// Counts and logs a snapshot that has been complete and durable since `written_at`. Writing it took the time `elapsed`.
    pub fn written(&self, bytes: u64, elapsed: Duration, written_at: SystemTime) {
        self.written.increment(1);
        self.last_bytes.set(bytes as f64);
        self.last_timestamp.set(unix_seconds(written_at));
        self.write_duration.record(elapsed);
        let begun = written_at.checked_sub(elapsed).unwrap_or(written_at);
        self.note_newest(unix_us_of(begun));
        tracing::info!(bytes, elapsed_seconds = elapsed.as_secs_f64(), "snapshot written");
    }

    /// Counts a snapshot that could not be written, and logs the error. The previous snapshot is still there.
    pub fn failed(&self, reason: SnapshotFailure, error: &dyn Display) {
        self.failed.get(reason).increment(1);
        tracing::error!(%reason, %error, "snapshot not written; the previous one is kept");
    }

    /// Counts a failed removal of outdated snapshots, and logs the error. The new snapshot has been written.
    pub fn prune_failed(&self, error: &dyn Display) {
        self.prunes_failed.increment(1);
        tracing::warn!(%error, "outdated snapshots are still there");
    }

    /// Counts a snapshot that was found but not loaded, and logs the error.
    pub fn rejected(&self, reason: SnapshotRejection, location: &dyn Display, error: &dyn Display) {
        self.rejected.get(reason).increment(1);
        tracing::error!(%reason, %location, %error, "snapshot not loaded; an older one is tried");
    }

    /// Sets the metrics about the snapshot that the process started from.
    pub fn restored(&self, restored: &RestoredSnapshot) {
        self.restored_holders.set(restored.holders as f64);
        self.restored_blocks.set(restored.blocks as f64);
        self.restore_duration.set(restored.elapsed.as_secs_f64());
        self.note_newest(restored.created_us);
    }

    /// Counts and logs a snapshot that was sent to the Object Store completely.
    pub fn uploaded(&self, name: &str, bytes: u64, elapsed: Duration) {
        self.uploaded.increment(1);
        tracing::info!(
            name,
            bytes,
            elapsed_seconds = elapsed.as_secs_f64(),
            "snapshot sent to the Object Store"
        );
    }

    /// Counts a snapshot that could not be sent to the Object Store, and logs the error. The snapshot is still in the directory.
    pub fn upload_failed(&self, error: &dyn Display) {
        self.uploads_failed.increment(1);
        tracing::warn!(%error, "snapshot not sent to the Object Store");
    }

    /// Counts and logs a snapshot fetched from the Object Store.
    pub fn fetched(&self, name: &str, bytes: u64, elapsed: Duration) {
        self.fetched.increment(1);
        tracing::info!(
            name,
            bytes,
            elapsed_seconds = elapsed.as_secs_f64(),
            "snapshot fetched from the Object Store"
        );
    }

    /// Counts a snapshot that could not be fetched from the Object Store, and logs the error.
    pub fn fetch_failed(&self, error: &dyn Display) {
        self.fetches_failed.increment(1);
        tracing::warn!(%error, "no snapshot fetched from the Object Store");
    }

    /// Counts an object of the Object Store that is passed over, and logs the reason. The other objects are still looked at.
    pub fn object_passed_over(&self, reason: &dyn Display) {
        self.objects_passed_over.increment(1);
        log_gated!(warn "an object of the Object Store is passed over"; %reason);
    }

    /// Sets the metric of the newest snapshot's age, as of `now`.
    pub fn publish_age(&self, now: SystemTime) {
        let newest_us = self.newest_us.load(Ordering::Relaxed);
        if newest_us > 0 {
            let age_us = unix_us_of(now).saturating_sub(newest_us);
            self.age.set(Duration::from_micros(age_us).as_secs_f64());
        }
    }

    fn note_newest(&self, created_us: u64) {
        self.newest_us.store(created_us, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::super::recorder::rendered;
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
            metrics.failed(SnapshotFailure::DiskFull, &"no room");
            metrics.failed(SnapshotFailure::DiskFull, &"no room");
            metrics.rejected(SnapshotRejection::Damaged, &"a.snapshot", &"checksum");
            metrics.prune_failed(&"read-only");
            metrics.publish_age(UNIX_EPOCH + Duration::from_millis(12_300));
            metrics.restored(&RestoredSnapshot {
                holders: 3,
                blocks: 70,
                created_us: 1,
                elapsed: Duration::from_millis(1500),
            });
            metrics.uploaded("a", 1, Duration::ZERO);
            metrics.upload_failed(&"no bucket");
            metrics.fetched("a", 1, Duration::ZERO);
            metrics.fetch_failed(&"no bucket");
        });
        for line in [
            "kvatlas_snapshots_written_total 1",
            "kvatlas_snapshots_failed_total{reason=\"disk_full\"} 2",
            "kvatlas_snapshots_failed_total{reason=\"sync\"} 0",
            "kvatlas_snapshots_rejected_total{reason=\"damaged\"} 1",
            "kvatlas_snapshot_prunes_failed_total 1",
            "kvatlas_snapshot_age_seconds 10",
            "kvatlas_restored_holders 3",
            "kvatlas_restored_blocks 70",
            "kvatlas_restore_duration_seconds 1.5",
            "kvatlas_snapshots_uploaded_total 1",
            "kvatlas_snapshot_uploads_failed_total 1",
            "kvatlas_snapshots_fetched_total 1",
            "kvatlas_snapshot_fetches_failed_total 1",
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
