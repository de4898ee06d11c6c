//! Reasons for doubt that a publisher reports about its own blocks. The daemon must keep them over a restart, whether
//! it gets its state from a snapshot or from a stream.

use kvatlas_core::wire::{DegradedReason, DegradedReasons, Event, Tier};

use crate::support::jetstream::{JETSTREAM, Restartable, kept, last_message, servers};
use crate::support::{Client, broker, daemon, eventually, hashes, reasons, snapshots_in, stored};

fn lost() -> Event {
    let reasons = DegradedReasons::of(DegradedReason::UpstreamGap).with(DegradedReason::UpstreamLost);
    Event::Doubted(reasons)
}

/// Waits until the holder has exactly `blocks` blocks and exactly these reasons for doubt.
async fn is_doubted(client: &Client, blocks: u64, doubts: &[&str]) {
    eventually(&format!("{blocks} blocks, doubted for {doubts:?}"), async || {
        let holder = client.holder("gpu-0", 0).await?;
        (holder.blocks == blocks && reasons(&holder) == doubts).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_keeps_the_doubt_and_the_stream_ends_it() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let folder = tempfile::tempdir().unwrap();
        let (key, directory) = snapshots_in(folder.path());
        let settings = [JETSTREAM, (key, directory.as_str())];
        let first = daemon(broker.url(), &settings).await;
        let client = Client::connect(broker.url()).await;
        let mut publisher = client.publisher("gpu-0", 0);
        let events = vec![stored(hashes(1, 4)), lost()];
        client.tell(&mut publisher, "gpu-0", 0, events).await;
        is_doubted(&client, 4, &["unverified", "upstream_gap", "upstream_lost"]).await;
        // Only the last snapshot has this batch.
        assert!(first.stop().await.overran.is_empty());
        let second = daemon(broker.url(), &settings).await;
        is_doubted(&client, 4, &["unverified", "upstream_gap", "upstream_lost"]).await;
        second.stop().await;
        // The doubt ends while no daemon runs. The stream has the batch that ends it.
        let before = last_message(&client.nats).await.unwrap();
        let seen = DegradedReasons::of(DegradedReason::UpstreamGap);
        let events = vec![Event::Doubted(seen)];
        publisher.publish(Tier::DEVICE, events).await.unwrap();
        kept(&client.nats, before, 1).await;
        let third = daemon(broker.url(), &settings).await;
        is_doubted(&client, 4, &["upstream_gap"]).await;
        client
            .tell(
                &mut publisher,
                "gpu-0",
                0,
                vec![Event::Cleared, stored(hashes(1, 2))],
            )
            .await;
        is_doubted(&client, 2, &[]).await;
        third.stop().await;
        let last = daemon(broker.url(), &settings).await;
        is_doubted(&client, 2, &[]).await;
        last.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_alone_brings_the_doubt_back() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let settings = [JETSTREAM];
        let first = daemon(broker.url(), &settings).await;
        let client = Client::connect(broker.url()).await;
        let mut publisher = client.publisher("gpu-0", 0);
        client
            .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 4))])
            .await;
        client.tell(&mut publisher, "gpu-0", 0, vec![lost()]).await;
        first.stop().await;
        let second = daemon(broker.url(), &settings).await;
        is_doubted(&client, 4, &["unverified", "upstream_gap", "upstream_lost"]).await;
        second.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_core_nats_a_restart_does_not_end_the_doubt() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let settings = [(key, directory.as_str())];
    let first = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    let seen = DegradedReasons::of(DegradedReason::UpstreamGap);
    let events = vec![stored(hashes(1, 4)), Event::Doubted(seen)];
    client.tell(&mut publisher, "gpu-0", 0, events).await;
    is_doubted(&client, 4, &["upstream_gap"]).await;
    first.stop().await;
    let second = daemon(broker.url(), &settings).await;
    is_doubted(&client, 4, &["unverified", "upstream_gap"]).await;
    // The next batch shows that no batch of the publisher is missing. The publisher's own doubt stays.
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 4))])
        .await;
    is_doubted(&client, 4, &["upstream_gap"]).await;
    client
        .tell(
            &mut publisher,
            "gpu-0",
            0,
            vec![Event::Doubted(DegradedReasons::default())],
        )
        .await;
    is_doubted(&client, 4, &[]).await;
    second.stop().await;
}
