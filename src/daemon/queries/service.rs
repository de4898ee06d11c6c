//! Service that answers queries from the index, on one connection.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::{Message, Subject};
use bytes::Bytes;
use tokio::sync::{Mutex, OwnedSemaphorePermit};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::lanes::LanePool;
use crate::responder::{Responder, check_size, check_status_size};
use crate::traces::OpenSpan;
use kvatlas_core::wire::{NamespaceName, QueryRequest, WireError};
use kvatlas_process::broker::{LastingSubscription, SubscribeError};
use kvatlas_telemetry::QueryMetricsByNamespace;
use kvatlas_telemetry::labels::ReplyDropReason;

use super::answer::{Answer, Answerer};
use super::heavy::HeavyRequest;
use super::observed::Observers;
use super::reply_memory::ReplyMemory;
use super::request_room::{LARGE_BYTES, RequestRoom, keep_alone};
use super::requests::{Asked, LastingRequests, NextRequest, ServedRequests};
use super::turns::Connected;

/// Maximum number of received requests that are answered in a row before the task checks for other work.
const REQUESTS_AT_ONCE: usize = 64;
/// Maximum number of replies that the task makes in a row before it lets the connection write them.
const REPLIES_AT_ONCE: usize = 32;

/// Service that answers queries on one connection.
pub(crate) struct QueryService {
    connected: Connected,
    served: ServedRequests,
    answering: ConnectionAnswerer,
    /// Answerer of the large requests, which is the turn for which they wait.
    large: Arc<Mutex<ConnectionAnswerer>>,
}

/// Parts that answer the requests of one connection, one after the other.
struct ConnectionAnswerer {
    answerer: Answerer,
    pool: Arc<LanePool>,
    metrics: QueryMetricsByNamespace,
    replies: ReplyMemory,
    responder: Responder,
    observers: Observers,
    /// Memory for waiting requests: large requests, which have many bytes, and heavy requests, which take long.
    room: RequestRoom,
    /// Tasks that answer large and heavy requests.
    tasks: TaskTracker,
}

/// Request that is being answered.
struct RequestInProgress {
    asked: Asked,
    started: Instant,
    span: Option<OpenSpan>,
    reply_to: Subject,
    room: Option<OwnedSemaphorePermit>,
}

impl QueryService {
    /// Makes a service on a connection. The service shares the requests with the other members of the queue group.
    ///
    /// - Large requests may wait if they have at most `waiting_bytes_max` bytes together.
    /// - The `observers` see every request.
    pub(super) fn new(
        connected: Connected,
        served: ServedRequests,
        answerer: Answerer,
        pool: Arc<LanePool>,
        waiting_bytes_max: usize,
        observers: Observers,
    ) -> Self {
        let answering = ConnectionAnswerer {
            responder: Responder::new(
                connected.client.clone(),
                served.subjects().clone(),
                served.shard(),
            ),
            answerer,
            pool,
            metrics: QueryMetricsByNamespace::default(),
            replies: ReplyMemory::new(),
            observers,
            room: RequestRoom::new(waiting_bytes_max),
            tasks: TaskTracker::new(),
        };
        Self {
            connected,
            served,
            large: Arc::new(Mutex::new(answering.again())),
            answering,
        }
    }

