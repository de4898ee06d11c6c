//! The roll call of those who publish, after the events have begun to be followed.
//!
//! Core NATS keeps no message from before a subscription, and a worker that nothing has come of is in no answer. Publishers send something
//! every second. So once a subscription has stood for longer than that, everybody is known, and answers lack nobody.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Sleep;

use crate::lanes::LanePool;
use kvatlas_core::stream::{StreamGeneration, StreamTrust};
use kvatlas_core::wire::HEARTBEAT_INTERVAL;

/// How long a subscription stands before everybody has been heard of: what a publisher sends late has half a second to come.
const LENGTH: Duration = HEARTBEAT_INTERVAL.saturating_add(Duration::from_millis(500));

/// The time in which those who publish show themselves.
pub(super) struct RollCall {
    generation: StreamGeneration,
    /// The end of the roll call; none once it is over.
    end: Option<Pin<Box<Sleep>>>,
}

impl RollCall {
    /// Begins with the subscription of `generation`.
    pub(super) fn begin(generation: StreamGeneration) -> Self {
        Self {
            generation,
            end: Some(Box::pin(tokio::time::sleep(LENGTH))),
        }
    }

    /// Waits until it is over; for ever where it has been waited for. Can be dropped at any time.
    pub(super) async fn over(&mut self) {
        match &mut self.end {
            Some(end) => end.await,
            None => std::future::pending().await,
        }
        self.end = None;
    }

    /// Tells `trust` that everybody is known, once `pool` has applied what has been handed over.
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
