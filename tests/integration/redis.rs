//! llm-d's router asks kvatlas as its Redis server. The tests replay the bytes of a session with a real Redis, and
//! cover cases that the session does not have.

use std::path::Path;
use std::time::Duration;

use kvatlas_client::ClientError;
use kvatlas_core::hash::{BlockHash, BlockSize, SequenceHash};
use kvatlas_core::wire::{
    ErrorCode, Event, EventBatch, ModelKey, NamespaceName, Profile, QueryKey, RemovedBlocks, Resumable,
    Shard, SingleQuery, StoredBlocks, Tier, worker_of_instance,
};
use kvatlas_daemon::Daemon;
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::http::HttpClient;
use crate::support::publisher::Publisher;
use crate::support::{Client, PATIENCE, broker, daemon, eventually, skipped, subjects};

/// Returns the model of the recorded session. Its block keys are those of llm-d with XXH64.
fn model() -> ModelKey {
    ModelKey::new("m").speaking(Some("llm-d-xxh64".parse().unwrap()))
}

fn namespace() -> NamespaceName {
    model().namespace().unwrap()
}

/// Returns the first tokens of the session's prompt, from 1 on.
fn tokens(count: u32) -> Vec<u32> {
    (1..=count).collect()
}

/// Returns the keys of a prompt of `blocks` blocks.
fn keys(blocks: u32) -> Vec<SequenceHash> {
    let chains = model().chains().unwrap();
    chains.sequence_hashes(&tokens(blocks * 16), BlockSize::DEFAULT, None, None)
}

fn stored(blocks: u32) -> Vec<Event> {
    vec![Event::Stored(StoredBlocks::by_sequence(None, None, keys(blocks)))]
}

fn publisher(client: &Client, pod: &str) -> Publisher {
    let worker = worker_of_instance(pod).unwrap();
    Publisher::new(client.nats.clone(), &subjects(), &namespace(), &worker, 0)
}

/// Has pod a store the blocks `keys` in a namespace, and waits until the daemon knows them. Returns the pod's publisher.
async fn stores(client: &Client, namespace: &NamespaceName, keys: &[SequenceHash]) -> Publisher {
    let worker = worker_of_instance("a").unwrap();
    let mut publisher = Publisher::new(client.nats.clone(), &subjects(), namespace, &worker, 0);
    let stored = StoredBlocks::by_sequence(None, None, keys.to_vec());
    let events = vec![Event::Stored(stored)];
    publisher.publish(Tier::DEVICE, events).await.unwrap();
    settles_in(client, namespace, keys.len() as u64).await;
    publisher
}

/// Waits until all holders of the namespace together have exactly `blocks` blocks.
async fn settles(client: &Client, blocks: u64) {
    settles_in(client, &namespace(), blocks).await;
}

async fn settles_in(client: &Client, namespace: &NamespaceName, blocks: u64) {
    eventually("the batches are applied", async || {
        let status = client.queries.status(namespace).await.ok()?;
        let held = status.holders.iter().map(|holder| holder.blocks).sum::<u64>();
        (held == blocks).then_some(())
    })
    .await;
}

/// Simulated router of llm-d, with its connection to the daemon's Redis listener.
struct Router(TcpStream);

impl Router {
    async fn connect(daemon: &Daemon) -> Self {
        let address = daemon.redis_address().unwrap();
        Self(TcpStream::connect(address).await.unwrap())
    }

