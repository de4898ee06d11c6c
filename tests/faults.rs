//! What users of a daemon meet sooner or later: it is killed, its broker is killed, the network fails, clocks jump, replicas are
//! restarted one after the other. While it happens no reply that is marked exact is wrong; afterwards every reply is the truth.
//!
//! Each scenario prints what its replies were worth. `deploy/faults.sh` runs the long form.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::fleet::{Fleet, Floors, OneDaemon};
use common::proxy::{Direction, Network, Proxy};
use common::truth::{Tally, Truth};
use common::{
    Client, PATIENCE, broker, broker_on, config, daemon, eventually, hashes, http_get, matches, port_of,
    snapshots_in, stored, stored_after,
};
use kvatlas::client::ClientError;
use kvatlas::daemon::Daemon;
use kvatlas::tracking::BatchCursor;
use kvatlas::wire::{EventBatch, Tier};

/// How many seeded runs a scenario has; the environment variable raises it.
fn runs() -> u64 {
    let given = std::env::var("KVATLAS_FAULT_RUNS").ok();
    given.map_or(2, |runs| runs.parse().expect("KVATLAS_FAULT_RUNS is a number"))
}

/// How long a router waits where the only daemon may be gone. Longer than the delays of the network.
const SHORT_PATIENCE: Duration = Duration::from_millis(400);