    /// Serves until `stop` is cancelled. Then answers the requests that the server has already sent, and returns.
    ///
    /// Calls `subscribed` each time the server has confirmed the subscriptions: at the start, and after each time
    /// that the server has withdrawn the right to subscribe and restored it.
    pub(crate) async fn run(
        mut self,
        stop: CancellationToken,
        subscribed: impl Fn(),
    ) -> Result<(), SubscribeError> {
        let client = self.connected.client.clone();
        let mut rosters = self.served.subscribe_roster(&self.connected).await?;
        let Some(mut requests) = self.join(&mut rosters, &stop).await? else {
            return Ok(());
        };
        subscribed();
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                Some(message) = rosters.next() => self.answering.serve_roster(message).await,
                request = requests.next() => match request? {
                    NextRequest::Request(asked, message) => {
                        self.serve(asked, message).await;
                        self.serve_received(&mut requests).await;
                    }
                    NextRequest::Rejoined => {
                        rosters = self.served.subscribe_roster(&self.connected).await?;
                        subscribed();
                    }
                    NextRequest::Closed => return Ok(()),
                },
            }
        }
        // From now on, no replica compares itself with this one. A replica that has just asked will ask again.
        rosters.drain().await;
        while let Some((asked, message)) = requests.next_until_left().await {
            self.serve(asked, message).await;
        }
        self.answering.tasks.close();
        self.answering.tasks.wait().await;
        let _ = client.flush().await;
        Ok(())
    }

    /// Answers up to [`REQUESTS_AT_ONCE`] requests that have been received already. They are answered in a row, because
    /// checking for other work takes longer than answering a request.
    async fn serve_received(&mut self, requests: &mut LastingRequests) {
        for number in 1..REQUESTS_AT_ONCE {
            if number == REPLIES_AT_ONCE {
                // Lets the connection write the replies, so that the clients go on.
                tokio::task::yield_now().await;
            }
            let Some((asked, message)) = requests.next_received() else {
                return;
            };
            self.serve(asked, message).await;
        }
    }

    /// Joins the queue group. Returns `None` if `stop` was cancelled first. Answers roster requests while it waits,
    /// because unanswered ones would fill the connection's buffer.
    async fn join(
        &self,
        rosters: &mut LastingSubscription,
        stop: &CancellationToken,
    ) -> Result<Option<LastingRequests>, SubscribeError> {
        let mut joining = pin!(LastingRequests::join(&self.connected, self.served.clone(), stop));
        loop {
            tokio::select! {
                joined = &mut joining => return joined,
                Some(message) = rosters.next() => {
                    self.connected.intake.took(&message);
                    self.answering.serve_roster(message).await;
                }
            }
        }
    }

    /// Answers one request. A large request (many bytes) is answered later, in a task of its own.
    async fn serve(&mut self, asked: Asked, message: Message) {
        let bytes = match asked {
            Asked::Query => message.payload.len(),
            Asked::Status => self.answering.answerer.status_bytes(&message.subject),
        };
        let reply_to = match &message.reply {
            Some(reply_to) if bytes > LARGE_BYTES => reply_to.clone(),
            _ => return self.answering.serve(asked, message, None).await,
        };
        match self.answering.room.take(bytes) {
            Ok(room) => self.serve_large(asked, message, room),
            Err(error) => {
                let observers = &self.answering.observers;
                let span = observers.begin(asked, &message);
                observers.end(asked, span, Duration::ZERO, Some(&error));
                self.answering.responder.send(reply_to, Err(error)).await;
            }
        }
    }

    /// Answers a large request (many bytes) when its turn has come: large requests are answered one after the other.
    fn serve_large(&self, asked: Asked, mut message: Message, room: OwnedSemaphorePermit) {
        keep_alone(&mut message);
        let large = Arc::clone(&self.large);
        self.answering.tasks.spawn(async move {
            let mut turn = large.lock().await;
            turn.serve(asked, message, Some(room)).await;
            // Small requests are answered first.
            tokio::task::yield_now().await;
        });
    }
}

impl ConnectionAnswerer {
    /// Clones the parts, for another task on the same connection.
    fn again(&self) -> Self {
        Self {
            responder: self.responder.again(),
            answerer: self.answerer.clone(),
            pool: Arc::clone(&self.pool),
            metrics: QueryMetricsByNamespace::default(),
            replies: ReplyMemory::new(),
            observers: self.observers.clone(),
            room: self.room.clone(),
            tasks: self.tasks.clone(),
        }
    }

