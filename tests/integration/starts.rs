//! Messages of other clients must not keep a daemon from starting, however many and large they are.

use std::net::SocketAddr;
use std::time::Duration;

use futures_util::StreamExt;
use kvatlas_core::wire::{
    ROSTER_PAGE_MAX, RosterHolder, RosterKey, RosterReply, RosterRequest, SHARD_HEADER, WorkerName,
};
use kvatlas_daemon::Daemon;
use kvatlas_process::broker::round_trip;
use tokio::sync::watch;

use crate::support::jetstream::Restartable;
use crate::support::proxy::{Direction, Network, Proxy};
use crate::support::{
    Client, PATIENCE, broker, by_sequence, config, daemon, eventually, hashes, http_get, namespace, server,
    subjects, worker,
};

/// Setting for the lowest possible limit on waiting bytes: bytes that a connection has received and the daemon has not
/// yet taken.
const SMALL: (&str, &str) = ("events.subscription_bytes", "4 MiB");
/// Number of bytes in a flood, which exceeds the limit in [`SMALL`].
const FLOOD_BYTES: usize = 8 << 20;

/// Answers requests for the list of holders with endless pages of invented holders. Returns a channel with the number
/// of bytes sent so far.
async fn lie_without_end(liar: &Client) -> watch::Receiver<usize> {
    let mut requests = liar.nats.subscribe(subjects().roster("kvatlas")).await.unwrap();
    round_trip(&liar.nats, PATIENCE).await.unwrap();
    let nats = liar.nats.clone();
    let (said, so_far) = watch::channel(0);
    tokio::spawn(async move {
        let mut number = 0_u64;
        while let Some(request) = requests.next().await {
            assert!(RosterRequest::decode(&request.payload).is_ok());
            let mut holders = Vec::new();
            for _ in 0..ROSTER_PAGE_MAX {
                number += 1;
                let key = RosterKey {
                    namespace: namespace(),
                    worker: WorkerName::new(&format!("made-up-{number:020}")).unwrap(),
                    rank: 0,
                };
                holders.push(RosterHolder { key, exact: true });
            }
            let more = true;
            let page = RosterReply { v: 1, holders, more }.encode();
            said.send_modify(|bytes| *bytes += page.len());
            nats.publish(request.reply.unwrap(), page.into()).await.unwrap();
        }
    });
    so_far
}

async fn becomes_ready(daemon: &Daemon) {
    tokio::time::timeout(PATIENCE, daemon.ready())
        .await
        .expect("the daemon becomes ready");
}

/// Breaks all connections of a daemon, and lets it connect again.
async fn breaks(proxy: &Proxy, admin: SocketAddr) {
    proxy.set(Network {
        is_cut: true,
        ..Network::default()
    });
    eventually("the connections have broken", async || {
        let latches = http_get(admin, "/readyz").1;
        latches.contains("\"connected\":false").then_some(())
    })
    .await;
    proxy.heal();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endless_roster_does_not_keep_a_daemon_from_its_queries() {
    let broker = broker().await;
    let liar = Client::connect(broker.url()).await;
    let mut said = lie_without_end(&liar).await;
    let daemon = daemon(broker.url(), &[]).await;
    let has_said = said.wait_for(|bytes| *bytes > 0);
    tokio::time::timeout(PATIENCE, has_said).await.unwrap().unwrap();
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_breaks_behind_a_large_roster_is_made_again() {
    let broker = Restartable::start(&server()).await;
    let proxy = Proxy::to(broker.port()).await;
    let liar = Client::connect(broker.url()).await;
    let mut said = lie_without_end(&liar).await;
    let daemon = Daemon::start(config(&proxy.url(), &[SMALL])).await.unwrap();
    let said_much = said.wait_for(|bytes| *bytes > FLOOD_BYTES);
    tokio::time::timeout(PATIENCE, said_much).await.unwrap().unwrap();
    breaks(&proxy, daemon.admin_address().unwrap()).await;
    becomes_ready(&daemon).await;
    daemon.stop().await;
}

/// Waits until a client has subscribed to `subject`, and then sends more bytes than the limit on waiting bytes
/// ([`SMALL`]) allows.
async fn flood_the_first_subscriber(from: &Client, subject: String) {
    eventually("somebody is subscribed", async || {
        let request = async_nats::Request::new().timeout(Some(Duration::from_millis(100)));
        let answer = from.nats.send_request(subject.clone(), request).await;
        let is_nobody = answer.is_err_and(|error| error.kind() == async_nats::RequestErrorKind::NoResponders);
        (!is_nobody).then_some(())
    })
    .await;
    let piece = vec![0_u8; 64 << 10];
    for _ in 0..FLOOD_BYTES / piece.len() {
        let sent = from.nats.publish(subject.clone(), piece.clone().into());
        sent.await.unwrap();
    }
    round_trip(&from.nats, PATIENCE).await.unwrap();
}

/// Starts a daemon while another client floods one of its subjects. A slow network delivers the flood before the
/// server's confirmation of the daemon's subscription. The daemon must become ready nevertheless.
async fn a_flood_before_the_confirmation_does_not_keep_a_daemon_from_its_start(subject: String) {
    // Delay that is longer than sending the flood takes.
    const DELAY: Duration = Duration::from_millis(500);
    let broker = Restartable::start(&server()).await;
    let proxy = Proxy::to(broker.port()).await;
    proxy.set(Network {
        to_daemon: Direction {
            delay: DELAY,
            is_silent: false,
        },
        ..Network::default()
    });
    let flooding = Client::connect(broker.url()).await;
    let starting = Daemon::start(config(&proxy.url(), &[SMALL]));
    let (daemon, ()) = tokio::join!(starting, flood_the_first_subscriber(&flooding, subject));
    let daemon = daemon.unwrap();
    becomes_ready(&daemon).await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_events_does_not_keep_a_daemon_from_its_start() {
    let subject = subjects().events(&namespace(), &worker("gpu-0"));
    a_flood_before_the_confirmation_does_not_keep_a_daemon_from_its_start(subject).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_queries_does_not_keep_a_daemon_from_its_start() {
    let subject = subjects().query(&namespace());
    a_flood_before_the_confirmation_does_not_keep_a_daemon_from_its_start(subject).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateways_connection_is_made_again_whatever_the_shards_have_answered() {
    const SHARDS: usize = 5;
    let broker = Restartable::start(&server()).await;
    let proxy = Proxy::to(broker.port()).await;
    let shards = Client::connect(broker.url()).await;
    let subject = subjects().of_shards().query(&namespace());
    let mut requests = shards.nats.subscribe(subject).await.unwrap();
    round_trip(&shards.nats, PATIENCE).await.unwrap();
    let nats = shards.nats.clone();
    tokio::spawn(async move {
        while let Some(request) = requests.next().await {
            let reply = request.reply.unwrap();
            for number in 0..SHARDS {
                let mut headers = async_nats::HeaderMap::new();
                headers.insert(SHARD_HEADER, format!("{number}/{SHARDS}"));
                let payload = vec![0_u8; 900 << 10].into();
                nats.publish_with_headers(reply.clone(), headers, payload)
                    .await
                    .unwrap();
            }
        }
    });
    let settings = [
        SMALL,
        ("gateway.enabled", "true"),
        ("gateway.deadline_ms", "60000"),
    ];
    let gateway = daemon(&proxy.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let asked = client.ask_with(by_sequence(&hashes(1, 2))).await;
    assert!(asked.is_err(), "no shard's answer means anything: {asked:?}");
    breaks(&proxy, gateway.admin_address().unwrap()).await;
    becomes_ready(&gateway).await;
    gateway.stop().await;
}
