//! Permissions of each role in the server configurations of `deploy/nats`: what a role may do, and what the server
//! refuses.

mod bridges;
mod commands;
mod doctor;
mod gateways;
mod reports;

use std::io::{Read, Write};
use std::time::Duration;

use futures_util::StreamExt;
use kvatlas_client::publish::{
    Beginning, HolderPublisher, PublishConnection, PublisherError, PublisherOptions,
};
use kvatlas_client::{ClientError, QueryClient};
use kvatlas_core::wire::{
    AdminCommand, AdminHolder, AdminReply, AdminRequest, BatchCursor, Event, HolderStatusReply, QueryRequest,
    SingleQuery, Tier,
};
use kvatlas_daemon::Daemon;
use kvatlas_process::broker::embedded::{BrokerOptions, EmbeddedBroker};
use kvatlas_process::broker::round_trip;
use serde_json::json;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::support::http::HttpClient;
use crate::support::metrics::{counter, total};
use crate::support::process::Process;
use crate::support::{
    PATIENCE, by_sequence, config, engine, eventually, hashes, matches, namespace, server, stored, subjects,
    worker,
};

const USERS: &str = include_str!("../../deploy/nats/users.conf");
const ACCOUNTS: &str = include_str!("../../deploy/nats/accounts.conf");

/// Roles, each with the variable that has its password in the configurations.
const ROLES: [(&str, &str); 7] = [
    ("daemon", "NATS_DAEMON_PASSWORD"),
    ("gpu-0", "NATS_GPU_0_PASSWORD"),
    ("rack-1", "NATS_RACK_1_PASSWORD"),
    ("router", "NATS_ROUTER_PASSWORD"),
    ("dynamo", "NATS_DYNAMO_PASSWORD"),
    ("gateway", "NATS_GATEWAY_PASSWORD"),
    ("operator", "NATS_OPERATOR_PASSWORD"),
];

fn password(role: &str) -> String {
    format!("secret-of-{role}")
}

fn inbox_prefix(role: &str) -> String {
    match role {
        "gpu-0" | "rack-1" => format!("_INBOX_{role}"),
        // Dynamo's processes cannot use another inbox prefix.
        "dynamo" => "_INBOX".to_owned(),
        _ => format!("_INBOX_{}", role.to_uppercase()),
    }
}

async fn broker(configuration: &str) -> EmbeddedBroker {
    // The server looks for variables in its file before it looks in the environment.
    let mut config_lines: Vec<String> = ROLES
        .iter()
        .map(|(role, variable)| format!("{variable}: \"{}\"", password(role)))
        .collect();
    config_lines.push(configuration.to_owned());
    let options = BrokerOptions {
        config_lines,
        ..crate::support::own_port()
    };
    EmbeddedBroker::start_with(&server(), options).await.unwrap()
}

/// Client that is connected in a role. It collects the refusals that the server sends.
struct InRole {
    nats: async_nats::Client,
    refusals: UnboundedReceiver<String>,
}

impl InRole {
    async fn connect(url: &str, role: &str) -> Self {
        let (sender, refusals) = unbounded_channel();
        let nats = async_nats::ConnectOptions::new()
            .user_and_password(role.to_owned(), password(role))
            .custom_inbox_prefix(inbox_prefix(role))
            .event_callback(move |event| {
                if let async_nats::Event::ServerError(error) = event {
                    let _ = sender.send(error.to_string());
                }
                std::future::ready(())
            })
            .connect(url)
            .await
            .unwrap();
        Self { nats, refusals }
    }

    fn queries(&self) -> QueryClient {
        QueryClient::new(self.nats.clone(), subjects()).with_patience(PATIENCE)
    }

    /// Waits until the server has sent a refusal that names `subject`.
    async fn is_refused(&mut self, subject: &str) {
        let refused = async {
            loop {
                let words = self.refusals.recv().await.expect("the connection is open");
                if words.to_lowercase().contains("permissions violation") && words.contains(subject) {
                    return;
                }
            }
        };
        tokio::time::timeout(PATIENCE, refused)
            .await
            .unwrap_or_else(|_| panic!("nobody refused {subject}"));
    }

