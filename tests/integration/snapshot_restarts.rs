//! Restarts from snapshots, over a real broker.

use std::path::{Path, PathBuf};

use crate::support::jetstream::{JETSTREAM, Restartable, servers};
use crate::support::{
    Client, daemon, eventually, hashes, matches, reasons, removed, snapshots_in, stored, stored_after,
};
use kvatlas_core::snapshot::{Frame, SnapshotReader, verify};
use kvatlas_core::wire::{BatchCursor, Tier, WireLimits};

type Settings<'a> = [(&'a str, &'a str)];

fn newest(folder: &Path) -> PathBuf {
    let entries = std::fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|suffix| suffix == "kvs"))
        .max()
        .unwrap()
}

/// Returns the numbers of holders, batches, and distinct blocks in forests (blocks stored once for many holders) in the
/// newest snapshot.
fn content(folder: &Path) -> (u64, u64, u64) {
    let file = std::fs::File::open(newest(folder)).unwrap();
    let totals = verify(std::io::BufReader::new(file), &WireLimits::default())
        .unwrap()
        .totals;
    (totals.holders, totals.batches, totals.forest_blocks)
}

/// Publishes two holders that share a prefix, and one holder with a hole.
async fn fill(client: &Client) {
    for (name, branch) in [("gpu-0", 20), ("gpu-1", 30)] {
        let mut publisher = client.publisher(name, 0);
        let events = vec![stored(hashes(10, 4)), stored_after(12, hashes(branch, 3))];
        client.tell(&mut publisher, name, 0, events).await;
    }
    let mut holey = client.publisher("gpu-2", 0);
    let events = vec![stored(hashes(10, 4)), removed(hashes(11, 1))];
    client.tell(&mut holey, "gpu-2", 0, events).await;
}

async fn check(client: &Client, is_exact: bool) {
    let of = |name: &str, blocks| (name.to_owned(), 0, blocks, is_exact);
    assert_eq!(
        matches(&client.ask(hashes(10, 6)).await),
        [of("gpu-0", 4), of("gpu-1", 4), of("gpu-2", 1)]
    );
    let branch = [hashes(10, 3), hashes(30, 3)].concat();
    assert_eq!(
        matches(&client.ask(branch).await),
        [of("gpu-1", 6), of("gpu-0", 3), of("gpu-2", 1)]
    );
    for (name, blocks) in [("gpu-0", 7), ("gpu-1", 7), ("gpu-2", 3)] {
        assert_eq!(client.holder(name, 0).await.unwrap().blocks, blocks, "{name}");
    }
}

