//! Tests of connections of llm-d's routers to a gateway. The tests answer in place of its only shard.

use std::sync::Arc;
use std::time::Duration;

use async_nats::{Client, HeaderMap, Message, Subscriber};
use futures_util::StreamExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use kvatlas_config::{Config, Depth};
use kvatlas_core::wire::{
    HolderMatch, ModelKey, NamespaceName, NamespacesReply, PROTOCOL_VERSION, QueryKey, QueryReply,
    QueryRequest, SHARD_HEADER, Subjects, WireLimits, WorkerName,
};
use kvatlas_process::admin::{Latch, Readiness};
use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};
use kvatlas_process::listener::{Acceptor, ConnectionLimits};
use kvatlas_telemetry::{RedisConnectionMetrics, RedisMetrics};

use super::commands::Commands;
use super::connection::{RedisDoor, serve};
use super::guesses::Guesses;
use super::prefixes::Prefixes;
use crate::queries::{ShardAsker, Shards, Source};

/// Time within which everything happens that a test waits for.
const PATIENCE: Duration = Duration::from_secs(20);
/// Time for which the gateway waits for the shard. A test whose questions come one after the other lasts as long.
const DEADLINE: Duration = Duration::from_secs(5);

/// Gateway with a listener for llm-d's routers, and the only shard behind it.
struct Site {
    door: Arc<RedisDoor>,
    router: TcpStream,
    /// Connection of the shard.
    nats: Client,
    /// Requests to the shard.
    requests: Subscriber,
    namespaces: Vec<NamespaceName>,
    _broker: EmbeddedBroker,
}

/// Question about the first blocks of a prompt.
struct Asked {
    request: Message,
    namespace: NamespaceName,
    blocks: u32,
}

/// Makes a gateway whose shard has namespaces of these models. It waits for `more_patience` for further keys, and has
/// `room` bytes of shared memory.
async fn site(models: &[&str], more_patience: Duration, room: usize) -> Site {
    let broker = EmbeddedBroker::start(&find_nats_server(None).unwrap())
        .await
        .unwrap();
    let nats = async_nats::connect(broker.url()).await.unwrap();
    let requests = nats.subscribe("kvatlas.v1.shards.>").await.unwrap();
    nats.flush().await.unwrap();
    let (subjects, asking) = (
        Subjects::new("kvatlas").unwrap(),
        async_nats::connect(broker.url()).await.unwrap(),
    );
    let source = Source::Shards(Box::new(Shards {
        asker: ShardAsker::new(asking, &subjects, 64, DEADLINE, Arc::default())
            .await
            .unwrap(),
        limits: WireLimits::default().into(),
        dialect_depth: Depth::Usable,
    }));
    let readiness = Arc::new(Readiness::new());
    Latch::ALL.iter().for_each(|latch| readiness.set(*latch));
    let mut config = Config::load(std::collections::BTreeMap::new(), std::iter::empty(), None).unwrap();
    config.redis.max_receiving_bytes = room;
    let door = Arc::new(RedisDoor {
        commands: Commands {
            token: None,
            guesses: Guesses::new(PATIENCE, 1 << 20),
            metrics: RedisMetrics::new(),
        },
        prefixes: Prefixes::new(Arc::new(source), readiness),
        room: RedisDoor::room(room),
        answer_room: RedisDoor::room(room),
        more_patience,
        config: config.redis.clone(),
    });
    let namespace = |model: &&str| {
        let model = ModelKey::new(*model).speaking(Some("llm-d-xxh64".parse().unwrap()));
        model.namespace().unwrap()
    };
    Site {
        router: connect(&door).await,
        door,
        nats,
        requests,
        namespaces: models.iter().map(namespace).collect(),
        _broker: broker,
    }
}

/// Serves a connection of a router. Returns the router's side.
async fn connect(door: &Arc<RedisDoor>) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = Acceptor {
        name: "redis",
        limits: ConnectionLimits {
            connections_max: 8,
            per_source_max: 8,
            head_timeout: PATIENCE,
            age_max: None,
            drain_timeout: PATIENCE,
            head_bytes_max: 1 << 20,
            unread_timeout: PATIENCE,
        },
        stopping: CancellationToken::new(),
        counts: Arc::new(RedisConnectionMetrics::new()),
    };
    let door = Arc::clone(door);
    let serve = move |stream, _, place| serve(Arc::clone(&door), stream, place, 1, CancellationToken::new());
    tokio::spawn(acceptor.accept(listener, serve));
    TcpStream::connect(address).await.unwrap()
}

