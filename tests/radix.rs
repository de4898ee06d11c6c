//! A namespace that is kept as a radix tree, over a real broker: the same answers, and what it refuses.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::relay::{Faults, Relay, origin};
use common::truth::{Tally, Truth, Workload, ask_all, settle};
use common::{
    Client, broker, by_sequence, daemon, hashes, http_get, matches, namespace, removed, snapshots_in, stored,
    stored_after, worker,
};
use kvatlas::client::ClientError;
use kvatlas::daemon::Daemon;
use kvatlas::hash::{Position, SequenceHash};
use kvatlas::publisher::{HolderPublisher, PublishedHolder, PublisherOptions};
use kvatlas::wire::{ErrorCode, QueryOptions, SingleQuery, Tier};

const RADIX: (&str, &str) = ("namespace_defaults.index", "radix");

/// What `/index` says of the test's namespace.
fn index_json(daemon: &Daemon) -> serde_json::Value {
    let (code, body) = http_get(daemon.admin_address().unwrap(), "/index");
    assert_eq!(code, 200);
    let json: serde_json::Value = serde_json::from_str(&body).unwrap();
    json["namespaces"][0].clone()
}

/// Three holders: a whole prompt, one with a hole, and one that has branched off.
async fn tell(client: &Client) {
    let mut whole = client.publisher("whole", 0);
    client
        .tell(&mut whole, "whole", 0, vec![stored(hashes(10, 8))])
        .await;
    let mut holed = client.publisher("holed", 0);
    let events = vec![stored(hashes(10, 8)), removed(hashes(14, 1))];
    client.tell(&mut holed, "holed", 0, events).await;
    let mut branched = client.publisher("branched", 1);
    let events = vec![stored(hashes(10, 4)), stored_after(13, hashes(90, 2))];
    client.tell(&mut branched, "branched", 1, events).await;
}

async fn check_answers(client: &Client, is_exact: bool) {
    let expect = |holders: [(&str, u32, u32); 3]| -> Vec<_> {
        holders
            .map(|(name, rank, blocks)| (name.to_owned(), rank, blocks, is_exact))
            .into()
    };
    let trunk = client.ask(hashes(10, 10)).await;
    let expected = expect([("whole", 0, 8), ("branched", 1, 4), ("holed", 0, 4)]);
    assert_eq!(matches(&trunk), expected);
    let branch: Vec<SequenceHash> = [hashes(10, 4), hashes(90, 2)].concat();
    let branch = client.ask(branch).await;
    let expected = expect([("branched", 1, 6), ("holed", 0, 4), ("whole", 0, 4)]);
    assert_eq!(matches(&branch), expected);
    assert!(client.ask(hashes(500, 3)).await.holders.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn it_gives_the_same_answers_and_explains_them() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[RADIX]).await;
    let client = Client::connect(broker.url()).await;
    tell(&client).await;
    check_answers(&client, true).await;

    let mut query = by_sequence(&hashes(10, 10));
    query.options = QueryOptions {
        explain: true,
        ..QueryOptions::default()
    };
    let reply = client.ask_with(query).await.unwrap();
    let dropped_out = reply.holders.iter().map(|holder| {
        let dropped_out = holder.dropped_out.as_ref().unwrap();
        (dropped_out.position, dropped_out.other_holders)
    });
    assert_eq!(dropped_out.collect::<Vec<_>>(), [(8, 0), (4, 1), (4, 1)]);

    let index = index_json(&daemon);
    assert_eq!(
        (index["index"].as_str(), index["hashing"].as_str()),
        (Some("radix"), Some("engine"))
    );
    assert_eq!(
        (index["distinct_blocks"].as_u64(), index["held_blocks"].as_u64()),
        (Some(10), Some(21))
    );
    assert!(index["bytes"].as_u64().unwrap() > 0);
    let status = client.status().await.unwrap();
    assert_eq!((status.distinct_blocks, status.holders.len()), (10, 3));
    let report = daemon.stop().await;
    assert!(report.overran.is_empty(), "{report}");
}

#[tokio::test(flavor = "multi_thread")]
async fn compressed_chains_are_refused() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[RADIX]).await;
    let client = Client::connect(broker.url()).await;
    tell(&client).await;
    let positions = [0, 7].map(|position| Position::new(position).unwrap());
    let query = SingleQuery {
        positions: Some(positions.to_vec()),
        ..by_sequence(&[SequenceHash(10), SequenceHash(17)])
    };
    let Err(ClientError::Refused(error)) = client.ask_with(query).await else {
        panic!("it must be refused");
    };
    assert_eq!(error.code, ErrorCode::BadRequest);
    assert!(error.text.contains("without positions"), "{}", error.text);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_makes_either_kind_from_either() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let client = Client::connect(broker.url()).await;
    for (round, kind) in ["radix", "radix", "lineage", "radix"].into_iter().enumerate() {
        let settings = [("namespace_defaults.index", kind), (key, directory.as_str())];
        let daemon = daemon(broker.url(), &settings).await;
        if round == 0 {
            tell(&client).await;
        }
        // What a snapshot says may have changed since: until the publisher is heard, it is not exact.
        check_answers(&client, round == 0).await;
        let index = index_json(&daemon);
        assert_eq!(index["index"].as_str(), Some(kind));
        assert_eq!(
            index["held_blocks"].as_u64(),
            Some(21),
            "what is behind the hole, too"
        );
        let report = daemon.stop().await;
        assert!(report.overran.is_empty(), "{report}");
    }
}

/// Two publishers whose batches are lost, repeated, out of order and damaged, and a router that asks between them.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_lost_is_resynced() {
    let broker = broker().await;
    let settings = [
        RADIX,
        ("events.lanes", "1"),
        ("resync.retry_min_ms", "10"),
        ("resync.retry_max_ms", "100"),
        ("resync.timeout_ms", "500"),
    ];
    let daemon = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let truth = Arc::new(Truth::default());
    let relay = Relay::start(broker.url(), Arc::clone(&truth), 7).await;
    let mut workload = Workload::new(7, 8);
    let options = || PublisherOptions {
        batch_delay: Duration::ZERO,
        heartbeat_interval: Duration::from_millis(50),
        ring_batches_max: 16,
        ..PublisherOptions::default()
    };
    let mut publishers = Vec::new();
    for name in ["gpu-0", "gpu-1"] {
        let holder = PublishedHolder {
            namespace: namespace(),
            worker: worker(name),
            rank: 0,
        };
        let subjects = origin();
        let publisher = HolderPublisher::start(relay.publishers(), &subjects, holder, options());
        publishers.push(publisher.await.unwrap());
    }
    relay.set_faults(Faults {
        drop: 60,
        duplicate: 60,
        reorder: 60,
        corrupt: 60,
    });
    let mut tally = Tally::default();
    for number in 0..200 {
        let events = workload.events();
        publishers[number % 2]
            .publish(Tier::DEVICE, events)
            .await
            .unwrap();
        if number % 20 == 0 {
            relay.barrier(&client).await;
            ask_all(&client, &truth, workload.prompts(), &mut tally).await;
        }
    }
    for publisher in &publishers {
        publisher.flush().await.unwrap();
    }
    relay.barrier(&client).await;
    relay.set_faults(Faults::default());
    settle(&client, &truth, workload.prompts(), &mut tally).await;
    // Whose first batches are lost is unknown until it is heard of: replies can be blind, but not wrong.
    tally.report("a radix tree, all faults at once");
    daemon.stop().await;
}
