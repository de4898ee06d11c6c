//! Task of a publisher. Only this task sends the publisher's batches.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_nats::connection::State;
use async_nats::{Client, HeaderMap, Message, Subject, Subscriber};
use futures_util::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use kvatlas_core::wire::{
    BatchCursor, DegradedReasons, ERROR_CODE_HEADER, ERROR_HEADER, ErrorCode, Event, Profile,
    ResyncAnswerKind, ResyncRequest, Tier, WireError, WireLimits,
};

use crate::clock::unix_time_us;

use super::epochs::is_far_ahead;
use super::error::PublisherError;
use super::handle::PublisherShared;
use super::options::Transport;
use super::outbox::{Clocks, Outbox, SealedBatch};
use super::state::SharedState;
use super::transport::{SendError, send};
use super::voice::Voice;

/// A request of the handle to the task.
#[derive(Debug)]
pub(super) enum PublisherCommand {
    /// Publish these events.
    Publish {
        tier: Tier,
        events: Vec<Event>,
        /// The events' room in the queue. The room is free again when the command leaves the queue.
        room: OwnedSemaphorePermit,
    },
    /// Tell this profile from now on.
    Profile(Profile),
    /// Begin a new epoch, in which the holder has no blocks. Its first batch tells these doubts.
    BeginEpoch(DegradedReasons),
    /// Send heartbeats until this time, and none afterwards. `None` means that heartbeats have no end.
    HeartbeatsUntil(Option<Instant>),
    /// Answer on this channel when the batches of all earlier commands have been sent to the server.
    Flush(oneshot::Sender<Result<BatchCursor, PublisherError>>),
}

/// Optional parts of a publisher that come from its caller: the holder's full state, and a voice, which tells when it
/// is this publisher's turn to publish.
#[derive(Clone, Default)]
pub(super) struct Lent {
    /// Full state of the holder, kept by the caller; `None` if the publisher keeps it in a table of its own.
    pub(super) state: Option<SharedState>,
    /// Voice that says when the publisher may publish; `None` if it always may.
    pub(super) voice: Option<Voice>,
}

/// Keeps track of whether it is this publisher's turn to publish. Only a publisher that shares its holder with other
/// publishers has turns.
struct PublisherTurns {
    voice: Voice,
    /// Number that the publisher's epochs must exceed in the turn that it has begun. `None` while it has no turn. The
    /// term may end before the turn does: see [`Task::may_speak`].
    current: Option<u64>,
    /// Subject of daemons' questions; `None` if the publisher answers none.
    questions_subject: Option<String>,
}

/// Task of a publisher, which sends the publisher's batches and its answers to daemons.
pub(super) struct Task {
    nats: Client,
    subject: String,
    outbox: Outbox,
    shared: Arc<PublisherShared>,
    /// Full state of the holder, kept by the caller; `None` if the publisher keeps it in a table of its own.
    state: Option<SharedState>,
    turns: Option<PublisherTurns>,
    started: Instant,
    answers: Arc<Semaphore>,
    /// Time at which a heartbeat is due, if nothing is sent before.
    heartbeat_at: Instant,
    /// Time until which heartbeats are sent; `None` if heartbeats have no end.
    beats_until: Option<Instant>,
    /// Error of a batch that could not be sent, kept until a flush reports it.
    failure: Option<SendError>,
    /// Time at which the log last told of an epoch that lies too far ahead.
    warned_at: Option<Instant>,
}

/// Shortest time between two warnings of epochs that are not believed.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// Returns the time on both clocks.
pub(super) fn clocks(started: Instant) -> Clocks {
    Clocks {
        monotonic_us: u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
        unix_us: unix_time_us(),
    }
}

impl Task {
    pub(super) fn new(
        nats: Client,
        subject: String,
        outbox: Outbox,
        shared: Arc<PublisherShared>,
        lent: Lent,
        questions_subject: Option<String>,
        started: Instant,
    ) -> Self {
        let answers = Arc::new(Semaphore::new(outbox.options.answers_max.max(1)));
        let heartbeat_at = Instant::now() + outbox.options.heartbeat_interval;
        let turns = lent.voice.map(|voice| PublisherTurns {
            voice,
            current: None,
            questions_subject,
        });
        Self {
            nats,
            subject,
            outbox,
            shared,
            state: lent.state,
            turns,
            started,
            answers,
            heartbeat_at,
            beats_until: None,
            failure: None,
            warned_at: None,
        }
    }

