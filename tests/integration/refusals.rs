//! Rights that the NATS server takes away from the daemon while it runs, or does not give it at first.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvatlas_client::QueryClient;
use kvatlas_client::publish::{HolderPublisher, PublishConnection, PublishedHolder, PublisherOptions};
use kvatlas_core::wire::{AdminCommand, AdminRequest, BatchCursor, Hint, Outcome, Tier};
use kvatlas_daemon::Daemon;
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::jetstream::JETSTREAM;
use crate::support::publisher::Publisher;
use crate::support::{
    Client, PATIENCE, broker, by_sequence, config, engine, eventually, hashes, http_get, matches, namespace,
    reasons, server, stored, stored_after, subjects, worker,
};

const GPU: &str = "gpu-0";
/// Subscriptions that the daemon needs. A test passes them to [`Scene::without`] to withhold the right to subscribe.
const SUBSCRIPTIONS: [&str; 6] = [
    "kvatlas.v1.events.>",
    "kvatlas.v1.query.>",
    "kvatlas.v1.status.>",
    "kvatlas.v1.roster.>",
    "_INBOX.>",
    SERVICES,
];
/// Subscriptions without which the daemon answers queries.
const REPORTS: [&str; 3] = ["kvatlas.v1.admin.*", "kvatlas.v1.outcome.*", "kvatlas.v1.hint.*"];
const SERVICES: &str = "$SRV.>";
/// Subscription that an engine's publisher needs for daemons' questions.
const QUESTIONS: &str = "kvatlas.v1.resync.llama.gpu-0.*";
const MESSAGES: [&str; 4] = [
    "kvatlas.v1.resync.>",
    "kvatlas.v1.roster.>",
    "kvatlas.v1.shards.>",
    "$JS.API.>",
];

/// A broker that limits the rights of its clients. A test can change these rights while the broker runs.
struct Scene {
    broker: EmbeddedBroker,
    folder: tempfile::TempDir,
}

impl Scene {
    /// Starts a broker that gives the daemon all its rights except `missing`.
    async fn without(missing: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        write_rights(&folder.path().join("rights.conf"), missing);
        // The server takes every path as relative to its own directory.
        let name = folder.path().file_name().unwrap().to_str().unwrap();
        let options = BrokerOptions {
            config_lines: vec![format!("include \"../{name}/rights.conf\"")],
            with_jetstream: true,
            ..crate::support::own_port()
        };
        let broker = EmbeddedBroker::start_with(&server(), options).await.unwrap();
        Self { broker, folder }
    }

    fn rights(&self) -> PathBuf {
        self.folder.path().join("rights.conf")
    }

    /// Makes the server load a configuration with all rights except `missing`.
    fn reload_without(&self, missing: &[&str]) {
        write_rights(&self.rights(), missing);
        let pid = Pid::from_raw(i32::try_from(self.broker.pid()).unwrap()).unwrap();
        kill_process(pid, Signal::HUP).unwrap();
    }

    async fn daemon(&self, settings: &[(&str, &str)]) -> Daemon {
        let mut all = vec![("nats.user", "daemon"), ("nats.password", "secret")];
        all.extend_from_slice(settings);
        Daemon::start(config(self.broker.url(), &all)).await.unwrap()
    }

    async fn client(&self) -> Client {
        let options = login("anybody");
        let nats = options.connect(self.broker.url()).await.unwrap();
        Client {
            queries: QueryClient::new(nats.clone(), subjects()).with_patience(PATIENCE),
            nats,
        }
    }
}

fn login(user: &str) -> async_nats::ConnectOptions {
    async_nats::ConnectOptions::new().user_and_password(user.to_owned(), "secret".to_owned())
}

fn write_rights(path: &std::path::Path, missing: &[&str]) {
    let list = |all: &[&str]| {
        let kept = all.iter().filter(|subject| !missing.contains(subject));
        let quoted: Vec<String> = kept.map(|subject| format!("\"{subject}\"")).collect();
        quoted.join(", ")
    };
    let text = format!(
        "authorization {{ users: [\n\
         {{ user: anybody, password: secret }}\n\
         {{ user: daemon, password: secret, permissions: {{\n\
           subscribe: {{ allow: [{}] }}\n\
           publish: {{ allow: [{}, \"_INBOX.>\"] }}\n\
         }} }}\n\
         {{ user: engine, password: secret, permissions: {{ subscribe: {{ allow: [{}] }} }} }}\n] }}\n",
        list(&[&SUBSCRIPTIONS[..], &REPORTS].concat()),
        list(&MESSAGES),
        list(&[QUESTIONS, "_INBOX.>"]),
    );
    std::fs::write(path, text).unwrap();
}

