//! What a running daemon does by the clock.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::ingest::LanePool;

use super::admin_source::DaemonView;

/// How often gauges are published and parked events timed out.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Publishes gauges and times out parked events until `stop` is cancelled.
pub(super) async fn keep_up(view: Arc<DaemonView>, pool: Arc<LanePool>, stop: CancellationToken) {
    let mut interval = tokio::time::interval(UPKEEP_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = interval.tick() => {
                pool.tick();
                view.publish();
                view.run_upkeep();
            }
        }
    }
}
