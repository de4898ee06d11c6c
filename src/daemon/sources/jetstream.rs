//! Source of events from JetStream. It reads a stream in order, from the position of a snapshot on.
//!
//! - The stream numbers its messages without a gap. A missing number shows a loss immediately, not only at the
//!   holder's next batch.
//! - A holder that was exact in the snapshot is exact again once the rest of the stream has been applied, unless its
//!   last message is so old that the holder is stale.
//! - Messages are pulled, a bounded number at a time, and not acknowledged. The daemon keeps the position itself, in
//!   snapshots.
//! - The connection can break, the server can fall silent, a message can be skipped. After each of these breaks, a
//!   new consumer begins after the last message that the lanes have. Until this consumer has read the stream up to
//!   its end, all holders are unverified: a [stall](StreamTrust::stall).
//! - After a restart of the server, publishers may still be without a connection, and their messages wait in their
//!   clients. A crash of the server may also have lost messages that it had taken, and without a leader the stream takes
//!   none. So a consumer begins a new generation of the stream in three cases: it is at another server, the stream has
//!   another leader, or the consumer before ended while the connection stood. The generation begins once the stream has
//!   been read up to its end. Each holder is then unverified until its next batch.
//! - The server can refuse requests, or withdraw the right to them. This is a break, too. Before holders are trusted
//!   again, a first request must show that the new consumer can be read.
//! - A store can be rolled back to an older copy, and grow again. Then other messages have the numbers of messages
//!   that were read before. So a consumer begins with the last message that was read, and checks that it is still the
//!   same.
//! - Messages can be gone for good: the stream's limits dropped them, or another stream has replaced the stream under
//!   the same name. This begins a new generation of the stream, as a loss with core NATS does.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::consumer::pull;
use async_nats::jetstream::{Context, Message};
use async_nats::{Client, connection::State};
use futures_util::{FutureExt, StreamExt};
use tokio::sync::watch;
use tokio::task::coop::unconstrained;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::lanes::{LanePool, PoolError, StreamPosition, log_lane_stopped, now_us};
use crate::traces::Tracer;
use kvatlas_client::Backoff;
use kvatlas_config::StreamConfig;
use kvatlas_core::snapshot::{StreamCursor, message_digest};
use kvatlas_core::stream::{StreamStall, StreamTrust};
use kvatlas_process::admin::{Latch, Readiness};
use kvatlas_process::broker::mend_requests;
use kvatlas_telemetry::StreamMetrics;
use kvatlas_telemetry::labels::ConsumerReset;

use super::attached::Attached;
use super::consumer_check::{ConsumerCheck, is_continued};
use super::pulse::{Beat, Pulse};
use super::span_of;
use super::stream::{EventStream, StreamError, StreamSpan, age_of, probe};
use super::stream_end::{StreamChange, StreamEnd, StreamLook, WatchedStream};
use super::stream_info::info_subject;
use super::unread::Unread;

/// Maximum number of messages in one pull, that is, in one request for messages.
const PULL_MESSAGES_MAX: usize = 1024;
/// Maximum number of bytes in one pull, that is, in one request for messages. The bound is higher if a single message
/// may be larger.
const PULL_BYTES: usize = 32 << 20;
/// Interval at which the server says that it has no messages. After twice that time without any message, a new
/// consumer is made.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
/// Time for which one request for messages stays open.
const PULL_DURATION: Duration = Duration::from_secs(30);
/// Maximum time to wait for the next message if the stream is known to have one. After this time, a new consumer shows
/// whether the message is gone.
const NEXT_PATIENCE: Duration = Duration::from_secs(3);
/// Pauses between two tries to make a consumer.
const RETRIES: Backoff = Backoff {
    pause_min: Duration::from_millis(100),
    pause_max: Duration::from_secs(4),
};

