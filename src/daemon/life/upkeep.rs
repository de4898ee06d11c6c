//! Work that a running daemon does at regular intervals.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use crate::lanes::{LanePool, TICK_INTERVAL};
use kvatlas_client::unix_time_us;
use kvatlas_config::Live;
use kvatlas_core::index::give_back_memory;
use kvatlas_core::stream::StreamTrust;
use kvatlas_process::admin::Latch;

use super::memory::give_to_system;
use super::view::DaemonView;
use super::watch::HolderWatch;

/// Interval between two rounds of the work, for example of the update of gauges.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Does the regular work until `stop` is cancelled:
///
/// - updates gauges
/// - notes whether a NATS server keeps the events of followed engines from daemons
/// - has the lanes give up events that have waited too long, and look for silent holders
/// - logs the holders that stay degraded
/// - forgets empty namespaces, and outcomes of removed holders
/// - gives memory back to the operating system
pub(super) async fn keep_up(
    view: Arc<DaemonView>,
    pool: Arc<LanePool>,
    trust: Arc<StreamTrust>,
    empty_namespace: Live<Duration>,
    stop: CancellationToken,
) {
    let started = Instant::now();
    let microseconds = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    let mut watch = HolderWatch::new(Instant::now());
    let mut interval = tokio::time::interval(UPKEEP_INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut ticks = tokio::time::interval(TICK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {
                trust.set_unheard(view.engines.as_ref().is_some_and(|engines| engines.is_unheard()));
                pool.tick(trust.followed().is_some());
            }
            _ = interval.tick() => {
                let mut look = watch.look();
                // Until the snapshot is loaded, holders are missing from the index, and would wrongly count as removed.
                let report = view.readiness.report();
                let is_loaded = report.is_set(Latch::SnapshotLoaded);
                let mut noted = is_loaded.then(|| view.history.look(unix_time_us() / 1_000_000));
                view.publish(|namespace, holder, reasons| {
                    look.saw(namespace, &holder.id, reasons);
                    if let Some(noted) = &mut noted {
                        noted.saw(namespace, holder, reasons);
                    }
                });
                if let Some(noted) = noted {
                    noted.end();
                }
                look.end(Instant::now());
                view.note_costs(Instant::now());
                view.page.remember(Instant::now());
                let empty_namespace = **empty_namespace.now();
                if !empty_namespace.is_zero() {
                    view.forget_empty_namespaces(
                        microseconds(started.elapsed()),
                        microseconds(empty_namespace),
                    );
                }
                view.forget_gone_outcomes();
                give_back_memory();
                if view.shrinks.lock().is_due() {
                    tokio::task::spawn_blocking(give_to_system);
                }
            }
        }
    }
}
