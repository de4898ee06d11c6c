//! Bounds on sending one request again.

use std::time::Duration;

/// Interval at which a waiting request checks whether the client has connected again.
pub(super) const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum number of connections on which one request is sent. There is a limit because the request itself may make a
/// server end the connection.
pub(super) const CONNECTIONS_MAX: usize = 8;
/// Divides a request's patience (the longest time that it waits for its answer), to give the time for which the request
/// is sent again while no daemon listens.
pub(super) const NOBODY_PARTS: u32 = 20;

/// Returns the text of an error: too many connections have ended while a request of `bytes` bytes was waiting for its
/// answer.
pub(super) fn ended_too_often(bytes: usize) -> String {
    format!(
        "the connection ended {CONNECTIONS_MAX} times with a request of {bytes} bytes under way; does the server take \
         as much from this account (max_payload)?"
    )
}