    /// Answers one request. A heavy request (one that takes long) is answered later, in a task of its own. Frees the
    /// memory `room` before the reply is sent, because a client that has the reply can ask again immediately.
    async fn serve(&mut self, asked: Asked, message: Message, room: Option<OwnedSemaphorePermit>) {
        let started = Instant::now();
        let span = self.observers.begin(asked, &message);
        let Some(reply_to) = message.reply else {
            return self
                .responder
                .errors
                .reply_dropped(ReplyDropReason::NoReplySubject, &message.subject);
        };
        let mut begun = RequestInProgress {
            asked,
            started,
            span,
            reply_to,
            room,
        };
        let (subject, payload) = (&message.subject, &message.payload);
        let bytes_max = self.responder.reply_bytes_max();
        if self.answerer.subjects.is_about_namespaces(subject) {
            let names = self.answerer.known_namespaces(&self.pool).encode();
            return self.finish_names(names, begun).await;
        }
        let answer = match asked {
            Asked::Query => match self.read(subject, payload, &mut begun) {
                Ok((name, request, Some(heavy))) => {
                    return self.serve_heavy(name, request, heavy, begun);
                }
                Ok((name, request, None)) => {
                    let reply = self.answerer.answer_request(&name, &request, bytes_max);
                    reply.map(|reply| Answer::to_query(name, &request, reply, bytes_max))
                }
                Err(error) => Err(error),
            },
            Asked::Status => {
                let waiting = self.pool.messages_waiting();
                self.answerer.answer_status(subject, waiting, bytes_max)
            }
        };
        self.finish(answer, begun).await;
    }

    /// Sends the names of the known namespaces.
    async fn finish_names(&self, names: Vec<u8>, begun: RequestInProgress) {
        let reply = check_status_size(names, self.responder.reply_bytes_max());
        let elapsed = begun.started.elapsed();
        self.observers
            .end(begun.asked, begun.span, elapsed, reply.as_ref().err());
        self.responder.send(begun.reply_to, reply.map(Bytes::from)).await;
    }

    /// Reads a query. Registers a heavy query (one that takes long) to wait for its turn, and reserves memory for it.
    fn read(
        &self,
        subject: &str,
        payload: &[u8],
        begun: &mut RequestInProgress,
    ) -> Result<(NamespaceName, QueryRequest, Option<HeavyRequest>), WireError> {
        let (name, request) = self.answerer.read_query(subject, payload)?;
        let heavy = self.answerer.enter_if_heavy(&name, &request)?;
        if heavy.is_some() && begun.room.is_none() {
            begun.room = Some(self.room.take(payload.len())?);
        }
        Ok((name, request, heavy))
    }

    /// Answers a heavy request (one that takes long) when its turn has come.
    fn serve_heavy(
        &self,
        name: NamespaceName,
        request: QueryRequest,
        heavy: HeavyRequest,
        begun: RequestInProgress,
    ) {
        let mut own = self.again();
        self.tasks.spawn(async move {
            let bytes_max = own.responder.reply_bytes_max();
            let reply = own
                .answerer
                .answer_in_pieces(&name, &request, bytes_max, &heavy)
                .await;
            let answer = reply.map(|reply| Answer::to_query(name, &request, reply, bytes_max));
            drop(heavy);
            own.finish(answer, begun).await;
        });
    }

    /// Counts an answer and sends it. If the answer is too long, sends an error instead.
    async fn finish(&mut self, answer: Result<Answer, WireError>, begun: RequestInProgress) {
        let (elapsed, bytes_max) = (begun.started.elapsed(), self.responder.reply_bytes_max());
        let reply = answer.and_then(|answer| {
            answer.count(&self.metrics, elapsed);
            match begun.asked {
                Asked::Query => check_size(answer.payload, bytes_max),
                Asked::Status => check_status_size(answer.payload, bytes_max),
            }
        });
        self.observers
            .end(begun.asked, begun.span, elapsed, reply.as_ref().err());
        let reply = reply.map(|reply| self.replies.take(reply));
        drop(begun.room);
        self.responder.send(begun.reply_to, reply).await;
    }

    async fn serve_roster(&self, message: Message) {
        if let Some(reply_to) = message.reply {
            let reply = self.answerer.answer_roster(&message.payload);
            self.responder.send(reply_to, reply.map(Bytes::from)).await;
        }
    }
}