    async fn may_not_publish(&mut self, subject: &str) {
        self.nats.publish(subject.to_owned(), "x".into()).await.unwrap();
        self.nats.flush().await.unwrap();
        self.is_refused(subject).await;
    }

    async fn may_not_listen(&mut self, subject: &str) {
        let _subscriber = self.nats.subscribe(subject.to_owned()).await.unwrap();
        self.nats.flush().await.unwrap();
        self.is_refused(subject).await;
    }

    async fn publisher(&self, name: &str, epoch: u64) -> HolderPublisher {
        let options = PublisherOptions {
            heartbeat_interval: Duration::from_millis(50),
            beginning: Beginning::Epoch(epoch),
            ..PublisherOptions::default()
        };
        engine(self.nats.clone(), &subjects(), name, options).await
    }
}

/// Starts a daemon with the rights of a role, and waits until it is ready.
async fn daemon(url: &str, role: &str, more: &[(&str, &str)]) -> Daemon {
    let daemon = started(url, role, more).await;
    tokio::time::timeout(PATIENCE, daemon.ready())
        .await
        .expect("the daemon becomes ready");
    daemon
}

/// Starts a daemon with the rights of a role. It need not become ready.
async fn started(url: &str, role: &str, more: &[(&str, &str)]) -> Daemon {
    let (password, prefix) = (password(role), inbox_prefix(role));
    let mut settings = vec![
        ("nats.user", role),
        ("nats.password", password.as_str()),
        ("nats.inbox_prefix", prefix.as_str()),
    ];
    settings.extend_from_slice(more);
    Daemon::start(config(url, &settings)).await.unwrap()
}

async fn holder(queries: &QueryClient, name: &str) -> Option<HolderStatusReply> {
    let status = queries.status(&namespace()).await.ok()?;
    status
        .holders
        .into_iter()
        .find(|holder| holder.worker.as_str() == name)
}

async fn is_exact_with(queries: &QueryClient, name: &str, blocks: u64) {
    eventually("the holder is exact", async || {
        let holder = holder(queries, name).await?;
        (holder.exact && holder.blocks == blocks).then_some(())
    })
    .await;
}

/// Makes the daemons forget a worker.
async fn an_operator_forgets_a_worker(url: &str, daemons: usize) {
    let operator = InRole::connect(url, "operator").await;
    let inbox = operator.nats.new_inbox();
    let mut replies = operator.nats.subscribe(inbox.clone()).await.unwrap();
    let request = AdminRequest {
        holder: Some(AdminHolder {
            namespace: namespace(),
            worker: worker("gpu-0"),
            rank: None,
        }),
        ..AdminRequest::default()
    };
    let subject = subjects().admin(AdminCommand::Forget);
    operator
        .nats
        .publish_with_reply(subject, inbox, request.encode().into())
        .await
        .unwrap();
    for _ in 0..daemons {
        let reply = tokio::time::timeout(PATIENCE, replies.next()).await;
        let reply = AdminReply::decode(&reply.expect("each daemon replies").unwrap().payload).unwrap();
        assert_eq!((reply.holders, reply.error), (1, None));
    }
}

