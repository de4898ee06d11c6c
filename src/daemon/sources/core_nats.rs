//! Source of events from core NATS, through a subscription.
//!
//! A broken connection or a full buffer loses messages. A loss shows as a gap in the batch numbers, but only at the
//! holder's next batch. Until then the holder's state is in doubt. So each such incident begins a new *generation* of
//! the stream. Holders are unverified until a batch received in that generation has their next batch number.
//!
//! Messages that were buffered before the incident belong to the old generation. Each generation therefore has a
//! subscription of its own. The steps of the change:
//!
//! 1. Subscribe again, and wait until the server has confirmed it.
//! 2. Unsubscribe the old subscription, and hand over its buffered messages first.
//! 3. Skip a message that came on both subscriptions: its batch number shows that it is a duplicate.
//!
//! The server may refuse the subscription, or withdraw the right to it later. An error on the connection says so. Each
//! such refusal is an incident, too. The source then subscribes repeatedly, until the server has the subscription and
//! has not refused it for the time of two round trips.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use async_nats::{Client, Message};
use futures_util::{FutureExt, StreamExt};
use tokio::sync::watch;
use tokio::task::coop::unconstrained;
use tokio_util::sync::CancellationToken;

use crate::lanes::{Inbox, LanePool};
use kvatlas_client::Backoff;
use kvatlas_process::broker::{Intake, SubscribeError, bytes_of, is_confirmed};

use crate::traces::Tracer;

use super::pulse::{Beat, Pulse};
use super::roll_call::RollCall;
use super::span_of;
use kvatlas_core::stream::{StreamGeneration, StreamTrust};

/// Pause before a new subscription after an incident (messages may have been lost). Incidents come in swarms, because a
/// full buffer drops many messages one after the other. One new subscription serves for a whole swarm.
const INCIDENT_PAUSE: Duration = Duration::from_millis(100);
/// Maximum number of messages that are handed over in a row before other work is looked at.
const MESSAGES_AT_ONCE: usize = 256;
/// Number of received bytes after which the source tells the intake (the count of waiting bytes) that it has taken
/// them.
const COUNTED_BYTES: u64 = 256 << 10;
/// Pauses before the next try after the server has refused a subscription.
const RETRIES: Backoff = Backoff {
    pause_min: Duration::from_millis(100),
    pause_max: Duration::from_secs(2),
};

/// Source that receives events through a subscription, and hands them to the lanes.
pub(crate) struct CoreNatsSource {
    pub(super) client: Client,
    /// Subject of the subscription: the subject of all events.
    pub(super) subject: String,
    pub(super) pool: Arc<LanePool>,
    pub(super) trust: Arc<StreamTrust>,
    /// Number of incidents that may have lost messages. The stream is put in doubt before this number changes.
    pub(super) incidents: watch::Receiver<u64>,
    /// Number of times that the server has refused the subscription. Each refusal may have lost messages.
    pub(super) refusals: watch::Receiver<u64>,
    /// Whether the server has confirmed the subscription. A refusal sets it to false. Both this source and the
    /// callback for notices of the connection notice refusals.
    pub(super) subscribed: watch::Sender<bool>,
    /// Maximum number of messages that the client buffers for the subscription.
    pub(super) buffered_max: usize,
    /// Count of the bytes that the connection has received, and that the source has not taken yet. The source reports
    /// to it the messages that it takes.
    pub(super) intake: Arc<Intake>,
    /// Tracer that opens spans. `None` if no collector is configured.
    pub(super) tracer: Option<Tracer>,
}

/// Subscription that the server has confirmed.
struct Confirmed {
    messages: async_nats::Subscriber,
    generation: StreamGeneration,
}

type Pending<'a> = Pin<Box<dyn Future<Output = Result<Confirmed, SubscribeError>> + Send + 'a>>;