async fn daemon_page(daemon: &Daemon, path: &'static str) -> (u16, String) {
    let address = daemon.admin_address().unwrap();
    let asking = tokio::task::spawn_blocking(move || http_get(address, path));
    asking.await.unwrap()
}

async fn is_ready(daemon: &Daemon) -> (bool, String) {
    let (code, body) = daemon_page(daemon, "/readyz").await;
    (code == 200, body)
}

async fn becomes_ready(daemon: &Daemon) {
    eventually("the daemon is ready", async || {
        is_ready(daemon).await.0.then_some(())
    })
    .await;
}

/// Waits until the daemon is not ready and reports, as a reason, the server's refusal that names `subject`.
async fn becomes_unready(daemon: &Daemon, subject: &str) {
    eventually(
        &format!("the daemon says that {subject} is refused"),
        async || {
            let (ready, body) = is_ready(daemon).await;
            let report: Value = serde_json::from_str(&body).unwrap();
            let said = report["reasons"].as_array()?.iter().any(|reason| {
                let reason = reason.as_str().unwrap();
                reason.contains("Permissions Violation") && reason.contains(subject)
            });
            (!ready && said).then_some(())
        },
    )
    .await;
}

/// Starts a publisher that has published four blocks, and checks that its holder is exact.
async fn four_blocks_are_told(client: &Client) -> Publisher {
    let mut publisher = client.publisher(GPU, 0);
    let blocks = vec![stored(hashes(10, 4))];
    assert!(client.tell(&mut publisher, GPU, 0, blocks).await.exact);
    publisher
}

/// Starts a daemon with all rights, which knows four blocks.
async fn with_four_blocks(settings: &[(&str, &str)]) -> (Scene, Daemon, Client, Publisher) {
    let scene = Scene::without(&[]).await;
    let daemon = scene.daemon(settings).await;
    becomes_ready(&daemon).await;
    let client = scene.client().await;
    let publisher = four_blocks_are_told(&client).await;
    (scene, daemon, client, publisher)
}

