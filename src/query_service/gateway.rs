//! The gateway: answers clients that expect one reply by gathering those of the shards.
//!
//! It listens on the plain subjects, like a daemon that has all workers, and asks on the shards' subjects, where only sharded
//! daemons listen; so nothing is answered twice. A reply that lacks shards names them. Gateways keep nothing: run as many as wanted,
//! they share the requests by queue group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{Client, Message, Subject};
use dashmap::DashMap;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::client::{ClientError, Gatherer};
use crate::telemetry::labels::{GatherOutcome, QueryKind, ReplyDropReason};
use crate::telemetry::{GatherMetrics, QueryMetrics};
use crate::wire::{
    ErrorCode, Gathered, NamespaceName, QueryRequest, SingleQuery, Subjects, WireError, WireLimits,
};

use super::answer::kind_of;
use super::responder::{Responder, check_size, check_status_size, unencodable};
use super::service::{QueryServiceError, ServedRequests, confirm};

/// How a gateway gathers.
#[derive(Debug, Clone)]
pub struct GatewaySettings {
    /// How long the shards have to answer.
    pub deadline: Duration,
    /// Requests gathered at the same time, at most.
    pub gathers_max: usize,
    /// Bounds on requests.
    pub limits: WireLimits,
}

/// Answers requests by asking the shards, on one connection.
pub struct Gateway {
    served: ServedRequests,
    permits: Arc<Semaphore>,
    under_way: TaskTracker,
    parts: Arc<Parts>,
    client: Client,
}

/// What the gathers under way share.
struct Parts {
    gatherer: Gatherer,
    responder: Responder,
    subjects: Subjects,
    settings: GatewaySettings,
    metrics: GatherMetrics,
    /// Of namespaces that a shard knows, so their number is bounded.
    namespaces: DashMap<NamespaceName, Arc<QueryMetrics>>,
}

/// Which of the gateway's subjects a message came on.
#[derive(Clone, Copy)]
enum Asked {
    Query,
    Status,
}

/// A reply, and what it is counted as.
struct Reply {
    payload: Vec<u8>,
    gathered: Gathered,
    namespace: NamespaceName,
    kind: QueryKind,
}

impl Gateway {
    /// A gateway on `client`, which shares the requests with the others of `queue_group`.
    ///
    /// # Errors
    ///
    /// [`ClientError::Connection`] if the connection is closed.
    pub async fn new(
        client: Client,
        subjects: &Subjects,
        queue_group: &str,
        settings: GatewaySettings,
    ) -> Result<Self, ClientError> {
        let parts = Parts {
            gatherer: Gatherer::new(client.clone(), subjects).await?,
            responder: Responder::new(client.clone(), None),
            subjects: subjects.clone(),
            metrics: GatherMetrics::new(),
            namespaces: DashMap::new(),
            settings,
        };
        Ok(Self {
            served: ServedRequests::new(subjects, queue_group, None),
            permits: Arc::new(Semaphore::new(parts.settings.gathers_max)),
            under_way: TaskTracker::new(),
            parts: Arc::new(parts),
            client,
        })
    }

    /// Serves until `stop` is cancelled, then answers what has been received. Calls `subscribed` once the server is known to
    /// have the subscriptions.
    ///
    /// # Errors
    ///
    /// [`QueryServiceError::Subscribe`] if the connection is closed.
    pub async fn run(
        self,
        stop: CancellationToken,
        subscribed: impl FnOnce(),
    ) -> Result<(), QueryServiceError> {
        let (mut queries, mut statuses) = self.served.join(&self.client).await?;
        if !confirm(&self.client, &stop).await {
            return Ok(());
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
        for (asked, requests) in [(Asked::Query, &mut queries), (Asked::Status, &mut statuses)] {
            while let Some(message) = requests.next_until_left().await {
                self.serve(asked, message).await;
            }
        }
        self.under_way.close();
        self.under_way.wait().await;
        let _ = self.client.flush().await;
        Ok(())
    }

    async fn serve(&self, asked: Asked, message: Message) {
        let parts = &self.parts;
        parts.metrics.replies_late(parts.gatherer.take_late_replies());
        let Some(reply_to) = message.reply.clone() else {
            let errors = &parts.responder.errors;
            return errors.reply_dropped(ReplyDropReason::NoReplySubject, &message.subject);
        };
        // Refused at once rather than made to wait: a router has something better to do.
        let Ok(permit) = Arc::clone(&self.permits).try_acquire_owned() else {
            parts.metrics.gathered(GatherOutcome::Overloaded);
            return parts.responder.send(reply_to, Err(parts.overloaded())).await;
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
        let reply = match asked {
            Asked::Query => self.query(&message).await,
            Asked::Status => self.status(&message).await,
        };
        let reply = reply.map(|reply| {
            self.count(&reply, started.elapsed());
            reply.payload
        });
        self.responder.send(reply_to, reply).await;
        drop(permit);
    }

    async fn query(&self, message: &Message) -> Result<Reply, WireError> {
        let limits = &self.settings.limits;
        let namespace = self
            .subjects
            .parse_query(&message.subject, limits.name_bytes_max)?;
        // What is wrong with a request is said here, and does not trouble the shards.
        let request = QueryRequest::decode(&message.payload, limits)?;
        let (payload, deadline) = (message.payload.clone(), self.settings.deadline);
        let (encoded, gathered, kind) = match &request {
            QueryRequest::Single(query) => {
                let merged = self
                    .gatherer
                    .query(&namespace, &query.options, payload, deadline)
                    .await;
                let merged = merged.map_err(|error| self.failed(error))?;
                (merged.reply.encode(), merged.gathered, kind_of(&query.key))
            }
            QueryRequest::Batch(queries) => {
                let merged = self
                    .gatherer
                    .query_batch(&namespace, queries, payload, deadline)
                    .await;
                let merged = merged.map_err(|error| self.failed(error))?;
                (merged.reply.encode(), merged.gathered, kind_of_batch(queries))
            }
        };
        let payload = encoded.map_err(|error| unencodable(&error))?;
        Ok(Reply {
            payload: check_size(payload, self.responder.reply_bytes_max())?,
            gathered,
            namespace,
            kind,
        })
    }

    async fn status(&self, message: &Message) -> Result<Reply, WireError> {
        let name_bytes_max = self.settings.limits.name_bytes_max;
        let namespace = self.subjects.parse_status(&message.subject, name_bytes_max)?;
        let merged = self.gatherer.status(&namespace, self.settings.deadline).await;
        let merged = merged.map_err(|error| self.failed(error))?;
        let payload = merged.reply.encode().map_err(|error| unencodable(&error))?;
        Ok(Reply {
            payload: check_status_size(payload, self.responder.reply_bytes_max())?,
            gathered: merged.gathered,
            namespace,
            kind: QueryKind::Status,
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
        let metrics = self.namespaces.entry(reply.namespace.clone());
        let metrics =
            metrics.or_insert_with(|| Arc::new(QueryMetrics::for_namespace(reply.namespace.as_str())));
        metrics.answered(reply.kind, elapsed);
    }

    /// Counts a gather without an answer, and says what the client is told.
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

fn kind_of_batch(queries: &[SingleQuery]) -> QueryKind {
    queries
        .first()
        .map_or(QueryKind::SequenceHashes, |query| kind_of(&query.key))
}
