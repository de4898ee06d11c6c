//! Whether this process has stood still: stopped, or without a processor. Engines go on meanwhile, and what they said waits unread.
//!
//! So after a stall a source is out of sight, until a look at it that begins afterwards has succeeded. All sources use the same watch:
//!
//! | Source | What ends the doubt |
//! |---|---|
//! | an engine with a replay socket | the answer to a question that was asked after the stall |
//! | a server that is asked | the same |
//! | an engine without a replay socket, an event plane | a whole interval, at whose end nothing waits to be read |

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::follower::FollowOptions;

/// The clock by which a bridge notices that it has stood still. Tests move it.
#[derive(Clone)]
pub struct BridgeClock(Arc<dyn Fn() -> Instant + Send + Sync>);

impl BridgeClock {
    /// A clock that says what `now` returns. It must not run backwards.
    pub fn new(now: impl Fn() -> Instant + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    fn now(&self) -> Instant {
        (self.0)()
    }
}

impl Default for BridgeClock {
    fn default() -> Self {
        Self::new(Instant::now)
    }
}

impl fmt::Debug for BridgeClock {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("BridgeClock")
    }
}

/// A look at an engine that has begun: a question that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Look {
    stalls_before: u64,
}

/// Notices when the task that it belongs to has stood still.
#[derive(Debug)]
pub(super) struct StallWatch {
    clock: BridgeClock,
    /// A longer time between two signs of life is a stall.
    pause_max: Duration,
    /// When the task was last seen to run.
    awake_at: Instant,
    stalls: u64,
    /// Whether what waited during a stall may not have been read yet.
    is_behind: bool,
}

impl StallWatch {
    pub(super) fn new(clock: BridgeClock, options: &FollowOptions) -> Self {
        Self {
            awake_at: clock.now(),
            clock,
            pause_max: options.pause_max(),
            stalls: 0,
            is_behind: false,
        }
    }

    /// To be called whenever the task has waited, before it tells daemons anything. Returns whether it has waited for too long: then the
    /// source has to be out of sight before anything else is told.
    pub(super) fn has_stalled(&mut self) -> bool {
        let now = self.clock.now();
        let paused = now.saturating_duration_since(self.awake_at);
        self.awake_at = now;
        let has_stalled = paused >= self.pause_max;
        self.stalls += u64::from(has_stalled);
        self.is_behind |= has_stalled;
        has_stalled
    }

    /// Forgets how long the task has waited, as what it follows was out of sight meanwhile.
    pub(super) fn begin(&mut self) {
        self.awake_at = self.clock.now();
        self.is_behind = false;
    }

    /// Whether what waited during a stall may not have been read yet. For sources that cannot be asked.
    pub(super) fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Nothing waits to be read, a whole interval after the last stall.
    pub(super) fn caught_up(&mut self) {
        self.is_behind = false;
    }

    /// A look begins now.
    pub(super) fn look(&self) -> Look {
        Look {
            stalls_before: self.stalls,
        }
    }

    /// Whether what `look` shows is still news: the task has not stood still since it began.
    pub(super) fn is_news(&self, look: Look) -> bool {
        look == self.look()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn what_was_asked_before_a_stall_is_no_news() {
        let begun = Instant::now();
        let moved = Arc::new(AtomicU64::new(0));
        let clock = BridgeClock::new({
            let moved = Arc::clone(&moved);
            move || begun + Duration::from_millis(moved.load(Ordering::Relaxed))
        });
        let options = FollowOptions {
            poll_interval: Duration::from_secs(1),
            ..FollowOptions::default()
        };
        let mut watch = StallWatch::new(clock, &options);
        let mut after = |milliseconds: u64| {
            moved.fetch_add(milliseconds, Ordering::Relaxed);
            let look = watch.look();
            (watch.has_stalled(), watch.is_news(look))
        };
        assert_eq!(after(0), (false, true));
        assert_eq!(after(1499), (false, true));
        assert_eq!(after(1499), (false, true));
        assert_eq!(after(1500), (true, false));
        assert_eq!(after(1499), (false, true));
        moved.fetch_add(5000, Ordering::Relaxed);
        watch.begin();
        assert!(!watch.has_stalled());
    }
}
