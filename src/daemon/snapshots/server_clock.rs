//! Clock of the NATS server that has the bucket with the snapshots. It is one clock for all replicas.
//!
//! A replica's own clock can be ahead of the others' clocks, or behind them. Snapshots that replicas exchange are
//! compared by the times in their names. So a daemon with a bucket takes these times from the server.

use parking_lot::Mutex;

use crate::lanes::now_us;

/// Clock of the NATS server. It goes on from the last time that the server has told.
#[derive(Debug, Default)]
pub(super) struct ServerClock {
    /// Last time that the server has told, and the value of [`now_us`] when the server's answer came. `None` before the
    /// first answer.
    told: Mutex<Option<(u64, u64)>>,
}

impl ServerClock {
    /// Notes the time that the server has told, in microseconds since the Unix epoch. The time that the answer was
    /// under way is not added. So this clock may be late, but is never early.
    pub(super) fn note(&self, server_us: u64) {
        *self.told.lock() = Some((server_us, now_us()));
    }

    /// Returns the server's time, in microseconds since the Unix epoch. `None` if the server has told none.
    pub(super) fn time_us(&self) -> Option<u64> {
        let (server_us, then_us) = (*self.told.lock())?;
        Some(server_us.saturating_add(now_us().saturating_sub(then_us)))
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
        clock.note(late);
        assert!(clock.time_us() >= Some(late));
        clock.note(early);
        let time = clock.time_us();
        assert!(Some(early) <= time && time < Some(late));
        assert!(clock.time_us() >= time);
    }
}
