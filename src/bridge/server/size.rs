//! Block size of an engine whose server does not tell it: the size of the blocks that the engine publishes.
//!
//! If a model has recurrent states, vLLM may publish a part of a block at the end of a prompt. The part is the only
//! block of its event, and no larger than a block of a recurrent state. Such an event does not tell the block size. In
//! a replay, the largest published block gives the block size.
//!
//! The events that were read for that are not lost: the task that follows the publisher takes over the connection, and
//! reads them again. So an engine that does not give them again is known from its first event on. An attempt that fails
//! elsewhere leaves the connections to the next attempt. They are read on meanwhile, so that the engine does not have to
//! keep its events for a connection that nobody reads.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use kvatlas_engines::subscribe::KvEventFrame;
use kvatlas_engines::{
    Content, DecodeLimits, Decoder, EngineBatch, EngineChange, EngineStored, Format, GroupKind,
};
use prost::Message;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use kvatlas_process::registry::GivenEngine;
use kvatlas_telemetry::BridgeMetrics;

use super::super::frames::Numbered;
use super::super::grpc::{Frames, GrpcError};
use super::super::sockets::{ReplaySocket, SocketError, Subscription};
use super::answers::{Publishers, Sockets};
use super::handle::{EarlyConnection, MadeConnection};

/// Error that keeps the bridge from seeing the engine's first block.
#[derive(Debug, thiserror::Error)]
pub(super) enum SizeError {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Grpc(#[from] GrpcError),
}

/// Maximum size of the events of one publisher that are kept while the block size is not known, in bytes.
const HEARD_BYTES_MAX: usize = 16 << 20;

/// Search for the block size of an engine, in what its publishers report.
pub(super) struct SizeSearch {
    publishers: Publishers,
    listening: Vec<Listening>,
}

/// Connection to one publisher, and what has come over it.
struct Listening {
    sockets: Sockets,
    listener: BlockSizeListener,
    channel: Option<OpenChannel>,
    /// Whether the replay socket was read to its end, or failed, since the connection was made; true if there is none.
    is_replayed: bool,
    /// Block size that the replay or the connection has shown; `None` until then.
    size: Option<u32>,
}

/// Connection to a publisher, with the events that were read from it.
#[allow(
    clippy::large_enum_variant,
    reason = "one for each rank, while its server is being asked"
)]
enum OpenChannel {
    Sockets(Subscription, Heard<Numbered>),
    Stream(Box<Frames>, Heard<KvEventFrame>),
}

/// Events that were read from a connection, up to [`HEARD_BYTES_MAX`].
struct Heard<T> {
    events: Vec<T>,
    bytes: usize,
}

impl<T> Heard<T> {
    fn new() -> Self {
        let (events, bytes) = (Vec::new(), 0);
        Self { events, bytes }
    }

    /// Notes an event of this size.
    fn note(&mut self, bytes: usize, event: impl FnOnce() -> T) {
        self.bytes = self.bytes.saturating_add(bytes);
        match self.bytes <= HEARD_BYTES_MAX {
            true => self.events.push(event()),
            false => self.events.clear(),
        }
    }

    /// Returns all events; `None` if they were too large to be kept.
    fn whole(self) -> Option<Vec<T>> {
        (self.bytes <= HEARD_BYTES_MAX).then_some(self.events)
    }
}

impl SizeSearch {
    pub(super) fn new(publishers: Publishers) -> Self {
        let listening = publishers.sockets.iter().map(|sockets| Listening {
            sockets: sockets.clone(),
            listener: BlockSizeListener::new(publishers.format),
            channel: None,
            is_replayed: sockets.replay.is_none(),
            size: None,
        });
        Self {
            listening: listening.collect(),
            publishers,
        }
    }

    /// Whether this is the search for the block size of these publishers.
    pub(super) fn is_of(&self, publishers: &Publishers) -> bool {
        self.publishers == *publishers
    }