/// Starts the publisher of gpu-0, in epoch 7, which has published three blocks.
async fn of_three_blocks(url: &str) -> HolderPublisher {
    let publisher = InRole::connect(url, "gpu-0").await.publisher("gpu-0", 7).await;
    let blocks = vec![stored(hashes(1, 3))];
    publisher.publish(Tier::DEVICE, blocks).await.unwrap();
    publisher
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_commands_all_daemons_with_either_configuration() {
    for configuration in [USERS, ACCOUNTS] {
        let broker = broker(configuration).await;
        let daemons = [
            daemon(broker.url(), "daemon", &[]).await,
            daemon(broker.url(), "daemon", &[]).await,
        ];
        let _publisher = of_three_blocks(broker.url()).await;
        let queries = InRole::connect(broker.url(), "operator").await.queries();
        // Repeated queries reach all daemons.
        for _ in 0..20 {
            is_exact_with(&queries, "gpu-0", 3).await;
        }
        an_operator_forgets_a_worker(broker.url(), daemons.len()).await;
        // The worker's next heartbeat makes the daemons ask for its blocks again.
        is_exact_with(&queries, "gpu-0", 3).await;
        for daemon in daemons {
            daemon.stop().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bridge_hears_resets_and_questions_after_services_with_either_configuration() {
    for configuration in [USERS, ACCOUNTS] {
        let broker = broker(configuration).await;
        let mut bridge = InRole::connect(broker.url(), "rack-1").await;
        let reset = subjects().admin(AdminCommand::Reset);
        let mut resets = bridge.nats.subscribe(reset.clone()).await.unwrap();
        let _services = bridge.nats.subscribe("$SRV.PING").await.unwrap();
        let _refused = bridge.nats.subscribe("kvatlas.v1.events.>").await.unwrap();
        let first = tokio::time::timeout(PATIENCE, bridge.refusals.recv()).await;
        let first = first.expect("the server refuses something").unwrap();
        assert!(first.contains("kvatlas.v1.events.>"), "{first}");
        let operator = InRole::connect(broker.url(), "operator").await;
        let inbox = operator.nats.new_inbox();
        let mut replies = operator.nats.subscribe(inbox.clone()).await.unwrap();
        let asked = operator.nats.publish_with_reply(reset, inbox, "x".into());
        asked.await.unwrap();
        let answered = async {
            let heard = resets.next().await.unwrap();
            let answer = bridge.nats.publish(heard.reply.unwrap(), "done".into());
            answer.await.unwrap();
            while replies.next().await.unwrap().payload != "done" {}
        };
        let answered = tokio::time::timeout(PATIENCE, answered).await;
        answered.expect("the bridge hears the command, and the operator the answer");
    }
}

/// Publishes 400,000 blocks of one worker, so that its full state takes many messages. Then replaces the daemon by a
/// daemon without state. Fails unless the new daemon gets all blocks from the publishers.
async fn publishers_work_as_they_should(url: &str) {
    let first = daemon(url, "daemon", &[]).await;
    let (engine, rack) = (
        InRole::connect(url, "gpu-0").await,
        InRole::connect(url, "rack-1").await,
    );
    let router = InRole::connect(url, "router").await;
    let publisher = engine.publisher("gpu-0", 7).await;
    for start in 0..40_u64 {
        let blocks = hashes(1 + start * 10_000, 10_000);
        publisher
            .publish(Tier::DEVICE, vec![stored(blocks)])
            .await
            .unwrap();
    }
    let other = rack.publisher("gpu-2", 7).await;
    other
        .publish(Tier::DEVICE, vec![stored(hashes(1, 3))])
        .await
        .unwrap();
    let queries = router.queries();
    is_exact_with(&queries, "gpu-0", 400_000).await;
    is_exact_with(&queries, "gpu-2", 3).await;
    first.stop().await;
    // The new daemon has no state. It gets the full state, which takes several chunks of at most 1 MiB.
    let second = daemon(url, "daemon", &[]).await;
    is_exact_with(&queries, "gpu-0", 400_000).await;
    is_exact_with(&queries, "gpu-2", 3).await;
    let query = by_sequence(&hashes(1, 3));
    let reply = queries.query(&namespace(), query).await.unwrap();
    let found: Vec<(String, u32)> = matches(&reply)
        .into_iter()
        .map(|(name, _, blocks, _)| (name, blocks))
        .collect();
    assert_eq!(found, [("gpu-0".to_owned(), 3), ("gpu-2".to_owned(), 3)]);
    second.stop().await;
}

async fn nobody_does_what_others_should(url: &str) {
    let mut engine = InRole::connect(url, "gpu-0").await;
    engine.may_not_publish("kvatlas.v1.events.llama.gpu-1").await;
    engine.may_not_publish("kvatlas.v1.query.llama").await;
    engine.may_not_publish("_INBOX_ROUTER.x").await;
    engine.may_not_listen("kvatlas.v1.events.>").await;
    engine.may_not_listen("kvatlas.v1.resync.*.gpu-1.*").await;
    engine.may_not_listen("_INBOX_DAEMON.>").await;
    let mut rack = InRole::connect(url, "rack-1").await;
    rack.may_not_publish("kvatlas.v1.events.llama.gpu-0").await;
    let mut router = InRole::connect(url, "router").await;
    router.may_not_publish("kvatlas.v1.events.llama.gpu-0").await;
    router.may_not_publish("kvatlas.v1.query.other").await;
    router.may_not_publish("kvatlas.v1.resync.llama.gpu-0.0").await;
    router.may_not_listen("kvatlas.v1.events.>").await;
    router.may_not_listen("kvatlas.v1.query.>").await;
    router.may_not_listen("kvatlas.v1.shards.query.>").await;
    router.may_not_listen("_INBOX_GATEWAY.>").await;
    for mut other in [engine, rack, router] {
        other.may_not_publish("kvatlas.v1.admin.forget").await;
        other.may_not_listen("kvatlas.v1.admin.*").await;
    }
    let mut gateway = InRole::connect(url, "gateway").await;
    gateway.may_not_publish("kvatlas.v1.admin.drain").await;
    gateway.may_not_publish("kvatlas.v1.events.llama.gpu-0").await;
    gateway.may_not_listen("kvatlas.v1.shards.query.>").await;
    let mut operator = InRole::connect(url, "operator").await;
    operator.may_not_publish("kvatlas.v1.resync.llama.gpu-0.0").await;
    operator.may_not_listen("kvatlas.v1.events.>").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_with_permissions_do_their_work_and_no_other() {
    let broker = broker(USERS).await;
    Box::pin(publishers_work_as_they_should(broker.url())).await;
    nobody_does_what_others_should(broker.url()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn accounts_share_what_is_exported_and_nothing_else() {
    let broker = broker(ACCOUNTS).await;
    Box::pin(publishers_work_as_they_should(broker.url())).await;
    // Events from another account do not arrive, so they are not even refused.
    let mut router = InRole::connect(broker.url(), "router").await;
    router.may_not_publish("kvatlas.v1.events.llama.gpu-0").await;
    let mut engine = InRole::connect(broker.url(), "gpu-0").await;
    engine.may_not_publish("kvatlas.v1.events.llama.gpu-1").await;
    engine.may_not_publish("kvatlas.v1.query.llama").await;
}

/// Returns the longest query by hash that fits into a message of `bytes`, and its length.
fn longest_query(bytes: usize) -> (SingleQuery, usize) {
    const BYTES_PER_BLOCK: usize = 8;
    let encoded = |query: &SingleQuery| QueryRequest::Single(query.clone()).encode().len();
    let beside = encoded(&by_sequence(&hashes(1, 10_000))) - 10_000 * BYTES_PER_BLOCK;
    let blocks = (bytes - beside) / BYTES_PER_BLOCK;
    let query = by_sequence(&hashes(1, blocks as u64));
    let length = encoded(&query);
    (query, length)
}

/// Publishes `blocks` blocks on each of `ranks` ranks of a worker. The batches fit even a server with a small
/// `max_payload`.
async fn hold_on_ranks(engine: &InRole, ranks: u32, blocks: u64) {
    for rank in 0..ranks {
        let (nats, name) = (engine.nats.clone(), worker("gpu-0"));
        let mut publisher =
            crate::support::publisher::Publisher::new(nats, &subjects(), &namespace(), &name, rank);
        let batch = stored(hashes(1, blocks));
        publisher.publish(Tier::DEVICE, vec![batch]).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_router_in_an_account_of_its_own_cannot_send_more_than_a_long_query() {
    const LIMIT: usize = 128 << 10;
    const RANKS: u32 = 12;
    let broker = broker(ACCOUNTS).await;
    let limit = LIMIT.to_string();
    let daemon = daemon(broker.url(), "daemon", &[("queries.max_message_bytes", &limit)]).await;
    let engine = InRole::connect(broker.url(), "gpu-0").await;
    hold_on_ranks(&engine, RANKS, 3).await;
    let router = InRole::connect(broker.url(), "router").await;
    let queries = router.queries();
    is_exact_with(&queries, "gpu-0", 3).await;
    eventually("all ranks are known", async || {
        let reply = queries
            .query(&namespace(), by_sequence(&hashes(1, 3)))
            .await
            .ok()?;
        (reply.holders_total == RANKS).then_some(())
    })
    .await;
    // This query has exactly the daemon's own limit.
    let (query, length) = longest_query(LIMIT);
    assert!((LIMIT - 8..=LIMIT).contains(&length), "{length}");
    let reply = queries.query(&namespace(), query).await.unwrap();
    assert_eq!(reply.holders[0].matched_blocks, 3);
    // A reply may be larger than the messages that the router may send.
    let asked = vec![by_sequence(&hashes(1, 3)); 256];
    let results = queries.query_batch(&namespace(), asked).await.unwrap();
    let bytes: usize = results
        .iter()
        .map(|result| rmp_serde::to_vec_named(result).unwrap().len())
        .sum();
    assert!(bytes > LIMIT, "{bytes}");
    // The client library ignores the limit of the account, so the connection ends. The query client does not try for
    // ever.
    let (query, _) = longest_query(2 * LIMIT);
    let error = queries.query(&namespace(), query).await.unwrap_err();
    let names_the_limit = |text: &String| text.contains("max_payload");
    assert!(
        matches!(&error, ClientError::Connection(text) if names_the_limit(text)),
        "{error}"
    );
    // A client that sends a longer message anyway is refused at its first line, and cut off.
    let user = format!(
        r#"{{"user":"router","pass":"{}","verbose":false}}"#,
        password("router")
    );
    let said = said_to(
        broker.url(),
        &format!("CONNECT {user}\r\nPUB kvatlas.v1.query.llama x {}\r\n", LIMIT + 1),
    );
    assert!(said.contains("Maximum Payload Violation"), "{said}");
    daemon.stop().await;
}

/// Sends `words` to a server, and returns all that it sends until it ends the connection.
fn said_to(url: &str, words: &str) -> String {
    let address = url.trim_start_matches("nats://");
    let mut connection = std::net::TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(PATIENCE)).unwrap();
    connection.write_all(words.as_bytes()).unwrap();
    let mut said = String::new();
    connection
        .read_to_string(&mut said)
        .expect("the server ends the connection");
    said
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_answers_for_the_shards_with_the_rights_of_a_gateway() {
    for configuration in [USERS, ACCOUNTS] {
        let broker = broker(configuration).await;
        let url = broker.url();
        let hints = ("hints.ttl_ms", "60000");
        let shards = [
            daemon(url, "daemon", &[("sharding.shard", "0/2"), hints]).await,
            daemon(url, "daemon", &[("sharding.shard", "1/2"), hints]).await,
        ];
        let settings = [("gateway.enabled", "true"), ("http.listen", "127.0.0.1:0")];
        let gateway = daemon(url, "gateway", &settings).await;
        let _publisher = of_three_blocks(url).await;
        let queries = InRole::connect(url, "router").await.queries();
        is_exact_with(&queries, "gpu-0", 3).await;
        reports_reach_the_shards(gateway.http_address().unwrap()).await;
        for daemon in shards.into_iter().chain([gateway]) {
            daemon.stop().await;
        }
    }
}

/// Sends a hint and an outcome to a gateway over HTTP.
async fn reports_reach_the_shards(gateway: std::net::SocketAddr) {
    let mut http = HttpClient::connect(gateway).await;
    let namespace = namespace();
    let hint = json!({"worker": "gpu-0", "prompt": {"sequence_hashes": [1, 2, 3, 4]}});
    let outcome = json!({"worker": "gpu-0", "promised_blocks": 3, "found_tokens": 48});
    for (path, list, report, taken) in [
        ("/v1/hints", "hints", hint, "taken"),
        ("/v1/outcomes", "outcomes", outcome, "counted"),
    ] {
        let told = json!({"namespace": namespace.as_str(), list: [report]});
        let whole = json!({taken: 1, "gathered": {"shards": 2, "missing": []}});
        // For a while, the shard without workers does not know that no worker of the namespace belongs to it.
        eventually("both shards take the report", async || {
            let answer = http.post(path, &told).await.json();
            (answer == whole).then_some(())
        })
        .await;
    }
}

/// Stops the daemon `leaving`, and fails unless it publishes on the subject `filler`. By the arrival of its own message
/// on this subject, a daemon knows that it has received all earlier requests.
async fn leaves_in_good_order(url: &str, leaving: Daemon, filler: &str) {
    let listener = InRole::connect(url, "daemon").await;
    let mut fillers = listener.nats.subscribe(filler.to_owned()).await.unwrap();
    round_trip(&listener.nats, PATIENCE).await.unwrap();
    leaving.stop().await;
    let filled = tokio::time::timeout(PATIENCE, fillers.next()).await;
    assert!(matches!(filled, Ok(Some(_))), "nobody may publish on {filler}");
}

#[tokio::test(flavor = "multi_thread")]
async fn daemons_and_gateways_may_learn_that_they_have_seen_every_request() {
    let broker = broker(USERS).await;
    let url = broker.url();
    let whole = daemon(url, "daemon", &[]).await;
    leaves_in_good_order(url, whole, "kvatlas.v1.query.~").await;
    let shard = daemon(url, "daemon", &[("sharding.shard", "0/2")]).await;
    let gateway = daemon(url, "gateway", &[("gateway.enabled", "true")]).await;
    leaves_in_good_order(url, gateway, "kvatlas.v1.status.~").await;
    leaves_in_good_order(url, shard, "kvatlas.v1.shards.query.~").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_takes_a_worker_out() {
    let broker = broker(USERS).await;
    let daemon = daemon(broker.url(), "daemon", &[]).await;
    let publisher = of_three_blocks(broker.url()).await;
    let operator = InRole::connect(broker.url(), "operator").await;
    let queries = operator.queries();
    is_exact_with(&queries, "gpu-0", 3).await;
    drop(publisher);
    let cursor = BatchCursor { epoch: 8, seq: 0 };
    let mut last_words = crate::support::publisher::Publisher::new(
        operator.nats.clone(),
        &subjects(),
        &namespace(),
        &worker("gpu-0"),
        0,
    )
    .resuming(cursor);
    last_words
        .publish(Tier::DEVICE, vec![Event::Goodbye])
        .await
        .unwrap();
    eventually("the worker is forgotten", async || {
        holder(&queries, "gpu-0").await.is_none().then_some(())
    })
    .await;
    daemon.stop().await;
}

/// Runs `kvatlas publish` for a worker, with the rights of gpu-0's publisher. Returns its exit code and its output.
async fn publish_by_command(url: &str, worker: &'static str) -> (Option<i32>, String) {
    let url = url.to_owned();
    let running = tokio::task::spawn_blocking(move || {
        let folder = tempfile::tempdir().unwrap();
        let lines = folder.path().join("lines");
        std::fs::write(&lines, "{\"type\":\"stored\",\"sequence_hashes\":[1,2,3]}\n").unwrap();
        let arguments = [
            "publish",
            "--nats-url",
            &url,
            "--namespace",
            "llama",
            "--worker",
            worker,
        ];
        let output = crate::support::process::kvatlas(&arguments)
            .arg(&lines)
            .env("KVATLAS_NATS_USER", "gpu-0")
            .env("KVATLAS_NATS_PASSWORD", password("gpu-0"))
            .env("KVATLAS_NATS_INBOX_PREFIX", inbox_prefix("gpu-0"))
            .output()
            .unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    });
    running.await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_that_the_server_refuses_is_an_error() {
    let broker = broker(USERS).await;
    let (code, said) = publish_by_command(broker.url(), "gpu-0").await;
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = publish_by_command(broker.url(), "gpu-1").await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("Permissions Violation"), "{said}");
}

/// Runs `kvatlas replay` with the rights of gpu-0's publisher, which do not allow queries. The output must name the
/// refused permission.
#[tokio::test(flavor = "multi_thread")]
async fn a_replay_that_may_not_ask_says_so() {
    let broker = broker(USERS).await;
    let url = broker.url().to_owned();
    let running = tokio::task::spawn_blocking(move || {
        let folder = tempfile::tempdir().unwrap();
        let trace = folder.path().join("trace");
        let request = r#"{"timestamp":0,"input_length":512,"output_length":2,"hash_ids":[1]}"#;
        std::fs::write(&trace, format!("{request}\n")).unwrap();
        crate::support::process::kvatlas(&["replay", "--nats-url", &url, "--trace"])
            .arg(&trace)
            .env("KVATLAS_NATS_USER", "gpu-0")
            .env("KVATLAS_NATS_PASSWORD", password("gpu-0"))
            .env("KVATLAS_NATS_INBOX_PREFIX", inbox_prefix("gpu-0"))
            .output()
            .unwrap()
    });
    let output = running.await.unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("Permissions Violation"), "{said}");
}

/// Starts the library's publisher for the worker `name`, with the rights of gpu-0's publisher.
async fn publish_with_library(url: &str, name: &str) -> HolderPublisher {
    let options = async_nats::ConnectOptions::new()
        .user_and_password("gpu-0".to_owned(), password("gpu-0"))
        .custom_inbox_prefix(inbox_prefix("gpu-0"));
    let nats = PublishConnection::connect(options, url).await.unwrap();
    let publisher = engine(nats, &subjects(), name, PublisherOptions::default()).await;
    let events = vec![stored(hashes(1, 3))];
    publisher.publish(Tier::DEVICE, events).await.unwrap();
    publisher
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_that_the_server_refuses_is_an_error_of_the_library() {
    let broker = broker(USERS).await;
    let ours = publish_with_library(broker.url(), "gpu-0").await;
    ours.flush().await.unwrap();
    assert_eq!(ours.counters().batches_refused, 0);
    ours.say_goodbye().await.unwrap();

    let others = publish_with_library(broker.url(), "gpu-1").await;
    let refused = others.flush().await.unwrap_err();
    assert!(
        matches!(&refused, PublisherError::Refused { words } if words.contains("Permissions Violation")),
        "{refused}"
    );
    assert!(others.counters().batches_refused >= 1);
    // The publisher continues after a refusal, because its next batch may be accepted.
    let events = vec![stored(hashes(4, 3))];
    others.publish(Tier::DEVICE, events).await.unwrap();
    let refused = others.say_goodbye().await.unwrap_err();
    assert!(matches!(&refused, PublisherError::Refused { .. }), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_does_not_speak_with_the_rights_of_the_daemon() {
    let broker = broker(USERS).await;
    let user = [
        ("nats.user", "daemon".to_owned()),
        ("nats.password", password("daemon")),
        ("nats.inbox_prefix", inbox_prefix("daemon")),
    ];
    let settings: Vec<(&str, &str)> = user.iter().map(|(key, text)| (*key, text.as_str())).collect();
    // The daemon has a process of its own, so that the metrics are its own.
    let daemon = Process::serve(broker.url(), &settings);
    let _publisher = of_three_blocks(broker.url()).await;
    let router = InRole::connect(broker.url(), "router").await;
    let queries = router.queries();
    is_exact_with(&queries, "gpu-0", 3).await;
    // The server lets a client name any subject for the reply, and lets the daemon reply there.
    let subjects = [
        "kvatlas.v1.events.llama.gpu-0",
        "kvatlas.v1.admin.drain",
        "$JS.API.STREAM.DELETE.KVATLAS_EVENTS",
    ];
    for reply_to in subjects {
        for asked in ["kvatlas.v1.query.llama", "kvatlas.v1.status.llama"] {
            let sent = router.nats.publish_with_reply(asked, reply_to, "x".into()).await;
            sent.unwrap();
        }
    }
    let dropped = "kvatlas_query_replies_dropped_total{reason=\"forbidden_reply_subject\"}";
    eventually("no reply is sent there", async || {
        (counter(&daemon, dropped) == 6).then_some(())
    })
    .await;
    let holder = holder(&queries, "gpu-0").await.unwrap();
    assert!(holder.exact, "{holder:?}");
    assert!(total(&daemon, "kvatlas_batches_dropped_total", "") == 0.0);
}