/// Source that reads the events stream, and hands its messages to the lanes.
pub(crate) struct JetStreamSource {
    pub(super) jetstream: Context,
    pub(super) client: Client,
    /// Subject of all events.
    pub(super) subject: String,
    /// Lanes that apply the messages.
    pub(super) pool: Arc<LanePool>,
    /// Configuration of the stream.
    pub(super) config: StreamConfig,
    /// Maximum number of messages that may wait in the stream while holders still count as exact. One pull requests
    /// at most half of this number.
    pub(super) lag_max: u64,
    /// State of the event stream, which says which holders are verified. Before the first query is answered, a
    /// [stall](StreamTrust::stall) must have begun. During a stall, no holder is verified.
    pub(super) trust: Arc<StreamTrust>,
    /// Position in the stream after which reading goes on. The source keeps it up to date.
    pub(super) position: Arc<StreamPosition>,
    /// Counter that must change whenever the connection breaks or the server refuses a request.
    pub(super) incidents: watch::Receiver<u64>,
    /// Whether the stream is being read. It becomes false in two cases: the server refuses a request, or an operator
    /// must correct the stream.
    pub(super) attached: watch::Sender<bool>,
    /// Whether the stream has been read up to its end once.
    pub(super) caught_up: watch::Sender<bool>,
    /// Number of a message that the stream is known to have, although the message after the last read one has not
    /// come in time. `None` if no message is late.
    pub(super) not_come: Option<u64>,
    /// Readiness of the daemon. The source stores there the reason why the stream cannot be read.
    pub(super) readiness: Arc<Readiness>,
    pub(super) metrics: StreamMetrics,
    /// Tracer that opens spans. `None` if no collector is configured.
    pub(super) tracer: Option<Tracer>,
}

/// Reason why a new consumer has to be made, and the detail for the log.
type Broken = (ConsumerReset, String);

/// Reason why a consumer is no longer read.
enum Detached {
    Stopped,
    Reset(ConsumerReset, String),
}

