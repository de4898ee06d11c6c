//! Consumer of the events stream, with what is known of the stream while the consumer is read.

use async_nats::jetstream::Message;
use async_nats::jetstream::consumer::pull;

use kvatlas_core::stream::{StreamGeneration, StreamStall};

use super::consumer_check::ConsumerCheck;
use super::roll_call::RollCall;
use super::unread::Unread;

/// Consumer of the stream, with the position up to which it must read.
pub(super) struct Attached {
    /// Message with which the stream answered the first request of this consumer. `None` if it had no message.
    pub(super) first: Option<Message>,
    pub(super) messages: pull::Stream,
    /// Comparison of a message: this consumer first delivers the last message that the previous consumer read, which
    /// must still be the same. `None` if there is nothing to compare.
    pub(super) check: Option<ConsumerCheck>,
    /// Number of the message up to which the lanes must apply the stream before the stall ends. During the stall, no
    /// holder counts as exact.
    pub(super) target: u64,
    pub(super) stall: Option<StreamStall>,
    /// Digest of who led the stream when the consumer was made, and since when.
    pub(super) leadership: u64,
    /// Digest of the servers through which the stream is read: the connection's, and the stream's leader.
    pub(super) servers: u64,
    /// Number that the consumer gives to the next message that it delivers.
    pub(super) delivery: u64,
    pub(super) unread: Unread,
    /// Time in microseconds of the last question about the stream that its leader has answered.
    pub(super) answered_us: u64,
    /// Number of the last read message at the time of the last look for the next message.
    pub(super) looked_at: Option<u64>,
    /// Roll call of the present generation: the time in which every publisher sends at least one message. `None`
    /// before the stream has been read up to its end.
    pub(super) roll_call: Option<RollCall>,
}

impl Attached {
    /// Returns the number of a message that has not been read, although the stream is known to have it. `last` is the
    /// number of the last read message. `None` if the stream is not known to have more messages.
    pub(super) fn awaited(&self, last: u64) -> Option<u64> {
        let target = self.stall.as_ref().map(|_| self.target);
        target.max(self.unread.last()).filter(|awaited| *awaited > last)
    }

    /// Begins the roll call of `generation`. Does nothing if it has begun already, or if the stream has not been read
    /// up to its end.
    pub(super) fn call_roll(&mut self, generation: StreamGeneration) {
        let is_called = self.roll_call.as_ref().is_some_and(|call| call.is_of(generation));
        if !is_called && self.stall.is_none() {
            self.roll_call = Some(RollCall::begin(generation));
        }
    }

    /// Waits until the roll call is over. Waits for ever if there is none. The future can be dropped at any time.
    pub(super) async fn roll_called(roll_call: &mut Option<RollCall>) {
        match roll_call {
            Some(call) => call.over().await,
            None => std::future::pending().await,
        }
    }
}
