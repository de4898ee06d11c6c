//! Reading of events by `dynamo-kv-router`.

use dynamo_kv_router::protocols::{KvCacheEventData, StorageTier, WorkerWithDpRank};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};

use crate::meaning::Meaning;

/// Whether the payload can be read. If one event cannot be read, `dynamo-kv-router` loses the whole batch.
pub fn reads(bytes: &[u8]) -> bool {
    decode_event_batch(bytes).is_ok()
}

/// Returns the meaning that Dynamo gives to a batch with one event.
pub fn meaning(block_size: u32, bytes: &[u8]) -> Meaning {
    let Ok(batch) = decode_event_batch(bytes) else {
        return Meaning::BatchLost;
    };
    let Some(raw) = batch.events.into_iter().next() else {
        return Meaning::Nothing("empty");
    };
    let worker = WorkerWithDpRank::from_worker_id(1);
    let mut normalizer = ZmqEventNormalizer::new(block_size);
    let raw = match normalizer.preprocess_with_reason(raw, worker) {
        Ok(raw) => raw,
        Err(reason) => return Meaning::Nothing(reason.as_label()),
    };
    let Some(event) = normalizer.normalize_preprocessed(raw, 1, worker) else {
        return Meaning::Nothing("not_converted");
    };
    let tier = match event.placement.tier {
        StorageTier::Device => 0,
        StorageTier::HostPinned => 1,
        StorageTier::Disk => 2,
        StorageTier::External => 3,
    };
    match event.event.data {
        KvCacheEventData::Stored(stored) => Meaning::Stored {
            tier,
            parent: stored.parent_hash.map(|hash| hash.0),
            blocks: stored
                .blocks
                .iter()
                .map(|block| (block.block_hash.0, block.tokens_hash.0))
                .collect(),
        },
        KvCacheEventData::Removed(removed) => Meaning::Removed {
            tier,
            names: removed.block_hashes.iter().map(|hash| hash.0).collect(),
        },
        KvCacheEventData::Cleared => Meaning::Cleared,
    }
}
