//! Sources that report several holders, and the task that follows one of these sources.
//!
//! Each kind of source is a module that implements [`FollowedSource`]: TensorRT-LLM's servers (`tensorrt`), servers that send
//! events over gRPC (`subscribed`), and Dynamo's event plane (`dynamo`).

use std::convert::Infallible;
use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::Client;
use tokio::sync::watch;
use tokio::time::{Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;

use kvatlas_client::publish::PublisherError;
use kvatlas_process::registry::NewEngine;
use kvatlas_telemetry::BridgeMetrics;

use super::dynamo::Records;
use super::follower::{FollowError, FollowOptions};
use super::progress::{SharedProgress, log_untold};
use super::server::OriginServer;
use super::sockets::SocketError;
use super::stalls::{BridgeClock, StallWatch};

/// Error because of which a source cannot be followed at the moment.
#[derive(Debug, thiserror::Error)]
pub(super) enum FollowedSourceError {
    /// The source cannot be reached, or its connection has broken.
    #[error(transparent)]
    Broken(Box<dyn Error + Send + Sync>),
    /// The connection was ended, because a message was beyond a bound, or messages were missing.
    #[error(transparent)]
    Cut(Box<dyn Error + Send + Sync>),
    /// State of the source that could not be read at the start can be read now, so the source has to be begun again.
    #[error("what was kept can be read now")]
    BeginAgain,
    /// The publisher that reports to daemons failed, which ends following.
    #[error(transparent)]
    Publisher(#[from] PublisherError),
}

/// End of a [`SourceTask`]'s run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RunEnd {
    /// The source is no longer followed.
    Over,
    /// The source has to be begun again, with state that can be read now.
    BeginAgain,
}

impl FollowedSourceError {
    pub(super) fn broken(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Broken(error.into())
    }
}

impl From<SocketError> for FollowedSourceError {
    fn from(error: SocketError) -> Self {
        match error.is_cut() {
            true => Self::Cut(error.into()),
            false => Self::broken(error),
        }
    }
}

impl From<FollowError> for FollowedSourceError {
    fn from(error: FollowError) -> Self {
        match error {
            FollowError::Socket(error) => error.into(),
            FollowError::BeginAgain => Self::BeginAgain,
            FollowError::Publisher(error) => error.into(),
        }
    }
}

/// Source of events, with the state that is needed to follow it. Each kind of source has its own implementation.
pub(super) trait FollowedSource: Send {
    /// Follows the source over one connection, until the connection breaks. Sets `failures` to 0 once the connection is of
    /// use.
    fn follow(
        &mut self,
        task: &SourceTask,
        failures: &mut u32,
    ) -> impl Future<Output = Result<Infallible, FollowedSourceError>> + Send;

    /// Puts all holders out of sight (events may be missing), as the connection has broken.
    fn disconnected(
        &mut self,
        task: &SourceTask,
    ) -> impl Future<Output = Result<(), FollowedSourceError>> + Send;

    /// Goes on telling daemons of the holders, which are out of sight: the server that reported the source is there, so
    /// the engine lives.
    fn told_alive(&mut self) -> impl Future<Output = Result<(), FollowedSourceError>> + Send {
        async { Ok(()) }
    }

    /// Ends the reports about the source's holders. If `says_goodbye` is set, daemons forget the holders.
    fn end(
        self,
        task: &SourceTask,
        says_goodbye: bool,
    ) -> impl Future<Output = Result<(), FollowedSourceError>> + Send;
}

/// Task that follows one source of events, such as an engine: connects, follows, and connects again, until it is
/// stopped.
pub(super) struct SourceTask {
    pub(super) engine: NewEngine,
    /// Server that reported the source; `None` if no server did. After each new connection, the server has to report the same
    /// source again.
    pub(super) origin: Option<OriginServer>,
    pub(super) options: FollowOptions,
    pub(super) clock: BridgeClock,
    pub(super) progress: SharedProgress,
    pub(super) metrics: Arc<BridgeMetrics>,
    /// Token that ends the task. Unless `says_goodbye` is set, daemons keep the holders until they are stale.
    pub(super) stop: CancellationToken,
    /// Whether daemons are told to forget the holders at the end.
    pub(super) says_goodbye: Arc<AtomicBool>,
    /// Records of Dynamo's discovery; `None` if no place for records is configured.
    pub(super) records: Option<watch::Receiver<Arc<Records>>>,
    /// NATS connection over which daemons are told.
    pub(super) nats: Client,
}

impl SourceTask {
    /// Follows the source until it is stopped: connects, and connects again after each failure.
    pub(super) async fn run(&self, mut source: impl FollowedSource) -> RunEnd {
        let mut failures = 0;
        loop {
            let failed_before = failures;
            let following = Box::pin(source.follow(self, &mut failures));
            let Some(ended) = self.stop.run_until_cancelled(following).await else {
                break;
            };
            let error = match ended {
                Ok(never) => match never {},
                Err(error) => error,
            };
            if matches!(error, FollowedSourceError::Publisher(_)) {
                self.progress.ended(&self.engine, &error);
                return RunEnd::Over;
            }
            if matches!(error, FollowedSourceError::BeginAgain) {
                return self.end_to_begin_again(source).await;
            }
            match &self.origin {
                None => self.progress.out_of_sight(&self.engine, &error),
                Some(origin) => {
                    self.progress.out_of_sight(&self.engine, &origin.explain(&error));
                    origin.ask_again();
                }
            }
            if self.tell_disconnected(&mut source).await.is_err() {
                return RunEnd::Over;
            }
            if matches!(error, FollowedSourceError::Cut(_)) {
                // The count of failures continues, although the connection was of use before.
                failures = failures.max(failed_before);
            }
            failures = failures.saturating_add(1);
            let pause = tokio::time::sleep(self.options.backoff.pause(failures));
            if self.stop.run_until_cancelled(pause).await.is_none() {
                break;
            }
        }
        let says_goodbye = self.says_goodbye.load(Ordering::Acquire);
        if let Err(error) = source.end(self, says_goodbye).await {
            log_untold(&self.engine, &error);
        }
        RunEnd::Over
    }

    async fn tell_disconnected(&self, source: &mut impl FollowedSource) -> Result<(), FollowedSourceError> {
        source.disconnected(self).await?;
        match self
            .origin
            .as_ref()
            .is_some_and(|origin| origin.handle.is_there())
        {
            true => source.told_alive().await,
            false => Ok(()),
        }
    }

    async fn end_to_begin_again(&self, source: impl FollowedSource) -> RunEnd {
        match source.end(self, false).await {
            Ok(()) => RunEnd::BeginAgain,
            Err(error) => {
                self.progress.ended(&self.engine, &error);
                RunEnd::Over
            }
        }
    }

    pub(super) fn stall_watch(&self) -> StallWatch {
        StallWatch::new(self.clock.clone(), &self.options)
    }

    /// Notes that the source is followed, and whether all of its holders are exact. `trouble` says what is wrong;
    /// `None` if nothing is wrong.
    pub(super) fn note_followed(&self, is_exact: bool, trouble: Option<&str>) {
        self.progress.followed(&self.engine, is_exact, trouble);
    }
}

/// Detects stalls (times in which this process stood still) for sources that cannot be asked for missed messages. The
/// task takes waiting messages before a tick of the timer. So a tick shows that all messages were read.
pub(super) struct Quiet {
    pub(super) stalls: StallWatch,
    ticks: Interval,
}

impl Quiet {
    pub(super) fn new(stalls: StallWatch, interval: Duration) -> Self {
        let mut ticks = tokio::time::interval(interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { stalls, ticks }
    }

    /// Waits for the next tick of the timer. A stall of this process restarts the interval between ticks.
    pub(super) async fn tick(&mut self) {
        self.ticks.tick().await;
    }

    /// Returns whether the bridge has stood still. If so, the caller puts the holders out of sight. Call it after each
    /// wait, before daemons are told anything. `is_tick` says that the wait ended with a tick, so that no message waits
    /// to be read.
    pub(super) fn has_stalled(&mut self, is_tick: bool) -> bool {
        let has_stalled = self.stalls.has_stalled();
        if has_stalled {
            self.ticks.reset();
        } else if is_tick {
            self.stalls.caught_up();
        }
        has_stalled
    }

    /// Whether messages that came during a stall may still be unread. The next message may then be one of them.
    pub(super) fn is_behind(&self) -> bool {
        self.stalls.is_behind()
    }
}
