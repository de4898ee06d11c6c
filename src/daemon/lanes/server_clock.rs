//! Clock of a NATS server, as its answers tell it. It is one clock for all replicas.
//!
//! A replica's own clock can be ahead of the others' clocks, or behind them. It can also jump while the replica is
//! stopped. So times that outlast a replica, or that replicas exchange, are times of the server:
//!
//! - times in the names of snapshots in a bucket
//! - ages of messages that a stream has kept
//! - times in snapshots at which publishers were last seen

use parking_lot::Mutex;

use super::clock::now_us;

/// Clock of the NATS server. It goes on from the last time that the server has told.
#[derive(Debug, Default)]
pub(crate) struct ServerClock {
    /// Last time that the server has told. `None` before the first answer.
    told: Mutex<Option<ServerReading>>,
}

/// Reading of the server's clock, in microseconds since the Unix epoch. The other times are readings of [`now_us`].
#[derive(Debug, Clone, Copy)]
struct ServerReading {
    server_us: u64,
    asked_us: u64,
    came_us: u64,
}

impl ServerClock {
    /// Notes the time that the server has told, in microseconds since the Unix epoch. `asked_us` is the value of
    /// [`now_us`] when the server was asked.
    pub(crate) fn note(&self, server_us: u64, asked_us: u64) {
        *self.told.lock() = Some(ServerReading {
            server_us,
            asked_us,
            came_us: now_us(),
        });
    }

    /// Returns the server's time, in microseconds since the Unix epoch. `None` if the server has told none. The time
    /// that the answer was under way is not added. So the result may be late, but is never early.
    pub(crate) fn time_us(&self) -> Option<u64> {
        let told = (*self.told.lock())?;
        Some(
            told.server_us
                .saturating_add(now_us().saturating_sub(told.came_us)),
        )
    }

    /// Returns the time on the server's clock at the local time `local_us`, a reading of [`now_us`]. `None` if the
    /// server has told no time. The result is never later than the true time.
    pub(super) fn server_us(&self, local_us: u64) -> Option<u64> {
        let told = (*self.told.lock())?;
        let later_us = local_us.saturating_sub(told.came_us);
        let earlier_us = told.came_us.saturating_sub(local_us);
        Some(told.server_us.saturating_add(later_us).saturating_sub(earlier_us))
    }

    /// Returns the age of an event that took place at `server_us` by the server's clock, in microseconds. It is never
    /// less than the true age. `None` if the server has told no time.
    ///
    /// A time in the server's future says nothing, because the clock was set back. The age is then the largest `u64`.
    pub(crate) fn age_us(&self, server_us: u64) -> Option<u64> {
        let told = (*self.told.lock())?;
        let time_us = told
            .server_us
            .saturating_add(now_us().saturating_sub(told.asked_us));
        Some(time_us.checked_sub(server_us).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_time_goes_on_from_what_it_told_last() {
        let clock = ServerClock::default();
        assert_eq!(clock.time_us(), None);
        // First the server tells a day of the year 2255, then one of 1970: only its last answer counts, not the
        // machine's clock.
        let (late, early) = (9_000_000_000_000_000, 5_000_000_000);
        clock.note(late, now_us());
        assert!(clock.time_us() >= Some(late));
        clock.note(early, now_us());
        let time = clock.time_us();
        assert!(Some(early) <= time && time < Some(late));
        assert!(clock.time_us() >= time);
    }

    #[test]
    fn an_age_by_the_servers_clock_is_at_least_the_true_one() {
        let clock = ServerClock::default();
        assert_eq!((clock.age_us(5), clock.server_us(5)), (None, None));
        let told_us = 5_000_000_000;
        let asked_us = now_us() - 1_000_000;
        clock.note(told_us, asked_us);
        // The answer may have been told just before it came, or just after the server was asked.
        assert!(clock.age_us(told_us) >= Some(1_000_000));
        assert!(clock.server_us(asked_us) <= Some(told_us - 1_000_000));
        assert!(clock.server_us(now_us()) >= Some(told_us));
        // A time in the future is no sign that anything took place just now.
        assert_eq!(clock.age_us(told_us + 3_600_000_000), Some(u64::MAX));
    }
}
