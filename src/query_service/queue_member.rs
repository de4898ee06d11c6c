//! A subscription within a queue group, which can be left without losing a request.
//!
//! The client library forgets a subscription as soon as it has told the server, or shortly after (its `drain` does not wait for the
//! server's answer), and drops what the server had sent before it knew: those requests would stay unanswered. What the library does keep is
//! a subscription that ends after a number of messages, and it counts like the server. So to leave is to announce an end a little ahead
//! of what has come, and to fill up what is missing until then with messages of our own on a subject that cannot be a request.
//! Some of these go to the others of the group, who pass over them.

use std::time::Duration;

use async_nats::{Client, Message};
use futures_util::{FutureExt, StreamExt};

use super::service::QueryServiceError;

/// How far ahead the end is: more messages than can be under way while the server learns of it.
const AHEAD: u64 = 128;
/// How long to wait for messages before more are made.
const FILL_INTERVAL: Duration = Duration::from_millis(5);
/// How often they are made. A message comes back with the chance of one in as many as the group has members.
const FILLS_MAX: u32 = 200;

/// A membership in a queue group.
pub(super) struct QueueMember {
    client: Client,
    filler_subject: String,
    messages: async_nats::Subscriber,
    received: u64,
    /// How many messages the subscription ends after, once it is being left; the largest number until then.
    end: u64,
    fills_left: u32,
}

impl QueueMember {
    /// Joins the queue group `group` on `subject`. `filler_subject` is one that `subject` matches and that carries no request.
    pub(super) async fn join(
        client: &Client,
        subject: String,
        filler_subject: String,
        group: &str,
    ) -> Result<Self, QueryServiceError> {
        let subscribed = client.queue_subscribe(subject.clone(), group.to_owned()).await;
        let messages = subscribed.map_err(|error| QueryServiceError::Subscribe {
            subject,
            reason: error.to_string(),
        })?;
        Ok(Self {
            client: client.clone(),
            filler_subject,
            messages,
            received: 0,
            end: u64::MAX,
            fills_left: FILLS_MAX,
        })
    }

    /// The next request; none when the client is closed.
    pub(super) async fn next(&mut self) -> Option<Message> {
        loop {
            let message = self.messages.next().await;
            if let Some(request) = self.noted(message)? {
                return Some(request);
            }
        }
    }

    /// The next request until the group has been left: first what has been received already, then, when the server has been told to send
    /// no more, what it sent before. None when the last has been taken.
    pub(super) async fn next_until_left(&mut self) -> Option<Message> {
        if self.end == u64::MAX {
            if let Some(request) = self.next_received() {
                return Some(request);
            }
            self.leave().await;
        }
        self.next_while_leaving().await
    }

    fn next_received(&mut self) -> Option<Message> {
        loop {
            let message = self.messages.next().now_or_never()?;
            if let Some(request) = self.noted(message)? {
                return Some(request);
            }
        }
    }

    /// Tells the server to send no more.
    async fn leave(&mut self) {
        self.end = self.received + AHEAD;
        // An error says that the client is closed: then nothing comes any more.
        let _ = self.messages.unsubscribe_after(self.end).await;
        self.fill(AHEAD).await;
    }

    async fn next_while_leaving(&mut self) -> Option<Message> {
        loop {
            match tokio::time::timeout(FILL_INTERVAL, self.messages.next()).await {
                Ok(message) => {
                    if let Some(request) = self.noted(message)? {
                        return Some(request);
                    }
                }
                Err(_) if self.fills_left == 0 => {
                    // The server does not let us publish there, or is gone.
                    tracing::debug!(
                        subject = self.filler_subject,
                        "leaving without the server's confirmation"
                    );
                    let _ = self.messages.drain().await;
                }
                Err(_) => {
                    self.fills_left -= 1;
                    self.fill(self.end.saturating_sub(self.received).max(1)).await;
                }
            }
        }
    }

    /// Counts a message; the inner option is none where it is a filler.
    fn noted(&mut self, message: Option<Message>) -> Option<Option<Message>> {
        let message = message?;
        self.received += 1;
        Some((message.subject.as_str() != self.filler_subject).then_some(message))
    }

    async fn fill(&self, count: u64) {
        for _ in 0..count {
            if self
                .client
                .publish(self.filler_subject.clone(), bytes::Bytes::new())
                .await
                .is_err()
            {
                return;
            }
        }
        let _ = self.client.flush().await;
    }
}
