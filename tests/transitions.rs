//! Every transition that an operator wants to see has a metric: gaps, resyncs that start, succeed and fail, holders that fall silent
//! and are removed, blocks that are evicted, the age of the newest snapshot, the lag of the events.
//!
//! Alone in its binary: the metrics are those of the process.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

use std::time::Duration;

use common::fleet::QUICK_RESYNCS;
use common::{
    Client, broker, daemon, eventually, hashes, http_get, namespace, snapshots_in, stored, stored_after,
    subjects, worker,
};
use kvatlas::daemon::Daemon;
use kvatlas::publisher::{HolderPublisher, PublishedHolder, PublisherOptions};
use kvatlas::tracking::BatchCursor;
use kvatlas::wire::Tier;

/// The sum of all series of a metric whose labels contain `label`.
fn value(daemon: &Daemon, metric: &str, label: &str) -> f64 {
    let (_, text) = http_get(daemon.admin_address().unwrap(), "/metrics");
    let is_wanted = |line: &&str| {
        let rest = line.strip_prefix(metric);
        rest.is_some_and(|rest| rest.starts_with(['{', ' ']) && rest.contains(label))
    };
    let values = text
        .lines()
        .filter(is_wanted)
        .map(|line| line.rsplit(' ').next().unwrap());
    values.map(|value| value.parse::<f64>().unwrap()).sum()
}

/// Waits until something has been counted.
async fn counted(daemon: &Daemon, metric: &str, label: &str) {
    eventually(&format!("{metric} {label} is above 0"), async || {
        (value(daemon, metric, label) > 0.0).then_some(())
    })
    .await;
}

async fn engine(url: &str, name: &str) -> HolderPublisher {
    let holder = PublishedHolder {
        namespace: namespace(),
        worker: worker(name),
        rank: 0,
    };
    let options = PublisherOptions {
        heartbeat_interval: Duration::from_millis(50),
        ..PublisherOptions::default()
    };
    let nats = async_nats::connect(url).await.unwrap();
    HolderPublisher::start(nats, &subjects(), holder, options)
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_transition_is_counted() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let mut settings = QUICK_RESYNCS.to_vec();
    settings.extend([
        (key, directory.as_str()),
        ("snapshots.interval_seconds", "1"),
        ("namespace_defaults.stale_after_ms", "500"),
        ("namespace_defaults.remove_after_ms", "1500"),
        ("limits.max_blocks_per_namespace", "1000"),
    ]);
    // It has said something before there was a daemon.
    let early = engine(broker.url(), "early").await;
    early
        .publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
        .await
        .unwrap();
    early.flush().await.unwrap();
    let daemon = daemon(broker.url(), &settings).await;
    for metric in [
        "kvatlas_sequence_gaps_total",
        "kvatlas_resyncs_started_total",
        "kvatlas_resyncs_succeeded_total",
        "kvatlas_resync_duration_seconds_count",
        "kvatlas_event_lag_seconds",
    ] {
        counted(&daemon, metric, "namespace=\"llama\"").await;
    }
    counted(&daemon, "kvatlas_holders_degraded_total", "reason=\"gap\"").await;
    counted(&daemon, "kvatlas_holders", "state=\"exact\"").await;

    // It loses a batch, nobody answers for it, and then it is silent.
    let client = Client::connect(broker.url()).await;
    let plain = client.publisher("plain", 0);
    let mut plain = plain.resuming(BatchCursor { epoch: 1, seq: 3 });
    plain
        .publish(Tier::DEVICE, vec![stored(hashes(1, 2))])
        .await
        .unwrap();
    counted(&daemon, "kvatlas_resyncs_failed_total", "reason=\"no_responder\"").await;
    counted(&daemon, "kvatlas_holders_degraded_total", "reason=\"stale\"").await;
    counted(&daemon, "kvatlas_holders_removed_total", "").await;

    // More than there is room for.
    let late = engine(broker.url(), "late").await;
    for chain in 1..=12 {
        let first = chain * 10_000;
        let events = vec![
            stored(hashes(first, 50)),
            stored_after(first + 49, hashes(first + 50, 50)),
        ];
        late.publish(Tier::DEVICE, events).await.unwrap();
    }
    counted(&daemon, "kvatlas_evicted_blocks", "").await;
    counted(&daemon, "kvatlas_holders_degraded_total", "reason=\"capacity\"").await;

    counted(&daemon, "kvatlas_snapshots_written_total", "").await;
    counted(&daemon, "kvatlas_snapshot_age_seconds", "").await;
    counted(&daemon, "kvatlas_last_snapshot_bytes", "").await;
    drop((early, late));
    daemon.stop().await;
}
