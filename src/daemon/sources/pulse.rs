//! The pulse of the connection on which events come: a message that the daemon sends to itself, again and again.
//!
//! The broker sends in order. So when the pulse comes back, all events that the broker had sent before it have come.
//! Once the source has handed these events to the lanes, the index is at most as old as the oldest event that waits
//! there.

use std::pin::Pin;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{Client, Subscriber};
use futures_util::StreamExt;
use tokio::time::{Instant, Sleep};

use crate::lanes::now_us;
use kvatlas_process::broker::SubscribeError;

/// Time after which the daemon sends itself another message (the pulse) if the last one has not come back. The
/// connection may have lost it.
const LOST_AFTER: Duration = Duration::from_secs(2);

/// Sender of the pulse, a message that the daemon sends to itself. Also notices when the pulse comes back.
pub(super) struct Pulse {
    client: Client,
    inbox: String,
    echoes: Subscriber,
    /// Interval between pulses. `None` if the configuration sets no limit on the age of the state. No pulse is needed
    /// then.
    interval: Option<Duration>,
    /// Timer that ends when the next pulse is due.
    due: Pin<Box<Sleep>>,
    /// Pulse that has been sent and has not come back, as its number and the time of sending in microseconds.
    under_way: Option<(u64, u64)>,
    sent: u64,
}

/// Result of [`Pulse::beat`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beat {
    /// Pulse has just been sent.
    Sent,
    /// Pulse came back. The value is the time at which it was sent, in microseconds.
    Felt(u64),
    /// Other message came on the pulse's subject, for example an earlier pulse that was late.
    Other,
}

impl Pulse {
    /// Makes the sender of the pulse (a message of the daemon to itself) on `client`, the connection that brings the
    /// events. Without an `interval`, no pulse is sent.
    pub(super) async fn new(client: Client, interval: Option<Duration>) -> Result<Self, SubscribeError> {
        let inbox = client.new_inbox();
        let subscribed = client.subscribe(inbox.clone()).await;
        let echoes = subscribed.map_err(|error| SubscribeError::new(&inbox, &error))?;
        Ok(Self {
            interval,
            client,
            inbox,
            echoes,
            due: Box::pin(tokio::time::sleep(Duration::ZERO)),
            under_way: None,
            sent: 0,
        })
    }

    /// Waits until a pulse is due and sends it, or until a message on the pulse's subject comes. The future can be
    /// dropped at any time.
    ///
    /// After [`Beat::Felt`], call [`LanePool::note_heard`](crate::lanes::LanePool::note_heard) once all messages that
    /// have come are handed over.
    pub(super) async fn beat(&mut self) -> Beat {
        let Some(interval) = self.interval else {
            return std::future::pending().await;
        };
        tokio::select! {
            biased;
            Some(message) = self.echoes.next() => self.felt(&message.payload),
            () = &mut self.due => {
                if self.under_way.is_some() {
                    self.listen_again().await;
                }
                let (number, sent_us) = (self.sent + 1, now_us());
                let payload = number.to_be_bytes().to_vec();
                // An error means that the client is closed.
                let _ = self.client.publish(self.inbox.clone(), payload.into()).await;
                self.sent = number;
                self.under_way = Some((number, sent_us));
                self.due.as_mut().reset(Instant::now() + LOST_AFTER.max(interval));
                Beat::Sent
            }
        }
    }

    /// Subscribes again, because the last pulse has not come back. The server may have withdrawn the right to the
    /// subscription, and given it back.
    async fn listen_again(&mut self) {
        if self.client.connection_state() != State::Connected {
            return;
        }
        // An error means that the client is closed.
        if let Ok(echoes) = self.client.subscribe(self.inbox.clone()).await {
            self.echoes = echoes;
        }
    }

    fn felt(&mut self, payload: &[u8]) -> Beat {
        match self.under_way {
            Some((number, sent_us)) if payload == number.to_be_bytes() => {
                self.under_way = None;
                let interval = self.interval.unwrap_or(LOST_AFTER);
                let travelled = Duration::from_micros(now_us().saturating_sub(sent_us));
                let pause = interval.saturating_sub(travelled);
                self.due.as_mut().reset(Instant::now() + pause);
                Beat::Felt(sent_us)
            }
            _ => Beat::Other,
        }
    }
}