    /// Runs the task until the handle is dropped and the queue is empty.
    pub(super) async fn run(
        mut self,
        mut queue: mpsc::Receiver<PublisherCommand>,
        questions: Option<Subscriber>,
    ) {
        let mut questions = questions;
        let first = self.outbox.first(self.clocks());
        self.send_all(first).await;
        loop {
            let wake_at = self.wake_at();
            tokio::select! {
                command = queue.recv() => match command {
                    Some(command) => {
                        self.obey(command).await;
                        // A batch that is due is sent here, because a timer would wait for its next tick.
                        if queue.is_empty() {
                            self.send_due().await;
                        }
                    }
                    None => break,
                },
                Some(question) = next(&mut questions) => self.answer(question, &mut queue).await,
                () = turn_changed(&mut self.turns) => self.change_turn(&mut questions).await,
                () = tokio::time::sleep_until(wake_at.into()) => self.wake().await,
            }
            // This is checked after every wake-up, not only before heartbeats: a publisher that always has events sends
            // none.
            self.listen_again(&mut questions).await;
        }
        let sealed = self.outbox.seal(self.clocks());
        self.send_all(sealed).await;
    }

    fn clocks(&self) -> Clocks {
        clocks(self.started)
    }

    /// Begins to publish if this publisher's turn has begun, and stops if its turn has ended. During its turn, the
    /// publisher publishes in place of the holder's other publishers.
    ///
    /// A turn counts even if its term is over at this moment. The term may be extended later, and no call follows then.
    async fn change_turn(&mut self, questions: &mut Option<Subscriber>) {
        let Some(turns) = &mut self.turns else { return };
        let turn = *turns.voice.turn.borrow();
        if turns.current == turn {
            return;
        }
        let has_lapsed = turns.current.is_some() && !turns.voice.term.holds_at(Instant::now());
        turns.current = turn;
        let Some(known) = turn else {
            // Daemons' questions now go to the publisher that has the turn.
            *questions = None;
            if has_lapsed {
                self.doubt_last().await;
            }
            return;
        };
        if let Some(subject) = turns.questions_subject.clone() {
            // A closed client has no more questions.
            *questions = self.nats.subscribe(subject).await.ok();
        }
        self.outbox.note_server_limit(self.nats.max_payload());
        let first = self.outbox.take_turn(known, self.clocks());
        self.send_all([first]).await;
    }

    /// Sends a doubt as the last batch of a turn whose term is over. The term may have ended because the server cannot
    /// be reached. The turn's batches may then wait in the client, and reach daemons late, although their numbers
    /// continue without a gap. The doubt follows these batches, so that daemons do not rely on them.
    async fn doubt_last(&mut self) {
        let Some(batch) = self.outbox.doubt_last(self.clocks()) else {
            return;
        };
        let transport = self.outbox.options.transport;
        if let Err(error) = send(&self.nats, transport, &self.subject, self.outbox.rank, &batch).await {
            tracing::debug!(%error, "the doubt at the end of a turn was not sent");
        }
        self.note_cursor(batch.cursor);
    }

    /// Whether the publisher may publish now. A publisher without turns always may. Any other publisher may as long as
    /// the turn that it has begun lasts.
    fn may_speak(&self) -> bool {
        self.turns
            .as_ref()
            .is_none_or(|turns| turns.current.is_some() && turns.voice.turn() == turns.current)
    }

    fn wake_at(&self) -> Instant {
        let due = self
            .outbox
            .due_us()
            .map(|due| self.started + Duration::from_micros(due));
        due.map_or(self.heartbeat_at, |due| due.min(self.heartbeat_at))
    }

    /// Sends the open batch (events that wait to share a batch) if the time to send it has come.
    async fn send_due(&mut self) {
        let clocks = self.clocks();
        if self.outbox.due_us().is_some_and(|due| due <= clocks.monotonic_us) {
            let sealed = self.outbox.seal(clocks);
            self.send_all(sealed).await;
        }
    }

