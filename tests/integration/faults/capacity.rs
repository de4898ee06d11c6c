//! An index that is too small for the workers' blocks, while other faults happen. Forgotten blocks make the depths in
//! answers smaller, never larger.

use super::{SHORT_PATIENCE, answers, pause, runs};
use crate::support::fleet::{Fleet, OneDaemon};
use crate::support::jetstream::Restartable;
use crate::support::process::Process;
use crate::support::truth::Tally;
use crate::support::way::Way;
use crate::support::{Client, daemon, server, snapshots_in};

/// Limit of 150 blocks in the namespace. All workers together have about 290 different blocks.
const ROOM: (&str, &str) = ("limits.max_blocks_per_namespace", "150");

#[tokio::test(flavor = "multi_thread")]
async fn too_little_room_and_a_broker_that_is_killed() {
    for way in [Way::Core, Way::Stream] {
        let mut broker = Restartable::start(&server()).await;
        let url = broker.url().to_owned();
        let daemon = daemon(&url, &way.settings(&[ROOM])).await;
        let mut fleet = Fleet::through(&url, way.publishers(), 4, 1)
            .await
            .with_patience(SHORT_PATIENCE);
        let kills = async {
            for dead_ms in [50, 300] {
                pause(400).await;
                broker.kill();
                pause(dead_ms).await;
                broker.restart().await;
                pause(400).await;
            }
        };
        let mut tally = Box::pin(fleet.under_load(&OneDaemon, kills)).await;
        fleet.settle_below(&mut tally).await;
        tally.report(&format!(
            "too little room, and a broker killed and restarted ({way})"
        ));
        daemon.stop().await;
    }
}

async fn killed_once(way: Way, seed: u64) -> Tally {
    let broker = Restartable::start(&server()).await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let settings = way.settings(&[ROOM, (key, &directory), ("snapshots.interval_seconds", "1")]);
    let mut process = Some(Process::start(broker.url(), &settings));
    answers(&Client::connect(broker.url()).await).await;
    let mut fleet = Fleet::through(broker.url(), way.publishers(), 4, seed)
        .await
        .with_patience(SHORT_PATIENCE);
    let kills = async {
        pause(1200).await;
        process.take().unwrap().kill();
        process = Some(Process::start(broker.url(), &settings));
        pause(600).await;
    };
    let mut tally = Box::pin(fleet.under_load(&OneDaemon, kills)).await;
    fleet.settle_below(&mut tally).await;
    tally
}

#[tokio::test(flavor = "multi_thread")]
async fn too_little_room_and_a_daemon_that_is_killed() {
    for way in [Way::Core, Way::Stream] {
        let mut all = Tally::default();
        for seed in 1..=runs() {
            all.add(Box::pin(killed_once(way, seed)).await);
        }
        all.report(&format!(
            "too little room, and kill -9 of the daemon ({way}), {} runs",
            runs()
        ));
    }
}
