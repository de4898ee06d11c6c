//! Metrics of every transition that an operator wants to see: gaps, resyncs, silent and removed holders, evicted
//! blocks, the age of the newest snapshot, and the lag of the events.
//!
//! The test is alone in its binary, because the metrics belong to the process.

use std::time::Duration;

use crate::support::fleet::QUICK_RESYNCS;
use crate::support::metrics::{counted, page, require_declared};
use crate::support::process::Process;
use crate::support::{Client, broker, engine, hashes, snapshots_in, stored, stored_after, subjects};
use kvatlas_client::publish::{HolderPublisher, PublisherOptions};
use kvatlas_core::wire::{BatchCursor, Tier};

async fn engine_at(url: &str, name: &str) -> HolderPublisher {
    let options = PublisherOptions {
        heartbeat_interval: Duration::from_millis(50),
        ..PublisherOptions::default()
    };
    let nats = async_nats::connect(url).await.unwrap();
    engine(nats, &subjects(), name, options).await
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
    // The engine has published a batch before the daemon started.
    let early = engine_at(broker.url(), "early").await;
    early
        .publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
        .await
        .unwrap();
    early.flush().await.unwrap();
    let daemon = Process::serve(broker.url(), &settings);
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

    // The worker loses a batch, its publisher answers no question, and then it is silent.
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

    // These blocks exceed the room of the index.
    let late = engine_at(broker.url(), "late").await;
    for chain in 1..=12 {
        let first = chain * 10_000;
        let events = vec![
            stored(hashes(first, 50)),
            stored_after(first + 49, hashes(first + 50, 50)),
        ];
        late.publish(Tier::DEVICE, events).await.unwrap();
    }
    counted(&daemon, "kvatlas_blocks_evicted_total", "").await;
    counted(&daemon, "kvatlas_holders_degraded_total", "reason=\"capacity\"").await;

    counted(&daemon, "kvatlas_snapshots_written_total", "").await;
    counted(&daemon, "kvatlas_snapshot_age_seconds", "").await;
    counted(&daemon, "kvatlas_last_snapshot_bytes", "").await;
    require_declared(&page(&daemon));
    drop((early, late));
    daemon.stop();
}
