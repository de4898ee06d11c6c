//! The gateway: answers clients that expect one reply by gathering those of the shards.
//!
//! - It listens on the plain subjects, like a daemon that has all workers. It asks on the shards' subjects, where only sharded daemons
//!   listen. So no request is answered twice.
//! - A reply that lacks shards names them.
//! - Gateways have no state. Any number of them share the requests by queue group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{HeaderMap, Message, Subject};
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::daemon::broker::SubscribeError;
use crate::daemon::config::Live;
use crate::daemon::metrics::labels::{GatherOutcome, QueryKind, ReplyDropReason};
use crate::daemon::metrics::{AnsweredPrompt, GatherMetrics, QueryMetricsByNamespace};
use kvatlas_client::{ClientError, Gatherer};
use kvatlas_core::wire::{ErrorCode, Gathered, NamespaceName, QueryRequest, Subjects, WireError, WireLimits};

use super::answer::{AnyReply, described, encode_status};
use super::observed::Observers;
use super::requests::{Asked, LastingRequests, NextRequest, ServedRequests};
use super::responder::{Responder, check_size, check_status_size};
use super::turns::Connected;

/// How a gateway gathers.
#[derive(Debug, Clone)]
pub(super) struct GatewaySettings {
    /// How long the shards have to answer.
    pub(super) deadline: Duration,
    /// Requests gathered at the same time, at most.
    pub(super) gathers_max: usize,
    /// Bounds on requests.
    pub(super) limits: Live<WireLimits>,
    /// Who sees every request.
    pub(super) observers: Observers,
}

/// Answers requests by asking the shards, on one connection.
pub(crate) struct Gateway {
    served: ServedRequests,
    permits: Arc<Semaphore>,
    under_way: TaskTracker,
    parts: Arc<Parts>,
    connected: Connected,
}

/// What the gathers under way share.
struct Parts {
    gatherer: Gatherer,
    responder: Responder,
    subjects: Subjects,
    settings: GatewaySettings,
    metrics: GatherMetrics,
    /// Of the namespaces that a shard knew.
    namespaces: QueryMetricsByNamespace,
}

/// A reply, and how it is counted.
struct Reply {
    payload: Vec<u8>,
    gathered: Gathered,
    namespace: NamespaceName,
    kind: QueryKind,
    prompts: Vec<AnsweredPrompt>,
}

impl Gateway {
    /// A gateway on a connection, which shares the `served` requests with the others of their queue group.
    ///
    /// # Errors
    ///
    /// [`ClientError::Connection`] if the connection is closed.
    pub(super) async fn new(
        connected: Connected,
        served: ServedRequests,
        settings: GatewaySettings,
    ) -> Result<Self, ClientError> {
        let (client, subjects) = (&connected.client, served.subjects());
        let parts = Parts {
            gatherer: Gatherer::new(client.clone(), subjects).await?,
            responder: Responder::new(client.clone(), subjects.clone(), None),
            subjects: subjects.clone(),
            metrics: GatherMetrics::new(),
            namespaces: QueryMetricsByNamespace::default(),
            settings,
        };
        Ok(Self {
            served,
            permits: Arc::new(Semaphore::new(parts.settings.gathers_max)),
            under_way: TaskTracker::new(),
            parts: Arc::new(parts),
            connected,
        })
    }

    /// Serves until `stop` is cancelled, then answers the requests that the server has sent. Calls `subscribed` whenever the server has
    /// confirmed the subscriptions: at first, and when it has given a right back that it took away.
    ///
    /// # Errors
    ///
    /// [`SubscribeError`] if the connection is closed.
    pub(crate) async fn run(
        self,
        stop: CancellationToken,
        subscribed: impl Fn(),
    ) -> Result<(), SubscribeError> {
        let joined = LastingRequests::join(&self.connected, self.served.clone(), &stop).await?;
        let Some(mut requests) = joined else {
            return Ok(());
        };
        subscribed();
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                request = requests.next() => match request? {
                    NextRequest::Request(asked, message) => self.serve(asked, message).await,
                    NextRequest::Rejoined => subscribed(),
                    NextRequest::Closed => return Ok(()),
                },
            }
        }
        while let Some((asked, message)) = requests.next_until_left().await {
            self.serve(asked, message).await;
        }
        self.under_way.close();
        self.under_way.wait().await;
        let _ = self.connected.client.flush().await;
        Ok(())
    }

    async fn serve(&self, asked: Asked, message: Message) {
        let parts = &self.parts;
        parts
            .metrics
            .replies_late
            .increment(parts.gatherer.take_late_replies());
        let Some(reply_to) = message.reply.clone() else {
            let errors = &parts.responder.errors;
            return errors.reply_dropped(ReplyDropReason::NoReplySubject, &message.subject);
        };
        // Refused at once: a router has no use for a late answer.
        let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else {
            parts.metrics.gathered(GatherOutcome::Overloaded);
            let error = parts.overloaded();
            let observers = &parts.settings.observers;
            let span = observers.begin(asked, &message);
            observers.end(asked, span, Duration::ZERO, Some(&error));
            return parts.responder.send(reply_to, Err(error)).await;
        };
        let parts = Arc::clone(parts);
        self.under_way
            .spawn(parts.answer(asked, message, reply_to, permit));
    }
}

