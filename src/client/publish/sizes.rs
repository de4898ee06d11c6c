//! Upper estimates of the bytes that events take in a batch.

use kvatlas_core::wire::Event;

/// Upper estimate of the bytes of a batch without its events.
pub(super) const BATCH_BYTES: usize = 64;
/// Upper estimate of the bytes of an event without its lists.
pub(super) const EVENT_BYTES: usize = 128;

/// Returns an upper estimate of the bytes that these events take in a batch.
pub(super) fn events_bytes(events: &[Event]) -> usize {
    BATCH_BYTES + events.iter().map(event_bytes).sum::<usize>()
}

/// Returns an upper estimate of the bytes that an event takes in a batch.
pub(super) fn event_bytes(event: &Event) -> usize {
    EVENT_BYTES + event.list_bytes()
}
