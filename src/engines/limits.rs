//! Bounds on the content of one engine payload.

/// The bounds that a decoder enforces before it spends memory. A payload with too many bytes or events is refused as
/// a whole. An event with a longer text is left out. A frame of `SubscribeKvEvents` with too many events is not
/// refused: only the events beyond the bound are left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodeLimits {
    /// Maximum size of a payload, in bytes. The decoded batch takes at most twelve times as much memory. If events
    /// list components of SGLang, it takes at most 48 times as much.
    pub payload_bytes_max: usize,
    /// Maximum number of events in one payload. A long payload may have more: one event for every 24 bytes.
    pub events_max: usize,
    /// Maximum size of a text that is looked at, in bytes. Such texts are names of adapters, salts, and identifiers of
    /// images.
    pub text_bytes_max: usize,
}

/// Minimum size of an event that names changed blocks, in bytes.
const BYTES_AN_EVENT: usize = 24;

impl DecodeLimits {
    /// Maximum number of events that are made from the events of a payload. An event of SGLang that lists components
    /// makes up to five events. There is room for four of every event that has 48 bytes or more.
    pub(crate) fn made_events_max(&self) -> usize {
        self.events_max.saturating_mul(2)
    }

    /// The limits for a payload of `bytes` bytes: longer payloads may have more events. The memory for events is bounded by the
    /// payload's length.
    pub(crate) fn for_payload(&self, bytes: usize) -> Self {
        Self {
            events_max: self.events_max.max(bytes / BYTES_AN_EVENT),
            ..*self
        }
    }
}

impl Default for DecodeLimits {
    fn default() -> Self {
        Self {
            payload_bytes_max: 16 << 20,
            events_max: 65_536,
            text_bytes_max: 4096,
        }
    }
}
