//! Back-pressure by bytes: a bound on the bytes that a connection has received and the daemon has not taken yet.
//!
//! The client library buffers the messages of a subscription, and bounds their number, not their size. The daemon takes
//! messages without waiting, so the buffer is usually short. But if a client publishes faster than a busy machine takes
//! the messages, the buffer could fill the memory.
//!
//! If more bytes wait than the bound allows, the connection ends. The daemon handles the lost messages as after any
//! broken connection. The next connection is made when at most half of the bound is waiting. Until then, the server
//! cannot send anything.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_nats::{Client, Message, Statistics, Subscriber};
use futures_util::StreamExt;
use tokio::sync::Notify;

use kvatlas_telemetry::log_gated;

/// Interval between two checks of the number of bytes that were received and not taken. The number can exceed the bound
/// by the bytes that arrive in one interval.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Upper bound on the bytes that the server sends for a message in addition to its subjects, headers and payload. A
/// bound that is too low would leave bytes of taken messages counted as waiting.
const MESSAGE_OVERHEAD_BYTES: u64 = 40;

/// Counts the bytes that a connection has received, and how many of them the process has taken.
#[derive(Debug)]
pub struct Intake {
    bytes_max: u64,
    /// Statistics of the connection; empty before the connection is made.
    statistics: OnceLock<Arc<Statistics>>,
    taken: AtomicU64,
    /// Wakes the task that takes messages, so that it checks whether its buffers are empty. Some bytes from the
    /// server belong to no message and would count as waiting for ever. If the buffers are empty, the task calls
    /// [`Intake::took_all`], which ends that.
    look_again: Notify,
}

impl Intake {
    /// Returns an intake that allows about `bytes_max` bytes to be received and not yet taken.
    pub fn new(bytes_max: usize) -> Arc<Self> {
        Arc::new(Self {
            bytes_max: bytes_max as u64,
            statistics: OnceLock::new(),
            taken: AtomicU64::new(0),
            look_again: Notify::new(),
        })
    }

    /// Begins to count the bytes that `client` receives. Only the first call has an effect.
    pub(super) fn count(&self, client: &Client) {
        self.statistics.get_or_init(|| client.statistics());
    }

    /// Returns the number of bytes that have been received since the connection was first made.
    pub fn received(&self) -> u64 {
        let statistics = self.statistics.get();
        statistics.map_or(0, |statistics| statistics.in_bytes.load(Ordering::Relaxed))
    }

    /// Notes that the process has taken a message from the connection. All calls of this method, of
    /// [`Self::took_bytes`] and of [`Self::took_all`] must come from one task.
    pub fn took(&self, message: &Message) {
        self.took_bytes(bytes_of(message));
    }

    /// Notes that the process has taken messages of `bytes` bytes together from the connection.
    pub fn took_bytes(&self, bytes: u64) {
        let taken = self.taken.load(Ordering::Relaxed) + bytes;
        self.taken.store(taken.min(self.received()), Ordering::Relaxed);
    }

    /// Counts the first `received` bytes of the connection as taken. To use it, first read `received` from
    /// [`Self::received`], then check that no message waits, and then call this.
    pub fn took_all(&self, received: u64) {
        self.taken.store(received, Ordering::Relaxed);
    }

    /// Waits until the intake asks whether the caller's buffers are empty, because more than half of the bound counts
    /// as waiting. If the buffers are empty, the caller then calls [`Self::took_all`].
    pub async fn asked(&self) {
        self.look_again.notified().await;
    }

    /// Ends a subscription from which no task takes messages any more. Counts all messages that the subscription has received as
    /// taken.
    pub async fn discard(&self, mut messages: Subscriber) {
        // An error means that the client is closed.
        let _ = messages.unsubscribe().await;
        while let Some(message) = messages.next().await {
            self.took(&message);
        }
    }

    /// Whether a new connection may be made: the bytes that were received and not taken are at most half of the
    /// bound.
    pub(super) fn has_room(&self) -> bool {
        self.waiting() <= self.bytes_max / 2
    }

    /// Returns the approximate number of bytes that have been received but not taken.
    pub fn waiting(&self) -> u64 {
        let taken = self.taken.load(Ordering::Relaxed);
        self.received().saturating_sub(taken)
    }

    /// Waits until the bytes that were received and not taken are at most half of the bound.
    pub(super) async fn room(&self) {
        while !self.has_room() {
            self.look_again.notify_one();
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Ends the connection of `client` whenever the bytes that were received and not taken exceed the bound. Returns
    /// when the client is closed. The client must have been made with this bound.
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
            log_gated!(
                warn "more bytes than events.subscription_bytes have been received and not taken; the connection ends until half of them have been";
                waiting
            );
            if client.force_reconnect().await.is_err() {
                return;
            }
            self.room().await;
        }
    }
}

/// Returns the approximate number of bytes that the server has sent for a message.
pub fn bytes_of(message: &Message) -> u64 {
    message.length as u64 + MESSAGE_OVERHEAD_BYTES
}

#[cfg(test)]
mod tests;