async fn pause(milliseconds: u64) {
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

/// `kvatlas serve` in a process of its own.
struct Process(Child);

impl Process {
    fn start(url: &str, snapshots: &Path) -> Self {
        let mut serve = Command::new(env!("CARGO_BIN_EXE_kvatlas"));
        serve.args([
            "serve",
            "--nats-url",
            url,
            "--admin-listen",
            "off",
            "--logging-level",
            "error",
        ]);
        serve
            .args(["--snapshots-interval-seconds", "1", "--snapshots-directory"])
            .arg(snapshots);
        Self(serve.stdin(Stdio::null()).spawn().unwrap())
    }
}

impl Drop for Process {
    /// SIGKILL: no drain, no last snapshot.
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn answers(client: &Client) {
    eventually("a daemon answers", async || match client.status().await {
        Ok(_) | Err(ClientError::Refused(_)) => Some(()),
        Err(_) => None,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_killed_at_any_moment() {
    let mut all = Tally::default();
    for seed in 1..=runs() {
        let broker = broker().await;
        let folder = tempfile::tempdir().unwrap();
        let mut process = Some(Process::start(broker.url(), folder.path()));
        answers(&Client::connect(broker.url()).await).await;
        let mut fleet = Fleet::new(broker.url(), 4, seed)
            .await
            .with_patience(SHORT_PATIENCE);
        let moments: Vec<(u64, u64)> = (0..2)
            .map(|_| (100 + fleet.below(1500), fleet.below(200)))
            .collect();
        let kills = async {
            for (alive_ms, dead_ms) in &moments {
                pause(*alive_ms).await;
                drop(process.take());
                pause(*dead_ms).await;
                process = Some(Process::start(broker.url(), folder.path()));
                pause(300).await;
            }
        };
        let mut tally = fleet.under_load(&OneDaemon, kills).await;
        fleet.settle(&mut tally).await;
        tally.report(&format!("kill -9 of the daemon, seed {seed}, at {moments:?} ms"));
        all.add(tally);
        drop(process);
    }
    all.report(&format!("kill -9 of the daemon, {} runs", runs()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_killed_and_restarted() {
    let first = broker().await;
    let (url, port) = (first.url().to_owned(), port_of(&first));
    let daemon = daemon(&url, &[]).await;
    let mut fleet = Fleet::new(&url, 4, 1).await.with_patience(SHORT_PATIENCE);
    let mut broker = Some(first);
    let kills = async {
        for dead_ms in [50, 400] {
            pause(300).await;
            // Killed, not stopped.
            drop(broker.take());
            pause(dead_ms).await;
            broker = Some(broker_on(port).await);
            pause(300).await;
        }
    };
    let mut tally = fleet.under_load(&OneDaemon, kills).await;
    fleet.settle(&mut tally).await;
    tally.report("broker killed and restarted (core NATS)");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_fails() {
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
        let broker = broker().await;
        let proxy = Proxy::to(port_of(&broker)).await;
        let daemon = daemon(&proxy.url(), &[]).await;
        let mut fleet = Fleet::new(broker.url(), 4, 1).await.with_patience(SHORT_PATIENCE);
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
        let mut tally = fleet.under_load(&OneDaemon, happens).await;
        fleet.settle(&mut tally).await;
        tally.report(&format!("network {name}"));
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clocks_that_jump() {
    let broker = broker().await;
    let folder = tempfile::tempdir().unwrap();
    let (key, directory) = snapshots_in(folder.path());
    let settings = [(key, directory.as_str())];
    let client = Client::connect(broker.url()).await;
    let subject = common::subjects().events(&common::namespace(), &common::worker("gpu-0"));

    // The publisher's clock: no batch is dropped or doubted for its time.
    let first = daemon(broker.url(), &settings).await;
    for (seq, time_us) in (1..).zip([0, u64::MAX, 1, u64::MAX - 1, 1_700_000_000_000_000]) {
        let events = match seq {
            1 => vec![stored(hashes(1, 1))],
            seq => vec![stored_after(seq - 1, hashes(seq, 1))],
        };
        let batch = EventBatch {
            epoch: 1,
            seq,
            rank: 0,
            time_us: Some(time_us),
            tier: Tier::DEVICE,
            events,
        };
        client
            .nats
            .publish(subject.clone(), batch.encode().into())
            .await
            .unwrap();
        assert!(
            client
                .applied("gpu-0", 0, BatchCursor { epoch: 1, seq })
                .await
                .exact
        );
    }
    let holder = |blocks| [("gpu-0".to_owned(), 0, blocks, true)];
    assert_eq!(matches(&client.ask(hashes(1, 9)).await), holder(5));
    first.stop().await;

    // The daemon's clock was a century ahead when that snapshot was written, and has been set right since.
    let snapshot = newest_snapshot(folder.path());
    let ahead = folder
        .path()
        .join(format!("snapshot-{:020}.kvs", 5_000_000_000_000_000_u64));
    std::fs::rename(snapshot, &ahead).unwrap();
    let second = daemon(broker.url(), &settings).await;
    let mut publisher = client
        .publisher("gpu-0", 0)
        .resuming(BatchCursor { epoch: 1, seq: 5 });
    assert!(
        client
            .tell(&mut publisher, "gpu-0", 0, vec![stored_after(5, hashes(6, 2))])
            .await
            .exact
    );
    second.stop().await;
    assert!(
        newest_snapshot(folder.path()) > ahead,
        "the newest snapshot is the one to start from"
    );
    let third = daemon(broker.url(), &settings).await;
    assert!(client.tell(&mut publisher, "gpu-0", 0, Vec::new()).await.exact);
    assert_eq!(matches(&client.ask(hashes(1, 9)).await), holder(7));
    third.stop().await;
    println!("clock jumps: queries 2, exact 2, degraded 0, wrong 0, blind 0");
}

fn newest_snapshot(folder: &Path) -> std::path::PathBuf {
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let snapshots = files.filter(|path| path.extension().is_some_and(|suffix| suffix == "kvs"));
    snapshots.max().unwrap()
}

/// Several daemons answer: what all that are up have applied. Empty while one of them comes or goes.
#[derive(Default)]
struct AllReplicas(parking_lot::Mutex<Vec<std::net::SocketAddr>>);

impl Floors for AllReplicas {
    async fn raise(&self, _: &Client, truth: &Truth) {
        let addresses = self.0.lock().clone();
        let cursors: Vec<_> = addresses.iter().map(|address| cursors_of(*address)).collect();
        let Some((first, others)) = cursors.split_first() else {
            return;
        };
        for (worker, cursor) in first {
            let seen = others
                .iter()
                .map(|cursors| cursors.get(worker).copied().unwrap_or_default());
            truth.raise_floor(worker, 0, seen.fold(*cursor, Ord::min));
        }
    }
}

/// How far a daemon has followed each worker, as its admin listener says.
fn cursors_of(address: std::net::SocketAddr) -> std::collections::BTreeMap<String, BatchCursor> {
    let (_, body) = http_get(address, "/workers");
    let json: serde_json::Value = serde_json::from_str(&body).unwrap();
    let cursor = |holder: &serde_json::Value| {
        let number = |key: &str| holder[key].as_u64().unwrap();
        let cursor = BatchCursor {
            epoch: number("epoch"),
            seq: number("seq"),
        };
        (holder["worker"].as_str().unwrap().to_owned(), cursor)
    };
    json["holders"].as_array().unwrap().iter().map(cursor).collect()
}

/// Restarts both replicas, one after the other, `rounds` times.
async fn rolling_restart(url: &str, folders: &[&Path; 2], rounds: u64) -> Tally {
    let start = async |folder: &Path| -> Daemon {
        let (key, directory) = snapshots_in(folder);
        daemon(url, &[(key, directory.as_str())]).await
    };
    let mut replicas = [Some(start(folders[0]).await), Some(start(folders[1]).await)];
    let mut fleet = Fleet::new(url, 4, rounds).await;
    let floors = AllReplicas::default();
    let both = |replicas: &[Option<Daemon>; 2]| -> Vec<_> {
        replicas
            .iter()
            .flatten()
            .filter_map(Daemon::admin_address)
            .collect()
    };
    *floors.0.lock() = both(&replicas);
    let restarts = async {
        pause(300).await;
        for _ in 0..rounds {
            for (index, folder) in folders.iter().enumerate() {
                floors.0.lock().clear();
                replicas[index].take().unwrap().stop().await;
                replicas[index] = Some(start(folder).await);
                *floors.0.lock() = both(&replicas);
                pause(200).await;
            }
        }
    };
    let mut tally = Box::pin(fleet.under_load(&floors, restarts)).await;
    fleet.settle(&mut tally).await;
    for replica in replicas.into_iter().flatten() {
        replica.stop().await;
    }
    tally
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_restarted_one_after_the_other() {
    let broker = broker().await;
    let kept = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let folders = [kept[0].path(), kept[1].path()];
    let tally = Box::pin(rolling_restart(broker.url(), &folders, runs())).await;
    tally.report(&format!("rolling restart of two replicas, {} rounds", runs()));
    assert_eq!(tally.blind, 0, "{:#?}", tally.examples);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_knows_less_takes_no_queries() {
    let broker = broker().await;
    let serving = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 4))])
        .await;

    // Nothing tells the new one of the worker, so it keeps out of the way.
    let starting = Daemon::start(config(broker.url(), &[])).await.unwrap();
    let latches = async || {
        let (_, body) = http_get(starting.admin_address().unwrap(), "/readyz");
        serde_json::from_str::<serde_json::Value>(&body).unwrap()["latches"].clone()
    };
    eventually("the new replica follows events", async || {
        (latches().await["events_subscribed"] == true).then_some(())
    })
    .await;
    for _ in 0..100 {
        assert_eq!(client.ask(hashes(1, 4)).await.holders.len(), 1);
    }
    assert_eq!(latches().await["settled"], false);

    // The worker begins a new epoch: now both know as much.
    let mut publisher = client
        .publisher("gpu-0", 0)
        .resuming(BatchCursor { epoch: 2, seq: 0 });
    publisher
        .publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
        .await
        .unwrap();
    tokio::time::timeout(PATIENCE, starting.ready())
        .await
        .expect("the new replica becomes ready");
    serving.stop().await;
    assert_eq!(
        matches(&client.ask(hashes(1, 4)).await),
        [("gpu-0".to_owned(), 0, 4, true)]
    );

    // Where nobody serves, any answer is better than none.
    starting.stop().await;
    let alone = daemon(broker.url(), &[]).await;
    alone.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_cannot_catch_up_serves_in_the_end() {
    let broker = broker().await;
    let serving = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 4))])
        .await;
    let late = daemon(broker.url(), &[("ready.settle_ms", "200")]).await;
    late.stop().await;
    serving.stop().await;
}
