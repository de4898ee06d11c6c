//! What a running daemon does by the clock.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::ingest::LanePool;
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
