//! Checks of the end of the events stream, and of its configuration, while it is read.
//!
//! Anybody with the right to do so can pause or change a consumer. The consumer then delivers nothing, reports no
//! error, and counts no message as waiting. So the server is asked for the number of the stream's last message.
//!
//! Anybody with the right to do so can also change the stream. The stream may then not keep all events, and no message
//! comes that shows it. So each answer of the server is checked ([`check_config`]). The same holds for the stream's leader:
//! what is published while there is none never comes, and the messages of others go on.

use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::Context;
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;

use crate::lanes::{LanePool, now_us};

use super::stream::check_config;
use super::stream_info::{leadership, look_up};

/// Shortest and longest time that the server may take to answer. A stream without a leader does not answer, and one that
/// gets a new leader meanwhile does not either: the next question finds it.
const PATIENCE: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(2)];

/// Change of the stream with which events may have been lost, although the messages that come have no hole.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum StreamChange {
    /// Stream has another leader, or none.
    #[error("the stream has {0}: it may have taken nothing meanwhile")]
    Leader(&'static str),
    /// Stream has a configuration with which it does not keep all events. Has the error's text.
    #[error("{0}")]
    Config(String),
}

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
    last: watch::Receiver<Result<StreamLook, StreamChange>>,
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
    pub(super) pool: Arc<LanePool>,
}

impl StreamEnd {
    /// Begins to ask for the number of the last message of the stream. Asks now, and then in each `interval`, also while
    /// messages come.
    pub(super) fn watch(stream: WatchedStream, interval: Duration) -> Self {
        let (told, last) = watch::channel(Ok(StreamLook::default()));
        let looking = tokio::spawn(async move {
            let patience = (interval * 4).clamp(PATIENCE[0], PATIENCE[1]);
            let mut interval = tokio::time::interval(interval);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                interval.tick().await;
                // If the server does not answer, the end of the stream is not known, and answers say so.
                if let Some(look) = stream.look(patience).await {
                    told.send_if_modified(|before| {
                        // A change stays until it has been read: it may have been undone since.
                        let is_news = before.is_ok();
                        if is_news {
                            *before = look;
                        }
                        is_news
                    });
                }
            }
        });
        Self {
            last,
            _looking: AbortOnDropHandle::new(looking),
        }
    }

    /// Waits for the server's next report about the end of the stream, and returns the report. The error says that the
    /// stream has changed. The future can be dropped at any time.
    pub(super) async fn told(&mut self) -> Result<StreamLook, StreamChange> {
        match self.last.changed().await {
            Ok(()) => self.last.borrow_and_update().clone(),
            // The runtime is ending.
            Err(_) => std::future::pending().await,
        }
    }
}

impl WatchedStream {
    /// Asks the server for the number of the stream's last message. Returns `None` if the server does not answer within
    /// `patience`.
    async fn look(&self, patience: Duration) -> Option<Result<StreamLook, StreamChange>> {
        let freshness = self.pool.freshness();
        let asked_us = now_us();
        let asking = look_up(&self.jetstream, &self.name, &freshness.stream_clock);
        let info = tokio::time::timeout(patience, asking).await.ok()?.ok()?;
        let last = info.state.last_sequence;
        if let Err(error) = check_config(&info.config, &self.subject) {
            return Some(Err(StreamChange::Config(error.to_string())));
        }
        Some(match leadership(&info) {
            Some(now) if now == self.leadership => Ok(StreamLook { last, asked_us }),
            Some(_) => Err(StreamChange::Leader("another leader")),
            None => Err(StreamChange::Leader("no leader")),
        })
    }
}
