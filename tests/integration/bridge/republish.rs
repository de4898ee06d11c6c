//! Engines' events that a bridge republishes, as seen by routers that have an index of their own.

use std::collections::{BTreeSet, HashMap};
use std::net::TcpListener;
use std::time::Duration;

use kvatlas_bridge::{Bridge, BridgeOptions, RepublishOptions, StateDirectory};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use super::python::{Publishers, Spec, python};
use super::{BLOCK, Site, options, removed, stored, tokens};
use crate::support::{eventually, subjects};

/// Tokens of each block of a prefix.
pub(super) type Path = Vec<Vec<u64>>;

/// Returns the first of `count` consecutive free ports.
pub(super) fn free_ports(count: u16) -> u16 {
    loop {
        let first = 12_000 + fastrand::u16(..10_000) * 2;
        let bound: Vec<_> = (first..first + count)
            .map(|port| TcpListener::bind(("0.0.0.0", port)))
            .collect();
        if bound.iter().all(Result::is_ok) {
            return first;
        }
    }
}

/// Returns, for each block in `blocks`, the prefix of sequence `which` that ends with this block.
pub(super) fn paths(which: u32, blocks: impl IntoIterator<Item = u32>) -> BTreeSet<Path> {
    let block = |place| tokens(which, place, 1).into_iter().map(u64::from).collect();
    let path = |last| (0..=last).map(block).collect();
    blocks.into_iter().map(path).collect()
}

/// Returns the events of a batch.
fn events_of(payload: &[u8]) -> Vec<Value> {
    let (_, events, rank): (f64, Vec<Value>, u64) = rmp_serde::from_slice(payload).unwrap();
    assert_eq!(rank, 0);
    events
}

/// Router that follows republished events as vLLM's router does. It takes a lower batch number for a restart. After a
/// gap, it asks for the missing batch and all later ones.
pub(super) struct Router {
    host: &'static str,
    port: u16,
    events: SubSocket,
    last_live: Option<u64>,
    last: Option<u64>,
    names: HashMap<u64, Path>,
    held: BTreeSet<Path>,
    replays: usize,
}

impl Router {
    pub(super) async fn start(port: u16) -> Self {
        Self::start_at("127.0.0.1", port).await
    }

    pub(super) async fn start_at(host: &'static str, port: u16) -> Self {
        let mut events = SubSocket::new();
        events.subscribe("").await.unwrap();
        eventually("the socket is there", async || {
            events.connect(&format!("tcp://{host}:{port}")).await.ok()
        })
        .await;
        Self {
            host,
            port,
            events,
            last_live: None,
            last: None,
            names: HashMap::new(),
            held: BTreeSet::new(),
            replays: 0,
        }
    }

    /// Follows until the router has exactly these blocks.
    pub(super) async fn reaches(&mut self, expected: &BTreeSet<Path>) {
        let following = async {
            while self.held != *expected || self.last.is_none() {
                self.follow_one().await;
            }
        };
        if tokio::time::timeout(Duration::from_secs(30), following)
            .await
            .is_err()
        {
            panic!("it has {:?} and should have {expected:?}", self.held);
        }
    }

    async fn follow_one(&mut self) {
        let message = self.events.recv().await.unwrap().into_vec();
        let [topic, number, payload] = message.as_slice() else {
            panic!("{message:?}");
        };
        assert!(topic.is_empty());
        let number = u64::from_be_bytes(number.as_ref().try_into().unwrap());
        if self.last_live.is_some_and(|last| number < last) {
            self.last = None;
            self.held.clear();
        }
        self.last_live = Some(number);
        let next = self.last.map_or(0, |last| last + 1);
        if number > next {
            self.replay(next).await;
        }
        if self.last.is_none_or(|last| number > last) {
            self.apply(number, payload);
        }
    }

    async fn replay(&mut self, from: u64) {
        self.replays += 1;
        let mut socket = DealerSocket::new();
        let endpoint = format!("tcp://{}:{}", self.host, self.port + 1);
        socket.connect(&endpoint).await.unwrap();
        let mut question = ZmqMessage::from(Vec::new());
        question.push_back(from.to_be_bytes().to_vec().into());
        socket.send(question).await.unwrap();
        let mut next = from;
        loop {
            let message = socket.recv().await.unwrap().into_vec();
            let [empty, topic, number, payload] = message.as_slice() else {
                panic!("{message:?}");
            };
            assert!(empty.is_empty() && topic.is_empty());
            let number = u64::from_be_bytes(number.as_ref().try_into().unwrap());
            if number == u64::MAX {
                return;
            }
            assert_eq!(number, next, "without a hole");
            next += 1;
            self.apply(number, payload);
        }
    }

