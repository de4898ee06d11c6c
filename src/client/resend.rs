//! Bounds on sending one request again.

use std::time::Duration;

/// Interval at which a waiting request checks whether the connection was made anew.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum number of connections on which one request is sent. The number is bounded, because a server may end a connection
/// because of the request itself.
pub(super) const CONNECTIONS_MAX: usize = 8;
/// Limits how long a request is sent again while no daemon listens: to the request's patience divided by this number.
/// The patience is the longest time that the request waits.
pub(super) const NOBODY_PARTS: u32 = 20;

/// Returns the text of the error that too many connections have ended with a request of `bytes` under way.
pub(super) fn ended_too_often(bytes: usize) -> String {
    format!(
        "the connection ended {CONNECTIONS_MAX} times with a request of {bytes} bytes under way; does the server take \
         as much from this account (max_payload)?"
    )
}
