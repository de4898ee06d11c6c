//! Pauses between attempts.

use std::time::Duration;

/// Pauses that double from attempt to attempt, up to a bound, with jitter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// The pause after the first failed attempt.
    pub pause_min: Duration,
    /// The longest pause.
    pub pause_max: Duration,
}

impl Backoff {
    /// Returns the pause after `failures` failed attempts in a row. The pause is shortened at random, by up to half. So
    /// clients that failed together do not all try again together.
    pub fn pause(&self, failures: u32) -> Duration {
        self.pause_with(failures, fastrand::u64(..))
    }

    fn pause_with(&self, failures: u32, random: u64) -> Duration {
        let doublings = failures.saturating_sub(1).min(20);
        let whole = self.pause_min.saturating_mul(1 << doublings).min(self.pause_max);
        let share = u32::try_from(random % 1024).unwrap_or_default();
        whole - whole / 2 * share / 1024
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACKOFF: Backoff = Backoff {
        pause_min: Duration::from_millis(100),
        pause_max: Duration::from_secs(5),
    };

    #[test]
    fn pauses_double_up_to_a_bound_and_are_jittered() {
        assert_eq!(BACKOFF.pause_with(0, 0), BACKOFF.pause_min);
        assert_eq!(BACKOFF.pause_with(1, 0), BACKOFF.pause_min);
        assert_eq!(BACKOFF.pause_with(3, 0), BACKOFF.pause_min * 4);
        assert_eq!(BACKOFF.pause_with(u32::MAX, 0), BACKOFF.pause_max);
        let shortest = BACKOFF.pause_with(u32::MAX, 1023);
        assert!(shortest >= BACKOFF.pause_max / 2 && shortest < BACKOFF.pause_max);
        for failures in 0..40 {
            let pause = BACKOFF.pause(failures);
            assert!(pause >= BACKOFF.pause_min / 2 && pause <= BACKOFF.pause_max);
        }
    }
}