    async fn write(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).await.unwrap();
    }

    /// Reads as many bytes as `expected` has.
    async fn read_like(&mut self, expected: &str) -> String {
        let mut bytes = vec![0; expected.len()];
        let read = tokio::time::timeout(PATIENCE, self.0.read_exact(&mut bytes));
        read.await.expect("a reply comes").unwrap();
        String::from_utf8(bytes).unwrap()
    }

    /// Sends `sent`, and requires that exactly `expected` comes back.
    async fn exchange(&mut self, sent: &str, expected: &str) {
        self.write(sent.as_bytes()).await;
        assert_eq!(self.read_like(expected).await, expected, "for {sent:?}");
        self.write(b"*2\r\n$4\r\necho\r\n$3\r\nend\r\n").await;
        assert_eq!(
            self.read_like("$3\r\nend\r\n").await,
            "$3\r\nend\r\n",
            "behind {sent:?}"
        );
    }

    /// Returns all bytes that come until the listener closes the connection.
    async fn rest(&mut self) -> String {
        let mut bytes = Vec::new();
        let read = tokio::time::timeout(PATIENCE, self.0.read_to_end(&mut bytes));
        read.await.expect("the connection ends").unwrap();
        String::from_utf8(bytes).unwrap()
    }
}

fn hkeys(keys: &[SequenceHash]) -> String {
    let command = |key: &SequenceHash| {
        let key = key.as_u64().to_string();
        format!("*2\r\n$5\r\nhkeys\r\n${}\r\n{key}\r\n", key.len())
    };
    keys.iter().map(command).collect()
}

fn field(pod: &str, tier: &str) -> String {
    let field = format!(
        "{{\"PodIdentifier\":\"{pod}\",\"DeviceTier\":\"{tier}\",\"Speculative\":false,\"HasGroup\":false,\"GroupIdx\":0}}"
    );
    format!("${}\r\n{field}\r\n", field.len())
}

#[derive(Deserialize)]
struct Recorded {
    connection: u32,
    from: String,
    bytes: String,
}

/// Returns the recorded session: for each connection, the bytes sent and the bytes that came back. `None` if there is
/// no record.
fn session() -> Option<Vec<Vec<(String, String)>>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/llmd/redis-session.jsonl");
    let Ok(text) = std::fs::read_to_string(&path) else {
        skipped(&format!("there is no recorded session at {}", path.display()));
        return None;
    };
    let mut connections: Vec<Vec<(String, String)>> = Vec::new();
    for line in text.lines() {
        let recorded: Recorded = serde_json::from_str(line).unwrap();
        let number = usize::try_from(recorded.connection).unwrap();
        if connections.len() < number {
            connections.push(Vec::new());
        }
        let exchanges = connections.last_mut().unwrap();
        match recorded.from.as_str() {
            "client" => exchanges.push((recorded.bytes, String::new())),
            _ => exchanges.last_mut().unwrap().1.push_str(&recorded.bytes),
        }
    }
    Some(connections)
}