    /// Sends the open batch (events that wait to share a batch), or else a heartbeat.
    async fn wake(&mut self) {
        let clocks = self.clocks();
        let mut sealed = self.outbox.seal(clocks);
        let beats = self.beats_until.is_none_or(|until| Instant::now() < until);
        if sealed.is_none() && beats {
            sealed = self.outbox.heartbeat(clocks);
        }
        self.heartbeat_at = Instant::now() + self.outbox.options.heartbeat_interval;
        self.send_all(sealed).await;
    }

    /// Subscribes to daemons' questions again if the server has refused the subscription. The server does not restore a
    /// refused subscription by itself when the client gets the right again.
    async fn listen_again(&mut self, questions: &mut Option<Subscriber>) {
        let Some(refusals) = &self.shared.refusals else {
            return;
        };
        let pause = self.outbox.options.heartbeat_interval;
        if let Some(subject) = refusals.refused_questions(pause) {
            // A closed client has no more questions.
            *questions = self.nats.subscribe(subject).await.ok();
        }
    }

    async fn obey(&mut self, command: PublisherCommand) {
        // After a reconnect, the server may take smaller messages.
        self.outbox.note_server_limit(self.nats.max_payload());
        match command {
            PublisherCommand::Publish { tier, events, room } => {
                drop(room);
                let sealed = self.outbox.add(tier, events, self.clocks());
                self.send_all(sealed).await;
            }
            PublisherCommand::BeginEpoch(doubts) => {
                let sealed = self.outbox.begin_epoch(doubts, self.clocks());
                self.send_all(sealed).await;
            }
            PublisherCommand::Profile(profile) => {
                let sealed = self.outbox.set_profile(profile, self.clocks());
                self.send_all(sealed).await;
            }
            PublisherCommand::HeartbeatsUntil(until) => self.beats_until = until,
            // The caller has stopped waiting. The next flush reports the failures.
            PublisherCommand::Flush(reply) if reply.is_closed() => {}
            PublisherCommand::Flush(reply) => {
                let sealed = self.outbox.seal(self.clocks());
                self.send_all(sealed).await;
                let failed = self.failure.take().map_or(Ok(()), Err);
                let flush = Flush {
                    sent: failed.map_err(PublisherError::from).map(|()| self.outbox.cursor),
                    connection: self.shared.unconfirmed.lock().take(),
                    is_asked: !self.outbox.has_left,
                };
                // The server may take long to answer. Another task waits for it, so that this task can answer daemons.
                tokio::spawn(finish_flush(
                    self.nats.clone(),
                    Arc::clone(&self.shared),
                    flush,
                    reply,
                ));
            }
        }
    }

    async fn send_all(&mut self, sealed: impl IntoIterator<Item = SealedBatch>) {
        for batch in sealed {
            if !self.may_speak() {
                // Another publisher has the turn, and reports these events. If this publisher's turn continues after
                // all, daemons see a gap and get the batch from the ring.
                self.note_cursor(batch.cursor);
                continue;
            }
            let transport = self.outbox.options.transport;
            if !batch.is_heartbeat {
                self.note_connection();
            }
            let sent = send(&self.nats, transport, &self.subject, self.outbox.rank, &batch).await;
            let counters = &self.shared.counters;
            let counter = match &sent {
                Err(_) => &counters.batches_failed,
                Ok(()) if batch.is_heartbeat => &counters.heartbeats_sent,
                Ok(()) => &counters.batches_sent,
            };
            let times = counter.fetch_add(1, Ordering::Relaxed) + 1;
            if let Err(error) = sent {
                // A publisher goes on publishing; its log must not fill up.
                if times.is_power_of_two() {
                    let seq = batch.cursor.seq;
                    tracing::warn!(subject = self.subject, seq, times, %error, "batch not sent");
                }
                self.failure.get_or_insert(error);
            }
            self.note_cursor(batch.cursor);
            self.heartbeat_at = Instant::now() + self.outbox.options.heartbeat_interval;
        }
    }

    /// Notes the connection to which events are handed. A stream acknowledges them, so that nothing need be noted. Events
    /// before a goodbye are of no use to daemons that have the goodbye.
    fn note_connection(&self) {
        let is_unacknowledged = self.outbox.options.transport == Transport::Core;
        let is_connected = self.nats.connection_state() == State::Connected;
        let present = (is_unacknowledged && is_connected).then(|| connection_of(&self.nats));
        let mut unconfirmed = self.shared.unconfirmed.lock();
        let earlier = unconfirmed.filter(|_| !self.outbox.has_left);
        *unconfirmed = earlier.or(present);
    }

