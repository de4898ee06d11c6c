//! Block size of an engine whose server does not tell it: the size of the blocks that the engine publishes.
//!
//! If a model has recurrent states, vLLM may publish a part of a block at the end of a prompt. The part is the only
//! block of its event, and no larger than a block of a recurrent state. Such an event does not tell the block size. In
//! a replay, the largest published block gives the block size.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_all;
use kvatlas_engines::{
    Content, DecodeLimits, Decoder, EngineBatch, EngineChange, EngineStored, Format, GroupKind,
};

use kvatlas_process::registry::GivenEngine;
use kvatlas_telemetry::BridgeMetrics;

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

/// Waits for the first block that one of the publishers reports, and returns its number of tokens.
pub(super) async fn first_size(
    publishers: &Publishers,
    patience: Duration,
    metrics: &Arc<BridgeMetrics>,
) -> Result<u32, SizeError> {
    let waiting = publishers
        .sockets
        .iter()
        .map(|sockets| Box::pin(size_of(sockets, publishers.format, patience, metrics)));
    // There is one rank at least.
    let (size, _, _) = select_all(waiting).await;
    size
}

async fn size_of(
    sockets: &Sockets,
    format: Format,
    patience: Duration,
    metrics: &Arc<BridgeMetrics>,
) -> Result<u32, SizeError> {
    let mut listener = BlockSizeListener::new(format);
    let Sockets { endpoint, topic, .. } = sockets;
    if GivenEngine::is_url(endpoint) {
        let mut frames = Frames::subscribe(endpoint, format, patience).await?;
        loop {
            let frame = frames.next().await?;
            frame.read(&DecodeLimits::default(), &mut listener.batch);
            if let Some(size) = listener.size_told() {
                return Ok(size);
            }
        }
    }
    // The subscription comes first, so that it gets the batches that are published while the replay is read.
    let mut subscription = Subscription::connect(endpoint, topic, patience, Arc::clone(metrics)).await?;
    if let Some(endpoint) = &sockets.replay {
        match listener.replayed(endpoint, patience, metrics).await {
            Ok(Some(size)) => return Ok(size),
            Ok(None) => {}
            // The engine is then treated like one without a replay socket: its next batch shows the size as well.
            Err(error) => tracing::debug!(endpoint, %error, "a replay socket does not tell the block size"),
        }
    }
    loop {
        let numbered = subscription.next().await?;
        if let Some(size) = listener.told(&numbered.payload) {
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