/// Sends the recorded commands of a connection to the daemon. Each reply must equal the recorded one byte for byte,
/// except for three commands. `eval` is not sent, because the listener knows llm-d's scripts from the start. The reply
/// to `evalsha` must be 1. In the reply to `hello`, the number of the connection must be 1.
async fn replay(daemon: &Daemon, exchanges: &[(String, String)]) {
    let mut router = Router::connect(daemon).await;
    for (sent, expected) in exchanges {
        if sent.contains("\r\nevalsha\r\n") {
            router.write(sent.as_bytes()).await;
            assert_eq!(router.read_like(":1\r\n").await, ":1\r\n");
        } else if sent.contains("\r\nhello\r\n") {
            router.write(sent.as_bytes()).await;
            let (before, behind) = expected.split_once("$2\r\nid\r\n:").unwrap();
            assert_eq!(router.read_like(before).await, before);
            router.read_like("$2\r\nid\r\n:1\r\n").await;
            let behind = behind.split_once("\r\n").unwrap().1;
            assert_eq!(router.read_like(behind).await, behind);
        } else if !sent.contains("\r\neval\r\n") {
            router.exchange(sent, expected).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_with_a_real_redis_has_the_same_bytes() {
    let Some(connections) = session() else { return };
    let [
        adds,
        guesses,
        look_up,
        takes_back,
        again,
        on_host,
        evicts,
        _clears,
        gone,
    ] = connections.as_slice()
    else {
        panic!("{} connections", connections.len());
    };
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("redis.listen", "127.0.0.1:0")]).await;
    let client = Client::connect(broker.url()).await;
    // In the recorded session, the router itself writes what engines hold. kvatlas gets the same facts as events.
    let (mut one, mut three) = (
        publisher(&client, "10.0.0.1:8000"),
        publisher(&client, "10.0.0.3:8000"),
    );
    for writes in [adds, on_host, evicts] {
        let (handshake, rest) = writes.split_at(4);
        replay(&daemon, handshake).await;
        assert!(rest[0].0.contains("zadd") || rest[0].0.contains("zrange"));
    }
    one.publish(Tier::DEVICE, stored(3)).await.unwrap();
    settles(&client, 3).await;
    for connection in [guesses, look_up, takes_back, again] {
        replay(&daemon, connection).await;
    }
    three.publish(Tier::new(1).unwrap(), stored(3)).await.unwrap();
    settles(&client, 6).await;
    let (gpu, cpu) = (field("10.0.0.1:8000", "gpu"), field("10.0.0.3:8000", "cpu"));
    let both = format!("*2\r\n{gpu}{cpu}").repeat(3);
    Router::connect(&daemon)
        .await
        .exchange(&hkeys(&keys(3)), &both)
        .await;
    let removed = keys(3).into_iter().rev().collect();
    let removed = vec![Event::Removed(RemovedBlocks::by_sequence(removed))];
    one.publish(Tier::DEVICE, removed).await.unwrap();
    settles(&client, 3).await;
    three.publish(Tier::DEVICE, vec![Event::Cleared]).await.unwrap();
    settles(&client, 0).await;
    replay(&daemon, gone).await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_may_come_in_parts_and_prompts_may_follow_each_other() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("redis.listen", "127.0.0.1:0")]).await;
    let client = Client::connect(broker.url()).await;
    let mut one = publisher(&client, "a");
    one.publish(Tier::DEVICE, stored(6)).await.unwrap();
    let mut two = publisher(&client, "b");
    two.publish(Tier::DEVICE, stored(4)).await.unwrap();
    settles(&client, 10).await;
    let (a, b) = (field("a", "gpu"), field("b", "gpu"));
    let reply = |position: usize| match position {
        0..4 => format!("*2\r\n{a}{b}"),
        4..6 => format!("*1\r\n{a}"),
        _ => "*0\r\n".to_owned(),
    };
    let replies = |positions: std::ops::Range<usize>| positions.map(reply).collect::<String>();
    let all = keys(8);
    let mut router = Router::connect(&daemon).await;
    for cut in 1..8 {
        // The second part is sent after the first part has been answered.
        router.write(hkeys(&all[..cut]).as_bytes()).await;
        let expected = replies(0..cut);
        assert_eq!(router.read_like(&expected).await, expected, "cut at {cut}");
        router.exchange(&hkeys(&all[cut..]), &replies(cut..8)).await;
    }
    // Two prompts follow one another, with keys between them that no holder has.
    router.write(hkeys(&all[..6]).as_bytes()).await;
    router.read_like(&replies(0..6)).await;
    router
        .write(hkeys(&[SequenceHash(5), SequenceHash(6)]).as_bytes())
        .await;
    router.read_like("*0\r\n*0\r\n").await;
    router.write(hkeys(&all[..2]).as_bytes()).await;
    assert_eq!(router.read_like(&replies(0..2)).await, replies(0..2));
    // A key in the middle of a prompt finds nothing without the keys before it.
    router.exchange("PING\r\n", "+PONG\r\n").await;
    router.exchange(&hkeys(&all[2..3]), "*0\r\n").await;
    daemon.stop().await;
}

