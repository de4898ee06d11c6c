//! Counting the connections of a listener.

/// A counter of connections.
pub trait ConnectionCounts: Send + Sync + 'static {
    /// Counts one that is served from now on.
    fn opened(&self);
    /// Counts one that has ended.
    fn closed(&self);
    /// Counts one that was closed because there are `connections_max` already, and logs it: a new one, or one that waited for its client.
    fn refused(&self, connections_max: usize);
}

/// Has a group with the gauge `open` and the counter `refused` count connections. The text is the line of the log about a refused one.
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
                static GATE: $crate::LogGate = $crate::LogGate::new();
                self.refused.increment(1);
                if let Some(suppressed) = GATE.admit() {
                    tracing::warn!(connections_max, suppressed, $refused);
                }
            }
        }
    };
}

pub(super) use count_connections;
