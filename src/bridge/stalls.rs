//! Stalls. A stall is a time in which this process stood still, because it was stopped or got no CPU time. Engines continue
//! meanwhile, and their messages wait unread.
//!
//! After a stall, each source is out of sight. It is in sight again once a look (a check of the source) that began after the
//! stall has succeeded. The table has the sign by which a look succeeds:
//!
//! | Source | Sign |
//! |---|---|
//! | an engine with a replay socket | the answer to a question that was asked after the stall |
//! | a server that is asked | the answer to a question that was asked after the stall |
//! | an engine without a replay socket, an event plane | a whole interval after the stall, at whose end no message is unread |

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvatlas_process::since_boot;

use super::follower::FollowOptions;

/// The clock by which a bridge notices that it has stood still. Tests move it.
#[derive(Clone)]
pub struct BridgeClock(Arc<dyn Fn() -> Instant + Send + Sync>);

impl BridgeClock {
    /// Makes a clock that reads `now`, which must not run backwards.
    pub fn new(now: impl Fn() -> Instant + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    pub(super) fn now(&self) -> Instant {
        (self.0)()
    }
}

impl Default for BridgeClock {
    /// Makes a clock that goes on while the machine is suspended, if the system has such a clock (Linux). Engines on other
    /// machines go on meanwhile, too.
    fn default() -> Self {
        let (begun, begun_at) = (Instant::now(), since_boot());
        Self::new(move || {
            let passed = since_boot().saturating_sub(begun_at);
            begun.checked_add(passed).unwrap_or(begun)
        })
    }
}

impl fmt::Debug for BridgeClock {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("BridgeClock")
    }
}

/// A look (a check of an engine) that has begun and has not ended yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PendingLook {
    stalls_before: u64,
}

/// Detects when the task that uses it has stood still.
#[derive(Debug)]
pub(super) struct StallWatch {
    clock: BridgeClock,
    /// Minimum pause of the task that counts as a stall.
    pause_max: Duration,
    /// Time at which the task was last seen to run.
    awake_at: Instant,
    stalls: u64,
    /// Time at which the first stall began after which the source has not been seen yet; `None` if it has been seen since
    /// the last stall.
    unseen_since: Option<Instant>,
    /// Whether messages that waited during a stall may still be unread. Used only for sources that cannot be asked for
    /// missed messages.
    is_behind: bool,
}

impl StallWatch {
    pub(super) fn new(clock: BridgeClock, options: &FollowOptions) -> Self {
        Self {
            awake_at: clock.now(),
            clock,
            pause_max: options.pause_max(),
            stalls: 0,
            unseen_since: None,
            is_behind: false,
        }
    }

    /// Returns whether the task's last wait was so long that it counts as a stall. The task calls it after each wait,
    /// before it tells daemons anything. After a stall, the task first has to put the source out of sight.
    pub(super) fn has_stalled(&mut self) -> bool {
        let now = self.clock.now();
        let before = std::mem::replace(&mut self.awake_at, now);
        let has_stalled = now.saturating_duration_since(before) >= self.pause_max;
        if has_stalled {
            self.unseen_since.get_or_insert(before);
        }
        self.stalls += u64::from(has_stalled);
        self.is_behind |= has_stalled;
        has_stalled
    }

    /// Restarts the measurement of pauses, after a time in which the source was out of sight (silent, or with events missing).
    /// That time is then not counted as a stall.
    pub(super) fn begin(&mut self) {
        self.awake_at = self.clock.now();
        self.unseen_since = None;
        self.is_behind = false;
    }

    /// Notes that the source is in sight.
    pub(super) fn seen(&mut self) {
        self.unseen_since = None;
    }

    /// Returns the time until which the source was watched: the beginning of a stall, if the source has not been seen since
    /// then, or else the last time at which the task ran.
    pub(super) fn watched_until(&self) -> Instant {
        self.unseen_since.unwrap_or(self.awake_at)
    }

    /// Whether messages that waited during a stall may still be unread. Used only for sources that cannot be asked for
    /// missed messages.
    pub(super) fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Notes that a whole interval has passed since the last stall, and that no message waits to be read.
    pub(super) fn caught_up(&mut self) {
        self.is_behind = false;
    }

    /// Begins a look, that is, a check of an engine, now.
    pub(super) fn look(&self) -> PendingLook {
        PendingLook {
            stalls_before: self.stalls,
        }
    }

    /// Whether the result of `look` (a check of an engine) still counts. It does if the task has run without a stall
    /// since the look began.
    pub(super) fn is_news(&self, look: PendingLook) -> bool {
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

    #[test]
    fn a_source_was_watched_until_the_stall_after_which_it_was_not_seen() {
        let begun = Instant::now();
        let moved = Arc::new(AtomicU64::new(0));
        let clock = BridgeClock::new({
            let moved = Arc::clone(&moved);
            move || begun + Duration::from_secs(moved.load(Ordering::Relaxed))
        });
        let mut watch = StallWatch::new(clock, &FollowOptions::default());
        let mut watched = |moved_s: u64, is_seen: bool| {
            moved.store(moved_s, Ordering::Relaxed);
            watch.has_stalled();
            if is_seen {
                watch.seen();
            }
            watch.watched_until() - begun
        };
        assert_eq!(watched(1, false), Duration::from_secs(1));
        assert_eq!(watched(100, false), Duration::from_secs(1), "it slept");
        assert_eq!(watched(200, false), Duration::from_secs(1));
        assert_eq!(watched(201, true), Duration::from_secs(201));
        assert_eq!(watched(202, false), Duration::from_secs(202));
    }
}