/// A worker with windows or states can reuse its blocks only from where it has kept the state.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_of_which_only_the_whole_can_be_reused_may_come_in_parts() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("redis.listen", "127.0.0.1:0")]).await;
    let client = Client::connect(broker.url()).await;
    let stored = Event::Stored(StoredBlocks {
        resumable: Resumable::from_flags([false, false, false, false, false, true]),
        ..StoredBlocks::by_sequence(None, None, keys(6))
    });
    publisher(&client, "a")
        .publish(Tier::DEVICE, vec![stored])
        .await
        .unwrap();
    settles(&client, 6).await;
    let (all, one) = (hkeys(&keys(6)), format!("*1\r\n{}", field("a", "gpu")));
    let mut router = Router::connect(&daemon).await;
    let whole = one.repeat(6);
    router.exchange(&all, &whole).await;
    for cut in [hkeys(&keys(2)).len() + 5, all.len() - 1] {
        // The reply to the first command shows that the part has been read.
        router.write(format!("PING\r\n{}", &all[..cut]).as_bytes()).await;
        router.read_like("+PONG\r\n").await;
        router.exchange(&all[cut..], &whole).await;
    }
    // The first part seems to be a prompt.
    router.write(hkeys(&keys(6)[..2]).as_bytes()).await;
    assert_eq!(router.read_like("*0\r\n*0\r\n").await, "*0\r\n*0\r\n");
    router.exchange(&hkeys(&keys(6)[2..]), &one.repeat(4)).await;
    daemon.stop().await;
}

/// Each part counts as an answer about the prompt so far. No part counts as a prompt of its own, which nobody would have.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_comes_in_parts_counts_as_found() {
    let broker = broker().await;
    let settings = [("redis.listen", "127.0.0.1:0"), ("http.listen", "127.0.0.1:0")];
    let daemon = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    // Other tests in this process do not use this model, so its counts are of this test.
    let model = ModelKey::new("in-parts").speaking(model().scheme);
    let (chains, namespace) = (model.chains().unwrap(), model.namespace().unwrap());
    let keys = chains.sequence_hashes(&tokens(6 * 16), BlockSize::DEFAULT, None, None);
    let _publisher = stores(&client, &namespace, &keys).await;
    let mut router = Router::connect(&daemon).await;
    let expected = format!("*1\r\n{}", field("a", "gpu")).repeat(2);
    for part in keys.chunks(2) {
        router.write(hkeys(part).as_bytes()).await;
        assert_eq!(router.read_like(&expected).await, expected);
    }
    let mut http = HttpClient::connect(daemon.http_address().unwrap()).await;
    let metrics = String::from_utf8(http.get("/metrics").await.body).unwrap();
    let answers = metrics
        .lines()
        .filter(|line| line.starts_with("kvatlas_query_answers_total{") && line.contains(namespace.as_str()));
    let count = |line: &str| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap();
    let (empty, found): (Vec<_>, Vec<_>) = answers.partition(|line| line.contains("\"empty\""));
    let sum = |lines: Vec<&str>| lines.into_iter().map(count).sum::<u64>();
    assert_eq!((sum(found), sum(empty)), (3, 0), "{metrics}");
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_all_tenants_are_found() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("redis.listen", "127.0.0.1:0")]).await;
    let client = Client::connect(broker.url()).await;
    let tenant = ModelKey::of_tenant("m", "zeta").speaking(model().scheme);
    let (tenant, pod) = (tenant.namespace().unwrap(), worker_of_instance("b").unwrap());
    let mut other = Publisher::new(client.nats.clone(), &subjects(), &tenant, &pod, 0);
    publisher(&client, "a")
        .publish(Tier::DEVICE, stored(4))
        .await
        .unwrap();
    other.publish(Tier::DEVICE, stored(2)).await.unwrap();
    settles(&client, 4).await;
    settles_in(&client, &tenant, 2).await;
    let (a, b) = (field("a", "gpu"), field("b", "gpu"));
    let expected = format!("*2\r\n{a}{b}*2\r\n{a}{b}*1\r\n{a}*1\r\n{a}*0\r\n");
    let mut router = Router::connect(&daemon).await;
    router.exchange(&hkeys(&keys(5)), &expected).await;
    daemon.stop().await;
}