    fn apply(&mut self, number: u64, payload: &[u8]) {
        self.last = Some(number);
        for event in events_of(payload) {
            let names = event["block_hashes"].as_array().cloned().unwrap_or_default();
            let names = names.iter().map(|name| name.as_u64().unwrap());
            match event["type"].as_str().unwrap() {
                "AllBlocksCleared" => self.held.clear(),
                "BlockRemoved" => {
                    for name in names {
                        self.held.remove(&self.names[&name]);
                    }
                }
                "BlockStored" => {
                    let parent = event["parent_block_hash"].as_u64();
                    let mut path = parent.map_or_else(Path::new, |name| self.names[&name].clone());
                    let tokens: Vec<u64> = serde_json::from_value(event["token_ids"].clone()).unwrap();
                    for (name, tokens) in names.zip(tokens.chunks(BLOCK as usize)) {
                        path.push(tokens.to_vec());
                        self.names.insert(name, path.clone());
                        self.held.insert(path.clone());
                    }
                }
                other => panic!("{other}"),
            }
        }
    }
}

/// Starts another bridge, which republishes engine `gpu-0`. `site` already has a bridge of its own.
fn republishing(site: &Site, port: u16, state: Option<&std::path::Path>) -> Bridge {
    let state = state.map(|folder| StateDirectory::open(folder, Duration::ZERO).unwrap());
    let bridge = Bridge::new(
        subjects(),
        BridgeOptions {
            republish: Some(RepublishOptions {
                addresses: vec![format!("gpu-0=tcp://127.0.0.1:{port}").parse().unwrap()],
                has_special: false,
                bytes_max: 1 << 20,
            }),
            state,
            ..options()
        },
    );
    bridge.start(&site.client.nats);
    bridge
}

