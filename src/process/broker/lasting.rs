//! Subscriptions and requests that work again after the server has withdrawn a right and given it back.
//!
//! A server that withdraws a right removes the subscription, and reports an error. When the right is back, nobody makes
//! the subscription again. The client library makes all its subscriptions again only when it connects anew.

use std::time::Duration;

use async_nats::connection::State;
use async_nats::{Client, Message, RequestErrorKind, Subscriber};
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use kvatlas_client::{Backoff, Refused};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use super::nats::{ConnectionNotice, SubscribeError};

/// Pauses before a refused subscription is made again. Some rights are optional, and may never be given.
const RETRIES: Backoff = Backoff {
    pause_min: Duration::from_secs(1),
    pause_max: Duration::from_secs(30),
};
/// Time that the server may take to answer a request.
const PATIENCE: Duration = Duration::from_secs(2);

/// Count of the subscriptions of a connection that the server has refused. Lasting subscriptions watch it.
#[derive(Debug, Clone, Default)]
pub struct RefusedSubscriptions(watch::Sender<u64>);

impl RefusedSubscriptions {
    /// Counts an incident of the connection, if it is a refusal of a subscription.
    pub fn note(&self, notice: &ConnectionNotice) {
        if let ConnectionNotice::Refused(refusal) = notice
            && matches!(refusal.refused, Refused::Subscription(_))
        {
            self.count();
        }
    }

    /// Returns a receiver of the count, which has seen all refusals until now.
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.0.subscribe()
    }

    /// Counts a refusal.
    pub fn count(&self) {
        self.0.send_modify(|refusals| *refusals += 1);
    }
}

/// Subscription that is made again after the server has refused it, or has withdrawn the right to it.
pub struct LastingSubscription {
    client: Client,
    subject: String,
    /// Queue group. `None` if the subscription receives all messages.
    group: Option<String>,
    messages: Subscriber,
    refusals: watch::Receiver<u64>,
    /// Number of refusals one soon after the other.
    failures: u32,
    refused_at: Option<Instant>,
    /// Time at which the subscription is made again. `None` if it was not refused.
    retry_at: Option<Instant>,
}

impl LastingSubscription {
    /// Subscribes to `subject`, in the queue group `group` if one is given. `refused` must count the refusals of this
    /// subscription. Refusals of others may count, too.
    ///
    /// # Errors
    ///
    /// [`SubscribeError`] if the client is closed.
    pub async fn new(
        client: Client,
        subject: String,
        group: Option<String>,
        refused: &RefusedSubscriptions,
    ) -> Result<Self, SubscribeError> {
        let refusals = refused.watch();
        let messages = subscribe(&client, &subject, group.as_ref()).await?;
        Ok(Self {
            client,
            subject,
            group,
            messages,
            refusals,
            failures: 0,
            refused_at: None,
            retry_at: None,
        })
    }

    /// Waits for the next message. Returns `None` when the client is closed. The future can be dropped at any time.
    pub async fn next(&mut self) -> Option<Message> {
        loop {
            let retry = async {
                match self.retry_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                message = self.messages.next() => return message,
                Ok(()) = self.refusals.changed() => self.note_refusal(),
                () = retry => {
                    let again = subscribe(&self.client, &self.subject, self.group.as_ref()).await;
                    self.messages = again.ok()?;
                    self.retry_at = None;
                }
            }
        }
    }

    /// Ends the subscription once the messages that are on the way have come.
    pub async fn drain(&mut self) {
        // An error means that the client is closed.
        let _ = self.messages.drain().await;
    }

    /// Returns the messages as a stream, which ends when the client is closed.
    pub fn into_stream(self) -> impl Stream<Item = Message> + Send {
        futures_util::stream::unfold(self, |mut subscription| async move {
            let message = subscription.next().await?;
            Some((message, subscription))
        })
    }

    fn note_refusal(&mut self) {
        let now = Instant::now();
        let is_recent = |at: Instant| now.duration_since(at) < RETRIES.pause_max * 2;
        if !self.refused_at.replace(now).is_some_and(is_recent) {
            self.failures = 0;
        }
        self.failures = self.failures.saturating_add(1);
        self.retry_at = Some(now + RETRIES.pause(self.failures));
    }
}

async fn subscribe(
    client: &Client,
    subject: &str,
    group: Option<&String>,
) -> Result<Subscriber, SubscribeError> {
    let subscribed = match group {
        Some(group) => client.queue_subscribe(subject.to_owned(), group.clone()).await,
        None => client.subscribe(subject.to_owned()).await,
    };
    subscribed.map_err(|error| SubscribeError::new(subject, &error))
}

/// Connects `client` anew if answers to its requests do not come, although answers on a new subscription do. `subject`
/// is the subject of a request that the server answers, and that changes nothing.
///
/// The client library has one subscription for the answers to all its requests. When the server has removed it,
/// only a new connection brings it back. While the client has no right to it, a new subscription gets no answer
/// either, and nothing is done.
pub async fn mend_requests(client: &Client, subject: &str) {
    if client.connection_state() != State::Connected {
        return;
    }
    let request = async_nats::Request::new()
        .payload(Bytes::new())
        .timeout(Some(PATIENCE));
    let asked = client.send_request(subject.to_owned(), request).await;
    let is_unanswered = asked.is_err_and(|error| error.kind() == RequestErrorKind::TimedOut);
    if is_unanswered && is_answered(client, subject).await {
        tracing::warn!("answers to requests no longer come: the connection to NATS is made anew");
        // An error means that the client is closed.
        let _ = client.force_reconnect().await;
    }
}

/// Whether the answer to a request on `subject` comes on a subscription of its own.
async fn is_answered(client: &Client, subject: &str) -> bool {
    let inbox = client.new_inbox();
    let asking = async {
        let mut answers = client.subscribe(inbox.clone()).await.ok()?;
        let sent = client.publish_with_reply(subject.to_owned(), inbox.clone(), Bytes::new());
        sent.await.ok()?;
        answers.next().await
    };
    matches!(timeout(PATIENCE, asking).await, Ok(Some(_)))
}