    fn note_cursor(&self, cursor: BatchCursor) {
        *self.shared.cursor.lock() = cursor;
        if let Some(turns) = &self.turns {
            turns.voice.epoch.store(cursor.epoch, Ordering::Release);
        }
    }

    /// Answers a daemon. All chunks of the answer are made before the first chunk is sent, so that all show the holder
    /// at the same moment. Later batches may be published while the chunks are sent.
    async fn answer(&mut self, question: Message, queue: &mut mpsc::Receiver<PublisherCommand>) {
        let Some(reply_to) = question.reply.filter(|_| self.may_speak()) else {
            return;
        };
        let answered = match Arc::clone(&self.answers).try_acquire_owned() {
            Ok(permit) => {
                let prepared = self.prepare(&question.payload, queue).await;
                prepared.map(|chunks| (permit, chunks))
            }
            Err(_) => Err(WireError::new(
                ErrorCode::Unavailable,
                "this publisher answers others; ask again",
            )),
        };
        match answered {
            Ok((permit, chunks)) => {
                tokio::spawn(send_chunks(self.nats.clone(), reply_to, chunks, permit));
            }
            Err(error) => {
                self.count(&self.shared.counters.answers_refused);
                refuse(&self.nats, reply_to, &error).await;
            }
        }
    }

    async fn prepare(
        &mut self,
        payload: &[u8],
        queue: &mut mpsc::Receiver<PublisherCommand>,
    ) -> Result<Vec<Vec<u8>>, WireError> {
        let request = ResyncRequest::decode(payload, &WireLimits::default())?;
        self.rise_above(request.cursor.epoch);
        let kept = match self.state.clone() {
            Some(state) if self.outbox.needs_state(&request) => Some(self.read(&state, queue).await),
            _ => None,
        };
        self.outbox.note_server_limit(self.nats.max_payload());
        let answer = self.outbox.answer(&request, kept, clocks(self.started))?;
        self.count(match answer.kind {
            ResyncAnswerKind::Missing => &self.shared.counters.answers_missing,
            ResyncAnswerKind::Full => &self.shared.counters.answers_full,
        });
        Ok(answer.chunks)
    }

    /// Begins an epoch above `known`, the epoch that a daemon knows, if `known` is higher than this publisher's epoch
    /// and can be believed.
    fn rise_above(&mut self, known: u64) {
        let (before, clocks) = (self.outbox.cursor.epoch, self.clocks());
        if !self.outbox.rise_above(known, clocks) {
            if known > before && is_far_ahead(known, clocks.unix_us) {
                self.warn_of(known);
            }
            return;
        }
        let epoch = self.outbox.cursor.epoch;
        tracing::warn!(
            subject = self.subject,
            before,
            known,
            epoch,
            "a daemon knew a higher epoch, of a process whose clock was ahead: a new one begins above it"
        );
        // Other daemons learn of the new epoch at once.
        self.heartbeat_at = Instant::now();
    }

    /// Tells in the log, once a minute at most, that an epoch is not believed.
    fn warn_of(&mut self, known: u64) {
        let now = Instant::now();
        if self.warned_at.is_some_and(|at| now - at < WARNING_INTERVAL) {
            return;
        }
        self.warned_at = Some(now);
        tracing::warn!(
            subject = self.subject,
            epoch = self.outbox.cursor.epoch,
            known,
            "a question names an epoch more than a day ahead of this machine's clock, which is not believed: see to the clocks, \
             or have the daemon that knows it forget the worker"
        );
    }

    /// Reads the full state from the publisher's caller, who keeps it. Before that, sends all events that the state
    /// contains, so that the state is the one after the last batch sent. The state is empty after a goodbye.
    async fn read(
        &mut self,
        state: &SharedState,
        queue: &mut mpsc::Receiver<PublisherCommand>,
    ) -> Vec<(Tier, Event)> {
        let mut lock = std::pin::pin!(state.lock());
        // The keeper may hold the lock while it waits for room in the queue. So the queue is emptied while this task
        // waits for the lock.
        let mut state = loop {
            tokio::select! {
                biased;
                state = &mut lock => break state,
                Some(command) = queue.recv() => self.obey(command).await,
            }
        };
        // Sends the remaining events that are already in the state. The keeper adds no event while this task holds the
        // lock.
        while let Ok(command) = queue.try_recv() {
            self.obey(command).await;
        }
        let sealed = self.outbox.seal(self.clocks());
        self.send_all(sealed).await;
        match self.outbox.has_left {
            true => Vec::new(),
            false => state.full_state(),
        }
    }

