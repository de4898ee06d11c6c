//! Two replicas that are restarted one after the other. Every query is answered, and every answer names a holder.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use async_nats::Request;
use kvatlas_core::wire::{BatchCursor, QueryRequest, Tier};
use kvatlas_daemon::Daemon;

use super::{pause, runs};
use crate::support::fleet::{Fleet, Floors};
use crate::support::jetstream::Restartable;
use crate::support::truth::{Tally, Truth};
use crate::support::way::Way;
use crate::support::{
    Client, PATIENCE, broker, by_sequence, config, daemon, eventually, hashes, http_get, matches, namespace,
    server, snapshots_in, stored, subjects,
};

/// Admin addresses of all replicas. A state becomes the floor of exact replies when all replicas have applied it. The
/// list is empty while a replica starts or stops; then no floor is raised.
#[derive(Default)]
pub(super) struct AllReplicas(pub(super) parking_lot::Mutex<Vec<std::net::SocketAddr>>);

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

/// Returns the cursor that a daemon has applied for each worker, from its admin listener.
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
async fn rolling_restart(way: Way, url: &str, folders: &[&Path; 2], rounds: u64) -> Tally {
    let start = async |folder: &Path| -> Daemon {
        let (key, directory) = snapshots_in(folder);
        daemon(url, &way.settings(&[(key, directory.as_str())])).await
    };
    let mut replicas = [Some(start(folders[0]).await), Some(start(folders[1]).await)];
    let mut fleet = Fleet::through(url, way.publishers(), 4, rounds).await;
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

async fn restarted_one_after_the_other(way: Way) {
    let broker = Restartable::start(&server()).await;
    let kept = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let folders = [kept[0].path(), kept[1].path()];
    let tally = Box::pin(rolling_restart(way, broker.url(), &folders, runs())).await;
    tally.report(&format!(
        "rolling restart of two replicas ({way}), {} rounds",
        runs()
    ));
    tally.require_sight();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_restarted_one_after_the_other() {
    restarted_one_after_the_other(Way::Core).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_that_read_a_stream_restarted_one_after_the_other() {
    restarted_one_after_the_other(Way::Stream).await;
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

    // The new replica has not heard of the worker, so it is not ready.
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

    // The worker begins a new epoch, so both replicas know the same.
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

    // A daemon without a serving replica becomes ready with any state.
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

/// A replica that leaves sends many messages to itself. None of them may push a query out of the smallest buffer.
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_with_a_small_buffer_leaves_without_losing_a_query() {
    let broker = broker().await;
    let settings = [("events.subscription_capacity", "16")];
    let leaving = daemon(broker.url(), &settings).await;
    let staying = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let mut publisher = client.publisher("gpu-0", 0);
    client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 4))])
        .await;
    let payload = QueryRequest::Single(by_sequence(&hashes(1, 4))).encode();
    let has_left = AtomicBool::new(false);
    // The query client would hide a loss, because it asks a second time.
    let ask_on = async || {
        while !has_left.load(Ordering::Relaxed) {
            let request = Request::new()
                .payload(payload.clone().into())
                .timeout(Some(PATIENCE));
            let asked = client.nats.send_request(subjects().query(&namespace()), request);
            asked.await.unwrap();
        }
    };
    let leave = async {
        pause(200).await;
        leaving.stop().await;
        has_left.store(true, Ordering::Relaxed);
    };
    futures_util::join!(leave, ask_on(), ask_on(), ask_on(), ask_on());
    staying.stop().await;
}
