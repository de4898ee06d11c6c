//! Clocks that jump: the clocks of publishers, and the clock of the daemon.

use std::path::{Path, PathBuf};

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::{BatchCursor, Event, EventBatch, Tier};

use crate::support::truth::{Tally, Truth, ask_all, settle};
use crate::support::{
    Client, broker, daemon, hashes, namespace, snapshots_in, stored, stored_after, subjects, worker,
};

/// A worker whose batches carry any time that the test chooses, and a client that queries.
struct Scene {
    client: Client,
    truth: Truth,
    prompts: Vec<Vec<SequenceHash>>,
    tally: Tally,
    seq: u64,
}

impl Scene {
    /// Publishes the worker's next batch, which adds a block to the chain.
    async fn publish(&mut self, time_us: Option<u64>) {
        self.seq += 1;
        let seq = self.seq;
        let events: Vec<Event> = match seq {
            1 => vec![stored(hashes(1, 1))],
            seq => vec![stored_after(seq - 1, hashes(seq, 1))],
        };
        let cursor = BatchCursor { epoch: 1, seq };
        self.truth.apply("gpu-0", 0, cursor, &events);
        let batch = EventBatch {
            epoch: 1,
            seq,
            rank: 0,
            time_us,
            tier: Tier::DEVICE,
            block_size: None,
            profile: None,
            events,
        };
        let subject = subjects().events(&namespace(), &worker("gpu-0"));
        self.client
            .nats
            .publish(subject, batch.encode().into())
            .await
            .unwrap();
        assert!(self.client.applied("gpu-0", 0, cursor).await.exact);
        self.truth.raise_floor("gpu-0", 0, cursor);
        ask_all(&self.client, &self.truth, &self.prompts, &mut self.tally).await;
    }

    /// Waits until every reply equals the truth.
    async fn settle(&mut self) {
        let mut settled = Tally::default();
        settle(&self.client, &self.truth, &self.prompts, &mut settled).await;
        self.tally.time_to_exactness = settled.time_to_exactness;
        self.tally.add(settled);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clocks_that_jump() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let settings = [(key, directory.as_str())];
    let mut scene = Scene {
        client: Client::connect(broker.url()).await,
        truth: Truth::default(),
        prompts: vec![hashes(1, 9), hashes(1, 5), hashes(1, 3)],
        tally: Tally::default(),
        seq: 0,
    };

    // The publisher's clock jumps. No batch is dropped or doubted because of its time.
    let first = daemon(broker.url(), &settings).await;
    for time_us in [0, u64::MAX, 1, u64::MAX - 1, 1_700_000_000_000_000] {
        scene.publish(Some(time_us)).await;
    }
    scene.settle().await;
    first.stop().await;

    // The daemon's clock was a century ahead when this snapshot was written, and is right now.
    let snapshot = newest_snapshot(folder.path());
    let ahead = folder
        .path()
        .join(format!("snapshot-{:020}.kvs", 5_000_000_000_000_000_u64));
    std::fs::rename(snapshot, &ahead).unwrap();
    let second = daemon(broker.url(), &settings).await;
    ask_all(&scene.client, &scene.truth, &scene.prompts, &mut scene.tally).await;
    scene.publish(None).await;
    scene.settle().await;
    second.stop().await;
    assert!(
        newest_snapshot(folder.path()) > ahead,
        "the newest snapshot is the one to start from"
    );
    let third = daemon(broker.url(), &settings).await;
    scene.publish(Some(1)).await;
    scene.settle().await;
    third.stop().await;
    scene.tally.report("clocks that jump");
    scene.tally.require_sight();
}

fn newest_snapshot(folder: &Path) -> PathBuf {
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let snapshots = files.filter(|path| path.extension().is_some_and(|suffix| suffix == "kvs"));
    snapshots.max().unwrap()
}
