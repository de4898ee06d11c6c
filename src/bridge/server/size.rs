//! Block size of an engine whose server does not tell it: the size of the blocks that the engine publishes.
//!
//! If a model has recurrent states, vLLM may publish a part of a block at the end of a prompt. The part is the only
//! block of its event, and no larger than a block of a recurrent state. Such an event does not tell the block size. In
//! a replay, the largest published block gives the block size.
//!
//! The events that were read for that are not lost: the task that follows the publisher takes over the connection, and
//! reads them again. So an engine that does not give them again is known from its first event on. An attempt that fails
//! elsewhere leaves the connections to the next attempt.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{join_all, select_all};
use kvatlas_engines::subscribe::KvEventFrame;
use kvatlas_engines::{
    Content, DecodeLimits, Decoder, EngineBatch, EngineChange, EngineStored, Format, GroupKind,
};
use prost::Message;
use tokio::time::timeout;

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
    /// The size that was found; `None` until then.
    found: Option<u32>,
}

/// Connection to one publisher, and what has come over it.
struct Listening {
    sockets: Sockets,
    listener: BlockSizeListener,
    channel: Option<OpenChannel>,
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
        });
        Self {
            listening: listening.collect(),
            publishers,
            found: None,
        }
    }

    /// Whether this is the search for the block size of these publishers.
    pub(super) fn is_of(&self, publishers: &Publishers) -> bool {
        self.publishers == *publishers
    }

    /// Waits for the first block that one of the publishers reports, and returns its number of tokens. If some publishers
    /// cannot be reached, waits for `patience` at most. The connections stay after an error, for the next call, unless one
    /// of them has broken: then another process may be there.
    pub(super) async fn first_size(
        &mut self,
        patience: Duration,
        metrics: &Arc<BridgeMetrics>,
    ) -> Result<u32, SizeError> {
        if let Some(size) = self.found {
            return Ok(size);
        }
        let format = self.publishers.format;
        let connecting = self
            .listening
            .iter_mut()
            .map(|listening| listening.connect(format, patience, metrics));
        let failed = join_all(connecting).await.into_iter().find_map(Result::err);
        let waiting: Vec<_> = self
            .listening
            .iter_mut()
            .filter_map(|listening| Some(Box::pin(listening.size(patience, metrics)?)))
            .collect();
        let size = match failed {
            Some(error) if waiting.is_empty() => return Err(error),
            Some(error) => match timeout(patience, select_all(waiting)).await {
                Ok((size, ..)) => size,
                Err(_) => return Err(error),
            },
            // There is one rank at least.
            None => select_all(waiting).await.0,
        };
        match &size {
            Ok(size) => self.found = Some(*size),
            Err(_) => *self = Self::new(self.publishers.clone()),
        }
        size
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

    /// Waits for the first block of the publisher, and returns its number of tokens. Nothing is lost if the future is
    /// dropped. Returns `None` if there is no connection.
    fn size<'a>(
        &'a mut self,
        patience: Duration,
        metrics: &'a Arc<BridgeMetrics>,
    ) -> Option<impl Future<Output = Result<u32, SizeError>> + 'a> {
        let Self {
            sockets,
            listener,
            channel,
        } = self;
        let channel = channel.as_mut()?;
        Some(async move {
            // The connection was made before, so it gets the batches that are published while the replay is read.
            if let Some(endpoint) = &sockets.replay {
                match listener.replayed(endpoint, patience, metrics).await {
                    Ok(Some(size)) => return Ok(size),
                    Ok(None) => {}
                    // The engine is then treated like one without a replay socket: its next batch shows the size as well.
                    Err(error) => {
                        tracing::debug!(endpoint, %error, "a replay socket does not tell the block size")
                    }
                }
            }
            loop {
                if let Some(size) = channel.next(listener).await? {
                    return Ok(size);
                }
            }
        })
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
    use serde_json::json;

    use super::*;

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