    fn count(&self, counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// Batches that a flush waits for.
struct Flush {
    /// Last batch, or the error of one that could not be sent.
    sent: Result<BatchCursor, PublisherError>,
    /// Number of the connection to which the first events were handed; `None` if none were handed to one.
    connection: Option<u64>,
    /// Whether daemons ask the publisher questions. After a goodbye, they ask none.
    is_asked: bool,
}

impl Flush {
    /// Fails if the connection was lost since the first events were handed to it: they may be lost with it.
    fn check_connection(&self, nats: &Client) -> Result<(), PublisherError> {
        match self.connection.is_none_or(|number| number == connection_of(nats)) {
            true => Ok(()),
            false => Err(PublisherError::Connection(
                "it was lost after events were handed to it; they may not have arrived".to_owned(),
            )),
        }
    }
}

/// Returns the number of the present connection of a client, or of its last one.
fn connection_of(nats: &Client) -> u64 {
    nats.statistics().connects.load(Ordering::Relaxed)
}

/// Waits until the server has processed the messages that were sent, and then answers a flush.
async fn finish_flush(
    nats: Client,
    shared: Arc<PublisherShared>,
    flush: Flush,
    mut reply: oneshot::Sender<Result<BatchCursor, PublisherError>>,
) {
    let connection = flush.connection;
    let keep = || {
        let mut unconfirmed = shared.unconfirmed.lock();
        *unconfirmed = connection.or(*unconfirmed);
    };
    let flushed = tokio::select! {
        flushed = nats.flush() => flushed,
        () = reply.closed() => return keep(),
    };
    let flushed = flushed.map_err(|error| PublisherError::Connection(error.to_string()));
    let looked_at = match &shared.refusals {
        Some(refusals) if flushed.is_ok() => refusals.look(&nats, flush.is_asked).await,
        _ => Ok(()),
    };
    let taken = flushed.and(looked_at);
    let is_told = taken.is_ok() && flush.sent.is_ok();
    let arrived = taken.and(flush.check_connection(&nats));
    let outcome = flush.sent.and_then(|cursor| arrived.map(|()| cursor));
    // A caller may no longer wait. What this flush has not told is left to the next one.
    if reply.send(outcome).is_err() || !is_told {
        keep();
    }
}

/// Waits for the next question of a daemon. Waits without end if the publisher takes no questions.
async fn next(questions: &mut Option<Subscriber>) -> Option<Message> {
    let question = match questions {
        Some(questions) => questions.next().await,
        None => std::future::pending().await,
    };
    if question.is_none() {
        // The client is closed: there will be no more.
        *questions = None;
    }
    question
}

/// Waits until the publisher's turn to publish begins or ends. Waits without end if the publisher takes no turns.
async fn turn_changed(turns: &mut Option<PublisherTurns>) {
    match turns {
        Some(turns) => turns.voice.changed().await,
        None => std::future::pending().await,
    }
}

async fn send_chunks(nats: Client, reply_to: Subject, chunks: Vec<Vec<u8>>, permit: OwnedSemaphorePermit) {
    for chunk in chunks {
        if let Err(error) = nats.publish(reply_to.clone(), chunk.into()).await {
            // The daemon asks again.
            tracing::debug!(%error, "a resync answer was cut short");
            break;
        }
    }
    drop(permit);
}

async fn refuse(nats: &Client, reply_to: Subject, error: &WireError) {
    let mut headers = HeaderMap::new();
    // Our own texts are single lines.
    headers.insert(ERROR_HEADER, error.text.as_str());
    headers.insert(ERROR_CODE_HEADER, error.code.as_u16().to_string().as_str());
    if let Err(error) = nats
        .publish_with_headers(reply_to, headers, bytes::Bytes::new())
        .await
    {
        tracing::debug!(%error, "a resync was not answered");
    }
}
