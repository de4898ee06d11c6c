//! Number of leading blocks that a request can reuse (`usable`). It must be right whether the daemon learns of the
//! blocks from batches, a stream, a snapshot, or the answer of a publisher.

use std::time::Duration;

use kvatlas_client::publish::PublisherOptions;
use kvatlas_core::wire::{Event, Resumable, ResumableBlocks, StoredBlocks, Tier};

use crate::support::jetstream::{JETSTREAM, Restartable, kept, last_message, servers};
use crate::support::{
    Client, broker, by_sequence, daemon, engine, eventually, hashes, snapshots_in, subjects,
};

const GPU: &str = "gpu-0";

/// Returns an event that stores four blocks. Only the first and the last are resumable: a request can continue after
/// them.
fn partly() -> Event {
    Event::Stored(StoredBlocks {
        resumable: Resumable::from_flags([true, false, false, true]),
        ..StoredBlocks::by_sequence(None, None, hashes(1, 4))
    })
}

/// Returns an event that makes block number `place` resumable or not resumable. After a resumable block, a request can
/// continue.
fn turned(place: u64, is_resumable: bool) -> Event {
    Event::Resumable(ResumableBlocks::by_sequence(hashes(1 + place, 1), is_resumable))
}

/// Waits until a certain answer has a holder with all four blocks, of which a request can reuse the first `usable`.
async fn is_usable(client: &Client, usable: u32) {
    eventually(&format!("{usable} of 4 blocks are usable"), async || {
        let query = by_sequence(&hashes(1, 4));
        // A daemon that has just started refuses, because it does not know all publishers yet.
        let reply = client.ask_with(query).await.ok()?;
        let holder = reply.holders.first()?;
        let depth = (holder.matched_blocks, holder.usable());
        (reply.is_exact() && depth == (4, usable)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn snapshots_and_streams_keep_it() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        let folder = tempfile::tempdir().unwrap();
        let (key, directory) = snapshots_in(folder.path());
        let settings = [JETSTREAM, (key, directory.as_str())];
        let first = daemon(broker.url(), &settings).await;
        let client = Client::connect(broker.url()).await;
        let mut publisher = client.publisher(GPU, 0);
        client.tell(&mut publisher, GPU, 0, vec![partly()]).await;
        is_usable(&client, 4).await;
        client.tell(&mut publisher, GPU, 0, vec![turned(3, false)]).await;
        is_usable(&client, 1).await;
        assert!(first.stop().await.overran.is_empty());
        let second = daemon(broker.url(), &settings).await;
        publisher.publish(Tier::DEVICE, Vec::new()).await.unwrap();
        is_usable(&client, 1).await;
        second.stop().await;
        // No daemon runs when this batch is published. The stream keeps it.
        let before = last_message(&client.nats).await.unwrap();
        publisher
            .publish(Tier::DEVICE, vec![turned(2, true)])
            .await
            .unwrap();
        kept(&client.nats, before, 1).await;
        let third = daemon(broker.url(), &settings).await;
        is_usable(&client, 3).await;
        third.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_that_is_asked_gives_it() {
    let broker = broker().await;
    let client = Client::connect(broker.url()).await;
    let options = PublisherOptions {
        heartbeat_interval: Duration::from_millis(50),
        ..PublisherOptions::default()
    };
    let publisher = engine(client.nats.clone(), &subjects(), GPU, options).await;
    publisher
        .publish(Tier::DEVICE, vec![partly(), turned(3, false)])
        .await
        .unwrap();
    publisher.flush().await.unwrap();
    let late = daemon(broker.url(), &[]).await;
    is_usable(&client, 1).await;
    late.stop().await;
}
