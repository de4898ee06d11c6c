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

use crate::lanes::StreamPosition;

/// Time without a message after which the server is asked. Also the interval between further requests.
const INTERVAL: Duration = Duration::from_millis(500);
/// Maximum time for the server to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Number of a stream's last message, as the server reports it from time to time.
pub(super) struct StreamEnd {
    last: watch::Receiver<u64>,
    _looking: AbortOnDropHandle<()>,
}

impl StreamEnd {
    /// Starts to ask for the last message of the stream `name` whenever `position` does not move.
    pub(super) fn watch(jetstream: Context, name: String, position: Arc<StreamPosition>) -> Self {
        let (told, last) = watch::channel(0);
        let looking = tokio::spawn(async move {
            let mut interval = tokio::time::interval(INTERVAL);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut before = None;
            loop {
                interval.tick().await;
                let now = position.sequence();
                if before.replace(now) != Some(now) {
                    continue;
                }
                // If the server does not answer, other doubts stand for that.
                let asked = tokio::time::timeout(PATIENCE, jetstream.get_stream(&name)).await;
                if let Ok(Ok(stream)) = asked {
                    told.send_replace(stream.cached_info().state.last_sequence);
                }
            }
        });
        Self {
            last,
            _looking: AbortOnDropHandle::new(looking),
        }
    }

    /// Waits for the server's next report of the number of the stream's last message, and returns that number. The
    /// future can be dropped at any time.
    pub(super) async fn told(&mut self) -> u64 {
        match self.last.changed().await {
            Ok(()) => *self.last.borrow_and_update(),
            // The runtime is ending.
            Err(_) => std::future::pending().await,
        }
    }
}
