//! When a holder may be asked for again.

use std::time::{Duration, Instant};

/// The pauses between attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPace {
    /// Pause after the first failed attempt; doubles with every further one.
    pub pause_min: Duration,
    /// The longest pause.
    pub pause_max: Duration,
}

impl RetryPace {
    /// The pause after so many failed attempts. `jitter`, of any value, takes off up to half, so that holders that failed together
    /// do not come back together.
    fn pause(&self, failures: u32, jitter: u64) -> Duration {
        let doubled = self
            .pause_min
            .saturating_mul(1 << failures.saturating_sub(1).min(20));
        let whole = doubled.min(self.pause_max);
        let share = u32::try_from(jitter % 1024).unwrap_or_default();
        whole - whole / 2 * share / 1024
    }
}

/// The attempts at one holder.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Attempts {
    failures: u32,
    not_before: Option<Instant>,
    /// Whether one is queued or running.
    pub(crate) is_busy: bool,
}

impl Attempts {
    /// Whether the holder may be asked for at `now`.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        !self.is_busy && self.not_before.is_none_or(|time| now >= time)
    }

    /// An attempt failed at `now`.
    pub(crate) fn fail(&mut self, now: Instant, pace: &RetryPace, jitter: u64) {
        self.is_busy = false;
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + pace.pause(self.failures, jitter));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: RetryPace = RetryPace {
        pause_min: Duration::from_millis(100),
        pause_max: Duration::from_secs(5),
    };

    #[test]
    fn pauses_double_up_to_a_bound_and_are_jittered() {
        assert_eq!(PACE.pause(1, 0), Duration::from_millis(100));
        assert_eq!(PACE.pause(3, 0), Duration::from_millis(400));
        assert_eq!(PACE.pause(u32::MAX, 0), PACE.pause_max);
        let least = PACE.pause(u32::MAX, 1023);
        assert!(least >= PACE.pause_max / 2 && least < PACE.pause_max);
    }

    #[test]
    fn a_failure_makes_a_holder_wait() {
        let now = Instant::now();
        let mut attempts = Attempts::default();
        assert!(attempts.is_due(now));
        attempts.is_busy = true;
        assert!(!attempts.is_due(now));
        attempts.fail(now, &PACE, 0);
        assert!(!attempts.is_due(now));
        assert!(attempts.is_due(now + PACE.pause_min));
    }
}