impl JetStreamSource {
    /// Reads the stream until `stop` is cancelled. Tries without end, because a daemon outlives its broker. Unread
    /// messages stay in the stream.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        loop {
            let attached = tokio::select! {
                attached = self.attach() => attached,
                () = stop.cancelled() => return,
            };
            match self.follow(attached, &stop).await {
                Detached::Stopped => return,
                Detached::Reset(reason, detail) => {
                    self.metrics.reset(reason, &detail);
                    self.tell_trouble(&detail);
                }
            }
            // The pause keeps a server that refuses every request from getting a new consumer for each.
            tokio::select! {
                () = tokio::time::sleep(RETRIES.pause_min) => {}
                () = stop.cancelled() => return,
            }
        }
    }

    fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Tells operators why the stream is not read. Tells nothing without a connection, which is then the reason.
    fn tell_trouble(&self, why: &impl ToString) {
        let trouble = self.is_connected().then(|| why.to_string());
        self.pool.freshness().set_stream_error(trouble);
    }

    async fn attach(&mut self) -> Attached {
        let mut failures = 0_u32;
        loop {
            // Incidents up to now are marked as seen before the first request. After any later incident, a new consumer
            // is made.
            self.incidents.borrow_and_update();
            let stall = self.trust.stall();
            match self.try_attach(stall).await {
                Ok(attached) => return attached,
                Err(error) => {
                    tracing::warn!(%error, "the events stream cannot be read yet");
                    self.tell_trouble(&error);
                    if self.is_connected() {
                        // The stream's server may be away.
                        self.position.note_servers(None);
                        // An operator must correct these errors. All others may end by themselves.
                        if error.is_of_stream() {
                            self.attached.send_replace(false);
                            // The stream does not keep what comes now.
                            self.doubt();
                        }
                    }
                    self.readiness
                        .set_trouble(Latch::EventsSubscribed, Some(error.to_string()));
                    if !error.is_of_stream() {
                        mend_requests(&self.client, &info_subject(&self.config.name)).await;
                    }
                }
            }
            failures = failures.saturating_add(1);
            tokio::time::sleep(RETRIES.pause(failures)).await;
        }
    }

    async fn try_attach(&self, stall: StreamStall) -> Result<Attached, StreamError> {
        let (freshness, subject) = (self.pool.freshness(), self.subject.clone());
        let clock = &freshness.stream_clock;
        let stream = EventStream::open(&self.jetstream, &self.config, subject, clock).await?;
        // Before the first answer, the client may not know any server yet.
        let leadership = stream.leadership;
        let servers = xxh3_64_with_seed(self.client.server_info().server_id.as_bytes(), leadership);
        let cursor = self.resume(&stream);
        let StreamSpan { first, last } = stream.span();
        let check = ConsumerCheck::of(&cursor, first, stream.beginning());
        let consumer = stream
            .consume_from(cursor.sequence + u64::from(check.is_none()))
            .await?;
        let waiting = consumer.cached_info().num_pending;
        let has_unread = waiting > u64::from(check.is_some());
        // The stream has had messages after the cursor, but the consumer finds none of them. They are gone, or this
        // server does not have them yet: a replica may still be catching up. They count as gone if they did not come in
        // time before.
        let is_behind = last > cursor.sequence;
        let is_lost = is_behind && !has_unread && self.not_come.is_some_and(|awaited| awaited >= last);
        if is_lost {
            self.note_lost(last - cursor.sequence, cursor.sequence + 1);
            self.position.advance(last, None);
        }
        self.metrics.set_progress(cursor.sequence, waiting);
        // The stream is known up to this time: its messages are read before the stall ends, or the first request
        // returns one.
        let asked_us = now_us();
        let first = probe(&consumer).await?;
        let messages = consumer
            .stream()
            .max_messages_per_batch(self.pull_messages())
            .max_bytes_per_batch(self.pull_bytes())
            .heartbeat(HEARTBEAT_INTERVAL)
            .expires(PULL_DURATION)
            .messages();
        let name = self.config.name.clone();
        let messages = messages
            .await
            .map_err(|source| StreamError::Pull { name, source })?;
        Ok(Attached {
            first,
            messages,
            check,
            target: if is_behind && !is_lost { last } else { 0 },
            stall: Some(stall),
            leadership,
            servers,
            delivery: 1,
            unread: Unread::since(asked_us),
            answered_us: asked_us,
            looked_at: None,
            roll_call: None,
        })
    }

    /// Returns the number of messages for one pull. It is smaller than the number that the client can buffer, because
    /// the client would drop the rest.
    fn pull_messages(&self) -> usize {
        let half = usize::try_from(self.lag_max / 2).unwrap_or(usize::MAX);
        half.clamp(1, PULL_MESSAGES_MAX)
    }

    /// Returns the number of bytes for one pull. If it were smaller than a message, that message would never come.
    fn pull_bytes(&self) -> usize {
        PULL_BYTES.max(self.client.server_info().max_payload.saturating_mul(2))
    }

    /// Returns the position in the stream after which reading goes on, and stores it. Messages before this position
    /// that were never read are lost.
    fn resume(&self, stream: &EventStream) -> StreamCursor {
        let (beginning, span) = (stream.beginning(), stream.span());
        let cursor = match self.position.get() {
            None => beginning,
            Some(last) if !is_continued(&last, &beginning, span) => {
                let detail = format!(
                    "read up to {} of another stream of the name {}",
                    last.sequence, last.stream
                );
                self.metrics.reset(ConsumerReset::Stream, &detail);
                self.doubt();
                beginning
            }
            Some(last) if last.sequence < beginning.sequence => {
                self.note_lost(beginning.sequence - last.sequence, last.sequence + 1);
                beginning
            }
            Some(last) if last.digest.is_some() && last.sequence < span.first => {
                // The message to compare with is gone: the store may have been rolled back meanwhile.
                self.doubt();
                StreamCursor {
                    has_all: false,
                    ..last
                }
            }
            Some(last) => last,
        };
        self.position.set(cursor.clone());
        cursor
    }

    fn note_lost(&self, messages: u64, expected: u64) {
        // The doubt begins before a message after the loss is applied.
        self.doubt();
        self.metrics.lost(messages, expected);
    }

    /// Begins a new generation of the stream, because messages are lost. All holders are unverified until batches of
    /// the new generation confirm them. Also notes that publishers may be unknown: a lost message may have been the
    /// only one of its publisher.
    fn doubt(&self) {
        self.position.note_all(false);
        self.trust.follow(self.trust.doubt());
    }

    async fn follow(&mut self, mut attached: Attached, stop: &CancellationToken) -> Detached {
        let freshness = self.pool.freshness();
        let mut pulse = match Pulse::new(self.client.clone(), freshness.pulse_interval()).await {
            Ok(pulse) => pulse,
            Err(error) => return Detached::Reset(ConsumerReset::Connection, error.to_string()),
        };
        freshness.set_stream_error(None);
        freshness.set_unread(0);
        freshness.stream_known(attached.unread.known_us(), attached.answered_us);
        self.attached.send_replace(true);
        if let Some(first) = attached.first.take()
            && let Err((reason, detail)) = self.take(first, &mut attached).await
        {
            return Detached::Reset(reason, detail);
        }
        if attached.check.is_none() {
            self.end_stall(&mut attached, 0).await;
        }
        let mut end = StreamEnd::watch(self.watched(attached.leadership), freshness.look_interval());
        let mut looks = tokio::time::interval(NEXT_PATIENCE);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            attached.call_roll(self.trust.generation());
            let taken = tokio::select! {
                biased;
                () = stop.cancelled() => return Detached::Stopped,
                changed = self.incidents.changed() => {
                    let detail = "the connection broke, or the server refused a request".to_owned();
                    return match changed {
                        Ok(()) => Detached::Reset(ConsumerReset::Connection, detail),
                        // The connection is closed: the daemon is stopping.
                        Err(_) => Detached::Stopped,
                    };
                }
                beat = pulse.beat() => match beat {
                    Beat::Felt(sent_us) => {
                        let taken = self.take_buffered(&mut attached).await;
                        self.pool.note_heard(sent_us);
                        taken
                    }
                    Beat::Sent | Beat::Other => Ok(()),
                },
                // Before the messages, which may always be there.
                look = end.told() => look
                    .map(|look| self.note_end(look, &mut attached))
                    .map_err(|change| self.note_changed(&change)),
                next = attached.messages.next() => self.take_next(next, &mut attached).await,
                () = Attached::roll_called(&mut attached.roll_call) => {
                    let taken = self.take_buffered(&mut attached).await;
                    self.close_roll_call(&mut attached);
                    taken
                }
                _ = looks.tick() => self.look_for_next(&mut attached).await,
            };
            if let Err((reason, detail)) = taken {
                return Detached::Reset(reason, detail);
            }
        }
    }

    /// Notes that the stream is not as it must be, or has another leader. Messages that came meanwhile may not be in it, and
    /// leave no hole in its numbers.
    fn note_changed(&self, change: &StreamChange) -> Broken {
        self.doubt();
        let reason = match change {
            StreamChange::Leader(_) => ConsumerReset::Leader,
            StreamChange::Config(_) => ConsumerReset::Stream,
        };
        (reason, change.to_string())
    }

    fn watched(&self, leadership: u64) -> WatchedStream {
        WatchedStream {
            jetstream: self.jetstream.clone(),
            name: self.config.name.clone(),
            subject: self.subject.clone(),
            leadership,
            pool: Arc::clone(&self.pool),
        }
    }

    /// Notes the number of the stream's last message, which the server has reported in `look`. All unread messages up
    /// to that number count as waiting, even if the consumer counts no waiting message.
    fn note_end(&self, look: StreamLook, attached: &mut Attached) {
        let sequence = self.position.sequence();
        attached.answered_us = look.asked_us;
        let since_us = attached.unread.note_end(sequence, look);
        self.publish_age(since_us, attached);
        self.metrics
            .set_progress(sequence, look.last.saturating_sub(sequence));
    }

    /// Tells queries how long messages have been unread (`unread_since_us`), and when the daemon last knew the whole
    /// stream.
    fn publish_age(&self, unread_since_us: u64, attached: &Attached) {
        let freshness = self.pool.freshness();
        // In this order, so that no query takes an unread message for a read one.
        freshness.set_unread(unread_since_us);
        freshness.stream_known(attached.unread.known_us(), attached.answered_us);
    }

    /// Notes that every publisher is known, because the roll call is over. Drops the roll call instead if it is of an
    /// ended generation, or if the stream is not read up to its end. In this case another roll call begins later.
    ///
    /// A roll call is needed if the stream does not show who publishes, after a loss, and after a snapshot that was
    /// written while batches were dropped.
    fn close_roll_call(&self, attached: &mut Attached) {
        let generation = self.trust.generation();
        let is_read = attached.stall.is_none();
        match &attached.roll_call {
            Some(call) if is_read && call.is_of(generation) => {
                self.position.note_all(true);
                call.close(&self.pool, &self.trust);
            }
            _ => attached.roll_call = None,
        }
    }

    /// Checks whether a message has come since the last call. If none has come although the stream is known to have a
    /// further one, that message may be gone. In that case returns an error, so that a new consumer shows whether the
    /// message is gone. If only the message to compare with has not come, it is gone, and nothing can be compared.
    async fn look_for_next(&mut self, attached: &mut Attached) -> Result<(), Broken> {
        let last = self.position.sequence();
        if attached.looked_at.replace(last) != Some(last) {
            return Ok(());
        }
        self.not_come = attached.awaited(last);
        if let Some(awaited) = self.not_come {
            let detail =
                format!("nothing has come for {NEXT_PATIENCE:?}, and the stream has had message {awaited}");
            return Err((ConsumerReset::Delivery, detail));
        }
        if attached.check.take().is_some() {
            self.doubt();
            self.end_stall(attached, last).await;
        }
        Ok(())
    }

    /// Hands the messages that have come to the lanes.
    async fn take_buffered(&self, attached: &mut Attached) -> Result<(), Broken> {
        for _ in 0..self.lag_max {
            // This poll ignores the task's tokio budget. Without budget, the buffer would look empty.
            let Some(next) = unconstrained(attached.messages.next()).now_or_never() else {
                break;
            };
            self.take_next(next, attached).await?;
        }
        Ok(())
    }

    async fn take_next(
        &self,
        next: Option<Result<Message, pull::MessagesError>>,
        attached: &mut Attached,
    ) -> Result<(), Broken> {
        let detail = match next {
            Some(Ok(message)) => return self.take(message, attached).await,
            Some(Err(error)) => error.to_string(),
            None => "the consumer has ended".to_owned(),
        };
        // Its server may have been away, and may have lost what came meanwhile.
        self.position.note_servers(None);
        Err((ConsumerReset::Delivery, detail))
    }

    /// Hands a message to the lanes, if it is the next one of the stream.
    async fn take(&self, message: Message, attached: &mut Attached) -> Result<(), Broken> {
        let (sequence, delivery, waiting, kept_for) = match message.info() {
            Ok(info) => (
                info.stream_sequence,
                info.consumer_sequence,
                info.pending,
                // A message that is read as soon as it is there has come just now, whatever the server's clock says.
                attached.stall.map_or(Duration::ZERO, |_| {
                    age_of(info.published, &self.pool.freshness().stream_clock)
                }),
            ),
            Err(error) => return Err((ConsumerReset::Delivery, error.to_string())),
        };
        match attached.check.take() {
            None => {}
            Some(check) if sequence <= check.sequence => {
                let at = (sequence, delivery, waiting);
                return self.recheck(&check, &message, at, attached).await;
            }
            // The message to compare with has gone since the check was made, so nothing can be compared.
            Some(_) => self.doubt(),
        }
        let last = self.position.sequence();
        if delivery != attached.delivery || sequence <= last {
            let detail = format!(
                "message {sequence} came as delivery {delivery} and not {}, behind message {last}",
                attached.delivery
            );
            return Err((ConsumerReset::Skipped, detail));
        }
        attached.delivery += 1;
        if sequence > last + 1 {
            // No delivery is missing, so the stream itself has a hole.
            self.note_lost(sequence - last - 1, last + 1);
        }
        let message = message.split().0;
        let generation = self.trust.generation();
        let span = span_of(self.tracer.as_ref(), &message);
        let digest = message_digest(&message.subject, &message.payload);
        self.pool
            .receive(&message.subject, &message.payload, generation, kept_for, span)
            .await;
        // The position moves after the lane has the message: a snapshot's position must not be ahead of the holders
        // that it dumps.
        self.position.advance(sequence, Some(digest));
        self.metrics.set_progress(sequence, waiting);
        let unread_since_us = attached.unread.note(sequence, waiting, now_us());
        self.publish_age(unread_since_us, attached);
        if attached.stall.is_none() && waiting > self.lag_max {
            attached.stall = Some(self.trust.stall());
            attached.target = sequence + waiting;
        }
        if waiting <= PULL_MESSAGES_MAX as u64 {
            self.end_stall(attached, sequence).await;
        }
        Ok(())
    }

    /// Compares the first message of a new consumer with the last message that was read before.
    async fn recheck(
        &self,
        check: &ConsumerCheck,
        message: &Message,
        (sequence, delivery, waiting): (u64, u64, u64),
        attached: &mut Attached,
    ) -> Result<(), (ConsumerReset, String)> {
        let digest = message_digest(&message.subject, &message.payload);
        if delivery != attached.delivery || sequence != check.sequence || digest != check.digest {
            // The messages read so far are of another store: the stream is read again from its beginning.
            self.doubt();
            self.position.set(check.beginning.clone());
            let detail = format!(
                "message {} of the stream is another one than was read under that number: its store is an older copy that has grown again",
                check.sequence
            );
            return Err((ConsumerReset::Stream, detail));
        }
        attached.delivery += 1;
        self.metrics.set_progress(sequence, waiting);
        self.end_stall(attached, sequence).await;
        Ok(())
    }

    /// Ends the stall once the lanes have applied every message up to the stall's target. During a stall, no holder
    /// is verified. `sequence` is the number of the last read message.
    async fn end_stall(&self, attached: &mut Attached, sequence: u64) {
        if sequence < attached.target {
            return;
        }
        let Some(stall) = attached.stall.take() else {
            return;
        };
        if self.drain().await.is_err() {
            log_lane_stopped();
            attached.stall = Some(stall);
            return;
        }
        if !self.position.is_through(attached.servers) {
            // In this order: a snapshot must not have the new servers with the old generation.
            self.doubt();
            self.position.note_servers(Some(attached.servers));
        }
        let generation = self.trust.generation();
        self.trust.follow(generation);
        // All messages up to here have been applied. If they may lack publishers, a roll call begins now.
        if self.position.has_all() {
            self.trust.note_listed(generation);
        }
        self.trust.end_stall(stall);
        self.caught_up.send_replace(true);
    }

    /// Waits until the lanes have applied all messages, and have looked for silent publishers. A publisher may have
    /// ended while the daemon did not read the stream, without a message that says so.
    async fn drain(&self) -> Result<(), PoolError> {
        self.pool.drain().await?;
        self.pool.tick(true);
        self.pool.drain().await
    }
}