#[tokio::test(flavor = "multi_thread")]
async fn routers_have_what_the_engine_has_whenever_they_come() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    publishers.publish(0, &json!([stored(1, 0, 8)]));
    let port = free_ports(2);
    let bridge = republishing(&site, port, None);
    super::follow(&bridge, &publishers, 0, "gpu-0");
    let mut early = Router::start(port).await;
    early.reaches(&paths(1, 0..8)).await;
    let asked = early.replays;
    for part in 0..20 {
        publishers.publish(0, &json!([stored(2, part, 1)]));
    }
    publishers.publish(0, &json!([removed(1, 3, 1), removed(1, 7, 1)]));
    let expected = &paths(1, [0, 1, 2, 4, 5, 6]) | &paths(2, 0..20);
    early.reaches(&expected).await;
    assert_eq!(early.replays, asked, "it has heard everything");
    let mut late = Router::start(port).await;
    late.reaches(&expected).await;
    assert_eq!(late.replays, 1);
    // Routers that follow already get further events, too.
    publishers.publish(0, &json!([stored(1, 3, 1)]));
    let expected = &paths(1, 0..7) | &paths(2, 0..20);
    early.reaches(&expected).await;
    late.reaches(&expected).await;
    // After an unreadable payload, blocks may be gone, so all are removed. A stored block then proves that the blocks
    // before it are still there.
    publishers.publish_raw(0, "c1");
    early.reaches(&BTreeSet::new()).await;
    late.reaches(&BTreeSet::new()).await;
    publishers.publish(0, &json!([stored(1, 7, 1)]));
    for router in [&mut early, &mut late, &mut Router::start(port).await] {
        router.reaches(&paths(1, 0..8)).await;
    }
    publishers.publish(0, &json!([["AllBlocksCleared"], stored(3, 0, 1)]));
    early.reaches(&paths(3, 0..1)).await;
    bridge.stop(false).await;
    // The next bridge knows what the engine replays. Routers that had followed the old bridge lose everything else.
    let next = republishing(&site, port, None);
    super::follow(&next, &publishers, 0, "gpu-0");
    publishers.publish(0, &json!([stored(3, 1, 1)]));
    late.reaches(&paths(3, 0..2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_replay_does_not_reach_is_kept_for_routers() {
    let Some(python) = python() else { return };
    let (site, folder) = (Site::new(&[]).await, tempfile::tempdir().unwrap());
    let mut publishers = Publishers::start(&python, &[Spec::with_buffer(4)]);
    let port = free_ports(2);
    let bridge = republishing(&site, port, Some(folder.path()));
    super::follow(&bridge, &publishers, 0, "gpu-0");
    site.settles("gpu-0", 0, &[]).await;
    for part in 0..20 {
        publishers.publish(0, &json!([stored(1, part, 1)]));
    }
    publishers.publish(0, &json!([removed(1, 3, 1)]));
    let mut router = Router::start(port).await;
    let held = &paths(1, 0..3) | &paths(1, 4..20);
    router.reaches(&held).await;
    bridge.stop(false).await;
    drop(bridge);
    // The engine publishes one batch between the two bridges. The replay socket has this batch and three earlier ones.
    publishers.publish(0, &json!([stored(1, 20, 1), removed(1, 19, 1)]));
    let next = republishing(&site, port, Some(folder.path()));
    super::follow(&next, &publishers, 0, "gpu-0");
    let held = &(&paths(1, 0..3) | &paths(1, 4..19)) | &paths(1, 20..21);
    for router in [&mut router, &mut Router::start(port).await] {
        router.reaches(&held).await;
    }
    next.stop(false).await;
    drop(next);
    // The kept blocks do not count for another process.
    let mut others = Publishers::start(&python, &[Spec::default()]);
    others.publish(0, &json!([stored(2, 0, 1)]));
    let next = republishing(&site, port, Some(folder.path()));
    super::follow(&next, &others, 0, "gpu-0");
    router.reaches(&paths(2, 0..1)).await;
    next.stop(false).await;
}

/// Sends bytes to a socket, and waits until the bridge ends the connection.
async fn is_cut(port: u16, bytes: &[u8]) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
    stream.write_all(bytes).await.unwrap();
    let mut received = Vec::new();
    let reading = stream.read_to_end(&mut received);
    let read = tokio::time::timeout(Duration::from_secs(30), reading).await;
    // The connection may end normally or by a reset.
    let _ = read.expect("the connection is ended");
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_other_kinds_harm_nobody() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let mut publishers = Publishers::start(&python, &[Spec::default()]);
    let port = free_ports(2);
    let bridge = republishing(&site, port, None);
    super::follow(&bridge, &publishers, 0, "gpu-0");
    let mut router = Router::start(port).await;
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    let ready = b"\x04\x06\x05READY";
    let endless = [&[2][..], &u64::MAX.to_be_bytes()].concat();
    for port in [port, port + 1] {
        is_cut(port, &[b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0; 64]].concat()).await;
        is_cut(port, &[&greeting[..], &endless].concat()).await;
        is_cut(port, &[&greeting[..], ready, &endless].concat()).await;
    }
    // The question has no batch number.
    is_cut(port + 1, &[&greeting[..], ready, b"\x00\x01x"].concat()).await;
    publishers.publish(0, &json!([stored(1, 0, 2)]));
    router.reaches(&paths(1, 0..2)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn heartbeats_of_clients_are_answered() {
    let Some(python) = python() else { return };
    let site = Site::new(&[]).await;
    let publishers = Publishers::start(&python, &[Spec::default()]);
    let port = free_ports(2);
    let bridge = republishing(&site, port, None);
    super::follow(&bridge, &publishers, 0, "gpu-0");
    Router::start(port).await;
    let mut greeting = [0; 64];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    let everything = &b"\x00\x01\x01"[..];
    for (port, kind, first) in [
        (port, "SUB", everything),
        (port, "SUB", b""),
        (port + 1, "DEALER", b""),
    ] {
        let length = u32::try_from(kind.len()).unwrap().to_be_bytes();
        let ready = [b"\x05READY\x0bSocket-Type", &length[..], kind.as_bytes()].concat();
        let head = [4, u8::try_from(ready.len()).unwrap()];
        let ping = b"\x04\x0b\x04PING\x00\x10text";
        let said = [&greeting[..], &head, &ready, first, ping].concat();
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        stream.write_all(&said).await.unwrap();
        let mut heard = Vec::new();
        let answered = async {
            while !heard.windows(9).any(|part| part == b"\x04PONGtext") {
                assert!(stream.read_buf(&mut heard).await.unwrap() > 0, "{kind}");
            }
        };
        let answered = tokio::time::timeout(Duration::from_secs(30), answered).await;
        assert!(answered.is_ok(), "{kind}: {heard:?}");
    }
}
