//! Sending of batches to NATS.

use std::time::Duration;

use async_nats::client::PublishErrorKind;
use async_nats::{Client, HeaderMap, Request, RequestErrorKind};
use serde::Deserialize;

use super::super::backoff::Backoff;
use super::error::PublisherError;
use super::options::Transport;
use super::outbox::SealedBatch;

/// Error that kept a batch from being sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum SendError {
    /// The batch is larger than the server's messages may be, so that sending it again does not help.
    #[error("the batch takes {bytes} bytes; the server takes {bytes_max} at most")]
    TooLarge {
        /// Size of the batch, in bytes.
        bytes: usize,
        /// Server's limit on a message, headers included, in bytes.
        bytes_max: usize,
    },
    /// The batch could not be sent for a reason other than its size. The text tells the reason.
    #[error("{0}")]
    Failed(String),
}

impl From<SendError> for PublisherError {
    fn from(error: SendError) -> Self {
        match error {
            SendError::TooLarge { bytes, bytes_max } => Self::TooLarge { bytes, bytes_max },
            SendError::Failed(words) => Self::Connection(words),
        }
    }
}

/// A stream's answer to a message, as JSON.
#[derive(Debug, Deserialize)]
struct Acknowledgement {
    #[serde(default)]
    error: Option<AcknowledgementError>,
}

#[derive(Debug, Deserialize)]
struct AcknowledgementError {
    #[serde(default)]
    description: String,
}

/// Pauses before a batch is sent again.
const RETRIES: Backoff = Backoff {
    pause_min: Duration::from_millis(100),
    pause_max: Duration::from_secs(1),
};

/// Hands a batch to NATS. Waits while the connection cannot take it; with JetStream, also waits until the batch is acknowledged.
pub(super) async fn send(
    nats: &Client,
    transport: Transport,
    subject: &str,
    rank: u32,
    batch: &SealedBatch,
) -> Result<(), SendError> {
    match transport {
        Transport::Core => nats
            .publish(subject.to_owned(), batch.payload.clone())
            .await
            .map_err(|error| match error.kind() {
                PublishErrorKind::MaxPayloadExceeded => too_large(nats, batch),
                _ => SendError::Failed(error.to_string()),
            }),
        Transport::JetStream {
            acknowledgement_timeout,
            attempts,
        } => {
            let mut sent = Err(SendError::Failed("no attempt is allowed".to_owned()));
            for attempt in 0..attempts {
                if attempt > 0 {
                    tokio::time::sleep(RETRIES.pause(attempt)).await;
                }
                sent = send_acknowledged(nats, subject, rank, batch, acknowledgement_timeout).await;
                if let Ok(()) | Err(SendError::TooLarge { .. }) = sent {
                    break;
                }
            }
            sent
        }
    }
}

async fn send_acknowledged(
    nats: &Client,
    subject: &str,
    rank: u32,
    batch: &SealedBatch,
    timeout: Duration,
) -> Result<(), SendError> {
    let mut headers = HeaderMap::new();
    // Every attempt has the same id, so that the stream keeps the batch only once.
    let id = format!("{subject}/{rank}/{}/{}", batch.cursor.epoch, batch.cursor.seq);
    headers.insert("Nats-Msg-Id", id.as_str());
    let request = Request::new()
        .payload(batch.payload.clone())
        .headers(headers)
        .timeout(Some(timeout));
    let reply = nats.send_request(subject.to_owned(), request).await;
    let reply = reply.map_err(|error| match error.kind() {
        RequestErrorKind::MaxPayloadExceeded => too_large(nats, batch),
        _ => SendError::Failed(format!("no stream acknowledges: {error}")),
    })?;
    check(&reply.payload)
}

fn too_large(nats: &Client, batch: &SealedBatch) -> SendError {
    SendError::TooLarge {
        bytes: batch.payload.len(),
        bytes_max: nats.max_payload(),
    }
}

fn check(payload: &[u8]) -> Result<(), SendError> {
    let acknowledgement: Acknowledgement = serde_json::from_slice(payload)
        .map_err(|error| SendError::Failed(format!("the acknowledgement cannot be read: {error}")))?;
    match acknowledgement.error {
        None => Ok(()),
        Some(error) => Err(SendError::Failed(format!(
            "the stream refused: {}",
            error.description
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_acknowledgement_is_read() {
        assert_eq!(check(br#"{"stream":"KV","seq":7}"#), Ok(()));
        assert_eq!(check(br#"{"stream":"KV","seq":7,"duplicate":true}"#), Ok(()));
        let refused = check(br#"{"error":{"code":503,"description":"no space"},"stream":"KV","seq":0}"#);
        assert_eq!(
            refused,
            Err(SendError::Failed("the stream refused: no space".to_owned()))
        );
        assert!(check(b"").is_err());
    }
}
