//! The events by core NATS: a subscription.
//!
//! Messages that a broken connection or a full buffer swallowed show as gaps in the batch numbers, but only when the next batch of
//! that holder comes. Until then its state is in doubt. So with every such incident a new *generation* of the stream begins:
//! holders are unverified until a batch received in that generation continues their count. Messages that were buffered
//! before the incident must not count as such, so each generation has a subscription of its own: the new one is made,
//! the server is seen to have it, the old one is closed, and what it had buffered is worked off first. A message that both
//! received is a duplicate by its number.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use futures_util::StreamExt;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::connection::round_trip;
use crate::tracking::{StreamGeneration, StreamTrust};

use super::dispatch::Dispatcher;

/// Incidents come in swarms (a full buffer drops message after message); one new subscription serves them all.
const INCIDENT_PAUSE: Duration = Duration::from_millis(100);
/// How long the server may take to confirm a subscription before it is asked again.
const CONFIRMATION_PATIENCE: Duration = Duration::from_secs(5);

/// Why the events cannot be subscribed.
#[derive(Debug, thiserror::Error)]
pub enum SubscriberError {
    /// The subscription was refused by the client.
    #[error("cannot subscribe to {subject}: {reason}")]
    Subscribe {
        /// The subject.
        subject: String,
        /// The client's words.
        reason: String,
    },
}

/// Receives events and brings them to the lanes.
pub struct Subscriber {
    client: Client,
    dispatcher: Dispatcher,
    trust: Arc<StreamTrust>,
    /// Counts the incidents that may have lost messages.
    incidents: watch::Receiver<u64>,
    subscribed: watch::Sender<bool>,
}

/// A subscription that the server is known to have.
struct Confirmed {
    messages: async_nats::Subscriber,
    generation: StreamGeneration,
}

type Pending<'a> = Pin<Box<dyn Future<Output = Result<Confirmed, SubscriberError>> + Send + 'a>>;

impl Subscriber {
    /// A subscriber on `client`. With everything that may have lost messages, `trust` must be doubted and then `incidents`
    /// must change; `subscribed` becomes true
    /// once the server is known to have the subscription.
    pub fn new(
        client: Client,
        dispatcher: Dispatcher,
        trust: Arc<StreamTrust>,
        incidents: watch::Receiver<u64>,
        subscribed: watch::Sender<bool>,
    ) -> Self {
        Self {
            client,
            dispatcher,
            trust,
            incidents,
            subscribed,
        }
    }

    /// Receives until `stop` is cancelled, then works off what is buffered.
    pub async fn run(self, stop: CancellationToken) -> Result<(), SubscriberError> {
        let mut incidents = self.incidents.clone();
        let mut current = tokio::select! {
            confirmed = self.subscribe(Duration::ZERO) => confirmed?,
            () = stop.cancelled() => return Ok(()),
        };
        self.subscribed.send_replace(true);
        let mut pending: Option<Pending<'_>> = None;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                // One at a time: incidents that come meanwhile are looked at when this one is settled.
                changed = incidents.changed(), if pending.is_none() => {
                    if changed.is_err() {
                        break;
                    }
                    pending = Some(Box::pin(self.subscribe(INCIDENT_PAUSE)));
                }
                confirmed = settle(&mut pending) => {
                    pending = None;
                    let old = std::mem::replace(&mut current, confirmed?);
                    self.close(old).await;
                }
                message = current.messages.next() => match message {
                    Some(message) => self.dispatcher.dispatch(message, current.generation).await,
                    // The client is closed.
                    None => break,
                },
            }
        }
        drop(pending);
        self.close(current).await;
        Ok(())
    }

    /// Subscribes, and waits until the server is seen to have the subscription; for ever, since a daemon outlives its broker.
    async fn subscribe(&self, pause: Duration) -> Result<Confirmed, SubscriberError> {
        tokio::time::sleep(pause).await;
        // Before the server is asked: an incident from here on begins a later generation.
        let generation = self.trust.generation();
        let subject = self.dispatcher.all_events();
        let subscribed = self.client.subscribe(subject.clone()).await;
        let messages = subscribed.map_err(|error| SubscriberError::Subscribe {
            subject,
            reason: error.to_string(),
        })?;
        while let Err(error) = round_trip(&self.client, CONFIRMATION_PATIENCE).await {
            tracing::warn!(%error, "the events subscription is not confirmed yet");
        }
        self.trust.follow(generation);
        Ok(Confirmed { messages, generation })
    }

    /// Works off what a subscription has buffered, and ends it.
    async fn close(&self, mut old: Confirmed) {
        if let Err(error) = old.messages.unsubscribe().await {
            tracing::debug!(%error, "the connection is closed already");
        }
        while let Some(message) = old.messages.next().await {
            self.dispatcher.dispatch(message, old.generation).await;
        }
    }
}

/// The subscription that is being made; waits for ever where there is none.
async fn settle(pending: &mut Option<Pending<'_>>) -> Result<Confirmed, SubscriberError> {
    match pending {
        Some(pending) => pending.await,
        None => std::future::pending().await,
    }
}
