//! What is counted, and logged, about the process: its lanes, connections and listeners.

use std::fmt::Display;
use std::time::{SystemTime, UNIX_EPOCH};

use metrics::{Counter, Gauge};

use super::labels::{Connection, ConnectionEvent, LabelValue, PerLabel};
use super::{LogGate, names};

/// One gate for each connection and event, `Connection` first.
static CONNECTION_GATES: [[LogGate; ConnectionEvent::COUNT]; Connection::COUNT] =
    [const { [const { LogGate::new() }; ConnectionEvent::COUNT] }; Connection::COUNT];
static REFUSED_GATE: LogGate = LogGate::new();

/// Seconds since the Unix epoch, or 0 for a time before it.
pub(crate) fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

/// Records what doesn't change while the process lives.
pub(crate) fn record_start(started_at: SystemTime) {
    names::BUILD_INFO.with([env!("CARGO_PKG_VERSION")]).set(1.0);
    names::PROCESS_START_TIME.with([]).set(unix_seconds(started_at));
}

/// The handle for the state of the process as a whole.
pub struct ProcessMetrics {
    ready: Gauge,
}

impl ProcessMetrics {
    /// Looks the handle up.
    #[expect(
        clippy::new_without_default,
        reason = "it registers series with the recorder, which a default should not"
    )]
    pub fn new() -> Self {
        Self {
            ready: names::READY.with([]),
        }
    }

    /// Records whether the readiness probe succeeds.
    pub fn set_ready(&self, ready: bool) {
        self.ready.set(if ready { 1.0 } else { 0.0 });
    }
}

/// The gauges of one lane's queue.
pub struct LaneMetrics {
    queue_bytes: Gauge,
    queue_messages: Gauge,
}

impl LaneMetrics {
    /// The gauges of the lane with this number, from 0.
    pub fn for_lane(lane: usize) -> Self {
        let lane = lane.to_string();
        Self {
            queue_bytes: names::LANE_QUEUE_BYTES.with([&lane]),
            queue_messages: names::LANE_QUEUE_MESSAGES.with([&lane]),
        }
    }

    /// Records how much waits for the lane.
    pub fn set_queue(&self, messages: u64, bytes: u64) {
        self.queue_messages.set(messages as f64);
        self.queue_bytes.set(bytes as f64);
    }
}

/// The handles for one connection to the message broker.
pub struct ConnectionMetrics {
    connection: Connection,
    events: PerLabel<ConnectionEvent, Counter>,
}

impl ConnectionMetrics {
    /// The handles of one connection.
    pub fn for_connection(connection: Connection) -> Self {
        let events = PerLabel::new(|event: ConnectionEvent| {
            names::CONNECTION_EVENTS.with([connection.as_str(), event.as_str()])
        });
        Self { connection, events }
    }

    /// Counts what happened to the connection, and logs it.
    pub fn happened(&self, event: ConnectionEvent, detail: &dyn Display) {
        self.events.get(event).increment(1);
        let gate = &CONNECTION_GATES[self.connection.index()][event.index()];
        let Some(suppressed) = gate.admit() else { return };
        let connection = self.connection;
        match event {
            ConnectionEvent::Connected => {
                tracing::info!(%connection, %event, %detail, suppressed, "connection to the broker");
            }
            _ => tracing::warn!(%connection, %event, %detail, suppressed, "connection to the broker"),
        }
    }
}

/// The handle for the admin listener.
pub struct AdminMetrics {
    connections_refused: Counter,
}

impl AdminMetrics {
    /// Looks the handle up.
    #[expect(
        clippy::new_without_default,
        reason = "it registers series with the recorder, which a default should not"
    )]
    pub fn new() -> Self {
        Self {
            connections_refused: names::ADMIN_CONNECTIONS_REFUSED.with([]),
        }
    }

    /// Counts a connection that was closed because `limit` of them were open, and logs it.
    pub fn connection_refused(&self, limit: usize) {
        self.connections_refused.increment(1);
        if let Some(suppressed) = REFUSED_GATE.admit() {
            tracing::warn!(limit, suppressed, "admin connection closed: too many are open");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::metrics::tests::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            record_start(UNIX_EPOCH + Duration::from_millis(1500));
            ProcessMetrics::new().set_ready(true);
            LaneMetrics::for_lane(3).set_queue(2, 512);
            let connection = ConnectionMetrics::for_connection(Connection::Queries);
            connection.happened(ConnectionEvent::Connected, &"broker-1");
            connection.happened(ConnectionEvent::SlowConsumer, &"7");
            connection.happened(ConnectionEvent::SlowConsumer, &"7");
            AdminMetrics::new().connection_refused(64);
        });
        let build = format!(
            "kvatlas_build_info{{version=\"{}\"}} 1",
            env!("CARGO_PKG_VERSION")
        );
        for line in [
            build.as_str(),
            "kvatlas_process_start_time_seconds 1.5",
            "kvatlas_ready 1",
            "kvatlas_lane_queue_messages{lane=\"3\"} 2",
            "kvatlas_lane_queue_bytes{lane=\"3\"} 512",
            "kvatlas_connection_events_total{connection=\"queries\",event=\"connected\"} 1",
            "kvatlas_connection_events_total{connection=\"queries\",event=\"slow_consumer\"} 2",
            "kvatlas_connection_events_total{connection=\"queries\",event=\"error\"} 0",
            "kvatlas_admin_connections_refused_total 1",
        ] {
            assert!(
                text.lines().any(|candidate| candidate == line),
                "missing: {line}\n{text}"
            );
        }
        assert!(rendered(|| ProcessMetrics::new().set_ready(false)).contains("kvatlas_ready 0\n"));
    }

    #[test]
    fn a_time_before_the_epoch_is_zero() {
        assert_eq!(
            unix_seconds(UNIX_EPOCH - Duration::from_secs(1)).to_bits(),
            0.0_f64.to_bits()
        );
    }
}
