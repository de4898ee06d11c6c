//! The subscriptions of the query service.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{Client, Message};
use futures_util::StreamExt;
use tokio_util::sync::CancellationToken;

use crate::connection::round_trip;
use crate::ingest::LanePool;
use crate::telemetry::QueryMetrics;
use crate::telemetry::labels::ReplyDropReason;
use crate::wire::{NamespaceName, Shard, Subjects};

use super::answer::{Answer, Answerer};
use super::queue_member::QueueMember;
use super::responder::{Responder, check_size, check_status_size};

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

/// Which requests a daemon answers.
#[derive(Debug, Clone)]
pub struct ServedRequests {
    subjects: Subjects,
    queue_group: String,
    shard: Option<Shard>,
}

impl ServedRequests {
    /// Those under `subjects` that fall to a member of `queue_group`. With a shard, those on the shards' subjects that fall to one of
    /// the shard's replicas: each shard is a queue group of its own, so every shard gets every request.
    pub fn new(subjects: &Subjects, queue_group: &str, shard: Option<Shard>) -> Self {
        match shard {
            None => Self {
                subjects: subjects.clone(),
                queue_group: queue_group.to_owned(),
                shard,
            },
            Some(of) => Self {
                subjects: subjects.of_shards(),
                queue_group: format!("{queue_group}-{}-of-{}", of.index(), of.count()),
                shard,
            },
        }
    }

    /// The subjects of the requests.
    pub fn subjects(&self) -> &Subjects {
        &self.subjects
    }

    /// Where replicas that answer the same requests tell which holders they know.
    pub fn roster_subject(&self) -> String {
        self.subjects.roster(&self.queue_group)
    }

    /// Joins the queue group for queries and for status requests.
    pub(super) async fn join(
        &self,
        client: &Client,
    ) -> Result<(QueueMember, QueueMember), QueryServiceError> {
        let (subjects, group) = (&self.subjects, &self.queue_group);
        let queries =
            QueueMember::join(client, subjects.all_queries(), subjects.query_filler(), group).await?;
        let statuses =
            QueueMember::join(client, subjects.all_statuses(), subjects.status_filler(), group).await?;
        Ok((queries, statuses))
    }
}

/// Waits until the server is known to have all subscriptions of `client`, or until `stop`; says whether it has.
pub(super) async fn confirm(client: &Client, stop: &CancellationToken) -> bool {
    while let Err(error) = round_trip(client, CONFIRMATION_PATIENCE).await {
        if stop.is_cancelled() {
            return false;
        }
        tracing::warn!(%error, "the query subscription is not confirmed yet");
    }
    true
}

/// Serves queries on one connection.
pub struct QueryService {
    client: Client,
    served: ServedRequests,
    answerer: Answerer,
    pool: Arc<LanePool>,
    metrics: HashMap<NamespaceName, QueryMetrics>,
    responder: Responder,
}

/// Which of the service's subjects a message came on.
#[derive(Clone, Copy)]
enum Asked {
    Query,
    Status,
}

impl QueryService {
    /// A service on `client`, which shares the requests with the others of their queue group.
    pub fn new(client: Client, served: ServedRequests, answerer: Answerer, pool: Arc<LanePool>) -> Self {
        Self {
            responder: Responder::new(client.clone(), served.shard),
            client,
            served,
            answerer,
            pool,
            metrics: HashMap::new(),
        }
    }

    /// Serves until `stop` is cancelled, then answers what has been received. Calls `subscribed` once the server is known to
    /// have the subscriptions.
    pub async fn run(
        mut self,
        stop: CancellationToken,
        subscribed: impl FnOnce(),
    ) -> Result<(), QueryServiceError> {
        let (mut queries, mut statuses) = self.served.join(&self.client).await?;
        let mut rosters = self.subscribe_roster().await?;
        if !confirm(&self.client, &stop).await {
            return Ok(());
        }
        subscribed();
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                Some(message) = statuses.next() => self.serve(Asked::Status, message).await,
                Some(message) = rosters.next() => self.serve_roster(message).await,
                message = queries.next() => match message {
                    Some(message) => self.serve(Asked::Query, message).await,
                    // The client is closed.
                    None => return Ok(()),
                },
            }
        }
        // First of all no replica is to compare itself with this one any more. One that just asks will ask again.
        let _ = rosters.drain().await;
        // No new requests; those that the server has sent already are answered.
        for (asked, requests) in [(Asked::Query, &mut queries), (Asked::Status, &mut statuses)] {
            while let Some(message) = requests.next_until_left().await {
                self.serve(asked, message).await;
            }
        }
        let _ = self.client.flush().await;
        Ok(())
    }

    async fn subscribe_roster(&self) -> Result<async_nats::Subscriber, QueryServiceError> {
        let subject = self.served.roster_subject();
        let group = self.served.queue_group.clone();
        let subscribed = self.client.queue_subscribe(subject.clone(), group).await;
        subscribed.map_err(|error| QueryServiceError::Subscribe {
            subject,
            reason: error.to_string(),
        })
    }

    async fn serve(&mut self, asked: Asked, message: Message) {
        let started = Instant::now();
        let Some(reply_to) = message.reply else {
            return self
                .responder
                .errors
                .reply_dropped(ReplyDropReason::NoReplySubject, &message.subject);
        };
        let bytes_max = self.responder.reply_bytes_max();
        let (subject, payload) = (&message.subject, &message.payload);
        let reply = match asked {
            Asked::Query => self
                .answerer
                .answer_query(subject, payload, bytes_max)
                .and_then(|answer| {
                    self.count(&answer, started.elapsed());
                    check_size(answer.payload, bytes_max)
                }),
            Asked::Status => {
                let answer = self.answerer.answer_status(subject, self.pool.messages_waiting());
                answer.and_then(|answer| {
                    self.count(&answer, started.elapsed());
                    check_status_size(answer.payload, bytes_max)
                })
            }
        };
        self.responder.send(reply_to, reply).await;
    }

    async fn serve_roster(&self, message: Message) {
        if let Some(reply_to) = message.reply {
            self.responder
                .send(reply_to, self.answerer.answer_roster(&message.payload))
                .await;
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