#[tokio::test(flavor = "multi_thread")]
async fn events_that_the_server_no_longer_gives_make_nobody_exact_until_it_gives_them_again() {
    let (scene, daemon, client, mut publisher) = with_four_blocks(&[]).await;

    scene.reload_without(&["kvatlas.v1.events.>"]);
    becomes_unready(&daemon, "kvatlas.v1.events.>").await;
    let unseen = vec![stored_after(13, hashes(14, 2))];
    publisher.publish(Tier::DEVICE, unseen).await.unwrap();
    publisher.flush().await.unwrap();
    let status = client.holder(GPU, 0).await.unwrap();
    assert_eq!((status.blocks, reasons(&status)), (4, vec!["unverified"]));
    let reply = client.ask(hashes(10, 6)).await;
    assert_eq!(matches(&reply), [(GPU.to_owned(), 0, 4, false)]);

    scene.reload_without(&[]);
    becomes_ready(&daemon).await;
    let mut publisher = publisher.resuming(BatchCursor { epoch: 2, seq: 0 });
    client
        .tell(&mut publisher, GPU, 0, vec![stored(hashes(10, 6))])
        .await;
    client.exact(GPU, 0).await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_without_the_right_to_events_is_not_ready_until_it_has_it() {
    let scene = Scene::without(&["kvatlas.v1.events.>"]).await;
    let daemon = scene.daemon(&[]).await;
    becomes_unready(&daemon, "kvatlas.v1.events.>").await;
    scene.reload_without(&[]);
    becomes_ready(&daemon).await;
    four_blocks_are_told(&scene.client().await).await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn queries_that_the_server_no_longer_gives_show_in_readiness_and_are_answered_again() {
    let (scene, daemon, client, _) = with_four_blocks(&[]).await;

    scene.reload_without(&["kvatlas.v1.query.>"]);
    becomes_unready(&daemon, "kvatlas.v1.query.>").await;
    assert!(
        client.holder(GPU, 0).await.unwrap().exact,
        "status requests are answered meanwhile"
    );
    scene.reload_without(&[]);
    becomes_ready(&daemon).await;
    let reply = client.ask(hashes(10, 6)).await;
    assert_eq!(matches(&reply), [(GPU.to_owned(), 0, 4, true)]);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_may_no_longer_be_asked_for_makes_nobody_exact_until_it_may() {
    let (scene, daemon, client, mut publisher) = with_four_blocks(&[JETSTREAM]).await;

    // A request in progress is still answered. The next request is refused, at the latest when a consumer is made anew.
    scene.reload_without(&["$JS.API.>"]);
    let mut blocks = 4;
    eventually("the refusal shows", async || {
        let more = vec![stored_after(9 + blocks, hashes(10 + blocks, 1))];
        publisher.publish(Tier::DEVICE, more).await.unwrap();
        blocks += 1;
        (!is_ready(&daemon).await.0).then_some(())
    })
    .await;
    becomes_unready(&daemon, "$JS.API").await;
    let status = client.holder(GPU, 0).await.unwrap();
    assert_eq!(reasons(&status), ["unverified"]);

    scene.reload_without(&[]);
    becomes_ready(&daemon).await;
    eventually("the stream has been read to its end", async || {
        (client.holder(GPU, 0).await?.blocks == blocks).then_some(())
    })
    .await;
    // The daemon can't know whether the stream has taken what was published while no request was answered.
    eventually("a batch has come since", async || {
        let told = client.tell(&mut publisher, GPU, 0, Vec::new()).await;
        told.exact.then_some(())
    })
    .await;
    daemon.stop().await;
}

/// Returns how often the server has refused a subscription of one of the daemon's connections.
async fn refusals(daemon: &Daemon, connection: &str) -> u64 {
    let page = daemon_page(daemon, "/metrics").await.1;
    let series = format!("kvatlas_connection_events_total{{connection=\"{connection}\",event=\"refused\"}}");
    let value = page.lines().find_map(|line| line.strip_prefix(series.as_str()));
    value.map_or(0, |value| value.trim().parse().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn inboxes_that_the_server_takes_and_gives_back_leave_holders_exact() {
    // Without its pulse, the daemon does not know how old its state is.
    let quick = [("events.behind_after_ms", "2000")];
    for settings in [&[][..], &[JETSTREAM]] {
        let scene = Scene::without(&[]).await;
        let daemon = scene.daemon(&[settings, &quick].concat()).await;
        becomes_ready(&daemon).await;
        let client = scene.client().await;
        let options = PublisherOptions {
            heartbeat_interval: Duration::from_millis(50),
            ..PublisherOptions::default()
        };
        let _publisher = engine(client.nats.clone(), &subjects(), GPU, options).await;
        client.exact(GPU, 0).await;

        scene.reload_without(&["_INBOX.>"]);
        eventually("the daemon no longer hears itself", async || {
            let holder = client.holder(GPU, 0).await?;
            (!holder.exact).then_some(())
        })
        .await;
        scene.reload_without(&[]);
        becomes_ready(&daemon).await;
        client.exact(GPU, 0).await;
        daemon.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_may_not_hear_replies_answers_again_when_it_may() {
    let scene = Scene::without(&[]).await;
    let login = [
        ("nats.user", "anybody"),
        ("nats.password", "secret"),
        ("sharding.shard", "0/1"),
    ];
    let shard = Daemon::start(config(scene.broker.url(), &login)).await.unwrap();
    becomes_ready(&shard).await;
    let gateway = scene.daemon(&[("gateway.enabled", "true")]).await;
    let client = scene.client().await;
    let _publisher = four_blocks_are_told(&client).await;

    scene.reload_without(&["_INBOX.>"]);
    let ask = async || client.ask_with(by_sequence(&hashes(10, 4))).await;
    eventually("the gateway hears nobody", async || ask().await.err()).await;
    scene.reload_without(&[]);
    eventually("the gateway hears the shard", async || ask().await.ok()).await;
    gateway.stop().await;
    shard.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_and_reports_are_heard_again_when_the_server_gives_them() {
    let (scene, daemon, client, _publisher) = with_four_blocks(&[("hints.ttl_ms", "60000")]).await;
    let missing = [&REPORTS[..], &[SERVICES]].concat();
    let before = refusals(&daemon, "admin").await;
    scene.reload_without(&missing);
    eventually("the subscriptions are refused", async || {
        (refusals(&daemon, "admin").await > before).then_some(())
    })
    .await;
    scene.reload_without(&[]);

    let request = AdminRequest::default().encode();
    let command = subjects().admin(AdminCommand::Resync);
    eventually("a command is heard", async || {
        let reply = client.nats.request(command.clone(), request.clone().into());
        reply.await.ok()
    })
    .await;
    let outcome = Outcome {
        worker: worker(GPU),
        rank: 0,
        promised_blocks: 1,
        found_tokens: 16,
        prompt_tokens: None,
        exact: true,
    };
    let hint = Hint {
        worker: worker(GPU),
        rank: 0,
        prompt: by_sequence(&hashes(10, 4)),
    };
    eventually("an outcome is heard", async || {
        let llama = namespace();
        let told = client.queries.tell_outcomes(&llama, vec![outcome.clone()]);
        told.await.ok()
    })
    .await;
    eventually("a hint is heard", async || {
        client
            .queries
            .tell_hints(&namespace(), vec![hint.clone()])
            .await
            .ok()
    })
    .await;
    eventually("the daemon is found", async || {
        client.nats.request("$SRV.PING.kvatlas", "".into()).await.ok()
    })
    .await;
    daemon.stop().await;
}

/// The server takes the daemon's right to receive publishers' answers, and gives it back later. The daemon must then
/// subscribe again, so that it can ask a publisher for a lost batch and get the answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_daemon_that_may_not_hear_answers_asks_again_until_it_may() {
    let scene = Scene::without(&[]).await;
    let daemon = scene.daemon(&[]).await;
    becomes_ready(&daemon).await;
    let client = scene.client().await;
    let options = PublisherOptions {
        heartbeat_interval: Duration::from_millis(50),
        ..PublisherOptions::default()
    };
    let _publisher = engine(client.nats.clone(), &subjects(), GPU, options).await;
    client.exact(GPU, 0).await;

    let count = async |series: &str| {
        let page = daemon_page(&daemon, "/metrics").await.1;
        let value = page.lines().find_map(|line| line.strip_prefix(series));
        value.map_or(0, |value| value.trim().parse::<u64>().unwrap())
    };
    scene.reload_without(&["_INBOX.>"]);
    eventually("the subscription is refused", async || {
        (refusals(&daemon, "resync").await > 0).then_some(())
    })
    .await;
    scene.reload_without(&[]);

    let succeeded = "kvatlas_resyncs_succeeded_total{namespace=\"llama\"}";
    let before = count(succeeded).await;
    let subject = subjects().events(&namespace(), &worker(GPU));
    client.nats.publish(subject, "garbage".into()).await.unwrap();
    eventually(
        "the publisher was asked for what could not be read, and heard",
        async || (count(succeeded).await > before).then_some(()),
    )
    .await;
    client.exact(GPU, 0).await;
    daemon.stop().await;
}

/// The server takes a publisher's right to receive questions, and gives it back later. The publisher must then
/// subscribe again, although it publishes so often that it never sends a heartbeat.
#[tokio::test(flavor = "multi_thread")]
async fn a_busy_publisher_that_may_not_hear_questions_listens_again_when_it_may() {
    let scene = Scene::without(&[]).await;
    let daemon = scene.daemon(&[]).await;
    becomes_ready(&daemon).await;
    let client = scene.client().await;
    let nats = PublishConnection::connect(login("engine"), scene.broker.url())
        .await
        .unwrap();
    let holder = PublishedHolder {
        namespace: namespace(),
        worker: worker(GPU),
        rank: 0,
    };
    let options = PublisherOptions {
        heartbeat_interval: Duration::from_millis(200),
        ..PublisherOptions::default()
    };
    let publisher = HolderPublisher::start(nats, &subjects(), holder, options)
        .await
        .unwrap();
    let busy = async {
        loop {
            publisher.publish(Tier::DEVICE, Vec::new()).await.unwrap();
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let asked = async {
        client.exact(GPU, 0).await;
        scene.reload_without(&[QUESTIONS]);
        eventually("the subscription is refused", async || {
            publisher.flush().await.is_err().then_some(())
        })
        .await;
        scene.reload_without(&[]);
        let subject = subjects().events(&namespace(), &worker(GPU));
        client.nats.publish(subject, "garbage".into()).await.unwrap();
        eventually("the publisher is asked, and answers", async || {
            (publisher.counters().answers_missing > 0).then_some(())
        })
        .await;
        client.exact(GPU, 0).await;
    };
    tokio::select! {
        () = busy => {}
        () = asked => {}
    }
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flush_fails_if_the_connection_was_lost_behind_what_it_confirms() {
    let broker = broker().await;
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let publisher = engine(nats.clone(), &subjects(), "gpu-0", PublisherOptions::default()).await;
    let reconnect = async || {
        let connects = || nats.statistics().connects.load(Ordering::Relaxed);
        let before = connects();
        nats.force_reconnect().await.unwrap();
        eventually("the connection is back", async || {
            (connects() > before).then_some(())
        })
        .await;
    };
    let publish = async |sent| {
        publisher
            .publish(Tier::DEVICE, vec![stored(hashes(1, 4))])
            .await
            .unwrap();
        eventually("the client has it", async || {
            (publisher.counters().batches_sent == sent).then_some(())
        })
        .await;
    };
    publish(1).await;
    publisher.flush().await.unwrap();
    reconnect().await;
    publisher.flush().await.unwrap();
    publish(2).await;
    reconnect().await;
    let lost = publisher.flush().await.unwrap_err().to_string();
    assert!(lost.contains("may not have arrived"), "{lost}");
    publisher.flush().await.unwrap();
    publish(3).await;
    reconnect().await;
    // What was lost before a goodbye is of no use behind it.
    publisher.say_goodbye().await.unwrap();
}
