//! A daemon whose index is too small. It forgets blocks, reports that, and never promises more blocks than there are.

use crate::support::metrics::metric;
use crate::support::process::Process;
use crate::support::{
    Client, broker, engine, eventually, hashes, matches, reasons, removed, stored, stored_after, subjects,
};
use kvatlas_client::publish::PublisherOptions;
use kvatlas_core::wire::{Event, Tier};

const LIMIT: &str = "1000";

#[tokio::test(flavor = "multi_thread")]
async fn what_has_no_room_is_left_out_and_the_answers_say_so() {
    let broker = broker().await;
    let daemon = Process::serve(broker.url(), &[("limits.max_blocks_per_namespace", LIMIT)]);
    let client = Client::connect(broker.url()).await;
    let (mut early, mut late) = (client.publisher("early", 0), client.publisher("late", 0));
    client
        .tell(&mut early, "early", 0, vec![stored(hashes(1, 100))])
        .await;
    for chain in 1..=20 {
        let event = stored(hashes(chain * 10_000, 100));
        client.tell(&mut late, "late", 0, vec![event]).await;
    }
    assert_eq!(
        matches(&client.ask(hashes(1, 100)).await),
        [("early".to_owned(), 0, 100, true)],
        "it is the oldest, and takes less than its share"
    );
    assert_eq!(matches(&client.ask(hashes(10_000, 100)).await), []);
    assert_eq!(
        matches(&client.ask(hashes(200_000, 100)).await),
        [("late".to_owned(), 0, 100, false)],
        "the newest is there, but nobody says that this is all"
    );
    assert_eq!(reasons(&client.holder("late", 0).await.unwrap()), ["capacity"]);
    assert!(metric(&daemon, "kvatlas_distinct_blocks{namespace=\"llama\"}") <= 1000);
    assert!(metric(&daemon, "kvatlas_blocks_evicted_total{namespace=\"llama\"}") >= 1100);

    // Blocks after a forgotten block are left out. Removing a forgotten block has no effect.
    let events = vec![
        stored_after(10_099, hashes(10_100, 5)),
        removed(hashes(10_090, 10)),
    ];
    let status = client.tell(&mut late, "late", 0, events).await;
    assert_eq!((reasons(&status), status.parked_events), (vec!["capacity"], 0));
    let rejected = "kvatlas_blocks_rejected_total{namespace=\"llama\",reason=\"capacity\"}";
    assert_eq!(metric(&daemon, rejected), 5);

    // After a clear, the holder is exact again.
    let events = vec![Event::Cleared, stored(hashes(10_000, 10))];
    assert!(client.tell(&mut late, "late", 0, events).await.exact);
    assert_eq!(
        matches(&client.ask(hashes(10_000, 100)).await),
        [("late".to_owned(), 0, 10, true)]
    );
    daemon.stop();
}

/// Two holders together have more blocks than the index has room for, so the daemon forgets blocks of one. When the
/// other holder leaves, the daemon must ask the first one for its blocks, and have all of them in the end.
#[tokio::test(flavor = "multi_thread")]
async fn who_was_short_is_asked_again_when_there_is_room() {
    let broker = broker().await;
    let daemon = Process::serve(broker.url(), &[("limits.max_blocks_per_namespace", LIMIT)]);
    let client = Client::connect(broker.url()).await;
    let early = engine(
        client.nats.clone(),
        &subjects(),
        "early",
        PublisherOptions::default(),
    )
    .await;
    // The holder takes more than half of the room, so that it loses blocks when another holder comes.
    let blocks = vec![stored(hashes(1, 900))];
    early.publish(Tier::DEVICE, blocks).await.unwrap();
    client.exact("early", 0).await;
    let mut late = client.publisher("late", 0);
    for chain in 1..=20 {
        let event = stored(hashes(chain * 10_000, 100));
        client.tell(&mut late, "late", 0, vec![event]).await;
    }
    assert_eq!(reasons(&client.holder("early", 0).await.unwrap()), ["capacity"]);
    assert_eq!(
        early.counters().answers_full,
        0,
        "there is no room for the answer"
    );
    late.publish(Tier::DEVICE, vec![Event::Goodbye]).await.unwrap();
    eventually("it is whole again", async || {
        let reply = client.ask(hashes(1, 900)).await;
        (matches(&reply) == [("early".to_owned(), 0, 900, true)]).then_some(())
    })
    .await;
    assert!(early.counters().answers_full > 0);
    daemon.stop();
}

/// A holder with most blocks of the index clears its cache. Then the resident memory of the daemon must become smaller
/// by most of the memory of these blocks.
#[tokio::test(flavor = "multi_thread")]
async fn memory_goes_back_to_the_system_after_most_blocks_have_gone() {
    const EVENTS: u64 = 48;
    const BLOCKS: u64 = 50_000;
    let broker = broker().await;
    let daemon = Process::serve(broker.url(), &[]);
    let resident = || metric(&daemon, "kvatlas_process_resident_memory_bytes");
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("large", 0);
    for event in 0..EVENTS {
        let event = stored(hashes(1 + event * BLOCKS, BLOCKS));
        client.tell(&mut publisher, "large", 0, vec![event]).await;
    }
    let most = eventually("the blocks are seen in the process's size", async || {
        let bytes = metric(&daemon, "kvatlas_index_bytes{namespace=\"llama\"}");
        (bytes > EVENTS * BLOCKS * 20 && resident() > bytes).then(resident)
    })
    .await;
    client
        .tell(&mut publisher, "large", 0, vec![Event::Cleared])
        .await;
    eventually("the process is smaller by most of that", async || {
        (resident() + EVENTS * BLOCKS * 16 < most).then_some(())
    })
    .await;
    daemon.stop();
}
