//! Whether a holder is still heard of.
//!
//! A publisher sends heartbeats. One that has been silent for a while is *stale*: replies say so, and keep what is known. After a
//! second, longer while it counts as gone.
//!
//! Silence is measured in time in which this daemon has listened. While the connection is down, or the daemon itself was
//! stopped or starved, nobody can be heard; that time does not count, so neither an outage of the broker, nor a suspended machine,
//! nor a clock that jumps can make a whole fleet look dead.

use std::time::Duration;

/// How long a holder may be silent. The limits of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LivenessLimits {
    /// After this long it is stale; never where it is absent.
    pub stale_after: Option<Duration>,
    /// After this long it is removed; never where it is absent.
    pub remove_after: Option<Duration>,
}

/// How silent a holder is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Silence {
    /// It has been heard of lately.
    Alive,
    /// It is silent for longer than it should be.
    Stale,
    /// It is silent for so long that it counts as gone.
    Gone,
}

/// Counts the time in which messages could be heard, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ListeningClock {
    heard_us: u64,
    looked_us: Option<u64>,
}

impl ListeningClock {
    /// Longest time between two looks that counts. Whoever looks less often was not listening in between.
    pub const STEP_US_MAX: u64 = 2_000_000;

    /// Looks at the time: `now_us` on a clock in microseconds. Counts what has passed since the last look, if messages could be
    /// heard. A clock that runs backwards counts nothing.
    pub fn look(&mut self, now_us: u64, is_listening: bool) {
        let since = self.looked_us.map_or(0, |looked| now_us.saturating_sub(looked));
        self.looked_us = Some(now_us);
        if is_listening {
            self.heard_us += since.min(Self::STEP_US_MAX);
        }
    }

    /// The time counted so far.
    pub fn now_us(&self) -> u64 {
        self.heard_us
    }
}

/// When one holder was last heard of, on a [`ListeningClock`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Liveness {
    heard_us: u64,
}

impl Liveness {
    /// A holder that is heard of now.
    pub fn heard_at(now_us: u64) -> Self {
        Self { heard_us: now_us }
    }

    /// It is heard of.
    pub fn hear(&mut self, now_us: u64) {
        self.heard_us = now_us;
    }

    /// How silent it is.
    pub fn silence(&self, now_us: u64, limits: &LivenessLimits) -> Silence {
        let silent = Duration::from_micros(now_us.saturating_sub(self.heard_us));
        let is_over = |limit: Option<Duration>| limit.is_some_and(|limit| silent >= limit);
        if is_over(limits.remove_after) {
            Silence::Gone
        } else if is_over(limits.stale_after) {
            Silence::Stale
        } else {
            Silence::Alive
        }
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
        let mut holder = Liveness::heard_at(clock.now_us());
        let mut seen = Vec::new();
        for second in 1..=10 {
            clock.look(second * SECOND, true);
            seen.push(holder.silence(clock.now_us(), &LIMITS));
        }
        assert_eq!(seen[..2], [Silence::Alive; 2]);
        assert_eq!(seen[2..9], [Silence::Stale; 7]);
        assert_eq!(seen[9], Silence::Gone);
        holder.hear(clock.now_us());
        assert_eq!(holder.silence(clock.now_us(), &LIMITS), Silence::Alive);
    }

    #[test]
    fn jumps_and_outages_make_nobody_look_dead() {
        let mut clock = ListeningClock::default();
        clock.look(5 * SECOND, true);
        let holder = Liveness::heard_at(clock.now_us());
        // The machine was suspended for a day, the clock was set back, the broker was away for an hour.
        clock.look(86_400 * SECOND, true);
        clock.look(SECOND, true);
        (0..3600).for_each(|second| clock.look((2 + second) * SECOND, false));
        assert_eq!(holder.silence(clock.now_us(), &LIMITS), Silence::Alive);
    }

    #[test]
    fn without_limits_nobody_is_stale() {
        let holder = Liveness::default();
        assert_eq!(
            holder.silence(u64::MAX, &LivenessLimits::default()),
            Silence::Alive
        );
    }
}
