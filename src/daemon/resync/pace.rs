//! Pace of the attempts to resync a holder.

use std::time::Instant;

use tokio_util::sync::CancellationToken;

use kvatlas_client::Backoff;
use kvatlas_telemetry::labels::ResyncFailure;

use super::queue::Prospect;

/// Record of consecutive failed attempts to resync a holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Failures {
    count: u32,
    last: ResyncFailure,
    /// Time before which no further attempt to resync the holder may begin.
    not_before: Instant,
}

/// Record of the attempts to resync one holder.
#[derive(Debug, Clone, Default)]
pub(super) struct Attempts {
    /// Whether an attempt is queued or running.
    pub(super) is_busy: bool,
    /// Token of the last attempt. Cancelled when the attempt's answer is no longer waited for.
    pub(super) overtaken: CancellationToken,
    /// Record of the failed attempts so far. `None` before the first failure.
    failures: Option<Failures>,
    /// Epoch of the holder when the last attempt was queued.
    epoch: u64,
    /// Whether the log already says that nobody answers for the holder.
    pub(super) is_unanswered_told: bool,
}

impl Attempts {
    /// Whether an attempt may begin at `now`. `epoch` is the holder's present epoch.
    ///
    /// After a failed attempt, a pause must end first. It need not end in two cases:
    ///
    /// - No publisher was subscribed when the last request was sent, and the holder's epoch has changed since. So a
    ///   publisher is running now.
    /// - The epoch is lower now: the holder was forgotten, or another publisher is believed.
    pub(super) fn is_due(&self, now: Instant, epoch: u64) -> bool {
        let is_over = |failures: Failures| {
            let is_running_now = failures.last == ResyncFailure::NoResponder && epoch != self.epoch;
            is_running_now || epoch < self.epoch || now >= failures.not_before
        };
        !self.is_busy && self.failures.is_none_or(is_over)
    }

    /// Notes that an attempt is queued. `epoch` is the holder's present epoch.
    pub(super) fn begin(&mut self, epoch: u64) {
        (self.is_busy, self.epoch) = (true, epoch);
        self.overtaken = CancellationToken::new();
    }

    /// Ends the attempt that is queued or running if the holder's epoch is lower now: another publisher is believed, and
    /// must be asked. The publisher that was asked may be dead.
    pub(super) fn end_if_overtaken(&self, epoch: u64) {
        if self.is_busy && epoch < self.epoch {
            self.overtaken.cancel();
        }
    }

    /// Returns how likely the publisher is to answer, judged by the last attempt.
    pub(super) fn prospect(&self) -> Prospect {
        match self.failures.map(|failures| failures.last) {
            None => Prospect::First,
            Some(ResyncFailure::TimedOut) => Prospect::Silent,
            Some(_) => Prospect::Again,
        }
    }

    /// Notes that an attempt failed at `now`, and sets the pause before the next one.
    pub(super) fn fail(&mut self, now: Instant, failure: ResyncFailure, backoff: &Backoff) {
        let before = self.failures.map_or(0, |failures| failures.count);
        let count = before.saturating_add(1);
        self.is_busy = false;
        self.failures = Some(Failures {
            count,
            last: failure,
            not_before: now + backoff.pause(count),
        });
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
        attempts.end_if_overtaken(6);
        assert!(!attempts.overtaken.is_cancelled());
        attempts.end_if_overtaken(4);
        assert!(
            attempts.overtaken.is_cancelled(),
            "the publisher that was asked may be dead"
        );
        assert_eq!(attempts.prospect(), Prospect::First);
        attempts.fail(now, ResyncFailure::TimedOut, &backoff);
        assert!(!attempts.is_busy);
        assert_eq!(attempts.prospect(), Prospect::Silent);
        assert!(!attempts.is_due(now, 6));
        assert!(attempts.is_due(now, 4), "the other publisher was not asked yet");
        assert!(attempts.is_due(now + backoff.pause_min, 5));
        // No publisher was subscribed at the last attempt, and then one has begun a new epoch.
        attempts.begin(5);
        assert!(!attempts.overtaken.is_cancelled());
        attempts.fail(now, ResyncFailure::NoResponder, &backoff);
        assert_eq!(attempts.prospect(), Prospect::Again);
        assert!(!attempts.is_due(now, 5));
        assert!(attempts.is_due(now, 6));
        assert_eq!(attempts.failures.map(|failures| failures.count), Some(2));
    }
}
