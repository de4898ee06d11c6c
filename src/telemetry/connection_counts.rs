//! Counting of the connections of a listener.

/// A counter of the connections of one listener.
pub trait ConnectionCounts: Send + Sync + 'static {
    /// Counts a connection that is served from now on.
    fn opened(&self);
    /// Counts a connection that was served and has ended.
    fn closed(&self);
    /// Counts and logs a connection that was closed because `connections_max` connections are open. The closed connection is
    /// either the new one, or the oldest one that waits for its client.
    fn refused(&self, connections_max: usize);
}

/// Implements [`ConnectionCounts`](crate::ConnectionCounts) for a metric group with the gauge `open` and the counter
/// `refused`. The second argument is the text of the log line that reports a refused connection.
macro_rules! count_connections {
    ($group:ident, $refused:literal) => {
        impl $crate::ConnectionCounts for $group {
            fn opened(&self) {
                self.open.increment(1.0);
            }

            fn closed(&self) {
                self.open.decrement(1.0);
            }

            fn refused(&self, connections_max: usize) {
                self.refused.increment(1);
                $crate::log_gated!(warn $refused; connections_max);
            }
        }
    };
}

pub(super) use count_connections;
