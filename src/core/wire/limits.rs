//! Limits on the content of one message.

/// Limits that a decoder checks before it allocates memory.
///
/// A query that exceeds a limit is answered with [`ErrorCode::TooLarge`](super::ErrorCode::TooLarge). An event batch
/// that exceeds a limit is dropped and counted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireLimits {
    /// Maximum payload of an event batch or a request, in bytes.
    pub message_bytes_max: usize,
    /// Maximum number of events in one batch.
    pub events_max: usize,
    /// Maximum number of blocks in one event.
    pub blocks_per_event_max: usize,
    /// Maximum number of tokens in one block. Together with the limits on blocks, it limits lists of tokens.
    pub tokens_per_block_max: usize,
    /// Maximum number of blocks in one query.
    pub query_depth_max: usize,
    /// Maximum number of queries in one request.
    pub queries_max: usize,
    /// Maximum number of workers that a query may name in its filter.
    pub filter_workers_max: usize,
    /// Maximum length of a namespace or worker name, in bytes.
    pub name_bytes_max: usize,
    /// Maximum length of a LoRA name or cache salt, in bytes.
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
