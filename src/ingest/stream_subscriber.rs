//! The events by JetStream: read in order from where a snapshot ends, with nothing dropped on the way.
//!
//! The stream numbers its messages without a gap. So a number that is missing is a loss that is seen at once, and not only at the
//! holder's next batch; and a holder that was exact when the snapshot was written is exact again as soon as the rest of the stream
//! has been applied, even if it stays silent.
//!
//! Messages are pulled, a bounded number at a time, and not acknowledged: the position is ours, and goes into snapshots. Whatever
//! happens (the connection breaks, the server is silent, a message is skipped on its way) the consumer is made anew behind
//! the last message that was handed to the lanes. From then until the stream has been read up to its end again, all holders
//! are unverified (a [stall](StreamTrust::stall)). Messages that are gone for good, because the stream's limits took them or it was
//! replaced by another, begin a new generation, as lost messages of core NATS do.

use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use async_nats::jetstream::consumer::pull;
use async_nats::jetstream::{self, Context, Message};
use futures_util::StreamExt;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::StreamConfig;
use crate::snapshot::StreamCursor;
use crate::telemetry::StreamMetrics;
use crate::telemetry::labels::ConsumerReset;
use crate::tracking::{StreamStall, StreamTrust};

use super::dispatch::Dispatcher;
use super::position::StreamPosition;
use super::stream::{EventStream, StreamError, StreamSpan};

/// Most messages that are on their way to us.
const PULL_MESSAGES_MAX: usize = 1024;
/// Most bytes of messages that are on their way to us, unless a single message may be larger.
const PULL_BYTES: usize = 32 << 20;
/// How often the server says that it has no messages. Twice that long without a word, and the consumer is made anew.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// How long one request for messages lasts.
const PULL_DURATION: Duration = Duration::from_secs(30);
/// Pause before a consumer is made anew; doubles with every failed attempt.
const RETRY_DELAY_MIN: Duration = Duration::from_millis(100);
/// Longest pause between two attempts to attach.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(4);

/// Reads the events stream and brings its messages to the lanes.
pub struct StreamSubscriber {
    jetstream: Context,
    client: Client,
    subject: String,
    dispatcher: Dispatcher,
    config: StreamConfig,
    /// Messages that may wait in the stream while holders still count as exact.
    lag_max: u64,
    trust: Arc<StreamTrust>,
    position: Arc<StreamPosition>,
    incidents: watch::Receiver<u64>,
    attached: watch::Sender<bool>,
    caught_up: watch::Sender<bool>,
    metrics: StreamMetrics,
}

/// What a [`StreamSubscriber`] works with, beside the connection.
pub struct StreamSubscriberParts {
    /// Where messages go.
    pub dispatcher: Dispatcher,
    /// The stream.
    pub config: StreamConfig,
    /// Messages that may wait in the stream while holders still count as exact; also bounds how many are on their way to us, to half
    /// of it.
    pub lag_max: usize,
    /// What queries ask. A stall must have begun before the first query is answered.
    pub trust: Arc<StreamTrust>,
    /// Where to go on reading; kept up to date.
    pub position: Arc<StreamPosition>,
    /// Must change whenever the connection broke.
    pub incidents: watch::Receiver<u64>,
    /// Becomes true when the stream is being read for the first time.
    pub attached: watch::Sender<bool>,
    /// Becomes true when the stream has been read up to its end for the first time.
    pub caught_up: watch::Sender<bool>,
}

/// A consumer, and what is known about the stream it reads.
struct Attached {
    messages: pull::Stream,
    /// Sequence number of the last message that must have been applied before holders are trusted again.
    target: u64,
    stall: Option<StreamStall>,
    /// The consumer's number of the next message.
    delivery: u64,
}

/// Why a consumer is not read any longer.
enum Detached {
    Stopped,
    Reset(ConsumerReset, String),
}

impl StreamSubscriber {
    /// A subscriber on `client`.
    pub fn new(client: Client, parts: StreamSubscriberParts) -> Self {
        Self {
            jetstream: jetstream::new(client.clone()),
            client,
            subject: parts.dispatcher.all_events(),
            dispatcher: parts.dispatcher,
            config: parts.config,
            lag_max: parts.lag_max as u64,
            trust: parts.trust,
            position: parts.position,
            incidents: parts.incidents,
            attached: parts.attached,
            caught_up: parts.caught_up,
            metrics: StreamMetrics::new(),
        }
    }

    /// Reads until `stop` is cancelled. Tries for ever: a daemon outlives its broker. What is not read stays in the stream.
    pub async fn run(mut self, stop: CancellationToken) {
        loop {
            let attached = tokio::select! {
                attached = self.attach() => attached,
                () = stop.cancelled() => return,
            };
            match self.follow(attached, &stop).await {
                Detached::Stopped => return,
                Detached::Reset(reason, detail) => self.metrics.reset(reason, &detail),
            }
            // A server that refuses every request must not be given a consumer for each.
            tokio::select! {
                () = tokio::time::sleep(RETRY_DELAY_MIN) => {}
                () = stop.cancelled() => return,
            }
        }
    }

    async fn attach(&mut self) -> Attached {
        let mut delay = RETRY_DELAY_MIN;
        loop {
            // Before anything is asked: a break from here on makes the consumer anew.
            self.incidents.borrow_and_update();
            let stall = self.trust.stall();
            match self.try_attach(stall).await {
                Ok(attached) => return attached,
                Err(error) => tracing::warn!(%error, "the events stream cannot be read yet"),
            }
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(RETRY_DELAY_MAX);
        }
    }

