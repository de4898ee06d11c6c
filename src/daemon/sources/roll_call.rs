//! The roll call: the time after the start of a subscription in which every publisher sends at least one message.
//!
//! Core NATS keeps no message from before a subscription, and a JetStream stream may be new or purged. So answers
//! lack the workers from which nothing has come yet. Every publisher sends something every second. So after a little
//! more than a second, every publisher is known, and answers lack no worker.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Sleep;

use crate::lanes::LanePool;
use kvatlas_core::stream::{StreamGeneration, StreamTrust};
use kvatlas_core::wire::HEARTBEAT_INTERVAL;

/// Length of a roll call: the interval at which publishers send heartbeats, and half a second for late messages.
pub(super) const LENGTH: Duration = HEARTBEAT_INTERVAL.saturating_add(Duration::from_millis(500));

/// Roll call of one generation of the stream, that is, the time in which every publisher sends at least one message.
pub(super) struct RollCall {
    generation: StreamGeneration,
    /// Timer for the length of the roll call. `None` once it has ended.
    end: Option<Pin<Box<Sleep>>>,
}

impl RollCall {
    /// Begins the roll call of `generation`.
    pub(super) fn begin(generation: StreamGeneration) -> Self {
        Self {
            generation,
            end: Some(Box::pin(tokio::time::sleep(LENGTH))),
        }
    }

    /// Whether this is the roll call of `generation`.
    pub(super) fn is_of(&self, generation: StreamGeneration) -> bool {
        self.generation == generation
    }

    /// Waits until the roll call is over. After that, a further call waits for ever. The future can be dropped at any
    /// time.
    pub(super) async fn over(&mut self) {
        match &mut self.end {
            Some(end) => end.await,
            None => std::future::pending().await,
        }
        self.end = None;
    }

    /// Notes in `trust` that every publisher is known. Does so later, once the lanes of `pool` have applied all
    /// messages that they have received until now.
    pub(super) fn close(&self, pool: &Arc<LanePool>, trust: &Arc<StreamTrust>) {
        let (pool, trust, generation) = (Arc::clone(pool), Arc::clone(trust), self.generation);
        // The lanes may be busy, and messages go on coming.
        tokio::spawn(async move {
            if pool.drain().await.is_ok() {
                trust.note_listed(generation);
            }
        });
    }
}
