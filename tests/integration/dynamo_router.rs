//! Dynamo's router asks kvatlas as its remote indexer, over NATS and over TCP, as in release 1.6.1.

use std::path::Path;

use futures_util::StreamExt;
use kvatlas_core::hash::{BlockHash, BlockSize, HashSeed, block_hashes, sequence_hashes};
use kvatlas_core::wire::{
    BatchCursor, Event, HolderStatusReply, ModelKey, Shard, StoredBlocks, Tier, WorkerName,
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::http::HttpClient;
use crate::support::publisher::Publisher;
use crate::support::{Client, PATIENCE, broker, daemon, eventually, lasting_port, subjects};

const MODEL: &str = "m";

/// Returns the contract's block hashes of a prompt of `count` blocks.
fn blocks(count: u32) -> Vec<BlockHash> {
    let tokens: Vec<u32> = (1..=count * 16).collect();
    block_hashes(&tokens, BlockSize::DEFAULT, HashSeed::default()).collect()
}

fn two_parts(header: &str, body: &str) -> Vec<u8> {
    let mut message = Vec::new();
    for length in [header.len() as u64, body.len() as u64, 0] {
        message.extend(length.to_be_bytes());
    }
    message.extend(header.bytes().chain(body.bytes()));
    message
}

/// Returns a record in a directory in which Dynamo's processes find each other; `None` if there is none. For tests with
/// only one instance.
fn record(folder: &Path) -> Option<Value> {
    records(folder).pop()
}

/// Returns all records in a directory in which Dynamo's processes find each other.
fn records(folder: &Path) -> Vec<Value> {
    let entries = std::fs::read_dir(folder.join("v1/instances"));
    let entries = entries.into_iter().flatten().flatten();
    let read = entries.filter_map(|entry| serde_json::from_slice(&std::fs::read(entry.path()).ok()?).ok());
    read.collect()
}

/// Simulated router of Dynamo. It has the listener at which it receives answers.
struct Router(TcpListener);

impl Router {
    /// Makes a router on a port that no other test has used, because [`Self::keeps_ports`] looks at all connections of
    /// the machine.
    async fn new() -> Self {
        Self(TcpListener::bind(("127.0.0.1", lasting_port())).await.unwrap())
    }

    fn request(&self, question: &Value) -> Vec<u8> {
        let address = self.0.local_addr().unwrap().to_string();
        let info = json!({"address": address, "subject": "s-1", "context": "c", "stream_type": "response"});
        let header = json!({
            "id": "r-1", "request_type": "single_in", "response_type": "many_out", "payload_codec": "json",
            "connection_info": {"transport": "tcp_server", "info": info.to_string()},
        });
        two_parts(&header.to_string(), &question.to_string())
    }

    /// Accepts a connection, and returns the header and body of each message of one answer. Then the router closes the
    /// connection, as Dynamo's router does.
    async fn answer(&self) -> Vec<(Value, Value)> {
        let taking = async {
            let (mut stream, _) = self.0.accept().await.unwrap();
            let mut messages = Vec::new();
            while messages
                .last()
                .is_none_or(|(header, _)| *header != json!("sentinel"))
            {
                let mut lengths = [0; 3];
                for length in &mut lengths {
                    *length = usize::try_from(stream.read_u64().await.unwrap()).unwrap();
                }
                let mut part = async |length: usize| {
                    let mut bytes = vec![0; length];
                    stream.read_exact(&mut bytes).await.unwrap();
                    serde_json::from_slice(&bytes).unwrap_or(Value::Null)
                };
                messages.push((part(lengths[0]).await, part(lengths[1]).await));
            }
            messages
        };
        tokio::time::timeout(PATIENCE, taking)
            .await
            .expect("an answer comes")
    }

    /// Whether the router's side closed all ended connections first, and so keeps their ports in the state TIME_WAIT.
    /// `None` if no connection has ended.
    #[cfg(target_os = "linux")]
    fn keeps_ports(&self) -> Option<bool> {
        const TIME_WAIT: &str = "06";
        let own = format!(":{:04X}", self.0.local_addr().unwrap().port());
        let connections = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let mut ended = connections.lines().filter_map(|line| {
            let mut columns = line.split_whitespace().skip(1);
            let (local, remote) = (columns.next()?, columns.next()?);
            let is_own = local.ends_with(&own);
            let has_ended = columns.next()? == TIME_WAIT && (is_own || remote.ends_with(&own));
            has_ended.then_some(is_own)
        });
        let first = ended.next()?;
        Some(first && ended.all(|is_own| is_own))
    }
}

/// Returns the data in an answer. Fails the test if one of the messages before and after the data is not as in Dynamo's
/// protocol.
fn data(messages: &[(Value, Value)]) -> Value {
    let [(hello, _), (prologue, _), (_, answer), (_, end), (sentinel, _)] = messages else {
        panic!("{messages:?}");
    };
    assert_eq!(*hello, json!({"subject": "s-1", "stream_type": "response"}));
    assert_eq!(*prologue, json!({"error": null}));
    assert_eq!(*end, json!({"complete_final": true}));
    assert_eq!(*sentinel, json!("sentinel"));
    assert_eq!(answer["complete_final"], json!(false));
    answer["data"].clone()
}

/// Fills the index. Worker 7 has three blocks on the device, and five on device and host together. Worker 11 has one
/// block, and so has `gpu-0`, which Dynamo does not know. Worker 9 is in doubt.
async fn fill(client: &Client) {
    let namespace = ModelKey::new(MODEL).namespace().unwrap();
    let stored = |count: u32| {
        let chain = sequence_hashes(blocks(count)).collect();
        vec![Event::Stored(StoredBlocks::by_sequence(None, None, chain))]
    };
    let host = Tier::new(1).unwrap();
    let publisher = |name: &str| {
        let name = WorkerName::new(name).unwrap();
        Publisher::new(client.nats.clone(), &subjects(), &namespace, &name, 0)
    };
    let mut seven = publisher("7");
    seven.publish(host, stored(5)).await.unwrap();
    seven.publish(Tier::DEVICE, stored(3)).await.unwrap();
    publisher("11").publish(Tier::DEVICE, stored(1)).await.unwrap();
    publisher("gpu-0").publish(Tier::DEVICE, stored(1)).await.unwrap();
    let cursor = BatchCursor { epoch: 1, seq: 3 };
    let mut nine = publisher("9").resuming(cursor);
    nine.publish(Tier::DEVICE, stored(5)).await.unwrap();
    eventually("the batches are applied", async || {
        // The replies come from either of two replicas, and both must know all blocks.
        for _ in 0..40 {
            let status = client.queries.status(&namespace).await.ok()?;
            if status.holders.iter().map(|holder| holder.blocks).sum::<u64>() != 12 {
                return None;
            }
        }
        Some(())
    })
    .await;
}

fn question(model: &str, count: u32) -> Value {
    let hashes: Vec<u64> = blocks(count).into_iter().map(u64::from).collect();
    json!({"model_name": model, "block_hashes": hashes, "device_only": false})
}

fn expected() -> Value {
    let worker = |id: u64| json!({"worker_id": id, "dp_rank": 0});
    let device = json!({"scores": [[worker(7), 3], [worker(11), 1]], "frequencies": []});
    json!({"TieredScores": {"device": device, "lower_tier": [["host_pinned", {"hits": [[worker(7), 2]]}]]}})
}

/// Returns an answer with its workers in the order of their numbers.
fn in_order(mut answer: Value) -> Value {
    if let Some(scores) = answer["TieredScores"]["device"]["scores"].as_array_mut() {
        scores.sort_by_key(|score| score[0]["worker_id"].as_u64());
    }
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn routers_ask_over_nats_and_replicas_share_what_they_ask() {
    let (broker, folder) = (broker().await, tempfile::tempdir().unwrap());
    let discovery = format!("file:{}", folder.path().display());
    let settings = [
        ("dynamo.components", "dynamo.backend"),
        ("dynamo.discovery", discovery.as_str()),
    ];
    let one = daemon(broker.url(), &settings).await;
    let other = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    fill(&client).await;
    let record = eventually("the record is there", async || record(folder.path())).await;
    assert_eq!(
        (&record["namespace"], &record["endpoint"]),
        (&json!("dynamo"), &json!("kv_indexer_query"))
    );
    let subject = record["transport"]["nats_tcp"].as_str().unwrap().to_owned();
    let router = Router::new().await;
    let ask = async |question: Value| {
        let asked = client
            .nats
            .request(subject.clone(), router.request(&question).into())
            .await;
        assert!(asked.unwrap().payload.is_empty(), "an acknowledgement");
        data(&router.answer().await)
    };
    assert_eq!(in_order(ask(question(MODEL, 6)).await), expected());
    // If no worker is known, the router gets an empty answer, because the protocol has no other.
    let empty = json!({"TieredScores": {"device": {"scores": [], "frequencies": []}, "lower_tier": []}});
    assert_eq!(ask(question("another", 6)).await, empty);
    assert_eq!(ask(question(MODEL, 0)).await, empty);
    assert!(ask(json!({"model_name": MODEL})).await["Error"].is_string());
    // One of two replicas stops while it is asked. No answer is lost, and the other replica keeps the record.
    let stopping = tokio::spawn(one.stop());
    let mut asked = 0;
    while !stopping.is_finished() || asked < 3 {
        let asking = tokio::time::timeout(PATIENCE, ask(question(MODEL, 6)));
        assert_eq!(in_order(asking.await.unwrap()), expected());
        asked += 1;
    }
    stopping.await.unwrap();
    // With one connection for each answer, the side that ends connections would run out of ports.
    #[cfg(target_os = "linux")]
    assert!(eventually("a connection has ended", async || router.keeps_ports()).await);
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_answers_for_all_its_shards() {
    let (broker, folder) = (broker().await, tempfile::tempdir().unwrap());
    let discovery = format!("file:{}", folder.path().display());
    let mut shards = Vec::new();
    for shard in ["0/2", "1/2"] {
        shards.push(daemon(broker.url(), &[("sharding.shard", shard)]).await);
    }
    let settings = [
        ("gateway.enabled", "true"),
        ("gateway.deadline_ms", "2000"),
        ("dynamo.components", "dynamo.backend"),
        ("dynamo.discovery", discovery.as_str()),
    ];
    let gateway = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    fill(&client).await;
    let record = eventually("the record is there", async || record(folder.path())).await;
    let subject = record["transport"]["nats_tcp"].as_str().unwrap();
    let router = Router::new().await;
    let ask = async || {
        let request = router.request(&question(MODEL, 6)).into();
        client.nats.request(subject.to_owned(), request).await.unwrap();
        in_order(data(&router.answer().await))
    };
    let shard_of = |worker: &str| {
        let worker = WorkerName::new(worker).unwrap();
        let owns = |index: &u32| Shard::new(*index, 2).unwrap().owns(&worker);
        (0..2).find(owns).unwrap() as usize
    };
    assert_ne!(shard_of("7"), shard_of("11"), "several shards have some");
    assert_eq!(ask().await, expected());
    // If a shard is missing, only the workers of that shard are missing.
    shards.remove(shard_of("11")).stop().await;
    let mut rest = expected();
    let scores = rest["TieredScores"]["device"]["scores"].as_array_mut();
    scores.unwrap().retain(|score| score[0]["worker_id"] == 7);
    assert_eq!(ask().await, rest);
    gateway.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn routers_ask_over_tcp() {
    let (broker, folder) = (broker().await, tempfile::tempdir().unwrap());
    let discovery = format!("file:{}", folder.path().display());
    let settings = [
        ("dynamo.components", "dynamo.backend"),
        ("dynamo.discovery", discovery.as_str()),
        ("dynamo.listen", "127.0.0.1:0"),
        ("queries.max_depth_blocks", "4"),
        ("http.listen", "127.0.0.1:0"),
    ];
    let daemon = daemon(broker.url(), &settings).await;
    let client = Client::connect(broker.url()).await;
    fill(&client).await;
    let record = eventually("the record is there", async || record(folder.path())).await;
    let (address, path) = tcp_target(&record);
    let router = Router::new().await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    // Several requests are sent on one connection.
    for count in [6, 6] {
        let payload = router.request(&question(MODEL, count));
        stream
            .write_u16(u16::try_from(path.len()).unwrap())
            .await
            .unwrap();
        stream.write_all(path.as_bytes()).await.unwrap();
        stream.write_u16(2).await.unwrap();
        stream.write_all(b"{}").await.unwrap();
        stream
            .write_u32(u32::try_from(payload.len()).unwrap())
            .await
            .unwrap();
        stream.write_all(&payload).await.unwrap();
        assert_eq!(stream.read_u32().await.unwrap(), 0, "an acknowledgement");
        // Only four blocks of the prompt are looked up. The answer still counts from the beginning of the prompt.
        let mut known = expected();
        known["TieredScores"]["lower_tier"][0][1]["hits"][0][1] = json!(1);
        assert_eq!(in_order(data(&router.answer().await)), known);
    }
    let mut http = HttpClient::connect(daemon.http_address().unwrap()).await;
    eventually("both are counted", async || {
        let metrics = String::from_utf8(http.get("/metrics").await.body).ok()?;
        // These metrics also count requests of other daemons in this process.
        let count = |start: &str| {
            let line = metrics.lines().find(|line| line.starts_with(start))?;
            line.rsplit_once(' ')?.1.parse::<f64>().ok()
        };
        let answered = count("kvatlas_dynamo_requests_total{outcome=\"answered\"}")?;
        let connections = count("kvatlas_dynamo_connections ")?;
        let queries = metrics
            .lines()
            .filter(|line| line.starts_with("kvatlas_queries_total{"));
        let mut of_blocks = queries.filter(|line| line.contains("block_hashes") && line.contains("\"m\""));
        let is_counted = of_blocks.any(|line| !line.ends_with(" 0"));
        (answered >= 2.0 && connections >= 1.0 && is_counted).then_some(())
    })
    .await;
    // A length beyond the bound ends the connection.
    stream
        .write_all(&[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff])
        .await
        .unwrap();
    assert!(stream.read_u32().await.is_err());
    daemon.stop().await;
    assert!(self::record(folder.path()).is_none());
}

/// Sends `count` requests on `subject` without waiting. Returns the subscription to their acknowledgements.
async fn flood(client: &Client, subject: &str, request: &[u8], count: usize) -> async_nats::Subscriber {
    let inbox = client.nats.new_inbox();
    let acknowledged = client.nats.subscribe(inbox.clone()).await.unwrap();
    for _ in 0..count {
        let request = request.to_vec().into();
        let asked = client
            .nats
            .publish_with_reply(subject.to_owned(), inbox.clone(), request);
        asked.await.unwrap();
    }
    client.nats.flush().await.unwrap();
    acknowledged
}

#[tokio::test(flavor = "multi_thread")]
async fn who_stops_answers_all_that_it_was_asked() {
    const ASKED: usize = 200;
    let (broker, folder) = (broker().await, tempfile::tempdir().unwrap());
    let discovery = format!("file:{}", folder.path().display());
    let settings = [
        ("dynamo.components", "dynamo.backend"),
        ("dynamo.discovery", discovery.as_str()),
    ];
    let (one, other) = (
        daemon(broker.url(), &settings).await,
        daemon(broker.url(), &settings).await,
    );
    let client = Client::connect(broker.url()).await;
    fill(&client).await;
    let record = eventually("the record is there", async || record(folder.path())).await;
    let subject = record["transport"]["nats_tcp"].as_str().unwrap();
    let router = Router::new().await;
    let request = router.request(&question(MODEL, 6));
    let answering = tokio::spawn(async move {
        for _ in 0..2 * ASKED {
            assert_eq!(in_order(data(&router.answer().await)), expected());
        }
    });
    let before = flood(&client, subject, &request, ASKED).await;
    let stopping = tokio::spawn(one.stop());
    let during = flood(&client, subject, &request, ASKED).await;
    for mut acknowledged in [before, during] {
        for _ in 0..ASKED {
            let acknowledged = tokio::time::timeout(PATIENCE, acknowledged.next()).await;
            assert!(acknowledged.unwrap().unwrap().status.is_none());
        }
    }
    tokio::time::timeout(PATIENCE, answering).await.unwrap().unwrap();
    stopping.await.unwrap();
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_over_tcp_waits_for_room() {
    let (broker, folder) = (broker().await, tempfile::tempdir().unwrap());
    let discovery = format!("file:{}", folder.path().display());
    let settings = [
        ("dynamo.components", "dynamo.backend"),
        ("dynamo.discovery", discovery.as_str()),
        ("dynamo.listen", "127.0.0.1:0"),
        ("dynamo.max_receiving_bytes", "8 MiB"),
        ("dynamo.request_timeout_ms", "60000"),
    ];
    let daemon = daemon(broker.url(), &settings).await;
    let record = eventually("the record is there", async || record(folder.path())).await;
    let (address, path) = tcp_target(&record);
    let request = Router::new().await.request(&question(MODEL, 6));
    let mut large = TcpStream::connect(address).await.unwrap();
    let mut small = TcpStream::connect(address).await.unwrap();
    send_over_tcp(&mut large, path, &request).await;
    // The payload of this request, which does not come yet, takes all of the room.
    large.write_all(&head(path, 8 << 20)).await.unwrap();
    let waiting = async {
        for _ in 0..3 {
            send_over_tcp(&mut small, path, &request).await;
        }
    };
    let made = async {
        // The other connection's request comes first.
        tokio::task::yield_now().await;
        let (payload, mut rest) = (vec![0; 8 << 20], [0; 4]);
        large.write_all(&payload).await.unwrap();
        large.read_exact(&mut rest).await.unwrap();
    };
    let ((), ()) = tokio::join!(waiting, made);
    daemon.stop().await;
}

/// Returns the address and the path at which an instance takes requests over TCP, as its record says.
fn tcp_target(record: &Value) -> (&str, &str) {
    let target = record["transport"]["tcp"].as_str().unwrap();
    target.split_once('/').unwrap()
}

/// Returns the bytes of a request over TCP before its payload of `bytes` bytes.
fn head(path: &str, bytes: u32) -> Vec<u8> {
    let mut head = u16::try_from(path.len()).unwrap().to_be_bytes().to_vec();
    head.extend_from_slice(path.as_bytes());
    head.extend_from_slice(b"\0\x02{}");
    head.extend_from_slice(&bytes.to_be_bytes());
    head
}

/// Sends a request over TCP, as a router does, and waits for its acknowledgement.
async fn send_over_tcp(stream: &mut TcpStream, path: &str, payload: &[u8]) {
    let mut message = head(path, u32::try_from(payload.len()).unwrap());
    message.extend_from_slice(payload);
    stream.write_all(&message).await.unwrap();
    assert_eq!(stream.read_u32().await.unwrap(), 0, "an acknowledgement");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_component_may_be_a_tenants() {
    let (broker, folder) = (broker().await, tempfile::tempdir().unwrap());
    let discovery = format!("file:{}", folder.path().display());
    let components = ("dynamo.components", "dynamo.backend,dynamo.other=team");
    let over_nats = daemon(
        broker.url(),
        &[components, ("dynamo.discovery", discovery.as_str())],
    )
    .await;
    let client = Client::connect(broker.url()).await;
    fill(&client).await;
    let team = ModelKey::of_tenant(MODEL.to_owned(), "team".to_owned());
    let namespace = team.namespace().unwrap();
    // The worker belongs to the tenant, and has two blocks. A daemon knows it from its first batch on.
    let tell = async |number: &str| {
        let name = WorkerName::new(number).unwrap();
        let mut publisher = Publisher::new(client.nats.clone(), &subjects(), &namespace, &name, 0);
        let chain = sequence_hashes(blocks(2)).collect();
        let stored = vec![Event::Stored(StoredBlocks::by_sequence(None, None, chain))];
        publisher.publish(Tier::DEVICE, stored).await.unwrap();
        eventually("the batch is applied", async || {
            let status = client.queries.status(&namespace).await.ok()?;
            let is_known = |holder: &HolderStatusReply| holder.worker == name && holder.exact;
            status.holders.iter().any(is_known).then_some(())
        })
        .await;
    };
    tell("10").await;
    let teams = |number: u64| {
        let scores = json!([[{"worker_id": number, "dp_rank": 0}, 2]]);
        json!({"TieredScores": {"device": {"scores": scores, "frequencies": []}, "lower_tier": []}})
    };
    let both = eventually("the records are there", async || {
        Some(records(folder.path())).filter(|records| records.len() == 2)
    })
    .await;
    let router = Router::new().await;
    for record in both {
        let subject = record["transport"]["nats_tcp"].as_str().unwrap().to_owned();
        let request = router.request(&question(MODEL, 6)).into();
        client.nats.request(subject, request).await.unwrap();
        let is_teams = record["component"] == "other";
        let known = if is_teams { teams(10) } else { expected() };
        assert_eq!(in_order(data(&router.answer().await)), known);
    }
    over_nats.stop().await;

    let settings = [
        components,
        ("dynamo.discovery", discovery.as_str()),
        ("dynamo.listen", "127.0.0.1:0"),
    ];
    let over_tcp = daemon(broker.url(), &settings).await;
    tell("11").await;
    let record = eventually("the records are there", async || {
        let mut records = records(folder.path()).into_iter();
        records.find(|record| record["component"] == "other" && record["transport"]["tcp"].is_string())
    })
    .await;
    let (address, path) = tcp_target(&record);
    let mut stream = TcpStream::connect(address).await.unwrap();
    send_over_tcp(&mut stream, path, &router.request(&question(MODEL, 6))).await;
    assert_eq!(data(&router.answer().await), teams(11));
    // A record of another component may be older than this daemon at the address.
    for (served, strange) in [("/dynamo/", "/prod/"), ("kv_indexer_query", "generate")] {
        let path = path.replacen(served, strange, 1);
        send_over_tcp(&mut stream, &path, &router.request(&question(MODEL, 6))).await;
        let answer = data(&router.answer().await);
        assert!(
            answer["Error"].is_string() && answer.get("TieredScores").is_none(),
            "{answer}"
        );
    }
    over_tcp.stop().await;
}
