//! A cluster of three NATS servers, each of which keeps the events stream. Two daemons, and the workers, are connected
//! to different servers.
//!
//! The short form of a scenario uses one transport instead of several, and leaves out the slowest parts.

use super::pause;
use super::replicas::AllReplicas;
use crate::support::cluster::{Cluster, SERVERS};
use crate::support::fleet::Fleet;
use crate::support::jetstream::{JETSTREAM, STREAM};
use crate::support::truth::Tally;
use crate::support::way::Way;
use crate::support::{
    Client, PATIENCE, daemon, eventually, has_gap, hashes, http_get, is_long_form, old_server, server,
    skipped, stored,
};
use futures_util::StreamExt;
use kvatlas_core::wire::Tier;
use kvatlas_daemon::Daemon;
use std::path::Path;
use std::time::{Duration, Instant};

/// Pause between two batches. It is long enough for three servers that share a machine with all other processes.
const PACE: Duration = Duration::from_millis(5);
/// Time without a fault between two faults, in milliseconds.
const CALM_MS: u64 = 1500;
const CALM: Duration = Duration::from_millis(CALM_MS);
/// Lock that lets only one cluster run at a time, because elections depend on time limits.
static TURN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Returns the transports with which a scenario runs: all of them, or only the first in the short form.
fn ways(all: &[Way]) -> &[Way] {
    if is_long_form() { all } else { &all[..1] }
}

/// A cluster of NATS servers with two daemons.
struct Scene {
    cluster: Cluster,
    daemons: Vec<Daemon>,
    fleet: Fleet,
    floors: AllReplicas,
    /// Connection for requests to the servers about the events stream.
    looks: async_nats::Client,
}

impl Scene {
    async fn start(binary: &Path, way: Way, copies: &str) -> Self {
        let cluster = Cluster::start(binary).await;
        let mut daemons = Vec::new();
        for number in 0..2 {
            let settings = way.settings(&[("events.stream_replicas", copies)]);
            daemons.push(daemon(cluster.url(number), &settings).await);
        }
        let floors = AllReplicas::default();
        let addresses = daemons.iter().filter_map(Daemon::admin_address);
        *floors.0.lock() = addresses.collect();
        let servers: Vec<String> = (0..SERVERS)
            .map(|number| cluster.url(number).to_owned())
            .collect();
        let fleet = Fleet::across(&servers[2], &servers, way.publishers(), 4, 1)
            .await
            .with_pace(PACE);
        let looks = async_nats::ConnectOptions::new()
            .max_reconnects(None)
            .connect(
                servers
                    .iter()
                    .map(|url| url.parse::<async_nats::ServerAddr>().unwrap())
                    .collect::<Vec<_>>(),
            )
            .await
            .unwrap();
        Self {
            cluster,
            daemons,
            fleet,
            floors,
            looks,
        }
    }

    /// Lets `faults` happen under load, and waits until every reply equals the truth again.
    async fn suffer(&mut self, faults: impl AsyncFnOnce(&mut Cluster, &async_nats::Client)) -> Tally {
        let happens = async {
            pause(CALM_MS).await;
            faults(&mut self.cluster, &self.looks).await;
            pause(CALM_MS).await;
        };
        let mut tally = Box::pin(self.fleet.under_load(&self.floors, happens)).await;
        self.wait_for_daemons().await;
        Box::pin(self.fleet.settle(&mut tally)).await;
        tally
    }

    /// Waits until every worker is exact at every daemon. Then every reply equals the truth, whichever daemon gives it.
    /// Workers send only heartbeats meanwhile.
    async fn wait_for_daemons(&mut self) {
        let started = Instant::now();
        let addresses = self.floors.0.lock().clone();
        loop {
            self.fleet.beat().await;
            let pages: Vec<String> = addresses
                .iter()
                .map(|address| http_get(*address, "/workers").1)
                .collect();
            let is_exact = |page: &String| {
                let json: serde_json::Value = serde_json::from_str(page).unwrap();
                let holders = json["holders"].as_array().unwrap();
                holders.iter().all(|holder| holder["exact"] == true)
            };
            if pages.iter().all(is_exact) {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "not exact: {pages:#?}");
        }
    }