impl CoreNatsSource {
    /// Receives messages until `stop` is cancelled, then hands over the buffered messages.
    pub(crate) async fn run(self, stop: CancellationToken) -> Result<(), SubscribeError> {
        let mut incidents = self.incidents.clone();
        let mut current = tokio::select! {
            confirmed = self.subscribe(Duration::ZERO) => confirmed?,
            () = stop.cancelled() => return Ok(()),
        };
        self.subscribed.send_replace(true);
        let mut pulse = Pulse::new(self.client.clone(), self.pool.freshness().pulse_interval()).await?;
        let mut inbox = self.pool.inbox();
        let mut roll_call = RollCall::begin(current.generation);
        let mut pending: Option<Pending<'_>> = None;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                // Incidents are handled one at a time. Further ones wait until this one is settled.
                changed = incidents.changed(), if pending.is_none() => {
                    if changed.is_err() {
                        break;
                    }
                    pending = Some(Box::pin(self.subscribe(INCIDENT_PAUSE)));
                }
                confirmed = settle(&mut pending) => {
                    pending = None;
                    self.subscribed.send_replace(true);
                    let old = std::mem::replace(&mut current, confirmed?);
                    // Publishers that began during the change are not known yet.
                    roll_call = RollCall::begin(current.generation);
                    self.close(&mut inbox, old).await;
                }
                beat = pulse.beat() => if let Beat::Felt(sent_us) = beat {
                    // Messages that came before the pulse are in the buffer, or have been handed over.
                    self.hand_over_buffered(&mut inbox, &mut current, self.buffered_max);
                    self.pool.note_heard(sent_us);
                },
                () = roll_call.over() => {
                    self.hand_over_buffered(&mut inbox, &mut current, self.buffered_max);
                    roll_call.close(&self.pool, &self.trust);
                }
                () = self.intake.asked() => {
                    self.hand_over_buffered(&mut inbox, &mut current, self.buffered_max);
                }
                message = current.messages.next() => match message {
                    Some(message) => {
                        self.take(&mut inbox, &message, current.generation);
                        self.hand_over_buffered(&mut inbox, &mut current, MESSAGES_AT_ONCE);
                    }
                    // The client is closed.
                    None => break,
                },
            }
        }
        drop(pending);
        self.close(&mut inbox, current).await;
        Ok(())
    }

    /// Subscribes, and waits until the server has confirmed the subscription. Tries without end, because a daemon
    /// outlives its broker, and because a withdrawn right can be restored.
    async fn subscribe(&self, pause: Duration) -> Result<Confirmed, SubscribeError> {
        tokio::time::sleep(pause).await;
        let mut failures = 0_u32;
        loop {
            // Before the server is asked: an incident from here on begins a later generation.
            let generation = self.trust.generation();
            let refusals = *self.refusals.borrow();
            let subscribed = self.client.subscribe(self.subject.clone()).await;
            let messages = subscribed.map_err(|error| SubscribeError::new(&self.subject, &error))?;
            if !is_confirmed(&self.client, &self.intake, "events").await {
                self.intake.discard(messages).await;
                continue;
            }
            if *self.refusals.borrow() == refusals {
                self.trust.follow(generation);
                return Ok(Confirmed { messages, generation });
            }
            self.subscribed.send_replace(false);
            failures = failures.saturating_add(1);
            tokio::time::sleep(RETRIES.pause(failures)).await;
        }
    }

    /// Ends a subscription, and hands its buffered messages to the lanes.
    async fn close(&self, inbox: &mut Inbox, mut old: Confirmed) {
        if let Err(error) = old.messages.unsubscribe().await {
            tracing::debug!(%error, "the connection is closed already");
        }
        while let Some(message) = old.messages.next().await {
            self.take(inbox, &message, old.generation);
            self.hand_over_buffered(inbox, &mut old, MESSAGES_AT_ONCE);
        }
    }

    /// Hands the messages in `inbox`, and at most `messages_max` buffered messages, to the lanes. Never waits. If the
    /// lanes have no room, they drop messages, and put the holders of their workers in doubt.
    fn hand_over_buffered(&self, inbox: &mut Inbox, current: &mut Confirmed, messages_max: usize) {
        let mut taken = MessageCounts::default();
        // Read only when the buffer seems empty, because the connection changes this counter with every message.
        let mut received = None;
        let take = poll_fn(|context| {
            while taken.messages < messages_max {
                if let Poll::Ready(Some(message)) = current.messages.poll_next_unpin(context) {
                    received = None;
                    self.sort(inbox, &message, current.generation);
                    taken.add(&message);
                    if taken.messages.is_multiple_of(MESSAGES_AT_ONCE) {
                        self.pool.hand_over(inbox);
                    }
                    if taken.bytes > COUNTED_BYTES {
                        self.intake.took_bytes(std::mem::take(&mut taken.bytes));
                    }
                } else if let Some(received) = received {
                    self.intake.took_all(received);
                    taken.bytes = 0;
                    break;
                } else {
                    received = Some(self.intake.received());
                }
            }
            Poll::Ready(())
        });
        // This poll ignores the task's tokio budget. Without budget, the buffer would look empty.
        unconstrained(take).now_or_never();
        self.intake.took_bytes(taken.bytes);
        self.pool.hand_over(inbox);
    }

    fn take(&self, inbox: &mut Inbox, message: &Message, generation: StreamGeneration) {
        self.intake.took(message);
        self.sort(inbox, message, generation);
    }

    fn sort(&self, inbox: &mut Inbox, message: &Message, generation: StreamGeneration) {
        let span = span_of(self.tracer.as_ref(), message);
        self.pool
            .sort(inbox, &message.subject, &message.payload, generation, span);
    }
}

/// Counts of messages taken from the buffer. `messages` is their number. `bytes` is the size of those that have not
/// been reported to the intake (the count of waiting bytes) yet.
#[derive(Default)]
struct MessageCounts {
    messages: usize,
    bytes: u64,
}

impl MessageCounts {
    fn add(&mut self, message: &Message) {
        self.messages += 1;
        self.bytes += bytes_of(message);
    }
}

/// Waits for the subscription that is being made. Waits for ever if none is being made.
async fn settle(pending: &mut Option<Pending<'_>>) -> Result<Confirmed, SubscribeError> {
    match pending {
        Some(pending) => pending.await,
        None => std::future::pending().await,
    }
}
