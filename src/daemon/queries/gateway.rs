//! The gateway answers clients that expect one reply. It asks all shards, and gathers their replies into one.
//!
//! - A gateway listens on the plain subjects, like a daemon that has all workers. It asks on the shards' subjects, on
//!   which only sharded daemons listen. So no request is answered twice.
//! - A reply that lacks shards names them.
//! - Gateways have no state. Any number of them share the requests by queue group.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{HeaderMap, Message, Subject};
use bytes::Bytes;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::responder::{Responder, check_size, check_status_size};
use kvatlas_client::ClientError;
use kvatlas_config::Live;
use kvatlas_core::wire::{QueryRequest, Subjects, WireError, WireLimits};
use kvatlas_process::broker::SubscribeError;
use kvatlas_telemetry::labels::{QueryKind, ReplyDropReason};

use super::answer::{Answer, encode_status};
use super::missing::MissingShards;
use super::observed::Observers;
use super::request_room::{RequestRoom, keep_alone};
use super::requests::{Asked, LastingRequests, NextRequest, ServedRequests};
use super::shards::ShardAsker;
use super::turns::Connected;

/// Settings of a gateway, which answers requests by asking the shards.
#[derive(Debug, Clone)]
pub(super) struct GatewaySettings {
    /// Maximum time to wait for the shards' answers.
    pub(super) deadline: Duration,
    /// Maximum number of requests for which shards are asked at the same time.
    pub(super) gathers_max: usize,
    /// Maximum number of bytes of the large requests that wait for the shards at the same time.
    pub(super) waiting_bytes_max: usize,
    /// Bounds on the size of requests.
    pub(super) limits: Live<WireLimits>,
    /// Observers (counts and trace spans) that see every request.
    pub(super) observers: Observers,
    /// Record of the shards that are missing from answers.
    pub(super) missing: Arc<MissingShards>,
}

/// Gateway on one connection. It answers requests by asking the shards.
pub(crate) struct Gateway {
    served: ServedRequests,
    under_way: TaskTracker,
    /// Memory for large requests that wait for the shards.
    room: RequestRoom,
    parts: Arc<Parts>,
    connected: Connected,
}

/// Parts that all requests in progress on a connection share.
struct Parts {
    asker: ShardAsker,
    responder: Responder,
    subjects: Subjects,
    settings: GatewaySettings,
}

impl Gateway {
    /// Makes a gateway on a connection. `served` describes the requests that the gateway answers. It shares them with
    /// the other members of the queue group.
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
        let (gathers_max, deadline) = (settings.gathers_max, settings.deadline);
        let missing = Arc::clone(&settings.missing);
        let room = RequestRoom::new(settings.waiting_bytes_max);
        let parts = Parts {
            asker: ShardAsker::new(client.clone(), subjects, gathers_max, deadline, missing).await?,
            responder: Responder::new(client.clone(), subjects.clone(), None),
            subjects: subjects.clone(),
            settings,
        };
        Ok(Self {
            served,
            under_way: TaskTracker::new(),
            room,
            parts: Arc::new(parts),
            connected,
        })
    }

    /// Serves until `stop` is cancelled. Then answers the requests that the server has already sent, and returns.
    ///
    /// Calls `subscribed` each time the server has confirmed the subscriptions: at the start, and after each time
    /// that the server has withdrawn the right to subscribe and restored it.
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
        let mut rights = pin!(self.parts.asker.try_rights());
        loop {
            // The shards' replies come on the same connection.
            self.connected
                .intake
                .took_bytes(self.parts.asker.take_reply_bytes());
            tokio::select! {
                () = stop.cancelled() => break,
                () = &mut rights => {}
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

    async fn serve(&self, asked: Asked, mut message: Message) {
        let parts = &self.parts;
        let Some(reply_to) = message.reply.clone() else {
            let errors = &parts.responder.errors;
            return errors.reply_dropped(ReplyDropReason::NoReplySubject, &message.subject);
        };
        let entered = parts.asker.enter().and_then(|permit| {
            let room = self.room.take_if_large(message.payload.len())?;
            Ok((permit, room))
        });
        let permits = match entered {
            Ok(permits) => permits,
            Err(error) => {
                let observers = &parts.settings.observers;
                let span = observers.begin(asked, &message);
                observers.end(asked, span, Duration::ZERO, Some(&error));
                return parts.responder.send(reply_to, Err(error)).await;
            }
        };
        keep_alone(&mut message);
        let parts = Arc::clone(parts);
        self.under_way
            .spawn(parts.answer(asked, message, reply_to, permits));
    }
}

impl Parts {
    async fn answer(
        self: Arc<Self>,
        asked: Asked,
        message: Message,
        reply_to: Subject,
        (permit, room): (OwnedSemaphorePermit, Option<OwnedSemaphorePermit>),
    ) {
        let started = Instant::now();
        let observers = &self.settings.observers;
        let span = observers.begin(asked, &message);
        let headers = observers.passed_on(span.as_ref(), &message);
        let counted = |answer: Answer| {
            answer.count(&self.asker.namespaces, started.elapsed());
            answer.payload
        };
        let reply = match asked {
            Asked::Query => self.query(&message, headers).await.map(counted),
            Asked::Status if self.subjects.is_about_namespaces(&message.subject) => self.names().await,
            Asked::Status => self.status(&message, headers).await.map(counted),
        };
        observers.end(asked, span, started.elapsed(), reply.as_ref().err());
        drop((message, room));
        self.responder.send(reply_to, reply.map(Bytes::from)).await;
        drop(permit);
    }

    async fn query(&self, message: &Message, headers: HeaderMap) -> Result<Answer, WireError> {
        let limits = WireLimits::clone(&self.settings.limits.now());
        let namespace = self
            .subjects
            .parse_query(&message.subject, limits.name_bytes_max)?;
        // An invalid request is refused here, and is not sent to the shards.
        let request = QueryRequest::decode(&message.payload, &limits)?;
        let asked = message.payload.clone();
        let reply = self.asker.ask(&namespace, &request, asked, headers).await?;
        let bytes_max = self.responder.reply_bytes_max();
        let answer = Answer::to_query(namespace, &request, reply, bytes_max);
        Ok(Answer {
            payload: check_size(answer.payload, bytes_max)?,
            ..answer
        })
    }

    /// Returns the answer to a request for the names of the namespaces that the shards know.
    async fn names(&self) -> Result<Vec<u8>, WireError> {
        let reply = self.asker.names().await?;
        check_status_size(reply.encode(), self.responder.reply_bytes_max())
    }

    async fn status(&self, message: &Message, headers: HeaderMap) -> Result<Answer, WireError> {
        let name_bytes_max = self.settings.limits.now().name_bytes_max;
        let namespace = self.subjects.parse_status(&message.subject, name_bytes_max)?;
        let mut status = self.asker.status(&namespace, headers).await?;
        let bytes_max = self.responder.reply_bytes_max();
        let payload = encode_status(&mut status, bytes_max);
        Ok(Answer {
            payload: check_status_size(payload, bytes_max)?,
            namespace,
            kind: QueryKind::Status,
            reply: None,
        })
    }
}
