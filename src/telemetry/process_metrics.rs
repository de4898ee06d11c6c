//! Metrics and log lines about the process: its build, resources, lanes, broker connections and admin listener.

use std::fmt::Display;
use std::time::{SystemTime, UNIX_EPOCH};

use metrics::{Counter, Gauge};
use rustix::param::page_size;
use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

use super::declare::metric_group;
use super::labels::{Connection, ConnectionEvent, LabelValue, LaneWork, PerLabel};
use super::{ConnectionCounts, LogGate, log_gated};

/// Gates that limit the rate of log lines: one for each pair of a connection and an event, `[connection][event]`.
static CONNECTION_GATES: [[LogGate; ConnectionEvent::ALL.len()]; Connection::ALL.len()] =
    [const { [const { LogGate::new() }; ConnectionEvent::ALL.len()] }; Connection::ALL.len()];

/// Returns a time in seconds since the Unix epoch; 0 for an earlier time.
pub(crate) fn unix_seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

metric_group! {
    /// Metrics about the program.
    BuildMetrics::of(version: &str, commit: &str) {
        /// Always 1; the labels tell the version of the program, and the commit that it was built from.
        info: Gauge = "kvatlas_build_info", Count;
    }
}

metric_group! {
    /// Metrics about the process.
    ProcessMetrics::new() {
        /// Start of the process, in seconds since the Unix epoch.
        start_time: Gauge = "kvatlas_process_start_time_seconds", Seconds;
        /// 1 while the readiness probe succeeds, else 0.
        pub ready: Gauge = "kvatlas_ready", Count;
        /// 1 while the process has the connection to NATS that it needs in order to work, else 0.
        pub connected: Gauge = "kvatlas_connected", Count;
        /// Processor time that the process has used, in whole seconds.
        cpu: Counter = "kvatlas_process_cpu_seconds_total", Seconds;
        /// Memory of the process that is in RAM; 0 if the system does not report it.
        resident_memory: Gauge = "kvatlas_process_resident_memory_bytes", Bytes;
        /// File descriptors that the process has open; 0 if the system does not report the number.
        open_descriptors: Gauge = "kvatlas_process_open_file_descriptors", Count;
        /// File descriptors that the process may have open.
        allowed_descriptors: Gauge = "kvatlas_process_allowed_file_descriptors", Count;
    }
}

/// Records the values that stay the same as long as the process lives: the build, and the start time `started_at`.
pub(crate) fn record_start(started_at: SystemTime) {
    let build = BuildMetrics::of(env!("CARGO_PKG_VERSION"), crate::commit());
    build.info.set(1.0);
    ProcessMetrics::new().start_time.set(unix_seconds(started_at));
}

impl ProcessMetrics {
    /// Sets the metrics of the processor time, the memory and the file descriptors that the process uses.
    pub fn publish_usage(&self) {
        let used = clock_gettime(ClockId::ProcessCPUTime);
        self.cpu.absolute(u64::try_from(used.tv_sec).unwrap_or_default());
        if let Some(bytes) = resident_bytes() {
            self.resident_memory.set(bytes as f64);
        }
        if let Ok(open) = std::fs::read_dir("/proc/self/fd") {
            // One of the descriptors is the one that reads the directory.
            self.open_descriptors.set(open.count().saturating_sub(1) as f64);
        }
        let allowed = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        self.allowed_descriptors.set(allowed as f64);
    }
}

/// Returns the number of bytes of the process's memory that are in RAM. `None` on systems without `/proc`.
fn resident_bytes() -> Option<u64> {
    // The second number is the count of resident pages.
    let numbers = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = numbers.split(' ').nth(1)?.parse().ok()?;
    pages.checked_mul(u64::try_from(page_size()).ok()?)
}

