//! Checks of the end of the events stream while no message comes from it.
//!
//! Anybody with the right to do so can pause or change a consumer. The consumer then delivers nothing, reports no
//! error, and counts no message as waiting. So while no message comes, the server is asked for the number of the
//! stream's last message.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::Context;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;

use crate::lanes::{StreamPosition, now_us};

/// Time that the server may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Report of the server about the end of the stream at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StreamLook {
    /// Number of the stream's last message.
    pub(super) last: u64,
    /// Time at which the daemon asked the server, by [`now_us`]. Messages with higher numbers than `last` came at
    /// that time or later.
    pub(super) asked_us: u64,
}

/// Watcher that asks the server for the number of the stream's last message while no message comes.
pub(super) struct StreamEnd {
    last: watch::Receiver<StreamLook>,
    _looking: AbortOnDropHandle<()>,
}

impl StreamEnd {
    /// Begins to ask for the number of the last message of the stream called `name`. Asks now, and then whenever
    /// `position` has not changed for `interval`.
    pub(super) fn watch(
        jetstream: Context,
        name: String,
        position: Arc<StreamPosition>,
        interval: Duration,
    ) -> Self {
        let (told, last) = watch::channel(StreamLook::default());
        let looking = tokio::spawn(async move {
            let mut interval = tokio::time::interval(interval);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut before = Some(position.sequence());
            loop {
                interval.tick().await;
                let now = position.sequence();
                if before.replace(now) != Some(now) {
                    continue;
                }
                let asked_us = now_us();
                // If the server does not answer, the end of the stream is not known, and answers say so.
                let asked = tokio::time::timeout(PATIENCE, jetstream.get_stream(&name)).await;
                if let Ok(Ok(stream)) = asked {
                    let last = stream.cached_info().state.last_sequence;
                    told.send_replace(StreamLook { last, asked_us });
                }
            }
        });
        Self {
            last,
            _looking: AbortOnDropHandle::new(looking),
        }
    }

    /// Waits for the server's next report about the end of the stream, and returns the report. The future can be
    /// dropped at any time.
    pub(super) async fn told(&mut self) -> StreamLook {
        match self.last.changed().await {
            Ok(()) => *self.last.borrow_and_update(),
            // The runtime is ending.
            Err(_) => std::future::pending().await,
        }
    }
}
