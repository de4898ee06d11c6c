//! Block size of an engine whose server does not tell it: the size of the first block that the engine publishes.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select_all;
use kvatlas_engines::{Content, DecodeLimits, Decoder, EngineBatch, EngineChange, Format};

use kvatlas_process::registry::GivenEngine;
use kvatlas_telemetry::BridgeMetrics;

use super::super::frames::ReplayMessage;
use super::super::grpc::{Frames, GrpcError};
use super::super::sockets::{ReplaySocket, SocketError, Subscription};
use super::answers::{Publishers, Sockets};

/// An error that keeps the first block from being seen.
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
    let mut listener = BlockSizeListener {
        decoder: Decoder::new(format, DecodeLimits::default()),
        batch: EngineBatch::default(),
    };
    let Sockets { endpoint, topic, .. } = sockets;
    if GivenEngine::is_url(endpoint) {
        let mut frames = Frames::subscribe(endpoint, format, patience).await?;
        loop {
            let frame = frames.next().await?;
            frame.read(&DecodeLimits::default(), &mut listener.batch);
            if let Some(size) = size_in(&listener.batch) {
                return Ok(size);
            }
        }
    }
    // The subscription comes first, so that nothing is published unseen while the replay is read.
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
}

impl BlockSizeListener {
    /// Reads the replay socket until a batch shows the block size; `None` if no batch of the socket reports a block.
    async fn replayed(
        &mut self,
        endpoint: &str,
        patience: Duration,
        metrics: &Arc<BridgeMetrics>,
    ) -> Result<Option<u32>, SocketError> {
        let mut replay = ReplaySocket::connect(endpoint, patience, Arc::clone(metrics)).await?;
        replay.ask(0).await?;
        loop {
            match replay.next().await? {
                ReplayMessage::End => return Ok(None),
                ReplayMessage::Batch(numbered) => {
                    if let Some(size) = self.told(&numbered.payload) {
                        return Ok(Some(size));
                    }
                }
            }
        }
    }

    /// Returns the block size that a payload shows; `None` if it reports no block or cannot be decoded.
    fn told(&mut self, payload: &[u8]) -> Option<u32> {
        self.decoder.decode(payload, &mut self.batch).ok()?;
        size_in(&self.batch)
    }
}

/// Returns the size of the blocks in a batch; `None` if it has no block. Blocks of layer groups beside main attention do not
/// count. Of several sizes the largest counts: a smaller one is a part of a block.
fn size_in(batch: &EngineBatch) -> Option<u32> {
    let sizes = batch.events().iter().filter_map(|event| {
        let EngineChange::Stored(stored) = event.change else {
            return None;
        };
        let told = match (stored.block_size, stored.content) {
            (Some(size), _) => u32::try_from(size).ok(),
            (None, Content::Tokens { step, .. }) => u32::try_from(step).ok(),
            (None, _) => None,
        };
        told.filter(|size| *size > 0 && !stored.group.is_beside_main())
    });
    sizes.max()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_largest_block_of_main_attention_tells_the_size() {
        let mut listener = BlockSizeListener {
            decoder: Decoder::new(Format::Vllm, DecodeLimits::default()),
            batch: EngineBatch::default(),
        };
        let mut told = |events: serde_json::Value| {
            listener.told(&rmp_serde::to_vec_named(&json!([1.5, events, 0])).unwrap())
        };
        let stored = |size: u32, kind: &str| {
            let tokens: Vec<u32> = (0..size).collect();
            json!({"type": "BlockStored", "block_hashes": [size], "parent_block_hash": null, "token_ids": tokens, "block_size": size,
                "medium": "GPU", "group_idx": 0, "kv_cache_spec_kind": kind})
        };
        assert_eq!(told(json!([{"type": "AllBlocksCleared"}])), None);
        assert_eq!(told(json!([stored(128, "mamba")])), None);
        assert_eq!(
            told(json!([
                stored(16, "full_attention"),
                stored(64, "full_attention")
            ])),
            Some(64)
        );
        assert_eq!(listener.told(b"\xc1"), None);
    }
}
