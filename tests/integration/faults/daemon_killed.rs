//! Kill -9 of the daemon, at random moments under load.

use super::{SHORT_PATIENCE, answers, pause, runs};
use crate::support::fleet::{Fleet, OneDaemon};
use crate::support::jetstream::Restartable;
use crate::support::process::Process;
use crate::support::truth::Tally;
use crate::support::way::Way;
use crate::support::{Client, server, snapshots_in};

async fn killed_once(way: Way, seed: u64) -> Tally {
    let broker = Restartable::start(&server()).await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let settings = way.settings(&[(key, &directory), ("snapshots.interval_seconds", "1")]);
    let mut process = Some(Process::start(broker.url(), &settings));
    answers(&Client::connect(broker.url()).await).await;
    let mut fleet = Fleet::through(broker.url(), way.publishers(), 4, seed)
        .await
        .with_patience(SHORT_PATIENCE);
    let moments: Vec<(u64, u64)> = (0..2)
        .map(|_| (100 + fleet.below(1500), fleet.below(200)))
        .collect();
    let kills = async {
        for (alive_ms, dead_ms) in &moments {
            pause(*alive_ms).await;
            process.take().unwrap().kill();
            pause(*dead_ms).await;
            process = Some(Process::start(broker.url(), &settings));
            pause(300).await;
        }
    };
    let mut tally = fleet.under_load(&OneDaemon, kills).await;
    fleet.settle(&mut tally).await;
    tally.report(&format!(
        "kill -9 of the daemon ({way}), seed {seed}, at {moments:?} ms"
    ));
    tally
}

async fn killed(way: Way) {
    let mut all = Tally::default();
    for seed in 1..=runs() {
        all.add(Box::pin(killed_once(way, seed)).await);
    }
    all.report(&format!("kill -9 of the daemon ({way}), {} runs", runs()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_killed_at_any_moment() {
    killed(Way::Core).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_reads_a_stream_killed_at_any_moment() {
    killed(Way::Stream).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_whose_publishers_wait_for_the_stream_killed_at_any_moment() {
    killed(Way::Acknowledged).await;
}
