//! Inbox: one subscription for the replies to all requests that are under way.
//!
//! The client library takes one reply for each request, but a gathered request gets one reply from every shard. A subscription
//! for each request would change the server's tables with every request. So all requests share one subscription with a wildcard.
//! The last token of the reply's subject tells which request it is for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_nats::{Client, Message};
use dashmap::DashMap;
use futures_util::StreamExt;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::{CancellationToken, DropGuard};

use kvatlas_core::wire::SHARDS_MAX;

use super::super::error::ClientError;

/// Maximum number of replies to one request that may wait to be read. While operators change the number of shards,
/// shards of the old and of the new division may reply, so there is room for the replies of two divisions.
const REPLIES_WAITING_MAX: usize = 2 * SHARDS_MAX as usize;

/// Minimum time between two subscriptions to one inbox.
const PAUSE: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
struct PendingRequests {
    requests: DashMap<u64, mpsc::Sender<Message>>,
    late: AtomicU64,
    /// Number of bytes of the replies since the last call of [`ReplyInbox::take_bytes`].
    bytes: AtomicU64,
}

/// Subscription on which replies arrive. It ends when the last clone is dropped.
#[derive(Debug, Clone)]
pub(super) struct ReplyInbox {
    prefix: String,
    numbers: Arc<AtomicU64>,
    waiting: Arc<PendingRequests>,
    /// Request to subscribe again.
    again: Arc<Notify>,
    _subscription: Arc<DropGuard>,
}

/// Receiver of the replies to one request. When it has been dropped, the inbox counts further replies to the request as
/// late.
#[derive(Debug)]
pub(super) struct Replies {
    number: u64,
    /// Subject to which the replies are to be sent.
    pub(super) reply_to: String,
    messages: mpsc::Receiver<Message>,
    waiting: Arc<PendingRequests>,
}

impl ReplyInbox {
    /// Subscribes to the inbox on `nats`, and starts to hand replies to their requests.
    pub(super) async fn open(nats: &Client) -> Result<Self, ClientError> {
        let prefix = nats.new_inbox();
        let subject = format!("{prefix}.*");
        let subscribed = nats.subscribe(subject.clone()).await;
        let mut messages = subscribed.map_err(|error| ClientError::Connection(error.to_string()))?;
        let waiting = Arc::new(PendingRequests::default());
        let stop = CancellationToken::new();
        let (router, stopped) = (Arc::clone(&waiting), stop.clone());
        let again = Arc::new(Notify::new());
        let (asked, nats) = (Arc::clone(&again), nats.clone());
        tokio::spawn(async move {
            let mut subscribed_at = Instant::now();
            loop {
                tokio::select! {
                    () = stopped.cancelled() => return,
                    () = asked.notified() => {
                        if subscribed_at.elapsed() < PAUSE {
                            continue;
                        }
                        subscribed_at = Instant::now();
                        match nats.subscribe(subject.clone()).await {
                        Ok(subscription) => messages = subscription,
                        // The client is closed.
                        Err(_) => return,
                        }
                    },
                    message = messages.next() => match message {
                        Some(message) => router.route(message),
                        // The client is closed.
                        None => return,
                    },
                }
            }
        });
        Ok(Self {
            prefix,
            numbers: Arc::default(),
            waiting,
            again,
            _subscription: Arc::new(stop.drop_guard()),
        })
    }

    /// Begins to receive the replies to one request. The returned value has the subject for the replies.
    pub(super) fn expect(&self) -> Replies {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let (sender, messages) = mpsc::channel(REPLIES_WAITING_MAX);
        self.waiting.requests.insert(number, sender);
        Replies {
            number,
            reply_to: format!("{}.{number:x}", self.prefix),
            messages,
            waiting: Arc::clone(&self.waiting),
        }
    }

    /// Subscribes again, because no reply has come to a request. The server may have withdrawn the right to the
    /// subscription, and given it back. A reply that comes on both subscriptions counts once.
    pub(super) fn subscribe_again(&self) {
        self.again.notify_one();
    }

    /// Returns the number of replies since the last call that came too late: their requests no longer waited for them.
    pub(super) fn take_late(&self) -> u64 {
        self.waiting.late.swap(0, Ordering::Relaxed)
    }

    /// Returns the number of bytes of all replies since the last call.
    pub(super) fn take_bytes(&self) -> u64 {
        self.waiting.bytes.swap(0, Ordering::Relaxed)
    }
}

impl PendingRequests {
    fn route(&self, message: Message) {
        self.bytes.fetch_add(message.length as u64, Ordering::Relaxed);
        let token = message.subject.rsplit('.').next().unwrap_or_default();
        let number = u64::from_str_radix(token, 16).ok();
        let is_taken = number
            .and_then(|number| self.requests.get(&number))
            .is_some_and(|request| request.try_send(message).is_ok());
        if !is_taken {
            self.late.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Replies {
    /// Waits for the next reply; `None` if the inbox has ended.
    pub(super) async fn next(&mut self) -> Option<Message> {
        self.messages.recv().await
    }
}

impl Drop for Replies {
    fn drop(&mut self) {
        self.waiting.requests.remove(&self.number);
    }
}
