//! Pace of the attempts to resync a holder. The table has the state after an attempt was queued, and after an attempt
//! failed:
//!
//! | state | `queued` | `failed` |
//! |---|---|---|
//! | `Untried` | `First` | `Paused` |
//! | `First` | `First` | `Paused` |
//! | `Paused` | `Again` | `Paused` |
//! | `Again` | `Again` | `Paused` |

use std::time::Instant;

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

/// State of the attempts to resync a holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum AttemptState {
    /// No attempt has been queued.
    #[default]
    Untried,
    /// First attempt is queued or running.
    First,
    /// Last attempt has failed, and no further one is queued.
    Paused(Failures),
    /// Further attempt is queued or running, after failed ones.
    Again(Failures),
}

impl AttemptState {
    /// Returns the record of the failed attempts so far. `None` before the first failure.
    fn failures(self) -> Option<Failures> {
        match self {
            Self::Untried | Self::First => None,
            Self::Paused(failures) | Self::Again(failures) => Some(failures),
        }
    }

    /// Returns the state after an attempt was queued.
    fn queued(self) -> Self {
        self.failures().map_or(Self::First, Self::Again)
    }

    /// Returns the state after an attempt failed at `now`.
    fn failed(self, now: Instant, failure: ResyncFailure, backoff: &Backoff) -> Self {
        let before = self.failures().map_or(0, |failures| failures.count);
        let count = before.saturating_add(1);
        Self::Paused(Failures {
            count,
            last: failure,
            not_before: now + backoff.pause(count),
        })
    }
}

/// Record of the attempts to resync one holder.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Attempts {
    state: AttemptState,
    /// Epoch of the holder when the last attempt was queued.
    epoch: u64,
    /// Whether the log already says that nobody answers for the holder.
    pub(super) is_unanswered_told: bool,
}

impl Attempts {
    /// Whether an attempt may begin at `now`. `epoch` is the holder's present epoch.
    ///
    /// After a failed attempt, a pause must end first. It need not end if two conditions hold: no publisher was
    /// subscribed when the last request was sent, and the holder's epoch has changed since. In that case a publisher
    /// is running now.
    pub(super) fn is_due(&self, now: Instant, epoch: u64) -> bool {
        match self.state {
            AttemptState::Untried => true,
            AttemptState::First | AttemptState::Again(_) => false,
            AttemptState::Paused(failures) => {
                let is_somebody_new = failures.last == ResyncFailure::NoResponder && epoch != self.epoch;
                is_somebody_new || now >= failures.not_before
            }
        }
    }

    /// Whether an attempt is queued or running.
    pub(super) fn is_busy(&self) -> bool {
        matches!(self.state, AttemptState::First | AttemptState::Again(_))
    }

    /// Notes that an attempt is queued. `epoch` is the holder's present epoch.
    pub(super) fn begin(&mut self, epoch: u64) {
        (self.state, self.epoch) = (self.state.queued(), epoch);
    }

    /// Returns how likely the publisher is to answer, judged by the last attempt.
    pub(super) fn prospect(&self) -> Prospect {
        match self.state.failures().map(|failures| failures.last) {
            None => Prospect::First,
            Some(ResyncFailure::TimedOut) => Prospect::Silent,
            Some(_) => Prospect::Again,
        }
    }

    /// Notes that an attempt failed at `now`, and sets the pause before the next one.
    pub(super) fn fail(&mut self, now: Instant, failure: ResyncFailure, backoff: &Backoff) {
        self.state = self.state.failed(now, failure, backoff);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use kvatlas_lab::transitions::table;

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
        // No publisher was subscribed at the last attempt, and then one has begun a new epoch.
        attempts.begin(5);
        attempts.fail(now, ResyncFailure::NoResponder, &backoff);
        assert_eq!(attempts.prospect(), Prospect::Again);
        assert!(!attempts.is_due(now, 5));
        assert!(attempts.is_due(now, 6));
    }

    #[test]
    fn attempts_change_as_the_table_says() {
        let (changes, rows) = table(include_str!("pace.rs"), 0);
        assert_eq!(changes, ["queued", "failed"]);
        let backoff = Backoff {
            pause_min: Duration::from_millis(100),
            pause_max: Duration::from_secs(5),
        };
        let now = Instant::now();
        let failed = |state: AttemptState| state.failed(now, ResyncFailure::TimedOut, &backoff);
        let paused = failed(AttemptState::Untried);
        let states = [
            AttemptState::Untried,
            AttemptState::First,
            paused,
            paused.queued(),
        ];
        let name = |state: AttemptState| match state {
            AttemptState::Untried => "Untried",
            AttemptState::First => "First",
            AttemptState::Paused(_) => "Paused",
            AttemptState::Again(_) => "Again",
        };
        let expected = states.map(|state| {
            let cells = [state.queued(), failed(state)].map(|after| name(after).to_owned());
            (name(state).to_owned(), cells.to_vec())
        });
        assert_eq!(rows, expected);
        let counts = states.map(|state| failed(state).failures().map(|failures| failures.count));
        assert_eq!(counts, [Some(1), Some(1), Some(2), Some(2)]);
    }
}