impl Site {
    /// Sends the router's commands for the blocks `keys` of a prompt.
    async fn ask(&mut self, keys: std::ops::Range<u32>) {
        let command = |key: u32| {
            let key = key.to_string();
            format!("*2\r\n$5\r\nHKEYS\r\n${}\r\n{key}\r\n", key.len())
        };
        let commands: String = keys.map(command).collect();
        self.router.write_all(commands.as_bytes()).await.unwrap();
    }

    /// Returns the next question that comes to the shard. Tells the names of the namespaces where they are asked for.
    async fn next(&mut self) -> Asked {
        loop {
            let request = timeout(PATIENCE, self.requests.next()).await;
            let request = request.expect("a question comes").unwrap();
            let Some((_, name)) = request.subject.split_once(".query.") else {
                let names = NamespacesReply {
                    v: PROTOCOL_VERSION,
                    namespaces: self.namespaces.clone(),
                    unused: None,
                    complete: None,
                };
                self.reply(&request, names.encode()).await;
                continue;
            };
            let namespace = name.parse().unwrap();
            let query = QueryRequest::decode(&request.payload, &WireLimits::default()).unwrap();
            let QueryRequest::Single(query) = query else {
                panic!("{query:?}");
            };
            let QueryKey::SequenceHashes(keys) = query.key else {
                panic!("{query:?}");
            };
            return Asked {
                request,
                namespace,
                blocks: keys.len().try_into().unwrap(),
            };
        }
    }

    /// Answers a question: each of the `workers` has `matched` blocks, of which a request can reuse `usable`.
    async fn answer(&self, asked: &Asked, workers: &[String], matched: u32, usable: u32) {
        let holder = |worker: &String| HolderMatch {
            usable_blocks: Some(usable),
            device_blocks: Some(matched),
            host_blocks: Some(matched),
            device_usable_blocks: Some(usable),
            host_usable_blocks: Some(usable),
            ..HolderMatch::new(WorkerName::new(worker).unwrap(), 0, matched)
        };
        let reply = QueryReply {
            v: PROTOCOL_VERSION,
            query_blocks: asked.blocks,
            block_size: 16,
            holders: workers.iter().map(holder).collect(),
            holders_total: workers.len().try_into().unwrap(),
            foreign_holders: 0,
            doubtful_holders: 0,
            gathered: None,
            unseen_blocks_max: 0,
            behind_us: 0,
            predicted: Vec::new(),
        };
        self.reply(&asked.request, reply.encode()).await;
    }

    async fn reply(&self, request: &Message, payload: Vec<u8>) {
        let mut headers = HeaderMap::new();
        headers.insert(SHARD_HEADER, "0/1");
        let reply_to = request.reply.clone().unwrap();
        let replying = self.nats.publish_with_headers(reply_to, headers, payload.into());
        replying.await.unwrap();
    }

    /// Reads `count` replies. Returns the number of pods in each.
    async fn pods(&mut self, count: usize) -> Vec<usize> {
        let mut text = String::new();
        let heads = |text: &str| -> Option<Vec<usize>> {
            // A reply is a list of texts.
            let (mut lines, mut pods) = (text.split_inclusive("\r\n"), Vec::new());
            while pods.len() < count {
                let head = lines.next()?.strip_suffix("\r\n")?.strip_prefix('*').unwrap();
                pods.push(head.parse().unwrap());
                for _ in 0..2 * pods[pods.len() - 1] {
                    lines.next()?.strip_suffix("\r\n")?;
                }
            }
            Some(pods)
        };
        loop {
            if let Some(pods) = heads(&text) {
                return pods;
            }
            let mut bytes = vec![0; 64 << 10];
            let read = timeout(PATIENCE, self.router.read(&mut bytes)).await;
            let read = read.expect("a reply comes").unwrap();
            assert!(read > 0, "the connection ends after {text:?}");
            text.push_str(std::str::from_utf8(&bytes[..read]).unwrap());
        }
    }
}

fn workers(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("gpu-{number}")).collect()
}

