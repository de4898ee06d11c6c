//! The broker is killed and comes back, with its store or without.

use rustix::process::{Pid, Signal, kill_process};

use super::{SHORT_PATIENCE, pause};
use crate::support::fleet::{Fleet, OneDaemon};
use crate::support::jetstream::{JETSTREAM, Restartable, servers};
use crate::support::way::Way;
use crate::support::{Client, by_sequence, daemon, embedded_daemon, eventually, hashes, matches, stored};

async fn killed_and_restarted(way: Way, keeps_store: bool) {
    for server in servers() {
        let mut broker = Restartable::start(&server).await;
        let url = broker.url().to_owned();
        let daemon = daemon(&url, &way.settings(&[])).await;
        let mut fleet = Fleet::through(&url, way.publishers(), 4, 1)
            .await
            .with_patience(SHORT_PATIENCE);
        let kills = async {
            for dead_ms in [50, 400] {
                pause(300).await;
                broker.kill();
                pause(dead_ms).await;
                if !keeps_store {
                    broker.forget_store();
                }
                broker.restart().await;
                pause(500).await;
            }
        };
        let mut tally = Box::pin(fleet.under_load(&OneDaemon, kills)).await;
        fleet.settle(&mut tally).await;
        let store = if keeps_store {
            "with its store"
        } else {
            "without its store"
        };
        tally.report(&format!("broker killed and restarted {store} ({way})"));
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_killed_and_restarted() {
    killed_and_restarted(Way::Core, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_killed_and_restarted_with_its_store() {
    killed_and_restarted(Way::Stream, true).await;
    killed_and_restarted(Way::Acknowledged, true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_killed_and_restarted_without_its_store() {
    killed_and_restarted(Way::Stream, false).await;
    killed_and_restarted(Way::Acknowledged, false).await;
}

/// Kills the embedded server of a daemon with these settings. The daemon must start the server again, and answer.
async fn outlive_the_embedded_server(settings: &[(&str, &str)]) {
    let daemon = embedded_daemon(settings).await;
    let server = &daemon.nats().urls[0];
    let client = Client::connect(&format!("nats://{}:{}", server.host(), server.port())).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(10, 3))])
        .await;
    let killed = daemon.broker_pid().unwrap();
    let pid = Pid::from_raw(i32::try_from(killed).unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    eventually("another server runs", async || {
        (daemon.broker_pid() != Some(killed)).then_some(())
    })
    .await;
    eventually("the daemon answers over the other server", async || {
        let reply = client.ask_with(by_sequence(&hashes(10, 3))).await.ok()?;
        let [(_, 0, 3, _)] = matches(&reply)[..] else {
            return None;
        };
        Some(())
    })
    .await;
    assert!(daemon.stop().await.overran.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_embedded_server_that_is_killed_is_started_again() {
    outlive_the_embedded_server(&[]).await;
    outlive_the_embedded_server(&[JETSTREAM]).await;
}
