//! The pace of attempts to resync a holder.

use std::time::Instant;

use kvatlas_client::Backoff;
use kvatlas_telemetry::labels::ResyncFailure;

use super::queue::Prospect;

/// Record of the attempts to resync one holder.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Attempts {
    failures: u32,
    not_before: Option<Instant>,
    last: Option<ResyncFailure>,
    /// Epoch of the holder when the last attempt was queued.
    epoch: u64,
    /// Whether the log says already that nobody answers for the holder.
    pub(super) is_unanswered_told: bool,
    is_busy: bool,
}

impl Attempts {
    /// Whether an attempt may begin at `now`, when the holder is in `epoch`. If nobody was there to answer, a new epoch shows that somebody
    /// is there now.
    pub(super) fn is_due(&self, now: Instant, epoch: u64) -> bool {
        let is_somebody_new = self.last == Some(ResyncFailure::NoResponder) && epoch != self.epoch;
        !self.is_busy && (is_somebody_new || self.not_before.is_none_or(|time| now >= time))
    }

    /// Whether an attempt is queued or running.
    pub(super) fn is_busy(&self) -> bool {
        self.is_busy
    }

    /// Notes that an attempt is queued, while the holder is in `epoch`.
    pub(super) fn begin(&mut self, epoch: u64) {
        (self.is_busy, self.epoch) = (true, epoch);
    }

    /// Prospect that the publisher answers, after the attempts so far.
    pub(super) fn prospect(&self) -> Prospect {
        match self.last {
            None => Prospect::First,
            Some(ResyncFailure::TimedOut) => Prospect::Silent,
            Some(_) => Prospect::Again,
        }
    }

    /// Notes that an attempt failed at `now`.
    pub(super) fn fail(&mut self, now: Instant, failure: ResyncFailure, backoff: &Backoff) {
        self.is_busy = false;
        self.last = Some(failure);
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
        assert!(attempts.is_due(now, 5));
        attempts.begin(5);
        assert!(!attempts.is_due(now, 6));
        assert_eq!(attempts.prospect(), Prospect::First);
        attempts.fail(now, ResyncFailure::TimedOut, &backoff);
        assert_eq!(attempts.prospect(), Prospect::Silent);
        assert!(!attempts.is_due(now, 6));
        assert!(attempts.is_due(now + backoff.pause_min, 5));
        // Nobody was there, and then somebody has begun.
        attempts.begin(5);
        attempts.fail(now, ResyncFailure::NoResponder, &backoff);
        assert_eq!(attempts.prospect(), Prospect::Again);
        assert!(!attempts.is_due(now, 5));
        assert!(attempts.is_due(now, 6));
    }
}
