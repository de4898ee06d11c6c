//! Membership in a queue group, which can be left without losing a request.
//!
//! The client library forgets a subscription when it unsubscribes, and its `drain` does not wait for the server either.
//! Requests that the server sent before it learned of the end would stay unanswered. The library does support a
//! subscription that ends after N messages, and counts these messages as the server does. So a member leaves in two
//! steps:
//!
//! 1. Tell the server to end the subscription after N more messages.
//! 2. Send *fillers* until N messages have come. A filler is an empty message that wants no reply.
//!
//! The server gives some fillers to other members of the queue group, which ignore them.

use std::time::Duration;

use async_nats::{Client, Message};
use futures_util::{FutureExt, StreamExt};
use tokio::task::coop::has_budget_remaining;

#[cfg(feature = "dynamo")]
use kvatlas_process::broker::Intake;
use kvatlas_process::broker::SubscribeError;

/// Number of messages after which the server ends the subscription, once a member leaves its queue group. The number
/// is larger than any burst of requests that can be on the way before the server learns that the member leaves.
const AHEAD: u64 = MEMBER_MESSAGES_MIN as u64 / 2;
/// Least number of messages that a member's connection must have room for. A leaving member gets up to [`AHEAD`]
/// fillers at once, and requests among them. The client library drops what it has no room for.
pub(crate) const MEMBER_MESSAGES_MIN: usize = 2 * 1024;
/// Maximum number of *fillers* that a leaving member sends at once, except for the first time. A filler is an empty
/// message that brings the subscription to its end. The first time, the member sends [`AHEAD`] fillers.
const FILL_MAX: u64 = 256;
/// Time without a message after which a leaving member sends fillers again.
const FILL_INTERVAL: Duration = Duration::from_millis(5);
/// Maximum number of times that a leaving member sends fillers again. In a group of M members, the server gives only
/// one filler in M to the leaving member.
const FILLS_MAX: u32 = 200;

/// Maximum time to wait for the last messages of a subscription that has ended.
const ENDED_PATIENCE: Duration = Duration::from_secs(1);

/// Membership in a NATS queue group.
pub(crate) struct QueueMember {
    client: Client,
    subject: String,
    /// Subject on which only fillers (empty messages that bring the subscription to its end) are sent. The subscription
    /// to `subject` receives them too. `None` if fillers are sent on `subject` itself.
    filler_subject: Option<String>,
    pub(super) messages: async_nats::Subscriber,
    received: u64,
    /// Number of messages after which the subscription ends. `u64::MAX` until the member leaves its group.
    end: u64,
    fills_left: u32,
}

impl QueueMember {
    /// Joins the queue group `group` on `subject`. `filler_subject`, if given, must be a subject without requests that
    /// the subscription to `subject` covers.
    pub(crate) async fn join(
        client: &Client,
        subject: String,
        filler_subject: Option<String>,
        group: &str,
    ) -> Result<Self, SubscribeError> {
        let subscribed = client.queue_subscribe(subject.clone(), group.to_owned()).await;
        let messages = subscribed.map_err(|error| SubscribeError::new(&subject, &error))?;
        Ok(Self {
            client: client.clone(),
            subject,
            filler_subject,
            messages,
            received: 0,
            end: u64::MAX,
            fills_left: FILLS_MAX,
        })
    }

    /// Waits for the next request. Returns `None` when the client is closed.
    pub(crate) async fn next(&mut self) -> Option<Message> {
        loop {
            let message = self.messages.next().await?;
            if self.is_request(&message) {
                return Some(message);
            }
        }
    }

    /// Waits for the next request as [`Self::next`] does. Tells `intake`, the count of waiting bytes, which messages were
    /// taken. The member must be the only one that takes messages from its connection.
    #[cfg(feature = "dynamo")]
    pub(crate) async fn next_counted(&mut self, intake: &Intake) -> Option<Message> {
        loop {
            let (received, can_tell) = (intake.received(), has_budget_remaining());
            if let Some(message) = self.next_received() {
                intake.took(&message);
                return Some(message);
            }
            if can_tell {
                intake.took_all(received);
            }
            tokio::select! {
                message = self.next() => return message.inspect(|message| intake.took(message)),
                () = intake.asked() => {}
            }
        }
    }

    /// Ends the subscription at once, because the server has ended it or because another one has replaced it. Returns
    /// the requests that still came. If the server does not confirm the end in time, its messages are given up.
    pub(crate) async fn ended(mut self) -> Vec<Message> {
        let mut left = Vec::new();
        let draining = async {
            let _ = self.messages.drain().await;
            while let Some(message) = self.next().await {
                left.push(message);
            }
        };
        let _ = tokio::time::timeout(ENDED_PATIENCE, draining).await;
        left
    }

