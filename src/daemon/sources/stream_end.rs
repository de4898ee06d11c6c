//! Checks of the end of the events stream, and of its configuration, while it is read.
//!
//! Anybody with the right to do so can pause or change a consumer. The consumer then delivers nothing, reports no
//! error, and counts no message as waiting. So while no message comes, the server is asked for the number of the
//! stream's last message.
//!
//! Anybody with the right to do so can also change the stream. The stream may then not keep all events, and no message
//! comes that shows it. So each answer of the server is checked ([`check_config`]).

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::Context;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};
use tokio_util::task::AbortOnDropHandle;

use crate::lanes::{LanePool, StreamPosition, now_us};

use super::stream::check_config;
use super::stream_info::{leadership, look_up};

/// Time that the server may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum time between two questions to the server, even while messages come. The stream's configuration and the
/// server's clock are known as of the last answer.
const LOOK_INTERVAL_MAX: Duration = Duration::from_secs(2);

/// Report of the server about the end of the stream at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct StreamLook {
    /// Number of the stream's last message.
    pub(super) last: u64,
    /// Time at which the daemon asked the server, by [`now_us`]. Messages with higher numbers than `last` came at
    /// that time or later.
    pub(super) asked_us: u64,
}

/// Watcher that asks the server for the number of the stream's last message.
pub(super) struct StreamEnd {
    last: watch::Receiver<Result<StreamLook, String>>,
    _looking: AbortOnDropHandle<()>,
}

/// Stream that a [`StreamEnd`] watches.
pub(super) struct WatchedStream {
    pub(super) jetstream: Context,
    /// Name of the stream.
    pub(super) name: String,
    /// Subject of all events. The stream must keep messages on it and on no other.
    pub(super) subject: String,
    /// Digest of who leads the stream, and since when (see [`leadership`]).
    pub(super) leadership: u64,
    pub(super) position: Arc<StreamPosition>,
    pub(super) pool: Arc<LanePool>,
}

impl StreamEnd {
    /// Begins to ask for the number of the last message of the stream. Asks now, and then whenever the position has
    /// not changed for `interval`.
    pub(super) fn watch(stream: WatchedStream, interval: Duration) -> Self {
        let (told, last) = watch::channel(Ok(StreamLook::default()));
        let looking = tokio::spawn(async move {
            let mut interval = tokio::time::interval(interval);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            let mut before = Some(stream.position.sequence());
            let mut looked = Instant::now();
            loop {
                interval.tick().await;
                let now = stream.position.sequence();
                let is_idle = before.replace(now) == Some(now);
                if !is_idle && looked.elapsed() < LOOK_INTERVAL_MAX {
                    continue;
                }
                looked = Instant::now();
                // If the server does not answer, the end of the stream is not known, and answers say so.
                if let Some(look) = stream.look().await {
                    // The report before is of no use any more.
                    drop(told.send_replace(look));
                }
            }
        });
        Self {
            last,
            _looking: AbortOnDropHandle::new(looking),
        }
    }

    /// Waits for the server's next report about the end of the stream, and returns the report. The error says that the
    /// stream is no longer as it must be, or has another leader. The future can be dropped at any time.
    pub(super) async fn told(&mut self) -> Result<StreamLook, String> {
        match self.last.changed().await {
            Ok(()) => self.last.borrow_and_update().clone(),
            // The runtime is ending.
            Err(_) => std::future::pending().await,
        }
    }
}

impl WatchedStream {
    /// Asks the server for the number of the stream's last message. Returns `None` if the server does not answer. The
    /// error says that the stream is not as it must be, or has another leader.
    async fn look(&self) -> Option<Result<StreamLook, String>> {
        let freshness = self.pool.freshness();
        let asked_us = now_us();
        let asking = look_up(&self.jetstream, &self.name, &freshness.stream_clock);
        let info = tokio::time::timeout(PATIENCE, asking).await.ok()?.ok()?;
        let last = info.state.last_sequence;
        let checked = check_config(&info.config, &self.subject);
        Some(match checked {
            Ok(()) if leadership(&info) != self.leadership => {
                Err("the stream has another leader: it may have taken nothing meanwhile".to_owned())
            }
            Ok(()) => Ok(StreamLook { last, asked_us }),
            Err(error) => Err(error.to_string()),
        })
    }
}
