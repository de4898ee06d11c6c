//! What a client can meet.

use std::time::Duration;

use crate::wire::WireError;

/// Why a request has no answer, or a batch was not sent.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody subscribes to the subject.
    #[error("no kvatlas daemon listens on {subject}; start one, or check the subject prefix")]
    NoDaemon {
        /// The subject asked.
        subject: String,
    },
    /// No answer came in time.
    #[error("no answer on {subject} within {patience:?}")]
    TimedOut {
        /// The subject asked.
        subject: String,
        /// How long was waited.
        patience: Duration,
    },
    /// The daemon answered with an error.
    #[error("the daemon refused: {0}")]
    Refused(#[from] WireError),
    /// The daemon answered with an error number this client does not know.
    #[error("the daemon refused: {text} (error {code})")]
    RefusedOtherwise {
        /// The number.
        code: String,
        /// The daemon's text.
        text: String,
    },
    /// The answer is not one of this contract.
    #[error("the answer cannot be decoded: {0}")]
    Undecodable(#[from] rmp_serde::decode::Error),
    /// The connection failed.
    #[error("NATS: {0}")]
    Connection(String),
}
