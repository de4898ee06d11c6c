//! A bound in bytes on what a connection has received and the daemon has not taken.
//!
//! The client library buffers the messages of a subscription. It bounds how many they are, not how large. The daemon takes them without
//! waiting, so few are there. But who publishes faster than a busy machine takes could fill the memory.
//!
//! Beyond the bound the connection ends. What is lost then is noticed as with any other break. The next connection logs in when half of the
//! bound has room again: until then the server has nobody to send to.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_nats::{Client, Message, Statistics, Subscriber};
use futures_util::StreamExt;
use tokio::sync::Notify;

use kvatlas_telemetry::LogGate;

static ENDED_GATE: LogGate = LogGate::new();

/// How often to look how much waits. What comes within that time can be too much.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Bytes that the server sends with a message beside subjects, headers and payload: at most this, so that nothing taken seems to wait.
const MESSAGE_OVERHEAD_BYTES: u64 = 40;

/// The messages that have been received on a connection and not been taken.
#[derive(Debug)]
pub struct Intake {
    bytes_max: u64,
    /// The connection's; none before it is made.
    statistics: OnceLock<Arc<Statistics>>,
    taken: AtomicU64,
    /// Whoever takes is to look again: not all that is received comes to a subscription.
    look_again: Notify,
}

impl Intake {
    /// Bounds what waits to about `bytes_max`.
    pub fn new(bytes_max: usize) -> Arc<Self> {
        Arc::new(Self {
            bytes_max: bytes_max as u64,
            statistics: OnceLock::new(),
            taken: AtomicU64::new(0),
            look_again: Notify::new(),
        })
    }

    /// Counts what `client` receives. Only the first call counts.
    pub(super) fn count(&self, client: &Client) {
        self.statistics.get_or_init(|| client.statistics());
    }

    /// Bytes that have been received in all.
    pub fn received(&self) -> u64 {
        let statistics = self.statistics.get();
        statistics.map_or(0, |statistics| statistics.in_bytes.load(Ordering::Relaxed))
    }

    /// A message has been taken. To be called by one task only, as [`Self::took_bytes`] and [`Self::took_all`].
    pub fn took(&self, message: &Message) {
        self.took_bytes(bytes_of(message));
    }

    /// Messages of so many bytes together have been taken.
    pub fn took_bytes(&self, bytes: u64) {
        let taken = self.taken.load(Ordering::Relaxed) + bytes;
        self.taken.store(taken.min(self.received()), Ordering::Relaxed);
    }

    /// Nothing waited when [`Self::received`] was this, or later.
    pub fn took_all(&self, received: u64) {
        self.taken.store(received, Ordering::Relaxed);
    }

    /// Returns when much seems to wait. Whoever finds its buffers empty then says so with [`Self::took_all`].
    pub async fn asked(&self) {
        self.look_again.notified().await;
    }

    /// Ends a subscription from which nobody takes any more. What it has received counts as taken.
    pub async fn discard(&self, mut messages: Subscriber) {
        // An error means that the client is closed.
        let _ = messages.unsubscribe().await;
        while let Some(message) = messages.next().await {
            self.took(&message);
        }
    }

    /// Whether half of the bound has room. Until then no connection is made.
    pub(super) fn has_room(&self) -> bool {
        self.waiting() <= self.bytes_max / 2
    }

    /// Bytes that wait to be taken, about.
    pub fn waiting(&self) -> u64 {
        let taken = self.taken.load(Ordering::Relaxed);
        self.received().saturating_sub(taken)
    }

    /// Waits until half of the bound has room.
    pub(super) async fn room(&self) {
        while !self.has_room() {
            self.look_again.notify_one();
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Ends the connection of `client` whenever too much waits, until the client is closed. It must have been made with this bound.
    pub async fn watch(self: Arc<Self>, client: Client) {
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            let waiting = self.waiting();
            if !self.has_room() {
                self.look_again.notify_one();
            }
            if waiting <= self.bytes_max {
                continue;
            }
            if let Some(suppressed) = ENDED_GATE.admit() {
                tracing::warn!(
                    waiting,
                    suppressed,
                    "more bytes than events.subscription_bytes have been received and not taken; the connection ends until half of them have been"
                );
            }
            if client.force_reconnect().await.is_err() {
                return;
            }
            self.room().await;
        }
    }
}

/// About what the server has sent for a message.
pub fn bytes_of(message: &Message) -> u64 {
    message.length as u64 + MESSAGE_OVERHEAD_BYTES
}

#[cfg(test)]
mod tests;
