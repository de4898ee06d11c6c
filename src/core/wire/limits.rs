//! Limits on the content of one message.

/// Limits that a decoder enforces before it takes memory.
///
/// A query that exceeds a limit is answered with [`ErrorCode::TooLarge`](super::ErrorCode::TooLarge). An event batch
/// that exceeds a limit is dropped and counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireLimits {
    /// Longest payload, in bytes, of an event batch or a request.
    pub message_bytes_max: usize,
    /// Most events in one batch.
    pub events_max: usize,
    /// Most blocks in one event.
    pub blocks_per_event_max: usize,
    /// Most tokens in one block. Together with the block limits, it limits lists of tokens.
    pub tokens_per_block_max: usize,
    /// Most blocks in one query.
    pub query_depth_max: usize,
    /// Most queries in one request.
    pub queries_max: usize,
    /// Most workers a query may name in its filter.
    pub filter_workers_max: usize,
    /// Longest namespace or worker name, in bytes.
    pub name_bytes_max: usize,
    /// Longest LoRA name or cache salt, in bytes.
    pub text_bytes_max: usize,
}

impl Default for WireLimits {
    fn default() -> Self {
        Self {
            message_bytes_max: 1 << 20,
            events_max: 4096,
            blocks_per_event_max: 65_536,
            tokens_per_block_max: 4096,
            query_depth_max: 65_536,
            queries_max: 256,
            filter_workers_max: 4096,
            name_bytes_max: 64,
            text_bytes_max: 1024,
        }
    }
}