    /// Waits for the first block that one of the publishers reports, and returns its number of tokens. Once the publishers
    /// are connected, calls `note` with the error of one that cannot be reached; `None` if all can be reached. With an error,
    /// waits for `patience` at most after the replays. The connections stay after an error, for the next call, unless one of
    /// them has broken: then another process may be there.
    pub(super) async fn first_size(
        &mut self,
        patience: Duration,
        metrics: &Arc<BridgeMetrics>,
        note: impl Fn(Option<&SizeError>),
    ) -> Result<u32, SizeError> {
        if let Some(size) = self.listening.iter().find_map(Listening::known_size) {
            return Ok(size);
        }
        let format = self.publishers.format;
        let connecting = self
            .listening
            .iter_mut()
            .map(|listening| listening.connect(format, patience, metrics));
        let absent = join_all(connecting).await.into_iter().find_map(Result::err);
        note(absent.as_ref());
        let limit = absent.is_some().then_some(patience);
        let connected = self
            .listening
            .iter_mut()
            .filter(|listening| listening.channel.is_some());
        let mut waiting: FuturesUnordered<_> = connected
            .map(|listening| listening.first_size(limit, patience, metrics))
            .collect();
        let told = loop {
            match waiting.next().await.map(Result::transpose) {
                // This publisher has shown no block in time.
                Some(None) => {}
                told => break told.flatten(),
            }
        };
        drop(waiting);
        match (told, absent) {
            (Some(Ok(size)), _) => Ok(size),
            (Some(Err(error)), _) => {
                *self = Self::new(self.publishers.clone());
                Err(error)
            }
            (None, Some(error)) => Err(error),
            // A server without publishers shows no block.
            (None, None) => std::future::pending().await,
        }
    }

    /// Reads what the publishers report during `pause`, and notes it. If a connection breaks, begins anew: then another
    /// process may be there.
    pub(super) async fn read_on(&mut self, pause: Duration) {
        let ends_at = Instant::now() + pause;
        let mut reading: FuturesUnordered<_> = self.listening.iter_mut().map(Listening::read_on).collect();
        let has_broken = timeout_at(ends_at, reading.next()).await.is_ok();
        drop(reading);
        if has_broken {
            *self = Self::new(self.publishers.clone());
            sleep_until(ends_at).await;
        }
    }

    /// Returns the connections to publishers. They return all events again that have come over them.
    pub(super) fn into_connections(self) -> impl Iterator<Item = EarlyConnection> {
        self.listening.into_iter().filter_map(Listening::into_connection)
    }
}

impl Listening {
    fn into_connection(self) -> Option<EarlyConnection> {
        let made = match self.channel? {
            OpenChannel::Sockets(mut subscription, heard) => {
                subscription.put_back(heard.whole()?);
                MadeConnection::Sockets(subscription)
            }
            OpenChannel::Stream(mut frames, heard) => {
                frames.put_back(heard.whole()?);
                MadeConnection::Stream(frames)
            }
        };
        let Sockets {
            rank,
            endpoint,
            topic,
            ..
        } = self.sockets;
        Some(EarlyConnection {
            rank,
            endpoint,
            topic,
            made,
        })
    }

    /// Connects to the publisher, unless that is done.
    async fn connect(
        &mut self,
        format: Format,
        patience: Duration,
        metrics: &Arc<BridgeMetrics>,
    ) -> Result<(), SizeError> {
        if self.channel.is_some() {
            return Ok(());
        }
        let Sockets { endpoint, topic, .. } = &self.sockets;
        self.channel = Some(match GivenEngine::is_url(endpoint) {
            true => {
                let frames = Frames::subscribe(endpoint, format, patience).await?;
                OpenChannel::Stream(Box::new(frames), Heard::new())
            }
            false => {
                let metrics = Arc::clone(metrics);
                let subscription = Subscription::connect(endpoint, topic, patience, metrics).await?;
                OpenChannel::Sockets(subscription, Heard::new())
            }
        });
        Ok(())
    }

    /// Returns the block size that was shown; `None` until then, and until the replay has been read.
    fn known_size(&self) -> Option<u32> {
        self.size.filter(|_| self.is_replayed)
    }

