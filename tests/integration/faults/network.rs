//! The network between daemon and broker: cut, delayed, or silent, in each direction.

use std::time::Duration;

use crate::support::fleet::{Fleet, OneDaemon};
use crate::support::jetstream::Restartable;
use crate::support::proxy::{Direction, Network, Proxy};
use crate::support::way::Way;
use kvatlas_client::publish::PublisherOptions;
use kvatlas_core::wire::{Event, Tier};

use super::{SHORT_PATIENCE, pause};
use crate::support::{Client, daemon, engine, eventually, hashes, matches, server, stored, subjects};

/// Holds back all events for the daemon, while queries and replies still pass. Until the daemon notices that the
/// publisher is silent, its replies stay as they were. From then on, they must not be exact; after the fault, they must
/// be right and exact.
async fn only_events_fall_silent(way: Way) {
    let broker = Restartable::start(&server()).await;
    let proxy = Proxy::to(broker.port()).await;
    let limits = [("namespace_defaults.stale_after_ms", "400")];
    let daemon = daemon(&proxy.url(), &way.settings(&limits)).await;
    let client = Client::connect(broker.url()).await;
    let options = PublisherOptions {
        heartbeat_interval: Duration::from_millis(50),
        ..PublisherOptions::default()
    };
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let engine = engine(nats, &subjects(), "gpu-0", options).await;
    let publish = async |event| {
        engine.publish(Tier::DEVICE, vec![event]).await.unwrap();
        engine.flush().await.unwrap();
    };
    let asked = hashes(1, 4);
    let ask = async || matches(&client.ask(asked.clone()).await);
    publish(stored(asked.clone())).await;
    client.exact("gpu-0", 0).await;
    let known = eventually("the blocks are known", async || {
        Some(ask().await).filter(|known| !known.is_empty())
    });
    assert_eq!(known.await, [("gpu-0".to_owned(), 0, 4, true)]);
    proxy.set(Network {
        is_for_events: true,
        to_daemon: Direction {
            delay: Duration::ZERO,
            is_silent: true,
        },
        ..Network::default()
    });
    publish(Event::Cleared).await;
    let missed = [("gpu-0".to_owned(), 0, 4, false)];
    eventually("the publisher is missed", async || {
        (ask().await == missed).then_some(())
    })
    .await;
    for _ in 0..50 {
        assert_eq!(
            ask().await,
            missed,
            "as long as nothing is heard, nothing is certain"
        );
    }
    proxy.heal();
    eventually("what happened is known", async || {
        ask().await.is_empty().then_some(())
    })
    .await;
    client.exact("gpu-0", 0).await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_that_fall_silent_while_queries_get_through() {
    for way in [Way::Core, Way::Stream] {
        only_events_fall_silent(way).await;
    }
}

async fn fails(way: Way) {
    const DELAY: Direction = Direction {
        delay: Duration::from_millis(60),
        is_silent: false,
    };
    const SILENCE: Direction = Direction {
        delay: Duration::ZERO,
        is_silent: true,
    };
    let fine = Network::default();
    let faults = [
        ("cut", Network { is_cut: true, ..fine }),
        (
            "delayed to the daemon",
            Network {
                to_daemon: DELAY,
                ..fine
            },
        ),
        (
            "delayed to the broker",
            Network {
                to_broker: DELAY,
                ..fine
            },
        ),
        (
            "delayed in both directions",
            Network {
                to_broker: DELAY,
                to_daemon: DELAY,
                ..fine
            },
        ),
        (
            "silent to the daemon",
            Network {
                to_daemon: SILENCE,
                ..fine
            },
        ),
        (
            "silent to the broker",
            Network {
                to_broker: SILENCE,
                ..fine
            },
        ),
    ];
    for (name, fault) in faults {
        let broker = Restartable::start(&server()).await;
        let proxy = Proxy::to(broker.port()).await;
        let daemon = daemon(&proxy.url(), &way.settings(&[])).await;
        let mut fleet = Fleet::through(broker.url(), way.publishers(), 4, 1)
            .await
            .with_patience(SHORT_PATIENCE);
        let happens = async {
            pause(200).await;
            proxy.set(fault);
            pause(600).await;
            // Delayed messages arrive now, unless the connection is cut before.
            proxy.heal();
            pause(200).await;
            proxy.set(fault);
            pause(200).await;
            proxy.set(Network {
                is_cut: true,
                ..fault
            });
            pause(100).await;
            proxy.heal();
            pause(300).await;
        };
        let mut tally = Box::pin(fleet.under_load(&OneDaemon, happens)).await;
        fleet.settle(&mut tally).await;
        tally.report(&format!("network {name} ({way})"));
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_fails() {
    fails(Way::Core).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_fails_before_a_stream() {
    fails(Way::Stream).await;
}
