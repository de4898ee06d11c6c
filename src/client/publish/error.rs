//! The errors that a publisher can meet.

use std::time::Duration;

use kvatlas_core::index::RegisterError;

/// Error of a publisher: events could not be published, or the publisher could not be started.
#[derive(Debug, thiserror::Error)]
pub enum PublisherError {
    /// The queue is full: batches come faster than NATS takes them, or the connection is down.
    #[error(
        "the queue of {queued_max} batches or {bytes_max} bytes is full; publish less, wait for room, or raise \
         queue_batches_max or queue_bytes_max"
    )]
    QueueFull {
        /// Maximum number of batches that may wait in the queue.
        queued_max: usize,
        /// Approximate maximum number of bytes that may wait in the queue.
        bytes_max: usize,
    },
    /// The events of one call do not fit into one message.
    #[error("the events take about {bytes} bytes; at most {bytes_max} fit into a batch, split them")]
    TooLarge {
        /// Approximate number of bytes that the events take.
        bytes: usize,
        /// Maximum size of a batch, in bytes.
        bytes_max: usize,
    },
    /// One call has more events than a batch may have.
    #[error("{events} events are too many for one batch; publish at most {events_max} at once")]
    TooManyEvents {
        /// Number of events in the call.
        events: usize,
        /// Maximum number of events in a batch.
        events_max: usize,
    },
    /// The publisher has stopped, because it said goodbye or the runtime has ended.
    #[error("the publisher has stopped; start another one")]
    Stopped,
    /// The connection to NATS failed. The text tells the reason.
    #[error("NATS: {0}")]
    Connection(String),
    /// The server has not taken the last batches in time, or has not answered. It may not have got these batches.
    #[error(
        "the NATS server has not answered for {waited:?}, and may not have the events; see whether it runs"
    )]
    Unanswered {
        /// Time for which the publisher has waited.
        waited: Duration,
    },
    /// The publisher is to go on after a batch with too large a number.
    #[error("no publisher goes on after batch {seq}; the largest number is {seq_max}, begin a new epoch")]
    SeqTooLarge {
        /// Number of the batch.
        seq: u64,
        /// Largest number after which a publisher goes on.
        seq_max: u64,
    },
    /// The server refused a batch, or the subscription to daemons' questions.
    #[error("the NATS server refuses it: {words}; give the user the right to it")]
    Refused {
        /// Text of the server's error.
        words: String,
    },
    /// The table of the holder's blocks cannot be made.
    #[error("the block table: {0}")]
    Table(#[from] RegisterError),
}