/// Only 64 namespaces are searched.
#[tokio::test(flavor = "multi_thread")]
async fn namespaces_that_nobody_uses_take_no_place_among_the_searched() {
    let broker = broker().await;
    let settings = [("redis.listen", "127.0.0.1:0"), ("limits.max_namespaces", "100")];
    let daemon = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let (mut first, mut last) = (None, Vec::new());
    for number in 0..=64 {
        let model = ModelKey::new(format!("many-{number:02}")).speaking(model().scheme);
        let (chains, namespace) = (model.chains().unwrap(), model.namespace().unwrap());
        last = chains.sequence_hashes(&tokens(16), BlockSize::DEFAULT, None, None);
        let publisher = stores(&client, &namespace, &last).await;
        first.get_or_insert(publisher);
    }
    let mut router = Router::connect(&daemon).await;
    router.exchange(&hkeys(&last), "*0\r\n").await;
    let mut first = first.unwrap();
    first.publish(Tier::DEVICE, vec![Event::Goodbye]).await.unwrap();
    eventually("the last namespace is searched", async || {
        router.write(hkeys(&last).as_bytes()).await;
        let is_found = router.read_like("*0\r\n").await == "*1\r\n";
        if is_found {
            router.read_like(&field("a", "gpu")).await;
        }
        is_found.then_some(())
    })
    .await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ranks_without_an_address_are_of_their_workers_pod() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("redis.listen", "127.0.0.1:0")]).await;
    let client = Client::connect(broker.url()).await;
    let worker = worker_of_instance("eng-0").unwrap();
    for (rank, blocks, address) in [(0, 1, Some("10.0.0.9:8000")), (1, 3, None)] {
        let batch = EventBatch {
            epoch: 1,
            seq: 1,
            rank,
            time_us: None,
            tier: Tier::DEVICE,
            block_size: None,
            profile: address.map(|address| Profile {
                address: address.parse().ok(),
                ..Profile::default()
            }),
            events: stored(blocks),
        };
        let subject = subjects().events(&namespace(), &worker);
        client.nats.publish(subject, batch.encode().into()).await.unwrap();
    }
    settles(&client, 4).await;
    let expected = format!("*1\r\n{}", field("10.0.0.9:8000", "gpu")).repeat(3);
    let mut router = Router::connect(&daemon).await;
    router.exchange(&hkeys(&keys(3)), &expected).await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_answers_for_all_its_shards() {
    let broker = broker().await;
    let mut shards = Vec::new();
    for shard in ["0/2", "1/2"] {
        shards.push(daemon(broker.url(), &[("sharding.shard", shard)]).await);
    }
    let settings = [
        ("gateway.enabled", "true"),
        ("gateway.deadline_ms", "2000"),
        ("redis.listen", "127.0.0.1:0"),
    ];
    let gateway = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let pods: Vec<String> = (0..8).map(|number| format!("10.0.0.{number}:8000")).collect();
    let [left, right] = [0, 1].map(|index| {
        let owns = |pod: &&String| {
            Shard::new(index, 2)
                .unwrap()
                .owns(&worker_of_instance(pod).unwrap())
        };
        pods.iter().find(owns).unwrap()
    });
    for (pod, blocks) in [(left, 4), (right, 2)] {
        let mut publisher = publisher(&client, pod);
        publisher.publish(Tier::DEVICE, stored(blocks)).await.unwrap();
    }
    settles(&client, 6).await;
    let expected = |left: &str, right: &str| {
        let (both, one) = (format!("*2\r\n{left}{right}"), format!("*1\r\n{left}"));
        format!("{both}{both}{one}{one}*0\r\n")
    };
    let expected = expected(&field(left, "gpu"), &field(right, "gpu"));
    let mut router = Router::connect(&gateway).await;
    eventually("the gateway knows the namespace", async || {
        router.write(hkeys(&keys(1)).as_bytes()).await;
        (router.read_like("*0\r\n").await != "*0\r\n").then_some(())
    })
    .await;
    let mut router = Router::connect(&gateway).await;
    router.exchange(&hkeys(&keys(5)), &expected).await;
    // If a shard is missing, only the pods of that shard are missing.
    let [_, away] = <[Daemon; 2]>::try_from(shards).ok().unwrap();
    away.stop().await;
    let (one, none) = (format!("*1\r\n{}", field(left, "gpu")), "*0\r\n");
    let rest = format!("{one}{one}{one}{one}{none}");
    router.exchange(&hkeys(&keys(5)), &rest).await;
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_in_doubt_is_left_out_and_guesses_are_never_exact() {
    let broker = broker().await;
    let settings = [
        ("redis.listen", "127.0.0.1:0"),
        ("redis.speculative_ttl_ms", "600000"),
    ];
    let daemon = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    let mut one = publisher(&client, "a");
    one.publish(Tier::DEVICE, stored(2)).await.unwrap();
    let mut lossy = publisher(&client, "b");
    let cursor = kvatlas_core::wire::BatchCursor {
        seq: 3,
        ..lossy.cursor()
    };
    lossy = lossy.resuming(cursor);
    lossy.publish(Tier::DEVICE, stored(2)).await.unwrap();
    settles(&client, 4).await;
    let guess = r#"{"PodIdentifier":"c","DeviceTier":"","Speculative":true,"HasGroup":false,"GroupIdx":0}"#;
    let key = keys(3)[2].as_u64().to_string();
    let write = format!(
        "*4\r\n$4\r\nHSET\r\n${}\r\n{key}\r\n${}\r\n{guess}\r\n$0\r\n\r\n",
        key.len(),
        guess.len()
    );
    let mut router = Router::connect(&daemon).await;
    router.exchange(&write, ":1\r\n").await;
    let a = field("a", "gpu");
    let expected = format!("*1\r\n{a}*1\r\n{a}*1\r\n${}\r\n{guess}\r\n", guess.len());
    router.exchange(&hkeys(&keys(3)), &expected).await;
    // Answers to other clients do not contain guesses.
    let query = SingleQuery::new(QueryKey::SequenceHashes(keys(3)));
    let reply = client.queries.query(&namespace(), query).await.unwrap();
    assert!(
        reply
            .holders
            .iter()
            .all(|holder| holder.worker.as_str() != "c" && holder.matched_blocks < 3)
    );
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_hashed_as_their_namespace_speaks() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[]).await;
    let client = Client::connect(broker.url()).await;
    publisher(&client, "a")
        .publish(Tier::DEVICE, stored(4))
        .await
        .unwrap();
    settles(&client, 4).await;
    let by_tokens = |lora_name: Option<&str>| {
        SingleQuery::new(QueryKey::Tokens {
            tokens: tokens(100),
            lora_name: lora_name.map(str::to_owned),
            cache_salt: None,
        })
    };
    let reply = client.queries.query(&namespace(), by_tokens(None)).await.unwrap();
    let [holder] = reply.holders.as_slice() else {
        panic!("{reply:?}")
    };
    assert_eq!(
        (reply.query_blocks, holder.matched_blocks, holder.exact),
        (6, 4, true)
    );
    let reply = client
        .queries
        .query(&namespace(), by_tokens(Some("sql")))
        .await
        .unwrap();
    assert_eq!((reply.holders.len(), reply.foreign_holders), (0, 0));
    // The namespace has no block hashes of the contract, so the query is refused.
    let blocks = SingleQuery::new(QueryKey::BlockHashes(vec![BlockHash(1)]));
    match client.queries.query(&namespace(), blocks).await {
        Err(ClientError::Refused(error)) => assert_eq!(error.code, ErrorCode::BadRequest),
        other => panic!("{other:?}"),
    }
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_need_the_password_and_have_bounds() {
    let (broker, folder) = (broker().await, tempfile::tempdir().unwrap());
    let token = folder.path().join("token");
    std::fs::write(&token, "s3cret\n").unwrap();
    let token = token.display().to_string();
    let settings = [
        ("redis.listen", "127.0.0.1:0"),
        ("redis.token_file", token.as_str()),
        ("redis.max_command_bytes", "4 KiB"),
        ("redis.max_connections_per_source", "2"),
    ];
    let daemon = daemon(broker.url(), &settings).await;
    let mut router = Router::connect(&daemon).await;
    let refused = "-NOAUTH Authentication required.\r\n";
    router.write(hkeys(&keys(1)).as_bytes()).await;
    assert_eq!(router.read_like(refused).await, refused);
    router
        .exchange("*2\r\n$4\r\nauth\r\n$6\r\ns3cret\r\n", "+OK\r\n")
        .await;
    router.exchange(&hkeys(&keys(1)), "*0\r\n").await;
    // The command never ends.
    router
        .write(format!("*2\r\n$4\r\nPING\r\n$100000\r\n{}", "x".repeat(5000)).as_bytes())
        .await;
    let end = router.rest().await;
    assert!(end.starts_with("-ERR a command is too long"), "{end}");
    let mut nested = Router::connect(&daemon).await;
    nested.write("*1\r\n".repeat(500).as_bytes()).await;
    let end = nested.rest().await;
    assert!(end.starts_with("-ERR Protocol error"), "{end}");
    // The oldest connection that waits is closed for a new one.
    let mut first = Router::connect(&daemon).await;
    let hello = "+PONG\r\n";
    first
        .write(b"*2\r\n$4\r\nauth\r\n$6\r\ns3cret\r\n*1\r\n$4\r\nping\r\n")
        .await;
    first.read_like("+OK\r\n+PONG\r\n").await;
    let mut others = Vec::new();
    for _ in 0..2 {
        let mut other = Router::connect(&daemon).await;
        other
            .write(b"*2\r\n$4\r\nauth\r\n$6\r\ns3cret\r\n*1\r\n$4\r\nping\r\n")
            .await;
        other.read_like("+OK\r\n+PONG\r\n").await;
        others.push(other);
    }
    assert_eq!(first.rest().await, "");
    others[1].write(b"*1\r\n$4\r\nping\r\n").await;
    assert_eq!(others[1].read_like(hello).await, hello);
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_has_to_arrive_in_full_in_time() {
    let broker = broker().await;
    let settings = [
        ("redis.listen", "127.0.0.1:0"),
        ("redis.request_timeout_ms", "300"),
    ];
    let daemon = daemon(broker.url(), &settings).await;
    let mut router = Router::connect(&daemon).await;
    router.write(b"*2\r\n$4\r\nPING\r\n$100000\r\n").await;
    // Each byte comes in time, the command does not.
    let trickle = async {
        let mut byte = [0];
        loop {
            let _ = router.0.write_all(b"x").await;
            let read = tokio::time::timeout(Duration::from_millis(50), router.0.read(&mut byte)).await;
            if let Ok(Ok(0) | Err(_)) = read {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, trickle).await.unwrap();
    daemon.stop().await;
}

/// Sends a PING with `bytes` bytes of text, and returns the reply. `None` if the connection was cut off.
async fn long_ping(daemon: &Daemon, bytes: usize) -> Option<String> {
    let mut router = Router::connect(daemon).await;
    let text = format!("${bytes}\r\n{}\r\n", "x".repeat(bytes));
    let command = format!("*2\r\n$4\r\nPING\r\n{text}");
    // Writing and reading may fail, because the connection may end meanwhile.
    router.0.write_all(command.as_bytes()).await.ok()?;
    let mut reply = vec![0; text.len()];
    let read = tokio::time::timeout(PATIENCE, router.0.read_exact(&mut reply));
    read.await.expect("a reply or the end comes").ok()?;
    String::from_utf8(reply).ok().filter(|reply| *reply == text)
}

#[tokio::test(flavor = "multi_thread")]
async fn all_commands_that_wait_have_one_bound() {
    let broker = broker().await;
    let settings = [
        ("redis.listen", "127.0.0.1:0"),
        ("redis.max_receiving_bytes", "1 MiB"),
    ];
    let daemon = daemon(broker.url(), &settings).await;
    assert!(long_ping(&daemon, 60_000).await.is_some());
    let begin = async || {
        let mut router = Router::connect(&daemon).await;
        let part = format!("*2\r\n$4\r\nPING\r\n$700000\r\n{}", "x".repeat(699_999));
        // The connection may be cut off during the write.
        let _ = router.0.write_all(part.as_bytes()).await;
        router
    };
    let (mut one, mut other) = (begin().await, begin().await);
    let ended = async |router: &mut Router| _ = router.0.read(&mut [0]).await;
    let cut = async {
        tokio::select! {
            () = ended(&mut one) => {}
            () = ended(&mut other) => {}
        }
    };
    tokio::time::timeout(PATIENCE, cut)
        .await
        .expect("for both there is no room");
    drop((one, other));
    eventually("the room is given back", async || {
        let reply = long_ping(&daemon, 900_000).await;
        reply.map(drop)
    })
    .await;
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_replies_come_whole() {
    const PODS: u32 = 40;
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("redis.listen", "127.0.0.1:0")]).await;
    let client = Client::connect(broker.url()).await;
    let pod = |number: u32| format!("10.0.0.{number}:8000");
    for number in 0..PODS {
        publisher(&client, &pod(number))
            .publish(Tier::DEVICE, stored(500))
            .await
            .unwrap();
    }
    settles(&client, u64::from(PODS) * 500).await;
    let mut router = Router::connect(&daemon).await;
    router.write(hkeys(&keys(501)).as_bytes()).await;
    let one: usize = (0..PODS).map(|number| field(&pod(number), "gpu").len()).sum();
    let expected = "x".repeat(500 * (one + format!("*{PODS}\r\n").len()) + 4);
    let reply = router.read_like(&expected).await;
    assert!(reply.starts_with(&format!("*{PODS}\r\n")) && reply.ends_with("*0\r\n"));
    assert_eq!(reply.matches(&field(&pod(7), "gpu")).count(), 500);
    router.exchange("PING\r\n", "+PONG\r\n").await;
    daemon.stop().await;
}

/// Redis's own command-line client works with the listener. Skipped if it is not installed.
#[tokio::test(flavor = "multi_thread")]
async fn redis_cli_is_answered() {
    let broker = broker().await;
    let daemon = daemon(broker.url(), &[("redis.listen", "127.0.0.1:0")]).await;
    let client = Client::connect(broker.url()).await;
    publisher(&client, "10.0.0.1:8000")
        .publish(Tier::DEVICE, stored(1))
        .await
        .unwrap();
    settles(&client, 1).await;
    let port = daemon.redis_address().unwrap().port().to_string();
    let key = keys(1)[0].as_u64().to_string();
    let cli = async |arguments: &[&str]| {
        let mut command = tokio::process::Command::new("redis-cli");
        command.args(["-p", &port]).args(arguments).kill_on_drop(true);
        let output = tokio::time::timeout(Duration::from_secs(30), command.output())
            .await
            .unwrap();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let Ok(pong) = cli(&["ping"]).await else {
        skipped("there is no redis-cli");
        return;
    };
    assert_eq!(pong, "PONG\n");
    for version in [&["-2"][..], &["-3"]] {
        let found = cli(&[version, &["hkeys", &key]].concat()).await.unwrap();
        assert!(
            found.contains("10.0.0.1:8000") && found.contains("gpu"),
            "{found}"
        );
    }
    let refused = cli(&["get", "x"]).await.unwrap();
    assert!(refused.starts_with("ERR unknown command 'get'"), "{refused}");
    daemon.stop().await;
}
