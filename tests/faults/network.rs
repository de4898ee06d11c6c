//! The network between daemon and broker: cut, delayed, or silent, in each direction.

use std::time::Duration;

use crate::common::fleet::{Fleet, OneDaemon};
use crate::common::jetstream::Restartable;
use crate::common::proxy::{Direction, Network, Proxy};
use crate::common::way::Way;
use crate::common::{daemon, server};
use crate::{SHORT_PATIENCE, pause};

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
            // What silence held back arrives now, unless the line is cut before.
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