    async fn end(self) {
        for daemon in self.daemons {
            daemon.stop().await;
        }
    }
}

async fn leader_killed(way: Way) {
    let _turn = TURN.lock().await;
    let mut scene = Box::pin(Scene::start(&server(), way, "3")).await;
    let tally = scene
        .suffer(async |cluster, looks| {
            let leader = cluster.leader(looks).await;
            cluster.kill(leader);
            pause(CALM_MS).await;
            cluster.restart(leader).await;
        })
        .await;
    tally.report(&format!("cluster: the stream's leader killed ({way})"));
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_leader_of_the_stream_is_killed() {
    for way in ways(&[Way::Acknowledged, Way::Stream]) {
        leader_killed(*way).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_server_is_killed_in_turn() {
    if !is_long_form() {
        return skipped("each server of a cluster killed in turn: only with deploy/faults.sh");
    }
    for way in [Way::Core, Way::Stream] {
        let _turn = TURN.lock().await;
        let mut scene = Box::pin(Scene::start(&server(), way, "3")).await;
        let tally = scene
            .suffer(async |cluster, _| {
                for number in 0..SERVERS {
                    cluster.kill(number);
                    pause(CALM_MS).await;
                    cluster.restart(number).await;
                    pause(CALM_MS).await;
                }
            })
            .await;
        tally.report(&format!("cluster: each server killed in turn ({way})"));
        scene.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_is_cut_off_from_the_others() {
    for way in ways(&[Way::Core, Way::Stream]).iter().copied() {
        let _turn = TURN.lock().await;
        let mut scene = Box::pin(Scene::start(&server(), way, "3")).await;
        let tally = scene
            .suffer(async |cluster, _| {
                // A daemon and a third of the workers are connected to this server.
                cluster.cut_off(0);
                pause(2 * CALM_MS).await;
                cluster.heal(0);
                pause(CALM_MS).await;
            })
            .await;
        tally.report(&format!("cluster: a server cut off and found again ({way})"));
        scene.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_server_of_a_daemon_retires() {
    for way in ways(&[Way::Stream, Way::Core]).iter().copied() {
        let _turn = TURN.lock().await;
        let mut scene = Box::pin(Scene::start(&server(), way, "3")).await;
        let tally = scene
            .suffer(async |cluster, _| {
                cluster.retire(0).await;
                pause(CALM_MS).await;
                cluster.restart(0).await;
            })
            .await;
        tally.report(&format!("cluster: lame duck of a daemon's server ({way})"));
        tally.require_sight();
        scene.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_servers_are_upgraded_one_after_the_other() {
    if !is_long_form() {
        return skipped("a cluster upgraded server by server: only with deploy/faults.sh");
    }
    let Some(old) = old_server() else {
        return;
    };
    for way in [Way::Core, Way::Stream] {
        let _turn = TURN.lock().await;
        let mut scene = Box::pin(Scene::start(&old, way, "3")).await;
        let tally = scene
            .suffer(async |cluster, looks| {
                for number in 0..SERVERS {
                    cluster.retire(number).await;
                    cluster.replace_binary(number, &server());
                    cluster.restart(number).await;
                    if way != Way::Core {
                        cluster.leader(looks).await;
                    }
                    pause(CALM_MS).await;
                }
            })
            .await;
        tally.report(&format!("cluster: rolling upgrade from an older version ({way})"));
        tally.require_sight();
        scene.end().await;
    }
}

/// While the lead goes from one server to another, the stream takes nothing, and no publisher hears of that.
#[tokio::test(flavor = "multi_thread")]
async fn another_leader_of_the_stream_leaves_doubts_until_the_next_batch() {
    let _turn = TURN.lock().await;
    let cluster = Cluster::start(&server()).await;
    let settings = [JETSTREAM, ("events.stream_replicas", "3")];
    let daemon = daemon(cluster.url(0), &settings).await;
    let client = Client::connect(cluster.url(1)).await;
    client.listed().await;
    let mut publisher = client.publisher("gpu-0", 0);
    let told = client
        .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 3))])
        .await;
    assert!(told.exact);
    let subject = format!("$JS.API.STREAM.LEADER.STEPDOWN.{STREAM}");
    let answer = client.nats.request(subject, "".into()).await.unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&answer.payload).unwrap();
    assert_eq!(answer["success"], true, "{answer}");
    eventually("the holder is in doubt", async || {
        let status = client.holder("gpu-0", 0).await?;
        (!status.exact).then_some(())
    })
    .await;
    eventually(
        "a batch that came after the end of the stream was read",
        async || {
            let told = client.tell(&mut publisher, "gpu-0", 0, Vec::new()).await;
            told.exact.then_some(())
        },
    )
    .await;
    daemon.stop().await;
}

/// One of the two servers that have the stream is gone, so nobody leads it, and it takes nothing. The other still answers
/// questions about it.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_without_a_leader_leaves_no_holder_exact() {
    let _turn = TURN.lock().await;
    let mut cluster = Cluster::start(&server()).await;
    let (replicas, patience) = (
        ("events.stream_replicas", "2"),
        ("events.behind_after_ms", "2000"),
    );
    let settings = [JETSTREAM, replicas, patience];
    // The first daemon makes the stream.
    let first = daemon(cluster.url(0), &settings).await;
    let looks = Client::connect(cluster.url(0)).await;
    let leader = cluster.leader(&looks.nats).await;
    let third = cluster.without_stream(&looks.nats).await;
    first.stop().await;
    drop(looks);
    let daemon = daemon(cluster.url(third), &settings).await;
    let client = Client::connect(cluster.url(third)).await;
    let mut publisher = client.publisher("gpu-0", 0);
    eventually("everybody is listed", async || {
        let told = client
            .tell(&mut publisher, "gpu-0", 0, vec![stored(hashes(1, 3))])
            .await;
        told.exact.then_some(())
    })
    .await;
    cluster.kill(leader);
    let subject = format!("$JS.API.STREAM.INFO.{STREAM}");
    eventually("the other server says that nobody leads the stream", async || {
        let asked = client.nats.request(subject.clone(), "".into());
        let answer = tokio::time::timeout(CALM, asked).await.ok()?.ok()?;
        let answer: serde_json::Value = serde_json::from_slice(&answer.payload).ok()?;
        let cluster = answer.get("cluster")?;
        cluster.get("leader").is_none().then_some(())
    })
    .await;
    eventually("the daemon is told the same", async || {
        let status = client.holder("gpu-0", 0).await?;
        (!status.exact).then_some(())
    })
    .await;
    // It asks again and again, and nothing makes the holder exact.
    let mut questions = client.nats.subscribe(subject).await.unwrap();
    for _ in 0..4 {
        publisher.publish(Tier::DEVICE, Vec::new()).await.unwrap();
        questions.next().await.unwrap();
        let status = client.holder("gpu-0", 0).await.unwrap();
        assert!(!status.exact && status.blocks == 3, "{status:?}");
    }
    // The daemon answers, and its server does. It is the stream that nothing is known of.
    let admin = daemon.admin_address().unwrap();
    eventually("the daemon says why", async || {
        let (code, _) = http_get(admin, "/readyz");
        let (_, index) = http_get(admin, "/index");
        let index: serde_json::Value = serde_json::from_str(&index).ok()?;
        let trouble = index["stream_trouble"].as_str()?;
        (code == 200 && trouble.contains("has no leader")).then_some(())
    })
    .await;
    cluster.restart(leader).await;
    eventually(
        "a later batch shows that the stream has not taken some",
        async || {
            publisher.publish(Tier::DEVICE, Vec::new()).await.ok()?;
            let status = client.holder("gpu-0", 0).await?;
            has_gap(&status).then_some(())
        },
    )
    .await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_is_moved_to_another_server() {
    if !is_long_form() {
        return skipped("a stream moved within a cluster: only with deploy/faults.sh");
    }
    let _turn = TURN.lock().await;
    let mut scene = Box::pin(Scene::start(&server(), Way::Stream, "1")).await;
    let tally = scene
        .suffer(async |cluster, looks| {
            let next = (cluster.leader(looks).await + 1) % SERVERS;
            cluster.move_stream(looks, next).await;
        })
        .await;
    tally.report("cluster: the stream moved to another server (JetStream)");
    scene.end().await;
}