    /// Waits for the first block of the publisher, and returns its number of tokens. Reads the replay first. Returns `None`
    /// if no block comes for `limit` after that. Nothing is lost if the future is dropped.
    async fn first_size(
        &mut self,
        limit: Option<Duration>,
        patience: Duration,
        metrics: &Arc<BridgeMetrics>,
    ) -> Result<Option<u32>, SizeError> {
        // The connection was made before, so it gets the batches that are published while the replay is read.
        self.read_replay(patience, metrics).await;
        let waiting = async {
            while self.size.is_none() {
                self.read().await?;
            }
            Ok::<_, SizeError>(())
        };
        match limit {
            Some(limit) => timeout(limit, waiting).await.unwrap_or(Ok(()))?,
            None => waiting.await?,
        }
        Ok(self.size)
    }

    /// Reads the replay socket to its end, unless that was done for this connection.
    async fn read_replay(&mut self, patience: Duration, metrics: &Arc<BridgeMetrics>) {
        let Some(endpoint) = self.sockets.replay.as_ref().filter(|_| !self.is_replayed) else {
            return;
        };
        match self.listener.replayed(endpoint, patience, metrics).await {
            Ok(size) => self.size = size.or(self.size),
            // The engine is then treated like one without a replay socket: its next batch shows the size as well.
            Err(error) => tracing::debug!(endpoint, %error, "a replay socket does not tell the block size"),
        }
        self.is_replayed = true;
    }

    /// Waits for the next events of the publisher, and notes them. Waits for ever if there is no connection.
    async fn read(&mut self) -> Result<(), SizeError> {
        let Some(channel) = &mut self.channel else {
            return std::future::pending().await;
        };
        let told = channel.next(&mut self.listener).await?;
        self.size = self.size.or(told);
        Ok(())
    }

    /// Notes the events of the publisher until the connection breaks.
    async fn read_on(&mut self) {
        while self.read().await.is_ok() {}
    }
}

impl OpenChannel {
    /// Waits for the next events, and notes them. Returns the block size that they show; `None` if they show none.
    async fn next(&mut self, listener: &mut BlockSizeListener) -> Result<Option<u32>, SizeError> {
        match self {
            Self::Sockets(subscription, heard) => {
                let Numbered { seq, payload, topic } = subscription.next().await?;
                // A copy, because the batch is a part of a read buffer, all of which it would keep in memory.
                heard.note(payload.len(), || Numbered {
                    seq,
                    payload: Bytes::copy_from_slice(&payload),
                    topic: Bytes::copy_from_slice(&topic),
                });
                Ok(listener.told(&payload))
            }
            Self::Stream(frames, heard) => {
                let frame = frames.next().await?;
                frame.read(&DecodeLimits::default(), &mut listener.batch);
                heard.note(frame.encoded_len(), || frame);
                Ok(listener.size_told())
            }
        }
    }
}

struct BlockSizeListener {
    decoder: Decoder,
    batch: EngineBatch,
    /// Largest block of a recurrent state so far, in tokens; 0 before the first.
    state_max: u32,
}

impl BlockSizeListener {
    fn new(format: Format) -> Self {
        Self {
            decoder: Decoder::new(format, DecodeLimits::default()),
            batch: EngineBatch::default(),
            state_max: 0,
        }
    }

    /// Reads the replay socket to its end, and returns the largest block size that a batch shows; `None` if none shows it.
    async fn replayed(
        &mut self,
        endpoint: &str,
        patience: Duration,
        metrics: &Arc<BridgeMetrics>,
    ) -> Result<Option<u32>, SocketError> {
        let mut replay = ReplaySocket::connect(endpoint, patience, Arc::clone(metrics)).await?;
        replay.ask(0).await?;
        let mut largest = None;
        while let Some(numbered) = replay.next().await? {
            largest = largest.max(self.told(&numbered.payload));
        }
        Ok(largest)
    }

    /// Returns the block size that a payload shows; `None` if it shows none or cannot be decoded.
    fn told(&mut self, payload: &[u8]) -> Option<u32> {
        self.decoder.decode(payload, &mut self.batch).ok()?;
        self.size_told()
    }

