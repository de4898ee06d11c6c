//! What a running daemon does by the clock.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::ingest::LanePool;
use crate::snapshotter::{SnapshotDirectory, save};
use crate::telemetry::SnapshotMetrics;
use crate::tracking::StreamTrust;

use super::admin_source::DaemonView;

/// How often gauges are published, what waits is timed out, and silent holders are looked for.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Publishes gauges, times out what waits and looks for silent holders until `stop` is cancelled.
pub(super) async fn keep_up(
    view: Arc<DaemonView>,
    pool: Arc<LanePool>,
    trust: Arc<StreamTrust>,
    stop: CancellationToken,
) {
    let mut interval = tokio::time::interval(UPKEEP_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = interval.tick() => {
                pool.tick(trust.followed().is_some());
                view.publish();
                view.run_upkeep();
            }
        }
    }
}

/// Writes a snapshot every `period` until `stop` is cancelled. One that is being written then is waited for.
pub(super) async fn save_regularly(
    pool: Arc<LanePool>,
    directory: SnapshotDirectory,
    metrics: Arc<SnapshotMetrics>,
    period: Duration,
    stop: CancellationToken,
) {
    let start = tokio::time::Instant::now() + period;
    let mut interval = tokio::time::interval_at(start, period);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = interval.tick() => save_once(&pool, &directory, &metrics).await,
        }
    }
}

/// Writes one snapshot, and counts how it went.
pub(super) async fn save_once(
    pool: &Arc<LanePool>,
    directory: &SnapshotDirectory,
    metrics: &Arc<SnapshotMetrics>,
) {
    let (pool, directory, metrics) = (Arc::clone(pool), directory.clone(), Arc::clone(metrics));
    let runtime = Handle::current();
    let written = tokio::task::spawn_blocking(move || match save(&pool, &directory, &runtime) {
        Ok(saved) => {
            metrics.written(saved.bytes, saved.elapsed, std::time::SystemTime::now());
            tracing::debug!(
                path = %saved.path.display(), bytes = saved.bytes, holders = saved.totals.holders,
                blocks = saved.totals.blocks, elapsed = ?saved.elapsed, "snapshot written"
            );
        }
        Err(error) => metrics.failed(&error),
    });
    if let Err(error) = written.await {
        tracing::error!(%error, "writing a snapshot was interrupted");
    }
}
