//! Bounds on sending one request again.

use std::time::{Duration, Instant};

/// Interval at which a waiting request checks whether the client has connected again.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum number of connections on which one request is sent. There is a limit because the request itself may make a
/// server end the connection.
pub(super) const CONNECTIONS_MAX: usize = 8;
/// Divides a request's patience (the longest time that it waits for its answer), to give the time for which the request
/// is sent again while no daemon listens.
const NOBODY_PARTS: u32 = 20;

/// Period in which one request is sent again because no daemon listens. It begins anew on each connection: daemons may
/// connect again later than the client.
#[derive(Debug, Clone, Copy)]
pub(super) struct NobodyPeriod {
    length: Duration,
    /// Connection on which the period began, and its beginning.
    begun: Option<(u64, Instant)>,
}

impl NobodyPeriod {
    /// Returns the period of a request that waits for `patience` at most.
    pub(super) fn of(patience: Duration) -> Self {
        Self {
            length: patience / NOBODY_PARTS,
            begun: None,
        }
    }

    /// Whether the period lasts at `now`, when the server has said on `connection` that no daemon listens. The first such
    /// word on a connection begins the period.
    pub(super) fn lasts(&mut self, connection: u64, now: Instant) -> bool {
        let begun = self.begun.filter(|(on, _)| *on == connection);
        let (_, since) = *self.begun.insert(begun.unwrap_or((connection, now)));
        now.saturating_duration_since(since) < self.length
    }
}

/// Returns the text of an error: too many connections have ended while a request of `bytes` bytes was waiting for its
/// answer.
pub(super) fn ended_too_often(bytes: usize) -> String {
    format!(
        "the connection ended {CONNECTIONS_MAX} times with a request of {bytes} bytes under way; does the server take \
         as much from this account (max_payload)?"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_may_listen_for_a_while_on_each_connection() {
        let mut period = NobodyPeriod::of(20 * Duration::from_secs(1));
        let begun = Instant::now();
        let heard = [
            (1, 5_000),
            (1, 5_999),
            (1, 6_000),
            (2, 7_000),
            (2, 7_999),
            (2, 8_000),
        ];
        let lasts = heard.map(|(connection, ms)| period.lasts(connection, begun + Duration::from_millis(ms)));
        assert_eq!(lasts, [true, true, false, true, true, false]);
    }
}
