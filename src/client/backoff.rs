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

/// Pauses between attempts to connect to NATS again.
const RECONNECTS: Backoff = Backoff {
    // In a cluster another server is available immediately.
    pause_min: Duration::from_millis(10),
    pause_max: Duration::from_millis(500),
};

/// Returns the pause before an attempt to connect to NATS again. `attempts` is the number of attempts that have failed.
/// The pause stays below one second: a publisher that is silent for longer may be missing in answers that are called
/// exact, if a daemon begins to follow the events meanwhile.
pub fn reconnect_pause(attempts: usize) -> Duration {
    RECONNECTS.pause(u32::try_from(attempts).unwrap_or(u32::MAX))
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

    #[test]
    fn publishers_connect_again_within_less_than_a_second() {
        for attempts in [0, 1, 12, 13, 1000, usize::MAX] {
            assert!(
                reconnect_pause(attempts) <= Duration::from_millis(500),
                "{attempts}"
            );
        }
    }
}
