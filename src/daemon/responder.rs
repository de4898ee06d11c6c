//! Sending of replies over NATS. Only this file turns answers and errors into messages.

use std::pin::pin;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{Client, HeaderMap, PublishError, Subject};
use bytes::Bytes;
use futures_util::FutureExt;

use kvatlas_core::wire::{
    ERROR_CODE_HEADER, ERROR_HEADER, ErrorBody, ErrorCode, PROTOCOL_VERSION, SHARD_HEADER, Shard, Subjects,
    WireError,
};
use kvatlas_telemetry::QueryErrorMetrics;
use kvatlas_telemetry::labels::ReplyDropReason;

/// Sender of replies on one NATS connection.
pub(crate) struct Responder {
    client: Client,
    subjects: Subjects,
    shard: Option<Shard>,
    pub(crate) errors: QueryErrorMetrics,
}

impl Responder {
    /// Makes a responder on `client`. The replies of a sharded daemon have a header with the shard.
    pub(crate) fn new(client: Client, subjects: Subjects, shard: Option<Shard>) -> Self {
        Self {
            client,
            subjects,
            shard,
            errors: QueryErrorMetrics::new(),
        }
    }

    /// Returns a second responder on the same connection, for another task.
    pub(crate) fn again(&self) -> Self {
        Self::new(self.client.clone(), self.subjects.clone(), self.shard)
    }

    /// Maximum length of a reply that the NATS server takes, in bytes.
    pub(crate) fn reply_bytes_max(&self) -> usize {
        match self.client.max_payload() {
            0 => usize::MAX,
            bytes_max => bytes_max,
        }
    }

    /// Sends an encoded reply, or an error in its place. Sends nothing if `reply_to` is a subject of the contract or of
    /// the server, because subscribers other than the sender of the request could read the reply.
    pub(crate) async fn send(&self, reply_to: Subject, reply: Result<Bytes, WireError>) {
        if !self.subjects.may_reply_to(&reply_to) {
            return self
                .errors
                .reply_dropped(ReplyDropReason::ForbiddenReplySubject, &reply_to);
        }
        let mut headers = HeaderMap::new();
        if let Some(shard) = self.shard {
            headers.insert(SHARD_HEADER, shard.to_string().as_str());
        }
        let payload = reply.unwrap_or_else(|error| {
            self.errors.failed(error.code, &error.text);
            error_reply(&error, &mut headers).into()
        });
        if let Err(error) = self.publish(reply_to, headers, payload).await {
            self.errors.reply_dropped(ReplyDropReason::PublishFailed, &error);
        }
    }

    /// Publishes a message. Waits while the client's buffer is full, but not without a connection: the next connection may
    /// be made only when the caller has taken more requests.
    async fn publish(&self, to: Subject, headers: HeaderMap, payload: Bytes) -> Result<(), PublishFailure> {
        let publishing = async {
            match headers.is_empty() {
                true => self.client.publish(to, payload).await,
                false => self.client.publish_with_headers(to, headers, payload).await,
            }
        };
        let mut publishing = pin!(publishing);
        if let Some(published) = publishing.as_mut().now_or_never() {
            return Ok(published?);
        }
        while self.client.connection_state() == State::Connected {
            if let Ok(published) = tokio::time::timeout(LOOK_INTERVAL, publishing.as_mut()).await {
                return Ok(published?);
            }
        }
        Err(PublishFailure::Unconnected)
    }
}

/// Time after which a sender that waits for room looks whether its connection still stands.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Reason why a reply is not sent.
#[derive(Debug, thiserror::Error)]
enum PublishFailure {
    /// Client cannot take the message.
    #[error(transparent)]
    Client(#[from] PublishError),
    /// Buffer for messages is full, and there is no connection that would empty it.
    #[error("the connection has ended, and as many replies wait as there is room for")]
    Unconnected,
}

/// Returns the error that is sent in place of a reply that is too long. The reply would have `bytes` or more, and the
/// server takes at most `bytes_max`.
pub(crate) fn reply_too_large(bytes: usize, bytes_max: usize) -> WireError {
    let text = format!(
        "the reply has {bytes} bytes or more, the server takes {bytes_max}; set limit or min_blocks, or ask for less at once"
    );
    WireError::new(ErrorCode::TooLarge, text)
}

/// Returns the payload of a reply to a query. Fails if the payload is longer than `bytes_max`.
pub(crate) fn check_size(payload: Vec<u8>, bytes_max: usize) -> Result<Vec<u8>, WireError> {
    match payload.len() {
        bytes if bytes <= bytes_max => Ok(payload),
        bytes => Err(reply_too_large(bytes, bytes_max)),
    }
}

/// Returns the payload of a reply to a status request. Fails if the payload is longer than `bytes_max`.
pub(crate) fn check_status_size(payload: Vec<u8>, bytes_max: usize) -> Result<Vec<u8>, WireError> {
    let bytes = payload.len();
    if bytes <= bytes_max {
        return Ok(payload);
    }
    let text = format!(
        "the reply has {bytes} bytes, the server takes {bytes_max}; ask the admin listener for /workers instead"
    );
    Err(WireError::new(ErrorCode::TooLarge, text))
}

/// Returns the payload of an error reply. Adds the error's headers to `headers`.
fn error_reply(error: &WireError, headers: &mut HeaderMap) -> Vec<u8> {
    // A header is one line.
    let text: String = error
        .text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    headers.insert(ERROR_HEADER, text.as_str());
    headers.insert(ERROR_CODE_HEADER, error.code.as_u16().to_string().as_str());
    let body = rmp_serde::to_vec_named(&ErrorReply {
        v: PROTOCOL_VERSION,
        error: error.into(),
    });
    body.unwrap_or_default()
}

/// The body of an error reply. It repeats the headers, for clients that read the payload only.
#[derive(serde::Serialize)]
struct ErrorReply {
    v: u64,
    error: ErrorBody,
}
