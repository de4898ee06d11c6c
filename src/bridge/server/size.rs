//! Block size of an engine whose server does not tell it: the size of the blocks that the engine publishes.
//!
//! If a model has recurrent states, vLLM may publish a part of a block at the end of a prompt. The part is the only
//! block of its event, and no larger than a block of a recurrent state. Such an event does not tell the block size. In
//! a replay, the largest published block gives the block size.
//!
//! The batches that were read for that are not lost: the task that follows the publisher takes over the subscription, and
//! reads them again. So an engine without a replay socket is known from its first batch on.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::select_all;
use kvatlas_engines::{
    Content, DecodeLimits, Decoder, EngineBatch, EngineChange, EngineStored, Format, GroupKind,
};

use kvatlas_core::wire::Rank;
use kvatlas_process::registry::GivenEngine;
use kvatlas_telemetry::BridgeMetrics;

use super::super::frames::Numbered;
use super::super::grpc::{Frames, GrpcError};
use super::super::sockets::{ReplaySocket, SocketError, Subscription};
use super::answers::{Publishers, Sockets};

/// Error that keeps the bridge from seeing the engine's first block.
#[derive(Debug, thiserror::Error)]
pub(super) enum SizeError {
    #[error(transparent)]
    Socket(#[from] SocketError),
    #[error(transparent)]
    Grpc(#[from] GrpcError),
}

/// Maximum size of the batches of one publisher that are kept while the block size is not known, in bytes.
const HEARD_BYTES_MAX: usize = 16 << 20;

/// Search for the block size of an engine, in what its publishers report.
pub(super) struct SizeSearch<'a> {
    format: Format,
    listening: Vec<Listening<'a>>,
}

/// Subscription to one publisher, and what has come over it.
struct Listening<'a> {
    sockets: &'a Sockets,
    /// Subscription to the publisher; `None` before the connection is made, and for a server over gRPC.
    subscription: Option<Subscription>,
    heard: Vec<Numbered>,
    heard_bytes: usize,
}

impl<'a> SizeSearch<'a> {
    pub(super) fn new(publishers: &'a Publishers) -> Self {
        let listening = publishers.sockets.iter().map(|sockets| Listening {
            sockets,
            subscription: None,
            heard: Vec::new(),
            heard_bytes: 0,
        });
        Self {
            format: publishers.format,
            listening: listening.collect(),
        }
    }

    /// Waits for the first block that one of the publishers reports, and returns its number of tokens.
    pub(super) async fn first_size(
        &mut self,
        patience: Duration,
        metrics: &Arc<BridgeMetrics>,
    ) -> Result<u32, SizeError> {
        let format = self.format;
        let waiting = self
            .listening
            .iter_mut()
            .map(|listening| Box::pin(listening.size(format, patience, metrics)));
        // There is one rank at least.
        let (size, _, _) = select_all(waiting).await;
        size
    }

    /// Returns the subscriptions to publishers, each with the rank of the publisher. They return all batches again that have
    /// come over them.
    pub(super) fn into_subscriptions(self) -> impl Iterator<Item = (Rank, Subscription)> {
        let listening = self.listening.into_iter();
        listening.filter_map(|listening| {
            let mut subscription = listening.subscription?;
            let is_whole = listening.heard_bytes <= HEARD_BYTES_MAX;
            subscription.put_back(listening.heard);
            is_whole.then_some((listening.sockets.rank, subscription))
        })
    }
}

impl Listening<'_> {
    async fn size(
        &mut self,
        format: Format,
        patience: Duration,
        metrics: &Arc<BridgeMetrics>,
    ) -> Result<u32, SizeError> {
        let mut listener = BlockSizeListener::new(format);
        let Sockets { endpoint, topic, .. } = self.sockets;
        if GivenEngine::is_url(endpoint) {
            return size_in_frames(endpoint, patience, listener).await;
        }
        // The subscription comes first, so that it gets the batches that are published while the replay is read.
        let subscription = Subscription::connect(endpoint, topic, patience, Arc::clone(metrics)).await?;
        let subscription = self.subscription.insert(subscription);
        if let Some(endpoint) = &self.sockets.replay {
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
            let Numbered { seq, payload, topic } = subscription.next().await?;
            let size = listener.told(&payload);
            self.heard_bytes += payload.len();
            if self.heard_bytes <= HEARD_BYTES_MAX {
                // A copy, because the batch is a part of a read buffer, all of which it would keep in memory.
                self.heard.push(Numbered {
                    seq,
                    payload: Bytes::copy_from_slice(&payload),
                    topic: Bytes::copy_from_slice(&topic),
                });
            } else {
                self.heard.clear();
            }
            if let Some(size) = size {
                return Ok(size);
            }
        }
    }
}

/// Waits for the first block in the frames of a server over gRPC, and returns its number of tokens.
async fn size_in_frames(
    endpoint: &str,
    patience: Duration,
    mut listener: BlockSizeListener,
) -> Result<u32, SizeError> {
    let mut frames = Frames::subscribe(endpoint, listener.decoder.format(), patience).await?;
    loop {
        let frame = frames.next().await?;
        frame.read(&DecodeLimits::default(), &mut listener.batch);
        if let Some(size) = listener.size_told() {
            return Ok(size);
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