async fn restart_again_and_again(url: &str, more: &Settings<'_>, is_exact: bool) {
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let settings = [&[(key, directory.as_str())][..], more].concat();
    let first = daemon(url, &settings).await;
    let client = Client::connect(url).await;
    fill(&client).await;
    assert!(first.stop().await.overran.is_empty());
    // The forests have blocks 10 to 13, and two branches. The holder with a hole is written as batches.
    assert_eq!(content(folder.path()), (3, 1, 10));

    // A snapshot of restored holders equals the first snapshot.
    for _ in 0..2 {
        let restarted = daemon(url, &settings).await;
        check(&client, is_exact).await;
        assert!(restarted.stop().await.overran.is_empty());
        let (holders, _, blocks) = content(folder.path());
        // A holder that begins a resync while the snapshot is written appears twice in it.
        assert!(holders >= 3 && blocks == 10, "{holders} holders, {blocks} blocks");
    }

    let last = daemon(url, &settings).await;
    check(&client, is_exact).await;
    last.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_jetstream_a_restart_is_exact() {
    for server in servers() {
        let broker = Restartable::start(&server).await;
        Box::pin(restart_again_and_again(broker.url(), &[JETSTREAM], true)).await;
    }
}

/// A snapshot does not keep two reasons for doubt: two publishers claim one holder, or the daemon has dropped the
/// batches of a publisher. After a restart the daemon must have both doubts again. With a higher limit on workers, it
/// must read the dropped batches from the stream.
#[tokio::test(flavor = "multi_thread")]
async fn doubts_of_the_moment_outlast_a_restart_and_raised_limits_read_the_stream_again() {
    let broker = Restartable::start(&crate::support::server()).await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let limit = "limits.max_workers_per_namespace";
    let settings = |most: &'static str| {
        [
            (key, directory.clone()),
            (JETSTREAM.0, JETSTREAM.1.to_owned()),
            (limit, most.to_owned()),
        ]
    };
    let begin = async |most: &'static str| {
        let owned = settings(most);
        let settings: Vec<_> = owned.iter().map(|(key, value)| (*key, value.as_str())).collect();
        daemon(broker.url(), &settings).await
    };
    let first = begin("1").await;
    let client = Client::connect(broker.url()).await;
    let at = |epoch| BatchCursor { epoch, seq: 0 };
    let mut higher = client.publisher("gpu-0", 0).resuming(at(9));
    client
        .tell(&mut higher, "gpu-0", 0, vec![stored(hashes(10, 4))])
        .await;
    let mut lower = client.publisher("gpu-0", 0).resuming(at(5));
    lower
        .publish(Tier::DEVICE, vec![stored(hashes(10, 1))])
        .await
        .unwrap();
    let mut dropped = client.publisher("gpu-1", 0);
    let events = vec![stored(hashes(20, 3))];
    dropped.publish(Tier::DEVICE, events).await.unwrap();
    eventually("both are doubted", async || {
        let holder = client.holder("gpu-0", 0).await?;
        let doubtful = client.ask(hashes(900, 1)).await.doubtful_holders;
        (reasons(&holder) == ["contested"] && doubtful == 2).then_some(())
    })
    .await;
    first.stop().await;

    let second = begin("1").await;
    let reply = client.ask(hashes(10, 4)).await;
    assert_eq!(matches(&reply), [("gpu-0".to_owned(), 0, 4, false)]);
    assert!(!client.ask(hashes(20, 3)).await.is_exact(), "gpu-1 may have them");
    second.stop().await;

    let third = begin("2").await;
    eventually("what was dropped is read from the stream", async || {
        let reply = client.ask(hashes(20, 3)).await;
        (matches(&reply) == [("gpu-1".to_owned(), 0, 3, false)]).then_some(())
    })
    .await;
    assert!(client.tell(&mut dropped, "gpu-1", 0, Vec::new()).await.exact);
    let known = client.holder("gpu-0", 0).await.unwrap();
    assert_eq!((known.blocks, known.exact), (4, false));
    third.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_stream_a_restart_is_warm() {
    let broker = crate::support::broker().await;
    Box::pin(restart_again_and_again(broker.url(), &[], false)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_from_a_forest_goes_on_where_it_was() {
    let broker = crate::support::broker().await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let settings = [(key, directory.as_str())];
    let first = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 3);
    let events = vec![stored(hashes(10, 4)), stored_after(12, hashes(20, 3))];
    client.tell(&mut publisher, "gpu-0", 3, events).await;
    first.stop().await;
    let file = std::fs::File::open(newest(folder.path())).unwrap();
    let mut reader = SnapshotReader::new(std::io::BufReader::new(file)).unwrap();
    assert!(matches!(reader.next_frame(), Ok(Some(Frame::Holder(holder))) if holder.forest.is_some()));

    let second = daemon(broker.url(), &settings).await;
    let status = client
        .tell(
            &mut publisher,
            "gpu-0",
            3,
            vec![removed(hashes(21, 2)), stored_after(20, hashes(40, 1))],
        )
        .await;
    assert_eq!((status.blocks, reasons(&status)), (6, vec![]));
    let branch = [hashes(10, 3), hashes(20, 1), hashes(40, 2)].concat();
    assert_eq!(
        matches(&client.ask(branch).await),
        [("gpu-0".to_owned(), 3, 5, true)]
    );
    publisher
        .publish(Tier::DEVICE, vec![removed(hashes(40, 1))])
        .await
        .unwrap();
    second.stop().await;
}