    /// Returns the next request while the member leaves its group. The buffered requests come first. Then come the
    /// requests that the server sent before it learned that the member leaves. Returns `None` after the last one.
    pub(crate) async fn next_until_left(&mut self) -> Option<Message> {
        if self.end == u64::MAX {
            if let Some(request) = self.next_buffered().await {
                return Some(request);
            }
            self.leave().await;
        }
        self.next_while_leaving().await
    }

    /// Returns the next request in the buffer. `None` if the buffer is empty. A member must empty its buffer before
    /// it tells the server after how many messages the subscription ends, because buffered messages would count as
    /// well.
    async fn next_buffered(&mut self) -> Option<Message> {
        loop {
            // If the task has used up its tokio budget, `next` returns nothing even if a message is in the buffer.
            if !has_budget_remaining() {
                tokio::task::yield_now().await;
            }
            let message = self.messages.next().now_or_never()??;
            if self.is_request(&message) {
                return Some(message);
            }
        }
    }

    /// Returns the next request that has been received already. Returns `None` if there is none, or if the task has
    /// used up its tokio budget.
    pub(super) fn next_received(&mut self) -> Option<Message> {
        loop {
            let message = self.messages.next().now_or_never()??;
            if self.is_request(&message) {
                return Some(message);
            }
        }
    }

    /// Tells the server to end the subscription after [`AHEAD`] more messages. Sends as many fillers (empty
    /// messages), so that these messages come.
    async fn leave(&mut self) {
        self.end = self.received + AHEAD;
        // An error means that the client is closed: no message comes any more.
        let _ = self.messages.unsubscribe_after(self.end).await;
        self.fill(AHEAD).await;
    }

    async fn next_while_leaving(&mut self) -> Option<Message> {
        loop {
            match tokio::time::timeout(FILL_INTERVAL, self.messages.next()).await {
                Ok(message) => {
                    let message = message?;
                    if self.is_request(&message) {
                        return Some(message);
                    }
                }
                Err(_) if self.fills_left == 0 => {
                    // The server refuses the fillers, or is gone.
                    tracing::debug!(
                        subject = self.subject,
                        "leaving without the server's confirmation"
                    );
                    let _ = self.messages.drain().await;
                }
                Err(_) => {
                    self.fills_left -= 1;
                    let left = self.end.saturating_sub(self.received);
                    self.fill(left.clamp(1, FILL_MAX)).await;
                }
            }
        }
    }

    /// Counts a message, and returns whether it is a request. Fillers (sent to bring the subscription to its end) are
    /// not requests. Any other empty message that wants no reply only tests the sender's right to publish, so it is not
    /// a request either.
    fn is_request(&mut self, message: &Message) -> bool {
        self.received += 1;
        let is_trial = message.reply.is_none() && message.payload.is_empty();
        let is_filler = self.filler_subject.as_deref() == Some(message.subject.as_str());
        !is_filler && !is_trial
    }

    async fn fill(&self, count: u64) {
        let subject = self.filler_subject.as_ref().unwrap_or(&self.subject);
        for _ in 0..count {
            let filled = self.client.publish(subject.clone(), bytes::Bytes::new());
            if filled.await.is_err() {
                return;
            }
        }
        let _ = self.client.flush().await;
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use kvatlas_process::broker::embedded::{EmbeddedBroker, find_nats_server};

    use super::*;

    #[tokio::test]
    async fn a_membership_that_ends_gives_the_requests_that_have_come() {
        let broker = EmbeddedBroker::start(&find_nats_server(None).unwrap())
            .await
            .unwrap();
        let client = async_nats::connect(broker.url()).await.unwrap();
        let subject = "requests".to_owned();
        let member = QueueMember::join(&client, subject.clone(), None, "group")
            .await
            .unwrap();
        for number in 0..64_u8 {
            let payload = Bytes::from(vec![number]);
            client.publish(subject.clone(), payload).await.unwrap();
        }
        // The server answers on this connection in order, so all requests have come before this answer.
        client.request("nobody", Bytes::new()).await.unwrap_err();
        let left = member.ended().await;
        let numbers: Vec<u8> = left.iter().map(|message| message.payload[0]).collect();
        assert_eq!(numbers, (0..64).collect::<Vec<u8>>());
    }
}
