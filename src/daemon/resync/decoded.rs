//! Memory that decoded batches take.

use kvatlas_core::wire::{BlockContent, BlockNames, Event, EventBatch, StoredBlocks};

/// Returns the memory that a decoded batch takes, in bytes.
pub(super) fn decoded_bytes(batch: &EventBatch) -> usize {
    let events = batch.events.iter().map(|event| match event {
        Event::Stored(stored) => stored_bytes(stored),
        Event::Removed(removed) => size_of_val(&*removed.hashes) + size_of_val(&*removed.lineage_hashes),
        Event::Resumable(resumable) => {
            size_of_val(&*resumable.hashes) + size_of_val(&*resumable.lineage_hashes)
        }
        Event::Cleared | Event::Doubted(_) | Event::Goodbye => 0,
    });
    size_of::<EventBatch>() + size_of_val(&*batch.events) + events.sum::<usize>()
}

/// Returns the memory that the lists of stored blocks take, in bytes.
fn stored_bytes(stored: &StoredBlocks) -> usize {
    let names = match &stored.names {
        BlockNames::Sequence { hashes, .. } => size_of_val(&**hashes),
        BlockNames::Lineage(hashes) => size_of_val(&**hashes),
    };
    let content = match &stored.content {
        None => 0,
        Some(BlockContent::BlockHashes(hashes)) => size_of_val(&**hashes),
        Some(BlockContent::Tokens { tokens, .. }) => size_of_val(&**tokens),
    };
    let engine_hashes = stored.engine_hashes.as_deref().map_or(0, size_of_val);
    let runs = stored.resumable.runs().map_or(0, size_of_val);
    names + content + engine_hashes + runs
}
