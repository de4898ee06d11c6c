//! The broker is killed and comes back, with its store or without.

use super::{SHORT_PATIENCE, pause};
use crate::support::daemon;
use crate::support::fleet::{Fleet, OneDaemon};
use crate::support::jetstream::{Restartable, servers};
use crate::support::way::Way;

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
