//! Whether a holder's publisher is still heard of.
//!
//! A publisher sends heartbeats. After some silence its holder is *stale*: replies still list its known blocks, and say
//! that it is stale. After a longer silence the holder counts as gone.
//!
//! | silence | time that counts |
//! |---|---|
//! | until a holder is stale | all time since the publisher was last seen; judged while messages can be received |
//! | until a holder is gone | only the time in which this daemon could listen: not without a connection, nor while suspended |
//!
//! So an outage of the broker, a suspended machine or a jumping clock cannot make all holders count as gone. A
//! publisher that ended during an outage is still noticed at once when the outage is over, because a message that
//! waited in the socket or in the stream does not show that its publisher is alive.

use std::time::Duration;

/// Interval at which lanes look for silent holders, and for events and held batches that have waited for too long.
pub(crate) const TICK_INTERVAL: Duration = Duration::from_millis(500);

/// Bounds of a namespace on the silence of its holders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LivenessLimits {
    /// Maximum silence before a holder is stale. `None` means that no holder becomes stale.
    pub stale_after: Option<Duration>,
    /// Maximum silence before a holder is removed. `None` means that no silent holder is removed.
    pub remove_after: Option<Duration>,
}

impl LivenessLimits {
    /// Bounds for probes of `kvatlas doctor`. A doctor that was killed leaves its holder. It is removed soon, and is
    /// never stale: its silence is no trouble of the deployment. The heartbeats of a doctor that runs keep its holder.
    pub(super) const OF_PROBES: Self = Self {
        stale_after: None,
        remove_after: Some(Duration::from_secs(10)),
    };
}

/// Grade of a holder's silence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Silence {
    /// Holder was heard of recently.
    Alive,
    /// Holder has been silent for longer than is normal.
    Stale,
    /// Holder has been silent for so long that it counts as gone.
    Gone,
}

/// Clock that counts only the time in which messages could be received, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct ListeningClock {
    heard_us: u64,
    looked_us: Option<u64>,
}

impl ListeningClock {
    /// Maximum time that one call of [`ListeningClock::look`] adds to the clock, in microseconds. If more time has
    /// passed since the last call, the daemon did not run in between, and so was not listening.
    pub(super) const STEP_US_MAX: u64 = 2_000_000;

    /// Adds the time since the last call, if messages could be received. `now_us` is the time in microseconds on the
    /// caller's clock. If that clock has been set back, adds nothing.
    pub(super) fn look(&mut self, now_us: u64, is_listening: bool) {
        let since = self.looked_us.map_or(0, |looked| now_us.saturating_sub(looked));
        self.looked_us = Some(now_us);
        if is_listening {
            self.heard_us += since.min(Self::STEP_US_MAX);
        }
    }

    /// Returns the listening time counted so far, in microseconds.
    pub(super) fn now_us(&self) -> u64 {
        self.heard_us
    }
}

/// Returns the grade of silence of a holder that was last heard of at `heard_us`. Both times are times of a
/// [`ListeningClock`].
pub(super) fn silence(heard_us: u64, now_us: u64, limits: &LivenessLimits) -> Silence {
    let silent = Duration::from_micros(now_us.saturating_sub(heard_us));
    let is_over = |limit: Option<Duration>| limit.is_some_and(|limit| silent >= limit);
    // The silence is checked once in each `TICK_INTERVAL`. So a holder counts as stale one interval before its limit,
    // but at most a quarter of the limit before.
    let soon = limits
        .stale_after
        .map(|limit| limit - TICK_INTERVAL.min(limit / 4));
    if is_over(limits.remove_after) {
        Silence::Gone
    } else if is_over(soon) {
        Silence::Stale
    } else {
        Silence::Alive
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;
    const LIMITS: LivenessLimits = LivenessLimits {
        stale_after: Some(Duration::from_secs(3)),
        remove_after: Some(Duration::from_secs(10)),
    };

    #[test]
    fn silence_grows_with_the_time_listened() {
        let mut clock = ListeningClock::default();
        clock.look(0, true);
        let heard_us = clock.now_us();
        let mut seen = Vec::new();
        for second in 1..=10 {
            clock.look(second * SECOND, true);
            seen.push(silence(heard_us, clock.now_us(), &LIMITS));
        }
        assert_eq!(seen[..2], [Silence::Alive; 2]);
        assert_eq!(seen[2..9], [Silence::Stale; 7]);
        assert_eq!(seen[9], Silence::Gone);
        assert_eq!(silence(clock.now_us(), clock.now_us(), &LIMITS), Silence::Alive);
    }

    /// A test that a silent holder counts as stale before its limit: half a second earlier, or a quarter of the limit
    /// if that is less. The next look for silent holders may come only half a second later.
    #[test]
    fn who_is_silent_is_stale_before_the_limit_is_over() {
        let after = |silent_us| silence(0, silent_us, &LIMITS);
        assert_eq!(after(5 * SECOND / 2 - 1), Silence::Alive);
        assert_eq!(after(5 * SECOND / 2), Silence::Stale);
        let short = LivenessLimits {
            stale_after: Some(Duration::from_millis(400)),
            remove_after: None,
        };
        assert_eq!(silence(0, 299_999, &short), Silence::Alive);
        assert_eq!(silence(0, 300_000, &short), Silence::Stale);
    }

    #[test]
    fn jumps_and_outages_make_nobody_look_dead() {
        let mut clock = ListeningClock::default();
        clock.look(5 * SECOND, true);
        let heard_us = clock.now_us();
        // The machine was suspended for a day, the clock was set back, the broker was away for an hour.
        clock.look(86_400 * SECOND, true);
        clock.look(SECOND, true);
        (0..3600).for_each(|second| clock.look((2 + second) * SECOND, false));
        assert_eq!(silence(heard_us, clock.now_us(), &LIMITS), Silence::Alive);
    }

    #[test]
    fn a_probe_is_removed_soon_and_never_stale() {
        let after = |silent_us| silence(0, silent_us, &LivenessLimits::OF_PROBES);
        assert_eq!(after(10 * SECOND - 1), Silence::Alive);
        assert_eq!(after(10 * SECOND), Silence::Gone);
    }

    #[test]
    fn without_limits_nobody_is_stale() {
        assert_eq!(silence(0, u64::MAX, &LivenessLimits::default()), Silence::Alive);
    }
}
