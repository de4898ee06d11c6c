//! Answers whose truth is uncertain must not be called exact. Uncertainty comes from lost, repeated, damaged and
//! misplaced batches, from broken connections, and from restarts.

use crate::support::{
    Client, broker, broker_on, daemon, eventually, hashes, lasting_port, matches, namespace, reasons,
    removed, snapshots_in, stored, stored_after, subjects, worker,
};
use kvatlas_core::wire::{BatchCursor, Event, EventBatch, Tier};

const GPU: &str = "gpu-0";

fn at(epoch: u64, seq: u64) -> BatchCursor {
    BatchCursor { epoch, seq }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gap_degrades_until_the_state_is_replaced() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    client.listed().await;
    let mut publisher = client.publisher(GPU, 0);
    let status = client
        .tell(&mut publisher, GPU, 0, vec![stored(hashes(10, 4))])
        .await;
    assert!(status.exact);

    let mut publisher = publisher.resuming(at(1, 2));
    let status = client
        .tell(&mut publisher, GPU, 0, vec![stored_after(13, hashes(14, 2))])
        .await;
    assert_eq!(reasons(&status), ["gap"], "batch 2 never came");
    assert_eq!(
        matches(&client.ask(hashes(10, 6)).await),
        [(GPU.to_owned(), 0, 6, false)]
    );
    let status = client.tell(&mut publisher, GPU, 0, Vec::new()).await;
    assert_eq!(
        reasons(&status),
        ["gap"],
        "a batch in order does not bring back the lost one"
    );
    // The lost batch may be about any blocks, also those of another prompt.
    let other = client.ask(hashes(900, 2)).await;
    assert_eq!((matches(&other), other.doubtful_holders), (Vec::new(), 1));

    // A new epoch replaces everything.
    let mut publisher = publisher.resuming(at(2, 0));
    let status = client
        .tell(&mut publisher, GPU, 0, vec![stored(hashes(10, 1))])
        .await;
    assert!(status.exact);
    assert_eq!(client.ask(hashes(900, 2)).await.doubtful_holders, 0);
    assert_eq!(
        matches(&client.ask(hashes(10, 6)).await),
        [(GPU.to_owned(), 0, 1, true)]
    );

    // A clear within an epoch replaces everything, too.
    let mut publisher = publisher.resuming(at(2, 7));
    let status = client.tell(&mut publisher, GPU, 0, Vec::new()).await;
    assert_eq!(reasons(&status), ["gap"]);
    let status = client
        .tell(
            &mut publisher,
            GPU,
            0,
            vec![Event::Cleared, stored(hashes(10, 3))],
        )
        .await;
    assert!(status.exact);
    assert_eq!(
        matches(&client.ask(hashes(10, 6)).await),
        [(GPU.to_owned(), 0, 3, true)]
    );
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_first_batch_that_is_not_the_first_is_a_gap() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher(GPU, 0).resuming(at(1, 56));
    let status = client
        .tell(&mut publisher, GPU, 0, vec![stored(hashes(10, 4))])
        .await;
    assert_eq!(reasons(&status), ["gap"]);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicates_and_old_epochs_change_nothing() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher(GPU, 0).resuming(at(5, 0));
    client
        .tell(&mut publisher, GPU, 0, vec![stored(hashes(10, 4))])
        .await;
    client
        .tell(&mut publisher, GPU, 0, vec![removed(hashes(13, 1))])
        .await;
    // A repeated batch and a batch of an earlier epoch are sent.
    for (epoch, seq) in [(5, 1), (4, 9)] {
        let again = EventBatch {
            epoch,
            seq,
            rank: 0,
            time_us: Some(1),
            tier: Tier::DEVICE,
            block_size: None,
            profile: None,
            events: vec![stored(hashes(10, 4))],
        };
        let subject = subjects().events(&namespace(), &worker(GPU));
        client.nats.publish(subject, again.encode().into()).await.unwrap();
    }
    // This batch goes over the same connection, so it arrives after the two batches above.
    let status = client.tell(&mut publisher, GPU, 0, Vec::new()).await;
    assert!(status.exact);
    assert_eq!((status.epoch, status.seq), (5, 3));
    assert_eq!(
        matches(&client.ask(hashes(10, 4)).await),
        [(GPU.to_owned(), 0, 3, true)]
    );
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undecodable_batch_degrades_every_rank_of_the_worker_it_came_for() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let (mut first, mut second, mut other) = (
        client.publisher(GPU, 0),
        client.publisher(GPU, 1),
        client.publisher("gpu-1", 0),
    );
    client.tell(&mut first, GPU, 0, vec![stored(hashes(10, 4))]).await;
    client
        .tell(&mut second, GPU, 1, vec![stored(hashes(10, 4))])
        .await;
    client
        .tell(&mut other, "gpu-1", 0, vec![stored(hashes(10, 4))])
        .await;
    let subject = subjects().events(&namespace(), &worker(GPU));
    client.nats.publish(subject, "garbage".into()).await.unwrap();
    // This batch follows the garbage, so the daemon has seen the garbage when the batch is applied.
    let status = client.tell(&mut first, GPU, 0, Vec::new()).await;
    assert_eq!(reasons(&status), ["undecodable"]);
    let expected = [("gpu-0", 0, false), ("gpu-0", 1, false), ("gpu-1", 0, true)];
    let reply = client.ask(hashes(10, 4)).await;
    for (found, (name, rank, exact)) in matches(&reply).iter().zip(expected) {
        assert_eq!(found, &(name.to_owned(), rank, 4, exact));
    }
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stored_blocks_wait_for_their_parent_within_bounds() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("events.parked_events_max", "2")]).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher(GPU, 0);
    let status = client
        .tell(&mut publisher, GPU, 0, vec![stored_after(13, hashes(14, 2))])
        .await;
    assert_eq!((status.parked_events, status.blocks), (1, 0));
    let status = client
        .tell(&mut publisher, GPU, 0, vec![stored(hashes(10, 4))])
        .await;
    assert_eq!((status.parked_events, status.blocks), (0, 6));
    assert!(status.exact);
    let waiting = (0..3)
        .map(|number| stored_after(1000 + number, hashes(2000 + number, 1)))
        .collect();
    let status = client.tell(&mut publisher, GPU, 0, waiting).await;
    assert_eq!(
        (status.parked_events, reasons(&status)),
        (2, vec!["unknown_parent"])
    );
    assert_eq!(
        matches(&client.ask(hashes(10, 6)).await),
        [(GPU.to_owned(), 0, 6, false)]
    );
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_parent_that_never_comes_is_given_up_on() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("events.parked_ttl_ms", "1")]).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher(GPU, 0);
    client
        .tell(&mut publisher, GPU, 0, vec![stored_after(13, hashes(14, 2))])
        .await;
    let status = eventually("the parked event is dropped", async || {
        client
            .holder(GPU, 0)
            .await
            .filter(|holder| holder.parked_events == 0 && !holder.exact)
    })
    .await;
    assert_eq!(reasons(&status), ["unknown_parent"]);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_broker_restart_a_holder_is_unverified_until_its_next_batch() {
    let port = lasting_port();
    let first = broker_on(port).await;
    let url = first.url().to_owned();
    let daemon = daemon(&url, &[]).await;
    let client = Client::connect(&url).await;
    let (mut quiet, mut lossy) = (client.publisher(GPU, 0), client.publisher("gpu-1", 0));
    client.tell(&mut quiet, GPU, 0, vec![stored(hashes(10, 4))]).await;
    client
        .tell(&mut lossy, "gpu-1", 0, vec![stored(hashes(10, 4))])
        .await;
    first.stop().await.unwrap();
    let second = broker_on(port).await;
    let status = eventually("the daemon answers again, in doubt", async || {
        client.holder(GPU, 0).await.filter(|holder| !holder.exact)
    })
    .await;
    assert_eq!(reasons(&status), ["unverified"]);
    assert_eq!(status.blocks, 4, "nothing is forgotten");

    // Until the daemon has subscribed again, batches are lost for good. A probe that begins a new epoch at each attempt
    // shows when the daemon receives batches.
    let mut epoch = 0;
    eventually("the daemon follows events again", async || {
        epoch += 1;
        let mut probe = client.publisher("probe", 0).resuming(at(epoch, 0));
        probe.publish(Tier::DEVICE, Vec::new()).await.unwrap();
        client.holder("probe", 0).await.filter(|holder| holder.exact)
    })
    .await;
    // A batch whose number continues proves that nothing was lost. A batch after a gap proves the opposite.
    assert_eq!(reasons(&client.holder(GPU, 0).await.unwrap()), ["unverified"]);
    assert!(client.tell(&mut quiet, GPU, 0, Vec::new()).await.exact);
    let mut lossy = lossy.resuming(at(1, 2));
    let status = client.tell(&mut lossy, "gpu-1", 0, Vec::new()).await;
    assert_eq!(reasons(&status), ["gap"]);
    daemon.stop().await;
    second.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_from_a_snapshot_is_warm_and_says_what_it_cannot_know() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let settings = [(key, directory.as_str())];
    let first = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let (mut steady, mut lossy) = (client.publisher(GPU, 0), client.publisher("gpu-1", 3));
    client
        .tell(
            &mut steady,
            GPU,
            0,
            vec![stored(hashes(10, 4)), stored_after(11, hashes(30, 2))],
        )
        .await;
    client
        .tell(
            &mut lossy,
            "gpu-1",
            3,
            vec![stored(hashes(10, 4)), removed(hashes(11, 1))],
        )
        .await;
    assert!(first.stop().await.overran.is_empty());

    // A batch is lost while no daemon runs.
    lossy
        .publish(Tier::DEVICE, vec![removed(hashes(10, 1))])
        .await
        .unwrap();
    lossy.flush().await.unwrap();

    let second = daemon(broker.url(), &settings).await;
    let reply = client.ask(hashes(10, 4)).await;
    assert_eq!(
        matches(&reply),
        [(GPU.to_owned(), 0, 4, false), ("gpu-1".to_owned(), 3, 1, false)]
    );
    assert_eq!(reasons(&client.holder(GPU, 0).await.unwrap()), ["unverified"]);
    let status = client
        .tell(&mut steady, GPU, 0, vec![stored_after(31, hashes(32, 1))])
        .await;
    assert!(status.exact, "the count goes on where the snapshot ended");
    assert_eq!(status.blocks, 7);
    let status = client
        .tell(&mut lossy, "gpu-1", 3, vec![stored_after(10, hashes(11, 1))])
        .await;
    assert_eq!(reasons(&status), ["gap"]);
    // The blocks after the hole are the same as before the restart.
    assert_eq!(
        matches(&client.ask(hashes(10, 4)).await)[1],
        ("gpu-1".to_owned(), 3, 4, false)
    );
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_snapshot_falls_back_to_the_one_before() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let settings = [(key, directory.as_str())];
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher(GPU, 0);
    for count in [2, 3] {
        let daemon = daemon(broker.url(), &settings).await;
        let mut fresh = publisher.resuming(at(count, 0));
        client
            .tell(&mut fresh, GPU, 0, vec![stored(hashes(10, count))])
            .await;
        publisher = fresh;
        daemon.stop().await;
    }
    let mut files: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|suffix| suffix == "kvs"))
        .collect();
    files.sort();
    let newest = files.pop().unwrap();
    let mut bytes = std::fs::read(&newest).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&newest, &bytes).unwrap();
    let daemon = daemon(broker.url(), &settings).await;
    assert_eq!(
        matches(&client.ask(hashes(10, 3)).await),
        [(GPU.to_owned(), 0, 2, false)]
    );
    assert!(newest.exists(), "the damaged file is left for people to look at");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_goodbye_removes_the_holder_and_frees_its_lane() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let (mut leaving, mut staying) = (client.publisher(GPU, 0), client.publisher("gpu-1", 0));
    client
        .tell(&mut staying, "gpu-1", 0, vec![stored(hashes(10, 4))])
        .await;
    client
        .tell(&mut leaving, GPU, 0, vec![stored(hashes(10, 4))])
        .await;
    let assigned = || {
        let (_, body) = crate::support::http_get(daemon.admin_address().unwrap(), "/index");
        serde_json::from_str::<serde_json::Value>(&body).unwrap()["assigned_workers"]
            .as_u64()
            .unwrap()
    };
    assert_eq!(assigned(), 2);
    leaving.publish(Tier::DEVICE, vec![Event::Goodbye]).await.unwrap();
    eventually("the holder is gone", async || {
        client.holder(GPU, 0).await.is_none().then_some(())
    })
    .await;
    eventually("its lane is free", async || (assigned() == 1).then_some(())).await;
    assert_eq!(
        matches(&client.ask(hashes(10, 4)).await),
        [("gpu-1".to_owned(), 0, 4, true)]
    );
    // The holder may come back after a goodbye.
    let mut back = leaving.resuming(at(2, 0));
    assert!(
        client
            .tell(&mut back, GPU, 0, vec![stored(hashes(10, 2))])
            .await
            .exact
    );
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_full_buffer_swallows_is_never_called_exact() {
    let broker = broker().await;
    let settings = [
        ("events.subscription_capacity", "16"),
        ("events.lane_queue_bytes", "1 MiB"),
        ("events.lanes", "1"),
    ];
    let daemon = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher(GPU, 0);
    // The flood exceeds the tiny buffer. Batch `n` stores block `n` of a chain.
    const BATCHES: u64 = 20_000;
    for number in 0..BATCHES {
        let event = if number == 0 {
            stored(hashes(1, 1))
        } else {
            stored_after(number, hashes(number + 1, 1))
        };
        publisher.publish(Tier::DEVICE, vec![event]).await.unwrap();
    }
    publisher.flush().await.unwrap();
    // Heartbeats are sent until the daemon has caught up. Then either all batches have come, or the holder has a gap.
    let status = eventually("the daemon is at the end of the count", async || {
        let cursor = publisher.publish(Tier::DEVICE, Vec::new()).await.unwrap();
        client
            .holder(GPU, 0)
            .await
            .filter(|holder| holder.seq + 50 > cursor.seq && holder.seq > BATCHES)
    })
    .await;
    let reply = client.ask(hashes(1, BATCHES)).await;
    let (_, _, matched, exact) = matches(&reply)[0].clone();
    assert!(
        !exact || u64::from(matched) == BATCHES,
        "{matched} of {BATCHES} blocks called exact"
    );
    if u64::from(matched) < BATCHES {
        assert!(reasons(&status).contains(&"gap"), "{status:?}");
    }
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publisher_can_change_only_the_worker_its_subject_names() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let mut honest = client.publisher(GPU, 0);
    client
        .tell(&mut honest, GPU, 0, vec![stored(hashes(10, 4))])
        .await;
    // A batch counts for the worker in its subject, even if its payload names another worker.
    let events = vec![Event::Cleared];
    let mut payload = EventBatch {
        epoch: 9,
        seq: 1,
        rank: 0,
        time_us: None,
        tier: Tier::DEVICE,
        block_size: None,
        profile: None,
        events,
    }
    .encode();
    payload[0] += 1; // One more entry in the map:
    payload.extend_from_slice(b"\xa6worker\xa5gpu-0");
    let subject = subjects().events(&namespace(), &worker("liar"));
    client.nats.publish(subject, payload.into()).await.unwrap();
    client.applied("liar", 0, at(9, 1)).await;
    assert_eq!(
        matches(&client.ask(hashes(10, 4)).await),
        [(GPU.to_owned(), 0, 4, true)]
    );
    daemon.stop().await;
}