metric_group! {
    /// Metrics about the queue of a lane.
    LaneMetrics::for_lane(lane: usize) {
        /// Payload bytes that wait for a lane.
        pub queue_bytes: Gauge = "kvatlas_lane_queue_bytes", Bytes;
        /// Messages that wait for a lane.
        pub queue_messages: Gauge = "kvatlas_lane_queue_messages", Count;
        /// Time that a lane has worked, in whole seconds, by kind of work.
        pub busy: PerLabel<LaneWork, Counter> = "kvatlas_lane_busy_seconds_total", Seconds;
    }
}

metric_group! {
    /// Metrics about connections to the message broker.
    ConnectionMetrics::for_connection(connection: Connection) keeping {
        /// Connection that the log lines name.
        which: Connection = connection
    } {
        /// Changes of the connections to the message broker.
        events: PerLabel<ConnectionEvent, Counter> = "kvatlas_connection_events_total", Count;
    }
}

impl ConnectionMetrics {
    /// Counts an event of the connection. Also writes a log line about it, with `detail`.
    pub fn happened(&self, event: ConnectionEvent, detail: &dyn Display) {
        self.events.get(event).increment(1);
        let gate = &CONNECTION_GATES[self.which.index()][event.index()];
        let Some(suppressed) = gate.admit() else { return };
        let connection = self.which;
        match event {
            ConnectionEvent::Connected => {
                tracing::info!(%connection, %event, %detail, suppressed, "connection to the broker");
            }
            _ => tracing::warn!(%connection, %event, %detail, suppressed, "connection to the broker"),
        }
    }
}

metric_group! {
    /// Metrics about the admin listener.
    AdminMetrics::new() {
        /// Connections to the admin listener that were closed because too many were open: the new connection, or the oldest one
        /// that waited for its client.
        connections_refused: Counter = "kvatlas_admin_connections_refused_total", Count;
    }
}

impl ConnectionCounts for AdminMetrics {
    fn opened(&self) {}

    fn closed(&self) {}

    fn refused(&self, limit: usize) {
        self.connections_refused.increment(1);
        log_gated!(warn "admin connection closed: too many are open"; limit);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::recorder::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            record_start(UNIX_EPOCH + Duration::from_millis(1500));
            ProcessMetrics::new().ready.set(1.0);
            ProcessMetrics::new().connected.set(1.0);
            LaneMetrics::for_lane(3).queue_messages.set(2.0);
            LaneMetrics::for_lane(3).queue_bytes.set(512.0);
            let connection = ConnectionMetrics::for_connection(Connection::Queries);
            connection.happened(ConnectionEvent::Connected, &"broker-1");
            connection.happened(ConnectionEvent::SlowConsumer, &"7");
            connection.happened(ConnectionEvent::SlowConsumer, &"7");
            AdminMetrics::new().refused(64);
        });
        let build = format!(
            "kvatlas_build_info{{version=\"{}\",commit=\"{}\"}} 1",
            env!("CARGO_PKG_VERSION"),
            crate::commit()
        );
        for line in [
            build.as_str(),
            "kvatlas_process_start_time_seconds 1.5",
            "kvatlas_ready 1",
            "kvatlas_connected 1",
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
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_use_of_memory_and_descriptors_follows_the_process() {
        let value = |name: &str, text: &str| -> f64 {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.unwrap().parse().unwrap()
        };
        let files: Vec<_> = (0..200).map(|_| tempfile::tempfile().unwrap()).collect();
        let memory = vec![1_u8; 64 << 20];
        let text = rendered(|| ProcessMetrics::new().publish_usage());
        let open = value("kvatlas_process_open_file_descriptors", &text);
        let allowed = value("kvatlas_process_allowed_file_descriptors", &text);
        assert!(files.len() as f64 <= open && open <= allowed, "{text}");
        let resident = value("kvatlas_process_resident_memory_bytes", &text);
        assert!(resident >= memory.len() as f64, "{text}");
    }

    #[test]
    fn a_time_before_the_epoch_is_zero() {
        assert_eq!(
            unix_seconds(UNIX_EPOCH - Duration::from_secs(1)).to_bits(),
            0.0_f64.to_bits()
        );
    }
}
