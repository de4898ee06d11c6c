//! The subscriptions of the query service.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{Client, HeaderMap, Message};
use futures_util::StreamExt;
use tokio_util::sync::CancellationToken;

use crate::connection::round_trip;
use crate::ingest::LanePool;
use crate::telemetry::labels::{QueryKind, ReplyDropReason};
use crate::telemetry::{QueryErrorMetrics, QueryMetrics};
use crate::wire::{
    ERROR_CODE_HEADER, ERROR_HEADER, ErrorBody, ErrorCode, NamespaceName, Subjects, WireError,
};

use super::answer::{Answer, Answerer, reply_too_large};

/// How long the server may take to confirm a subscription before it is asked again.
const CONFIRMATION_PATIENCE: Duration = Duration::from_secs(5);

/// Why queries cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum QueryServiceError {
    /// The subscription was refused by the client.
    #[error("cannot subscribe to {subject}: {reason}")]
    Subscribe {
        /// The subject.
        subject: String,
        /// The client's words.
        reason: String,
    },
}

/// Serves queries on one connection.
pub struct QueryService {
    client: Client,
    subjects: Subjects,
    queue_group: String,
    answerer: Answerer,
    pool: Arc<LanePool>,
    metrics: HashMap<NamespaceName, QueryMetrics>,
    errors: QueryErrorMetrics,
}

/// Which of the service's subjects a message came on.
#[derive(Clone, Copy)]
enum Asked {
    Query,
    Status,
}

impl QueryService {
    /// A service on `client`, which shares the requests with the others of `queue_group`.
    pub fn new(
        client: Client,
        subjects: Subjects,
        queue_group: String,
        answerer: Answerer,
        pool: Arc<LanePool>,
    ) -> Self {
        Self {
            client,
            subjects,
            queue_group,
            answerer,
            pool,
            metrics: HashMap::new(),
            errors: QueryErrorMetrics::new(),
        }
    }

    /// Serves until `stop` is cancelled, then answers what has been received. Calls `subscribed` once the server is known to
    /// have the subscriptions.
    pub async fn run(
        mut self,
        stop: CancellationToken,
        subscribed: impl FnOnce(),
    ) -> Result<(), QueryServiceError> {
        let mut queries = self.subscribe(self.subjects.all_queries()).await?;
        let mut statuses = self.subscribe(self.subjects.all_statuses()).await?;
        while let Err(error) = round_trip(&self.client, CONFIRMATION_PATIENCE).await {
            if stop.is_cancelled() {
                return Ok(());
            }
            tracing::warn!(%error, "the query subscription is not confirmed yet");
        }
        subscribed();
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                Some(message) = statuses.next() => self.serve(Asked::Status, message).await,
                message = queries.next() => match message {
                    Some(message) => self.serve(Asked::Query, message).await,
                    // The client is closed.
                    None => return Ok(()),
                },
            }
        }
        // No new requests; those that the server has sent already are answered.
        for subscription in [&mut queries, &mut statuses] {
            if let Err(error) = subscription.drain().await {
                tracing::debug!(%error, "the connection is closed already");
            }
        }
        while let Some(message) = queries.next().await {
            self.serve(Asked::Query, message).await;
        }
        while let Some(message) = statuses.next().await {
            self.serve(Asked::Status, message).await;
        }
        let _ = self.client.flush().await;
        Ok(())
    }

    async fn subscribe(&self, subject: String) -> Result<async_nats::Subscriber, QueryServiceError> {
        let subscribed = self
            .client
            .queue_subscribe(subject.clone(), self.queue_group.clone())
            .await;
        subscribed.map_err(|error| QueryServiceError::Subscribe {
            subject,
            reason: error.to_string(),
        })
    }

    async fn serve(&mut self, asked: Asked, message: Message) {
        let started = Instant::now();
        let Some(reply_to) = message.reply else {
            return self
                .errors
                .reply_dropped(ReplyDropReason::NoReplySubject, &message.subject);
        };
        let bytes_max = self.reply_bytes_max();
        let answered = match asked {
            Asked::Query => self
                .answerer
                .answer_query(&message.subject, &message.payload, bytes_max),
            Asked::Status => self
                .answerer
                .answer_status(&message.subject, self.pool.messages_waiting()),
        };
        let answered = answered.and_then(|answer| check_size(answer, bytes_max));
        let sent = match answered {
            Ok(answer) => {
                self.count(&answer, started.elapsed());
                self.client.publish(reply_to, answer.payload.into()).await
            }
            Err(error) => {
                self.errors.failed(error.code, &error.text);
                let (headers, payload) = error_reply(&error);
                self.client
                    .publish_with_headers(reply_to, headers, payload.into())
                    .await
            }
        };
        if let Err(error) = sent {
            self.errors.reply_dropped(ReplyDropReason::PublishFailed, &error);
        }
    }

    /// The longest reply that the server takes.
    fn reply_bytes_max(&self) -> usize {
        match self.client.server_info().max_payload {
            0 => usize::MAX,
            bytes_max => bytes_max,
        }
    }

    fn count(&mut self, answer: &Answer, elapsed: Duration) {
        // Only namespaces that exist are answered, and their number is bounded.
        if !self.metrics.contains_key(&answer.namespace) {
            let metrics = QueryMetrics::for_namespace(answer.namespace.as_str());
            self.metrics.insert(answer.namespace.clone(), metrics);
        }
        if let Some(metrics) = self.metrics.get(&answer.namespace) {
            metrics.answered(answer.kind, elapsed);
        }
    }
}

/// A reply that the server would not take becomes an error that it does.
fn check_size(answer: Answer, bytes_max: usize) -> Result<Answer, WireError> {
    let bytes = answer.payload.len();
    if bytes <= bytes_max {
        return Ok(answer);
    }
    if answer.kind == QueryKind::Status {
        let text = format!(
            "the reply has {bytes} bytes, the server takes {bytes_max}; ask the admin listener for /workers instead"
        );
        return Err(WireError::new(ErrorCode::TooLarge, text));
    }
    Err(reply_too_large(bytes, bytes_max))
}

/// The one place that maps errors to the wire.
fn error_reply(error: &WireError) -> (HeaderMap, Vec<u8>) {
    let mut headers = HeaderMap::new();
    // A header is one line.
    let text: String = error
        .text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    headers.insert(ERROR_HEADER, text.as_str());
    headers.insert(ERROR_CODE_HEADER, error.code.as_u16().to_string().as_str());
    let body = rmp_serde::to_vec_named(&ErrorReply {
        v: crate::wire::PROTOCOL_VERSION,
        error: error.into(),
    });
    (headers, body.unwrap_or_default())
}

/// The body of an error reply: what the headers say, for clients that look at the payload only.
#[derive(serde::Serialize)]
struct ErrorReply {
    v: u64,
    error: ErrorBody,
}
