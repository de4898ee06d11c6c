//! The pace of attempts to resync a holder.

use std::time::Instant;

use kvatlas_client::Backoff;

use super::queue::Prospect;

/// Record of the attempts to resync one holder.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Attempts {
    failures: u32,
    not_before: Option<Instant>,
    was_silent: bool,
    /// Whether the log says already that nobody answers for the holder.
    pub(super) is_unanswered_told: bool,
    /// Whether an attempt is queued or running.
    pub(super) is_busy: bool,
}

impl Attempts {
    /// Whether an attempt may begin at `now`.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        !self.is_busy && self.not_before.is_none_or(|time| now >= time)
    }

    /// Prospect that the publisher answers, after the attempts so far.
    pub(super) fn prospect(&self) -> Prospect {
        match (self.failures, self.was_silent) {
            (0, _) => Prospect::First,
            (_, false) => Prospect::Again,
            (_, true) => Prospect::Silent,
        }
    }

    /// Notes that an attempt failed at `now`. `was_silent` says whether the publisher did not answer in time.
    pub(super) fn fail(&mut self, now: Instant, was_silent: bool, backoff: &Backoff) {
        self.is_busy = false;
        self.was_silent = was_silent;
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + backoff.pause(self.failures));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_failure_makes_a_holder_wait() {
        let backoff = Backoff {
            pause_min: Duration::from_millis(100),
            pause_max: Duration::from_secs(5),
        };
        let now = Instant::now();
        let mut attempts = Attempts::default();
        assert!(attempts.is_due(now));
        attempts.is_busy = true;
        assert!(!attempts.is_due(now));
        assert_eq!(attempts.prospect(), Prospect::First);
        attempts.fail(now, true, &backoff);
        assert_eq!(attempts.prospect(), Prospect::Silent);
        assert!(!attempts.is_due(now));
        assert!(attempts.is_due(now + backoff.pause_min));
    }
}
