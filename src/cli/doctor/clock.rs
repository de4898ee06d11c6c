//! Compares a daemon's clock with the clock of this machine.

use std::time::Duration;

use kvatlas_client::unix_time_us;
use serde::Deserialize;

use super::report::Check;
use crate::cli::admin_client::AdminClient;

const NAME: &str = "clock";
/// Largest accepted difference between the clocks of two machines. A larger difference makes lags and times in the log
/// misleading.
const SKEW_MAX: Duration = Duration::from_secs(1);

#[derive(Debug, Deserialize)]
struct Clock {
    now_us: u64,
}

/// Compares a daemon's clock with the clock of this machine. The daemon's time must lie between the question and the
/// answer.
pub(super) async fn check(replica: &AdminClient) -> Check {
    let asked = unix_time_us();
    let mut events = match replica.events("/page/frames").await {
        Ok(events) => events,
        Err(failure) => return Check::skipped(NAME, failure),
    };
    let place = replica.authority();
    let clock = loop {
        match events.next().await {
            None => return Check::skipped(NAME, format!("the daemon at {place} told no time")),
            Some((name, data)) if name == "frame" => break serde_json::from_str::<Clock>(&data),
            Some(_) => {}
        }
    };
    match clock {
        Err(error) => Check::skipped(NAME, format!("that of {place}: {error}")),
        Ok(clock) => judge(place, [asked, unix_time_us()], clock.now_us),
    }
}

/// Returns the check of a daemon's clock: `theirs_us` should lie between `asked_us` and `answered_us`, except for
/// [`SKEW_MAX`]. `place` is the daemon's address.
fn judge(place: &str, [asked_us, answered_us]: [u64; 2], theirs_us: u64) -> Check {
    let ahead = theirs_us.saturating_sub(answered_us);
    let behind = asked_us.saturating_sub(theirs_us);
    let skew = Duration::from_micros(ahead.max(behind));
    if skew <= SKEW_MAX {
        return Check::fine(NAME, format!("that of {place} is at most {SKEW_MAX:?} off"));
    }
    let direction = if ahead > 0 { "ahead of" } else { "behind" };
    Check::failed(
        NAME,
        format!("that of {place} is {skew:.1?} {direction} this machine's"),
        "run an NTP client on both: lags are measured by the publishers' clocks, and a clock that runs ahead makes epochs look stale",
    )
}

#[cfg(test)]
mod tests {
    use super::super::report::CheckOutcome;
    use super::*;

    #[test]
    fn clocks_may_differ_by_a_second() {
        let at = 1_700_000_000_000_000;
        let outcome = |theirs| judge("a:1", [at, at + 1000], theirs).outcome();
        assert_eq!(outcome(at + 500), CheckOutcome::Fine);
        assert_eq!(outcome(at + 900_000), CheckOutcome::Fine);
        assert_eq!(outcome(at - 900_000), CheckOutcome::Fine);
        assert_eq!(outcome(at + 2_000_000), CheckOutcome::Failed);
        assert_eq!(outcome(at - 60_000_000), CheckOutcome::Failed);
    }
}