    /// Returns the block size that the batch shows: the largest size among its blocks of main attention. A smaller
    /// block is only a part of a block. `None` if the batch has no block of main attention, or if each of these blocks
    /// may be only a part of a block.
    fn size_told(&mut self) -> Option<u32> {
        let stored = || {
            self.batch
                .events()
                .iter()
                .filter_map(|event| match &event.change {
                    EngineChange::Stored(stored) => Some((stored, size_of_blocks(stored)?)),
                    _ => None,
                })
        };
        let of_states = stored().filter(|(stored, _)| stored.group.kind == Some(GroupKind::State));
        let state_max = of_states.map(|(_, size)| size).fold(self.state_max, u32::max);
        let is_whole = |stored: &EngineStored, size| stored.names.len() > 1 || size > state_max;
        let whole =
            stored().filter(|(stored, size)| !stored.group.is_beside_main() && is_whole(stored, *size));
        let told = whole.map(|(_, size)| size).max();
        self.state_max = state_max;
        told
    }
}

/// Returns the number of tokens in each block of an event; `None` if the event does not tell it.
fn size_of_blocks(stored: &EngineStored) -> Option<u32> {
    let told = match (stored.block_size, stored.content) {
        (Some(size), _) => u32::try_from(size).ok(),
        (None, Content::Tokens { step, .. }) => u32::try_from(step).ok(),
        (None, _) => None,
    };
    told.filter(|size| *size > 0)
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
    use serde_json::json;
    use tokio::net::TcpListener;

    use super::super::super::zmtp::{PeerConnection, Role, push_message};
    use super::*;

    /// Maximum time for a step.
    const PATIENCE: Duration = Duration::from_millis(200);

    async fn listener() -> (TcpListener, String) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
        (listener, endpoint)
    }

    /// Returns an endpoint at which nobody listens.
    async fn absent() -> String {
        listener().await.1
    }

    /// Makes a search among ranks at these endpoints, with these replay sockets.
    fn search(ranks: Vec<(String, Option<String>)>) -> SizeSearch {
        let sockets = ranks.into_iter().zip(0..);
        let sockets = sockets.map(|((endpoint, replay), rank)| Sockets {
            rank,
            endpoint,
            replay,
            topic: String::new(),
            refused_hint: None,
        });
        SizeSearch::new(Publishers {
            format: Format::Vllm,
            block_size: None,
            has_no_connector: false,
            sockets: sockets.collect(),
        })
    }

    /// Takes a subscription, and publishes a batch with blocks of `size` tokens.
    async fn publish_to_next(listener: &TcpListener, size: u32) -> PeerConnection {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            // On a busy machine, a connection may not be made in time.
            let Ok(mut peer) = PeerConnection::open(stream, Role::Publisher).await else {
                continue;
            };
            if peer.next().await.is_ok() {
                publish(&mut peer, size).await;
                return peer;
            }
        }
    }

    async fn publish(peer: &mut PeerConnection, size: u32) {
        let payload = rmp_serde::to_vec_named(&json!([1.5, [stored(size, 2, "full_attention")], 0]));
        let mut message = Vec::new();
        push_message(&mut message, &[b"", &0_u64.to_be_bytes(), &payload.unwrap()]);
        peer.send(&message).await.unwrap();
    }

    /// Number of batches that the first rank's connection has brought; `None` if there is no connection.
    fn heard(search: &SizeSearch) -> Option<usize> {
        match search.listening[0].channel.as_ref()? {
            OpenChannel::Sockets(_, heard) => Some(heard.events.len()),
            OpenChannel::Stream(..) => None,
        }
    }

    /// Reads on until `is_done`.
    async fn read_on_until(search: &mut SizeSearch, is_done: impl Fn(&SizeSearch) -> bool) {
        let reading = async {
            while !is_done(search) {
                search.read_on(Duration::from_millis(1)).await;
            }
        };
        timeout(Duration::from_secs(60), reading).await.unwrap();
    }

    /// An engine must not have to keep its events for a bridge that waits for something else. Its next process may have
    /// another block size.
    #[tokio::test]
    async fn a_connection_is_read_after_it_has_told_the_size() {
        let metrics = Arc::new(BridgeMetrics::new());
        let (listener, endpoint) = listener().await;
        let mut search = search(vec![(endpoint, None)]);
        let searching = search.first_size(Duration::from_secs(60), &metrics, |absent| {
            assert!(absent.is_none())
        });
        let (size, mut peer) = tokio::join!(searching, publish_to_next(&listener, 16));
        assert_eq!((size.unwrap(), heard(&search)), (16, Some(1)));
        publish(&mut peer, 16).await;
        read_on_until(&mut search, |search| heard(search) == Some(2)).await;
        drop(peer);
        read_on_until(&mut search, |search| heard(search).is_none()).await;
        let searching = search.first_size(Duration::from_secs(60), &metrics, |_| {});
        let (size, _peer) = tokio::join!(searching, publish_to_next(&listener, 64));
        assert_eq!(size.unwrap(), 64);
    }

    /// A replay socket that does not answer takes all of the time that is set for an attempt with an absent rank.
    #[tokio::test]
    async fn a_batch_tells_the_size_where_a_rank_is_absent_and_a_replay_silent() {
        let metrics = Arc::new(BridgeMetrics::new());
        let ((listener, endpoint), (_silent, replay)) = (listener().await, self::listener().await);
        let mut search = search(vec![(endpoint, Some(replay)), (absent().await, None)]);
        let noted = Mutex::new(Vec::new());
        let searching = async {
            let note = |absent: Option<&SizeError>| noted.lock().push(absent.is_some());
            loop {
                match search.first_size(PATIENCE, &metrics, note).await {
                    Ok(size) => break size,
                    Err(error) => assert!(matches!(error, SizeError::Socket(_)), "{error}"),
                }
            }
        };
        let found = async { tokio::join!(searching, publish_to_next(&listener, 16)) };
        let (size, _peer) = timeout(Duration::from_secs(60), found).await.unwrap();
        assert_eq!(size, 16);
        assert!(noted.into_inner().iter().all(|is_absent| *is_absent));
    }

    /// Stored blocks of `size` tokens, as vLLM tells them.
    fn stored(size: u32, blocks: u32, kind: &str) -> serde_json::Value {
        let (tokens, names): (Vec<u32>, Vec<u32>) = ((0..size * blocks).collect(), (0..blocks).collect());
        json!({"type": "BlockStored", "block_hashes": names, "parent_block_hash": null, "token_ids": tokens, "block_size": size,
            "medium": "GPU", "group_idx": 0, "kv_cache_spec_kind": kind})
    }

    fn told(listener: &mut BlockSizeListener, events: &serde_json::Value) -> Option<u32> {
        listener.told(&rmp_serde::to_vec_named(&json!([1.5, events, 0])).unwrap())
    }

    #[test]
    fn the_largest_block_of_main_attention_tells_the_size() {
        let mut listener = BlockSizeListener::new(Format::Vllm);
        let main = |size| stored(size, 1, "full_attention");
        assert_eq!(told(&mut listener, &json!([{"type": "AllBlocksCleared"}])), None);
        assert_eq!(told(&mut listener, &json!([main(16), main(64)])), Some(64));
        assert_eq!(told(&mut listener, &json!([stored(128, 1, "mamba")])), None);
        assert_eq!(listener.told(b"\xc1"), None);
    }

    /// A test with batches of Qwen3-Next in vLLM 0.33, with decode context parallelism. There, main attention has
    /// blocks of 128 tokens.
    #[test]
    fn a_block_that_may_be_a_part_does_not_tell_the_size() {
        let state = || stored(64, 1, "mamba");
        let main = |size, blocks| stored(size, blocks, "full_attention");
        let mut listener = BlockSizeListener::new(Format::Vllm);
        assert_eq!(told(&mut listener, &json!([state(), main(64, 1)])), None);
        assert_eq!(told(&mut listener, &json!([main(64, 1)])), None);
        assert_eq!(told(&mut listener, &json!([state(), main(128, 1)])), Some(128));
        let whole = json!([state(), main(128, 11), main(64, 1)]);
        assert_eq!(told(&mut listener, &whole), Some(128));
        // Without context parallelism, blocks of states and of main attention have the same size. Only an event with
        // several blocks then has whole blocks for certain.
        let mut listener = BlockSizeListener::new(Format::Vllm);
        assert_eq!(told(&mut listener, &json!([state(), main(64, 1)])), None);
        assert_eq!(told(&mut listener, &json!([state(), main(64, 2)])), Some(64));
    }
}
