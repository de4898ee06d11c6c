//! What is counted, and logged, about snapshots.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use metrics::{Counter, Gauge, Histogram};

use super::labels::{LabelValue, PerLabel, SnapshotFailure, SnapshotRejection};
use super::names;
use super::process_metrics::unix_seconds;

/// The handles for snapshots. Snapshots are minutes apart, so each is logged.
pub struct SnapshotMetrics {
    written: Counter,
    failed: PerLabel<SnapshotFailure, Counter>,
    rejected: PerLabel<SnapshotRejection, Counter>,
    prunes_failed: Counter,
    uploaded: Counter,
    uploads_failed: Counter,
    fetched: Counter,
    fetches_failed: Counter,
    last_timestamp: Gauge,
    last_bytes: Gauge,
    age: Gauge,
    restored_holders: Gauge,
    restored_blocks: Gauge,
    restore_duration: Gauge,
    write_duration: Histogram,
    /// When the newest snapshot was begun, in microseconds since the Unix epoch; 0 while there is none.
    newest_us: AtomicU64,
}

/// The snapshot that the process started from, for the metrics.
#[derive(Debug, Clone, Copy)]
pub struct RestoredSnapshot {
    /// Holders in it.
    pub holders: u64,
    /// Blocks in it, summed over its holders.
    pub blocks: u64,
    /// When it was begun, in microseconds since the Unix epoch.
    pub created_us: u64,
    /// How long it took to load.
    pub elapsed: Duration,
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
            failed: PerLabel::new(|reason: SnapshotFailure| names::SNAPSHOTS_FAILED.with([reason.as_str()])),
            rejected: PerLabel::new(|reason: SnapshotRejection| {
                names::SNAPSHOTS_REJECTED.with([reason.as_str()])
            }),
            prunes_failed: names::SNAPSHOT_PRUNES_FAILED.with([]),
            uploaded: names::SNAPSHOTS_UPLOADED.with([]),
            uploads_failed: names::SNAPSHOT_UPLOADS_FAILED.with([]),
            fetched: names::SNAPSHOTS_FETCHED.with([]),
            fetches_failed: names::SNAPSHOT_FETCHES_FAILED.with([]),
            last_timestamp: names::LAST_SNAPSHOT_TIMESTAMP.with([]),
            last_bytes: names::LAST_SNAPSHOT_BYTES.with([]),
            age: names::SNAPSHOT_AGE.with([]),
            restored_holders: names::RESTORED_HOLDERS.with([]),
            restored_blocks: names::RESTORED_BLOCKS.with([]),
            restore_duration: names::RESTORE_DURATION.with([]),
            write_duration: names::SNAPSHOT_WRITE_DURATION.with([]),
            newest_us: AtomicU64::new(0),
        }
    }

    /// Counts a snapshot that is complete and durable since `written_at`, and logs it.
    pub fn written(&self, bytes: u64, elapsed: Duration, written_at: SystemTime) {
        self.written.increment(1);
        self.last_bytes.set(bytes as f64);
        self.last_timestamp.set(unix_seconds(written_at));
        self.write_duration.record(elapsed);
        let begun = written_at.checked_sub(elapsed).unwrap_or(written_at);
        self.note_newest(unix_us(begun));
        tracing::info!(bytes, elapsed_seconds = elapsed.as_secs_f64(), "snapshot written");
    }

    /// Counts a snapshot that could not be written, and logs why. The one before it is still there.
    pub fn failed(&self, reason: SnapshotFailure, error: &dyn Display) {
        self.failed.get(reason).increment(1);
        tracing::error!(%reason, %error, "snapshot not written; the previous one is kept");
    }

    /// Counts outdated snapshots that could not be removed, and logs why. The new one is there.
    pub fn prune_failed(&self, error: &dyn Display) {
        self.prunes_failed.increment(1);
        tracing::warn!(%error, "outdated snapshots are still there");
    }

    /// Counts a snapshot that was found but not loaded, and logs why.
    pub fn rejected(&self, reason: SnapshotRejection, location: &dyn Display, error: &dyn Display) {
        self.rejected.get(reason).increment(1);
        tracing::error!(%reason, %location, %error, "snapshot not loaded; an older one is tried");
    }

    /// Publishes what the process started from.
    pub fn restored(&self, restored: &RestoredSnapshot) {
        self.restored_holders.set(restored.holders as f64);
        self.restored_blocks.set(restored.blocks as f64);
        self.restore_duration.set(restored.elapsed.as_secs_f64());
        self.note_newest(restored.created_us);
    }

    /// Counts a snapshot that is in the Object Store, and logs it.
    pub fn uploaded(&self, name: &str, bytes: u64, elapsed: Duration) {
        self.uploaded.increment(1);
        tracing::info!(
            name,
            bytes,
            elapsed_seconds = elapsed.as_secs_f64(),
            "snapshot sent to the Object Store"
        );
    }

    /// Counts a snapshot that could not be sent to the Object Store, and logs why. It is still in the directory.
    pub fn upload_failed(&self, error: &dyn Display) {
        self.uploads_failed.increment(1);
        tracing::warn!(%error, "snapshot not sent to the Object Store");
    }

    /// Counts a snapshot fetched from the Object Store, and logs it.
    pub fn fetched(&self, name: &str, bytes: u64, elapsed: Duration) {
        self.fetched.increment(1);
        tracing::info!(
            name,
            bytes,
            elapsed_seconds = elapsed.as_secs_f64(),
            "snapshot fetched from the Object Store"
        );
    }

    /// Counts a snapshot that could not be fetched from the Object Store, and logs why.
    pub fn fetch_failed(&self, error: &dyn Display) {
        self.fetches_failed.increment(1);
        tracing::warn!(%error, "no snapshot fetched from the Object Store");
    }

    /// Publishes how old the newest snapshot is at `now`.
    pub fn publish_age(&self, now: SystemTime) {
        let newest_us = self.newest_us.load(Ordering::Relaxed);
        if newest_us > 0 {
            let age_us = unix_us(now).saturating_sub(newest_us);
            self.age.set(Duration::from_micros(age_us).as_secs_f64());
        }
    }

    fn note_newest(&self, created_us: u64) {
        self.newest_us.store(created_us, Ordering::Relaxed);
    }
}

/// Microseconds since the Unix epoch, or 0 for a time before it.
fn unix_us(time: SystemTime) -> u64 {
    let since_epoch = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX)
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