    async fn try_attach(&self, stall: StreamStall) -> Result<Attached, StreamError> {
        let stream = EventStream::open(&self.jetstream, &self.config, self.subject.clone()).await?;
        let cursor = self.resume(&stream);
        let consumer = stream.consume_from(cursor.sequence + 1).await?;
        let waiting = consumer.cached_info().num_pending;
        let StreamSpan { last, .. } = stream.span();
        if waiting == 0 && last > cursor.sequence {
            // All of it went while we asked.
            self.note_lost(last - cursor.sequence, cursor.sequence + 1);
            self.position.advance(last);
        }
        self.metrics.set_progress(cursor.sequence, waiting);
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
            messages,
            target: if waiting == 0 { 0 } else { last },
            stall: Some(stall),
            delivery: 1,
        })
    }

    /// Fewer than the client can hold: it would drop what is more.
    fn pull_messages(&self) -> usize {
        let half = usize::try_from(self.lag_max / 2).unwrap_or(usize::MAX);
        half.clamp(1, PULL_MESSAGES_MAX)
    }

    /// A message that is larger than a request allows would never come.
    fn pull_bytes(&self) -> usize {
        PULL_BYTES.max(self.client.server_info().max_payload.saturating_mul(2))
    }

    /// Where to go on in the stream. What lies before it and was never read is lost.
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
            Some(last) => last,
        };
        self.position.set(cursor.clone());
        cursor
    }

    fn note_lost(&self, messages: u64, expected: u64) {
        // Before anything behind the loss is applied.
        self.doubt();
        self.metrics.lost(messages, expected);
    }

    /// Begins a new generation, which is followed at once: what comes behind a loss is read, as before.
    fn doubt(&self) {
        self.trust.follow(self.trust.doubt());
    }

    async fn follow(&mut self, mut attached: Attached, stop: &CancellationToken) -> Detached {
        self.attached.send_replace(true);
        self.end_stall(&mut attached, 0).await;
        loop {
            let next = tokio::select! {
                biased;
                () = stop.cancelled() => return Detached::Stopped,
                changed = self.incidents.changed() => {
                    let detail = "the connection broke".to_owned();
                    return match changed {
                        Ok(()) => Detached::Reset(ConsumerReset::Connection, detail),
                        // Nobody tells any more: the daemon is going.
                        Err(_) => Detached::Stopped,
                    };
                }
                next = attached.messages.next() => next,
            };
            let taken = match next {
                Some(Ok(message)) => self.take(message, &mut attached).await,
                Some(Err(error)) => Err((ConsumerReset::Delivery, error.to_string())),
                None => Err((ConsumerReset::Delivery, "the consumer has ended".to_owned())),
            };
            if let Err((reason, detail)) = taken {
                return Detached::Reset(reason, detail);
            }
        }
    }

    /// Hands a message to its lane, if it is the next one.
    async fn take(&self, message: Message, attached: &mut Attached) -> Result<(), (ConsumerReset, String)> {
        let (sequence, delivery, waiting) = match message.info() {
            Ok(info) => (info.stream_sequence, info.consumer_sequence, info.pending),
            Err(error) => return Err((ConsumerReset::Delivery, error.to_string())),
        };
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
            // Every delivery came, so the stream itself has a hole.
            self.note_lost(sequence - last - 1, last + 1);
        }
        let message = message.split().0;
        let generation = self.trust.generation();
        self.dispatcher.dispatch(message, generation).await;
        // After the lane has it: a snapshot's position must not run ahead of what it dumps.
        self.position.advance(sequence);
        self.metrics.set_progress(sequence, waiting);
        if attached.stall.is_none() && waiting > self.lag_max {
            attached.stall = Some(self.trust.stall());
            attached.target = sequence + waiting;
        }
        if waiting <= PULL_MESSAGES_MAX as u64 {
            self.end_stall(attached, sequence).await;
        }
        Ok(())
    }

    /// Trusts the holders again when all that was to be read has been applied.
    async fn end_stall(&self, attached: &mut Attached, sequence: u64) {
        if sequence < attached.target {
            return;
        }
        let Some(stall) = attached.stall.take() else {
            return;
        };
        if self.dispatcher.drain().await.is_err() {
            tracing::error!("a lane has stopped; its workers' events are lost");
            attached.stall = Some(stall);
            return;
        }
        self.trust.follow(self.trust.generation());
        self.trust.end_stall(stall);
        self.caught_up.send_replace(true);
    }
}

/// Whether `last` is a position in the stream that begins at `beginning`.
fn is_continued(last: &StreamCursor, beginning: &StreamCursor, span: StreamSpan) -> bool {
    let is_same = last.stream == beginning.stream && last.created_us == beginning.created_us;
    is_same && last.sequence <= span.last
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cursor(created_us: u64, sequence: u64) -> StreamCursor {
        StreamCursor {
            stream: "EVENTS".to_owned(),
            created_us,
            sequence,
        }
    }

    #[test]
    fn a_position_counts_only_in_the_stream_it_was_taken_in() {
        let span = StreamSpan { first: 5, last: 9 };
        let beginning = cursor(7, 4);
        assert!(is_continued(&cursor(7, 9), &beginning, span));
        assert!(is_continued(&cursor(7, 0), &beginning, span));
        // Beyond its end: it has lost what we have read, and numbers others the same.
        assert!(!is_continued(&cursor(7, 10), &beginning, span));
        assert!(!is_continued(&cursor(8, 9), &beginning, span));
    }
}