#[tokio::test]
async fn a_gateway_asks_about_all_namespaces_at_once() {
    let mut site = site(&["a", "b"], Duration::ZERO, 1 << 20).await;
    let both = [("a", 1), ("b", 2)];
    for (first, searches) in [(0, 1), (1, 2)] {
        site.ask(first..first + 1).await;
        // A search for the prompt's next key comes before the one for a new prompt.
        for _ in 0..searches {
            let asked = [site.next().await, site.next().await];
            assert_ne!(asked[0].namespace, asked[1].namespace);
            for (asked, (_, number)) in asked.iter().zip(both) {
                site.answer(asked, &workers(number)[number - 1..], 1, 1).await;
            }
        }
        assert_eq!(site.pods(1).await, [2]);
    }
}

#[tokio::test]
async fn a_part_that_ends_between_two_commands_waits_for_more_where_it_matters() {
    let mut site = site(&["a"], PATIENCE, 1 << 20).await;
    site.ask(0..4).await;
    let asked = site.next().await;
    assert_eq!(asked.blocks, 4);
    site.answer(&asked, &workers(1), 4, 0).await;
    site.ask(4..8).await;
    let asked = site.next().await;
    assert_eq!(asked.blocks, 8, "the first part is searched with the second one");
    site.answer(&asked, &workers(1), 8, 8).await;
    assert_eq!(site.pods(8).await, [1; 8]);
    // The prompt goes on in a third part, of which the worker has one block that it cannot reuse yet.
    site.ask(8..9).await;
    let asked = site.next().await;
    site.answer(&asked, &workers(1), 9, 8).await;
    let asked = site.next().await;
    site.answer(&asked, &workers(1), 9, 8).await;
    site.ask(9..11).await;
    for _ in 0..2 {
        let asked = site.next().await;
        site.answer(&asked, &workers(1), 10, 10).await;
    }
    // All keys have come, as far as anybody has them.
    assert_eq!(site.pods(3).await, [1, 1, 0]);
}

#[tokio::test]
async fn a_search_that_is_made_again_with_more_keys_counts_no_answer() {
    let metrics = kvatlas_telemetry::install_shared().unwrap();
    // Other tests do not use this model, so its counts are of this test.
    let mut site = site(&["counted-once"], PATIENCE, 1 << 20).await;
    site.ask(0..4).await;
    let asked = site.next().await;
    site.answer(&asked, &workers(1), 4, 0).await;
    site.ask(4..8).await;
    let asked = site.next().await;
    site.answer(&asked, &workers(1), 8, 8).await;
    assert_eq!(site.pods(8).await, [1; 8]);
    let rendered = metrics.render();
    let own = |line: &&str| {
        let is_count = ["kvatlas_queries_total{", "kvatlas_query_matched_blocks_count{"];
        is_count.iter().any(|name| line.starts_with(name)) && line.contains(site.namespaces[0].as_str())
    };
    let counts = rendered
        .lines()
        .filter(own)
        .filter_map(|line| line.rsplit_once(' '));
    let counts: Vec<&str> = counts
        .map(|(_, count)| count)
        .filter(|count| *count != "0")
        .collect();
    assert_eq!(counts, ["1", "1"], "{rendered}");
}

#[tokio::test]
async fn a_part_is_answered_when_no_more_comes() {
    for (patience, ends) in [(Duration::ZERO, false), (PATIENCE, true)] {
        let mut site = site(&["a"], patience, 1 << 20).await;
        site.ask(0..4).await;
        if ends {
            site.router.shutdown().await.unwrap();
        }
        let asked = site.next().await;
        site.answer(&asked, &workers(2), 4, 3).await;
        assert_eq!(site.pods(4).await, [2, 2, 2, 0]);
    }
}

#[tokio::test]
async fn answers_that_are_taken_in_pieces_share_a_room() {
    const PODS: usize = 300;
    for (room, is_cut) in [(64 << 10, true), (1 << 20, false)] {
        let mut site = site(&["a"], Duration::ZERO, room).await;
        let free = site.door.answer_room.available_permits();
        site.ask(0..8).await;
        if !is_cut {
            site.router.write_all(b"QUIT\r\n").await.unwrap();
        }
        let asked = site.next().await;
        site.answer(&asked, &workers(PODS), 8, 8).await;
        let mut replies = String::new();
        let read = timeout(PATIENCE, site.router.read_to_string(&mut replies));
        read.await.expect("the connection ends").unwrap();
        assert_eq!(replies.contains("-ERR too many bytes of answers"), is_cut);
        assert_eq!(replies.matches("PodIdentifier").count() == 8 * PODS, !is_cut);
        assert_eq!(site.door.answer_room.available_permits(), free);
    }
}
