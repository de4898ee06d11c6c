//! The errors that a client can meet.

use std::time::Duration;

use async_nats::{Client, PublishError, PublishErrorKind};
use kvatlas_core::wire::WireError;

/// Error that leaves a request without an answer, or a message unsent.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No daemon subscribes to the subject.
    #[error(
        "no kvatlas daemon listens on {subject}; start one, or a gateway if there are only shards; or check the subject prefix"
    )]
    NoDaemon {
        /// Subject of the request.
        subject: String,
    },
    /// No answer came in time.
    #[error("no answer on {subject} within {patience:?}")]
    TimedOut {
        /// Subject of the request.
        subject: String,
        /// Time that the request waited.
        patience: Duration,
    },
    /// The daemon answered with an error.
    #[error("the daemon refused: {0}")]
    Refused(#[from] WireError),
    /// The daemon answered with an error code that this client does not know.
    #[error("the daemon refused: {text} (error {code})")]
    RefusedOtherwise {
        /// The unknown error code, as the daemon sent it.
        code: String,
        /// The daemon's error text.
        text: String,
    },
    /// The answer cannot be decoded as an answer of this contract.
    #[error("the answer cannot be decoded: {0}")]
    Undecodable(#[from] rmp_serde::decode::Error),
    /// The message is larger than the NATS server takes; nothing was sent.
    #[error(
        "the message to {subject} has {bytes} bytes, and the NATS server takes at most {bytes_max}; \
         split it, or raise max_payload in the server's configuration"
    )]
    TooLarge {
        /// Subject of the message.
        subject: String,
        /// Length of the message in bytes.
        bytes: usize,
        /// The server's limit on a message, in bytes.
        bytes_max: usize,
    },
    /// The connection to NATS failed. The text tells the reason.
    #[error("NATS: {0}")]
    Connection(String),
}

impl ClientError {
    /// Returns the error for a message of `bytes` bytes to `subject` that the connection did not take.
    pub(super) fn unsent(error: &PublishError, nats: &Client, subject: &str, bytes: usize) -> Self {
        match error.kind() {
            PublishErrorKind::MaxPayloadExceeded => Self::too_large(nats, subject, bytes),
            _ => Self::Connection(error.to_string()),
        }
    }

    /// Returns the error for a message of `bytes` bytes to `subject` that is larger than the server takes.
    pub(super) fn too_large(nats: &Client, subject: &str, bytes: usize) -> Self {
        Self::TooLarge {
            subject: subject.to_owned(),
            bytes,
            bytes_max: nats.max_payload(),
        }
    }
}
