//! Looks at the end of the events stream where nothing comes from it.
//!
//! A consumer can be paused, or changed, by whoever has the right to it. It then delivers nothing, says that nothing is wrong, and counts no
//! message as waiting. So while nothing comes the stream itself is asked for its last message.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::Context;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;

use crate::lanes::StreamPosition;

/// How long nothing comes before the stream is asked, and how often it is asked then.
const INTERVAL: Duration = Duration::from_millis(500);
/// How long the server may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The last message of a stream, as its server tells it.
pub(super) struct StreamEnd {
    last: watch::Receiver<u64>,
    _looking: AbortOnDropHandle<()>,
}

impl StreamEnd {
    /// Looks at the stream called `name` from now on, while `position` stands still.
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
                // Where the server does not answer, other doubts stand for that.
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

    /// Waits until the server has told the last message again, and returns its number. Can be dropped at any time.
    pub(super) async fn told(&mut self) -> u64 {
        match self.last.changed().await {
            Ok(()) => *self.last.borrow_and_update(),
            // The runtime is ending.
            Err(_) => std::future::pending().await,
        }
    }
}