impl Parts {
    async fn answer(
        self: Arc<Self>,
        asked: Asked,
        message: Message,
        reply_to: Subject,
        permit: OwnedSemaphorePermit,
    ) {
        let started = Instant::now();
        let observers = &self.settings.observers;
        let span = observers.begin(asked, &message);
        let headers = observers.passed_on(span.as_ref(), &message);
        let reply = match asked {
            Asked::Query => self.query(&message, headers).await,
            Asked::Status => self.status(&message, headers).await,
        };
        let reply = reply.map(|reply| {
            self.count(&reply, started.elapsed());
            reply.payload
        });
        observers.end(asked, span, started.elapsed(), reply.as_ref().err());
        self.responder.send(reply_to, reply.map(Bytes::from)).await;
        drop(permit);
    }

    async fn query(&self, message: &Message, headers: HeaderMap) -> Result<Reply, WireError> {
        let limits = WireLimits::clone(&self.settings.limits.now());
        let namespace = self
            .subjects
            .parse_query(&message.subject, limits.name_bytes_max)?;
        // A wrong request is refused here, and does not trouble the shards.
        let request = QueryRequest::decode(&message.payload, &limits)?;
        let (asked, deadline) = (message.payload.clone(), self.settings.deadline);
        let (mut reply, gathered) = match &request {
            QueryRequest::Single(query) => {
                let merged = self
                    .gatherer
                    .query(&namespace, &query.options, asked, headers, deadline)
                    .await;
                let merged = merged.map_err(|error| self.failed(error))?;
                (AnyReply::Single(merged.reply), merged.gathered)
            }
            QueryRequest::Batch(queries) => {
                let merged = self
                    .gatherer
                    .query_batch(&namespace, queries, asked, headers, deadline)
                    .await;
                let mut merged = merged.map_err(|error| self.failed(error))?;
                merged.reply.say_profiles_once();
                (AnyReply::Batch(merged.reply), merged.gathered)
            }
        };
        let bytes_max = self.responder.reply_bytes_max();
        Ok(Reply {
            payload: check_size(reply.encode_within(bytes_max), bytes_max)?,
            gathered,
            namespace,
            kind: described(&request).0,
            prompts: reply.prompts().collect(),
        })
    }

    async fn status(&self, message: &Message, headers: HeaderMap) -> Result<Reply, WireError> {
        let name_bytes_max = self.settings.limits.now().name_bytes_max;
        let namespace = self.subjects.parse_status(&message.subject, name_bytes_max)?;
        let merged = self
            .gatherer
            .status(&namespace, headers, self.settings.deadline)
            .await;
        let mut merged = merged.map_err(|error| self.failed(error))?;
        let bytes_max = self.responder.reply_bytes_max();
        let payload = encode_status(&mut merged.reply, bytes_max);
        Ok(Reply {
            payload: check_status_size(payload, bytes_max)?,
            gathered: merged.gathered,
            namespace,
            kind: QueryKind::Status,
            prompts: Vec::new(),
        })
    }

    fn count(&self, reply: &Reply, elapsed: Duration) {
        let missing = &reply.gathered.missing;
        let outcome = match missing.is_empty() {
            true => GatherOutcome::Complete,
            false => GatherOutcome::Partial,
        };
        self.metrics.gathered(outcome);
        missing
            .iter()
            .for_each(|index| self.metrics.shard_missing(*index));
        let metrics = self.namespaces.of(&reply.namespace);
        metrics.answered(reply.kind, elapsed);
        reply.prompts.iter().for_each(|prompt| metrics.found(*prompt));
    }

    /// Counts a gather without an answer; returns the error for the client.
    fn failed(&self, error: ClientError) -> WireError {
        match error {
            ClientError::Refused(error) => {
                self.metrics.gathered(GatherOutcome::Refused);
                error
            }
            other => {
                self.metrics.gathered(GatherOutcome::Unanswered);
                let text = format!("no shard answered the gateway: {other}; ask again, or start the shards");
                WireError::new(ErrorCode::Unavailable, text)
            }
        }
    }

    fn overloaded(&self) -> WireError {
        let gathers = self.settings.gathers_max;
        let text = format!(
            "the gateway has {gathers} requests under way; ask again, run another gateway, or raise gateway.max_gathers"
        );
        WireError::new(ErrorCode::Unavailable, text)
    }
}
