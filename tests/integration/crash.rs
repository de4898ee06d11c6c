//! The real process is killed with SIGKILL. Afterwards, the newest snapshot can be loaded. A holder is not exact if
//! batches may have come after the snapshot.

use std::path::Path;

use crate::support::process::Process;
use crate::support::{
    Client, broker, eventually, hashes, matches, reasons, snapshots_in, stored, stored_after,
};
use kvatlas_client::ClientError;
use kvatlas_core::wire::{Tier, WireLimits};
use kvatlas_process::broker::embedded::EmbeddedBroker;

/// Starts a daemon that writes a snapshot every second.
fn start(broker: &EmbeddedBroker, snapshots: &Path) -> Process {
    let (_, folder) = snapshots_in(snapshots);
    let settings = [
        ("snapshots.interval_seconds", "1"),
        ("snapshots.directory", folder.as_str()),
    ];
    Process::start(broker.url(), &settings)
}

/// Returns the number of blocks in the newest snapshot; `None` if there is no snapshot. Every file with a snapshot's
/// name must be complete.
fn snapshot_blocks(folder: &Path) -> Option<u64> {
    let entries = std::fs::read_dir(folder)
        .ok()?
        .filter_map(Result::ok)
        .map(|entry| entry.path());
    let mut files: Vec<_> = entries
        .filter(|path| path.extension().is_some_and(|suffix| suffix == "kvs"))
        .collect();
    files.sort();
    let limits = WireLimits {
        message_bytes_max: 64 << 20,
        ..WireLimits::default()
    };
    let mut newest = None;
    for file in files {
        // A file may be removed after it was listed, but it is never incomplete.
        let Ok(bytes) = std::fs::read(&file) else { continue };
        let summary = kvatlas_core::snapshot::summarise(bytes.as_slice(), &limits);
        newest = Some(
            summary
                .unwrap_or_else(|error| panic!("{}: {error}", file.display()))
                .content
                .totals
                .blocks,
        );
    }
    newest
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_daemon_comes_back_with_its_snapshot() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let client = Client::connect(broker.url()).await;
    let (mut steady, mut busy) = (client.publisher("steady", 0), client.publisher("busy", 0));

    let daemon = start(&broker, folder.path());
    eventually("the daemon answers", async || {
        steady.publish(Tier::DEVICE, Vec::new()).await.unwrap();
        client.holder("steady", 0).await
    })
    .await;
    // Batches from before the daemon listened are missing, so a new epoch begins.
    let mut steady = steady.resuming(kvatlas_core::wire::BatchCursor { epoch: 2, seq: 0 });
    client
        .tell(
            &mut steady,
            "steady",
            0,
            vec![stored(hashes(10, 5)), stored_after(11, hashes(40, 3))],
        )
        .await;
    client
        .tell(&mut busy, "busy", 0, vec![stored(hashes(10, 4))])
        .await;
    eventually("a snapshot has all blocks", async || {
        (snapshot_blocks(folder.path())? == 12).then_some(())
    })
    .await;
    daemon.kill();

    // While the daemon is dead, one holder publishes a batch, which is lost.
    busy.publish(Tier::DEVICE, vec![stored_after(13, hashes(14, 1))])
        .await
        .unwrap();
    busy.flush().await.unwrap();

    let daemon = start(&broker, folder.path());
    let status = eventually("the daemon answers again", async || {
        client.holder("steady", 0).await
    })
    .await;
    assert_eq!((status.blocks, reasons(&status)), (8, vec!["unverified"]));
    let expected = [
        ("steady".to_owned(), 0, 5, false),
        ("busy".to_owned(), 0, 4, false),
    ];
    assert_eq!(matches(&client.ask(hashes(10, 6)).await), expected);
    assert!(
        client.tell(&mut steady, "steady", 0, Vec::new()).await.exact,
        "nothing of it was lost"
    );
    let status = client.tell(&mut busy, "busy", 0, Vec::new()).await;
    assert_eq!(reasons(&status), ["gap"], "its lost batch is not forgotten");
    daemon.kill();
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_moment_it_leaves_only_whole_snapshots() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let client = Client::connect(broker.url()).await;
    let mut blocks = 0;
    for round in 1..=4_u64 {
        let daemon = start(&broker, folder.path());
        eventually("the daemon answers", async || match client.status().await {
            Ok(_) | Err(ClientError::Refused(_)) => Some(()),
            Err(_) => None,
        })
        .await;
        let mut publisher = client
            .publisher("gpu-0", 0)
            .resuming(kvatlas_core::wire::BatchCursor { epoch: round, seq: 0 });
        // The load is so heavy that snapshots are being written at the time of the kill, which differs in each round.
        for batch in 0..40 * round {
            let first = batch << 32;
            publisher
                .publish(Tier::DEVICE, vec![stored(hashes(first + 1, 500))])
                .await
                .unwrap();
        }
        eventually("a snapshot was written", async || {
            let found = snapshot_blocks(folder.path())?;
            let is_new = found > 0 && found != blocks;
            blocks = found;
            is_new.then_some(())
        })
        .await;
        daemon.kill();
        assert!(snapshot_blocks(folder.path()).is_some());
    }
}
