//! Upper estimates of the bytes that events take in a batch.

use kvatlas_core::wire::{BlockContent, BlockNames, Event};

/// Upper estimate of the bytes of a batch without its events.
pub(super) const BATCH_BYTES: usize = 64;
/// Upper estimate of the bytes of an event without its lists.
pub(super) const EVENT_BYTES: usize = 128;
/// Maximum number of bytes that one run length takes in an event. An event marks its resumable blocks by a list of run
/// lengths.
pub(super) const RUN_BYTES: usize = 5;

/// Returns an upper estimate of the bytes that these events take in a batch.
pub(super) fn events_bytes(events: &[Event]) -> usize {
    BATCH_BYTES + events.iter().map(event_bytes).sum::<usize>()
}

/// Returns an upper estimate of the bytes that an event takes in a batch.
pub(super) fn event_bytes(event: &Event) -> usize {
    let lists = match event {
        Event::Stored(stored) => {
            let names = match &stored.names {
                BlockNames::Sequence { hashes, .. } => size_of_val(hashes.as_slice()),
                BlockNames::Lineage(hashes) => size_of_val(hashes.as_slice()),
            };
            let content = match &stored.content {
                None => 0,
                Some(BlockContent::BlockHashes(hashes)) => size_of_val(hashes.as_slice()),
                Some(BlockContent::Tokens {
                    tokens,
                    lora_name,
                    cache_salt,
                }) => {
                    let texts = [lora_name, cache_salt];
                    let text_bytes: usize = texts
                        .iter()
                        .map(|text| text.as_ref().map_or(0, String::len))
                        .sum();
                    size_of_val(tokens.as_slice()) + text_bytes
                }
            };
            names
                + content
                + stored
                    .engine_hashes
                    .as_ref()
                    .map_or(0, |hashes| size_of_val(hashes.as_slice()))
                + stored.resumable.runs().map_or(0, |runs| RUN_BYTES * runs.len())
        }
        Event::Removed(removed) => {
            size_of_val(removed.hashes.as_slice()) + size_of_val(removed.lineage_hashes.as_slice())
        }
        Event::Resumable(blocks) => {
            size_of_val(blocks.hashes.as_slice()) + size_of_val(blocks.lineage_hashes.as_slice())
        }
        Event::Cleared | Event::Doubted(_) | Event::Goodbye => 0,
    };
    EVENT_BYTES + lists
}
