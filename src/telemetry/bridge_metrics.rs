//! Metrics and log lines about the engines that a bridge follows.

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::Arc;

use metrics::{Counter, Gauge};
use parking_lot::Mutex;

use kvatlas_engines::Reason;

use super::declare::metric_group;
use super::labels::{EngineSource, FrameFault, PerLabel, RepublishCut, RepublishOmission, label_of};
use super::log_gated;
use super::told::{ExactGaugeEntry, ExactGauges};

/// Maximum number of engines that have metric series of their own at the same time.
const ENGINES_MAX: usize = 1024;
/// Label that engines share if [`ENGINES_MAX`] other engines already have labels of their own.
const OTHER_ENGINES: &str = "(other)";

/// Name of an engine in labels: the namespace, and the instance with its rank.
type EngineName = (String, String);

/// Permission for an engine to have metric series of its own. At most [`ENGINES_MAX`] engines have the permission at a
/// time. An engine loses it when its last lease is dropped.
struct EngineLease {
    named: Arc<Mutex<HashMap<EngineName, usize>>>,
    name: EngineName,
}

impl Drop for EngineLease {
    fn drop(&mut self) {
        let mut named = self.named.lock();
        if let Some(handles) = named.get_mut(&self.name) {
            *handles -= 1;
            if *handles == 0 {
                named.remove(&self.name);
            }
        }
    }
}

metric_group! {
    /// Metrics about sources in which a bridge finds engines, and faults of the bridge.
    BridgeMetrics::new() keeping {
        /// Engines that have series of their own, each with its number of handles.
        named: Arc<Mutex<HashMap<EngineName, usize>>> = Arc::default(),
        /// Gauges of exact engines, which are 0 while daemons cannot be told.
        gauges: ExactGauges = ExactGauges::default()
    } {
        /// Payloads of engines that could not be decoded.
        undecodable: Counter = "kvatlas_bridge_undecodable_total", Count;
        /// Events of engines, or blocks of such events, that the bridge did not pass on to daemons, by reason.
        left_out: PerLabel<Reason, Counter> = "kvatlas_bridge_events_left_out_total", Count;
        /// Connections to engines that the bridge ended because a frame, message or command on them exceeded a limit, by reason.
        cut: PerLabel<FrameFault, Counter> = "kvatlas_bridge_connections_cut_total", Count;
        /// Blocks of engines that the bridge did not republish for routers, by reason.
        republish_left_out: PerLabel<RepublishOmission, Counter> = "kvatlas_bridge_republish_left_out_total", Count;
        /// Engines whose events the bridge does not republish for routers, because they have no ports of `--republish` yet.
        pub republish_without_ports: Gauge = "kvatlas_bridge_republish_engines_without_ports", Count;
        /// Connections of routers to republished events that the bridge ended, by reason.
        republish_cut: PerLabel<RepublishCut, Counter> = "kvatlas_bridge_republish_connections_cut_total", Count;
        /// Servers of engines that the bridge asks for their publishers.
        servers: Gauge = "kvatlas_bridge_servers", Count;
        /// Servers of engines that do not answer, or whose engines cannot be followed; `/workers` of the bridge says why.
        servers_troubled: Gauge = "kvatlas_bridge_servers_troubled", Count;
        /// Engines that the bridge found, by the source in which it looked for them.
        pub discovered: PerLabel<EngineSource, Gauge> = "kvatlas_bridge_discovered_engines", Count;
        /// Engines that the bridge found and does not follow, by source; `/workers` of the bridge says why.
        pub refused: PerLabel<EngineSource, Gauge> = "kvatlas_bridge_refused_engines", Count;
        /// Models of which daemons are not told that the bridge refuses their engines, because too many are told of.
        pub models_untold: Gauge = "kvatlas_bridge_models_untold", Count;
        /// Failed searches for engines, by source; the bridge still follows the engines that it found before, but none of an
        /// InferencePool that is gone.
        pub discovery_failures: PerLabel<EngineSource, Counter> = "kvatlas_bridge_discovery_failures_total", Count;
        /// Times that a part of the bridge's state could not be written or removed, or not be read again after its first reading
        /// had failed; the bridge tries again.
        state_failures: Counter = "kvatlas_bridge_state_failures_total", Count;
    }
}

impl BridgeMetrics {
    /// Makes the metric handles of one engine of a namespace. The engine's series end when its last handle is dropped.
    /// At most 1024 engines have series of their own at a time. All further engines share the series of one label.
    pub fn of_engine(&self, namespace: &str, engine: &str) -> EngineMetrics {
        let name = (namespace.to_owned(), engine.to_owned());
        {
            let mut named = self.named.lock();
            if !named.contains_key(&name) && named.len() >= ENGINES_MAX {
                return self.with_gauge(EngineMetrics::labelled(OTHER_ENGINES, OTHER_ENGINES), None);
            }
            *named.entry(name.clone()).or_default() += 1;
        }
        let lease = EngineLease {
            named: Arc::clone(&self.named),
            name,
        };
        self.with_gauge(EngineMetrics::labelled(namespace, engine), Some(lease))
    }

    fn with_gauge(&self, engine: EngineMetrics, lease: Option<EngineLease>) -> EngineMetrics {
        EngineMetrics {
            _lease: lease,
            told: Some(self.gauges.add(engine.exact.clone())),
            ..engine
        }
    }

    /// Records whether the NATS server is away. Meanwhile no engine counts as exact, because daemons cannot be told of it.
    pub fn set_away(&self, is_away: bool) {
        self.gauges.set_away(is_away);
    }

    /// Records the number of servers that are asked for their publishers (`asked`), and how many of them do not answer or have
    /// engines that cannot be followed (`troubled`).
    pub fn set_servers(&self, asked: usize, troubled: usize) {
        self.servers.set(asked as f64);
        self.servers_troubled.set(troubled as f64);
    }

    /// Counts and logs a failure to write or remove a part of the bridge's state, or to read it late.
    pub fn state_failed(&self, file: &dyn Display, error: &dyn Display) {
        self.state_failures.increment(1);
        log_gated!(error "the bridge's state is not kept"; %file, %error);
    }

    /// Counts and logs a payload that could not be decoded.
    pub fn undecodable(&self, engine: &dyn Display, error: &dyn Display) {
        self.undecodable.increment(1);
        log_gated!(warn "a payload of an engine cannot be decoded"; %engine, %error);
    }

    /// Counts and logs a connection to an engine that the bridge has ended. The engine had announced a frame, message
    /// or command that exceeds a limit.
    pub fn connection_cut(&self, fault: FrameFault, endpoint: &dyn Display) {
        self.cut.get(fault).increment(1);
        log_gated!(warn "a connection to an engine was ended"; %endpoint, reason = %fault);
    }

    /// Counts blocks that are not republished for routers. If a bound is the reason, also writes a log line.
    pub fn republish_left_out(&self, reason: RepublishOmission, blocks: u64) {
        if blocks == 0 {
            return;
        }
        self.republish_left_out.get(reason).increment(blocks);
        match reason {
            RepublishOmission::Full => log_gated!(
                warn "an engine has more blocks than --republish-max-bytes has room for: routers are not told of all";
                blocks
            ),
            RepublishOmission::Salts => log_gated!(
                warn "an engine's blocks have more salts and adapters than are told apart: routers are not told of all";
                blocks
            ),
            RepublishOmission::Special | RepublishOmission::Unknown => {}
        }
    }

    /// Counts and logs a connection of a router that the bridge ended.
    pub fn republish_cut(&self, reason: RepublishCut) {
        self.republish_cut.get(reason).increment(1);
        log_gated!(warn "a connection of a router was ended"; %reason);
    }

    /// Counts events of an engine, or blocks of events, that the bridge does not pass on to daemons. Also writes a log line at
    /// level debug.
    pub fn left_out(&self, reason: Reason, times: u64, engine: &dyn Display) {
        self.left_out.get(reason).increment(times);
        log_gated!(
            debug "left out of an engine's events" per Reason(reason);
            %engine, reason = reason.as_str(), times
        );
    }
}

label_of!(Reason: "reason");

metric_group! {
    /// Metrics about one engine that a bridge follows.
    EngineMetrics::labelled(namespace: &str, engine: &str) keeping {
        /// Permission for series of the engine's own; `None` if the engine shares the label [`OTHER_ENGINES`].
        _lease: Option<EngineLease> = None,
        /// Entry of the gauge `exact`; `None` only while the handles are made.
        told: Option<ExactGaugeEntry> = None
    } {
        /// Batches that an engine has published or replayed, and that were applied.
        batches: Counter = "kvatlas_bridge_batches_total", Count;
        /// Payload bytes of the batches that an engine has published or replayed.
        bytes: Counter = "kvatlas_bridge_received_bytes_total", Bytes;
        /// Connections made to an engine's publisher.
        pub connections: Counter = "kvatlas_bridge_connections_total", Count;
        /// Times that an engine's replay socket was asked.
        pub replays: Counter = "kvatlas_bridge_replays_total", Count;
        /// Times that batches of an engine were found to be lost, and the engine could not send them again.
        gaps: Counter = "kvatlas_bridge_gaps_total", Count;
        /// Times that the bridge found that an engine had been replaced by another process.
        restarts: Counter = "kvatlas_bridge_restarts_total", Count;
        /// 1 while the engine's blocks are known for certain and daemons can be told of them, else 0.
        exact: Gauge = "kvatlas_bridge_engine_exact", Count;
        /// 1 while this bridge publishes the engine's blocks to daemons, 0 while another bridge of its group does.
        pub speaks: Gauge = "kvatlas_bridge_engine_speaks", Count;
        /// Memory of the engine's blocks with their tokens, which the bridge keeps to republish them for routers.
        pub republished_bytes: Gauge = "kvatlas_bridge_republished_bytes", Bytes;
        /// Routers that subscribe to the engine's republished events.
        pub republish_subscribers: Gauge = "kvatlas_bridge_republish_subscribers", Count;
        /// Times that the bridge sent all of the engine's blocks to a router.
        pub republish_answers: Counter = "kvatlas_bridge_republish_answers_total", Count;
    }
}

impl EngineMetrics {
    /// Records whether the engine's blocks are known for certain.
    pub fn set_exact(&self, is_exact: bool) {
        if let Some(told) = &self.told {
            told.set(is_exact);
        }
    }

    /// Counts a batch that the engine published or replayed, and its payload bytes.
    pub fn received(&self, bytes: usize) {
        self.batches.increment(1);
        self.bytes.increment(bytes as u64);
    }

    /// Counts and logs a loss of batches that the engine cannot send again.
    pub fn lost_batches(&self, engine: &dyn Display) {
        self.gaps.increment(1);
        log_gated!(warn "batches of an engine are lost; in doubt until it clears or restarts"; %engine);
    }

    /// Counts and logs that the bridge found another process in place of the engine.
    pub fn restarted(&self, engine: &dyn Display) {
        self.restarts.increment(1);
        log_gated!(info "the engine is another process: nothing of the old one is left"; %engine);
    }
}

#[cfg(test)]
mod tests {
    use super::super::recorder::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let mut kept = None;
        let text = rendered(|| {
            let bridge = BridgeMetrics::new();
            bridge.undecodable(&"a/0", &"no batch");
            bridge.left_out(Reason::Placeholder, 3, &"a/0");
            bridge.connection_cut(FrameFault::TooManyFrames, &"tcp://a:1");
            bridge.republish_left_out(RepublishOmission::Full, 0);
            bridge.republish_left_out(RepublishOmission::Full, 5);
            bridge.republish_cut(RepublishCut::Slow);
            bridge.republish_without_ports.set(3.0);
            bridge.set_servers(7, 2);
            bridge.discovered.get(EngineSource::Dns).set(3.0);
            bridge
                .discovery_failures
                .get(EngineSource::Kubernetes)
                .increment(1);
            bridge.state_failed(&"registered", &"no space left");
            let engine = bridge.of_engine("m", "a/0");
            engine.received(7);
            engine.connections.increment(1);
            engine.replays.increment(1);
            engine.lost_batches(&"a/0");
            engine.restarted(&"a/0");
            engine.set_exact(true);
            engine.speaks.set(1.0);
            engine.republished_bytes.set(9.0);
            engine.republish_subscribers.set(2.0);
            engine.republish_answers.increment(1);
            kept = Some(engine);
        });
        drop(kept);
        for line in [
            "kvatlas_bridge_undecodable_total 1",
            "kvatlas_bridge_events_left_out_total{reason=\"placeholder\"} 3",
            "kvatlas_bridge_connections_cut_total{reason=\"too_many_frames\"} 1",
            "kvatlas_bridge_republish_left_out_total{reason=\"full\"} 5",
            "kvatlas_bridge_republish_connections_cut_total{reason=\"slow\"} 1",
            "kvatlas_bridge_republish_engines_without_ports 3",
            "kvatlas_bridge_republished_bytes{namespace=\"m\",engine=\"a/0\"} 9",
            "kvatlas_bridge_republish_subscribers{namespace=\"m\",engine=\"a/0\"} 2",
            "kvatlas_bridge_republish_answers_total{namespace=\"m\",engine=\"a/0\"} 1",
            "kvatlas_bridge_servers 7",
            "kvatlas_bridge_servers_troubled 2",
            "kvatlas_bridge_discovered_engines{source=\"dns\"} 3",
            "kvatlas_bridge_discovery_failures_total{source=\"kubernetes\"} 1",
            "kvatlas_bridge_state_failures_total 1",
            "kvatlas_bridge_batches_total{namespace=\"m\",engine=\"a/0\"} 1",
            "kvatlas_bridge_received_bytes_total{namespace=\"m\",engine=\"a/0\"} 7",
            "kvatlas_bridge_connections_total{namespace=\"m\",engine=\"a/0\"} 1",
            "kvatlas_bridge_replays_total{namespace=\"m\",engine=\"a/0\"} 1",
            "kvatlas_bridge_gaps_total{namespace=\"m\",engine=\"a/0\"} 1",
            "kvatlas_bridge_restarts_total{namespace=\"m\",engine=\"a/0\"} 1",
            "kvatlas_bridge_engine_exact{namespace=\"m\",engine=\"a/0\"} 1",
            "kvatlas_bridge_engine_speaks{namespace=\"m\",engine=\"a/0\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "missing: {line}\n{text}");
        }
    }

    #[test]
    fn engines_without_end_share_a_label() {
        let mut kept = Vec::new();
        let text = rendered(|| {
            let bridge = BridgeMetrics::new();
            for number in 0..ENGINES_MAX + 5 {
                let engine = bridge.of_engine("m", &number.to_string());
                engine.connections.increment(1);
                kept.push(engine);
            }
        });
        let series = text
            .lines()
            .filter(|line| line.starts_with("kvatlas_bridge_connections_total{"));
        assert_eq!(series.count(), ENGINES_MAX + 1);
        let others = "kvatlas_bridge_connections_total{namespace=\"(other)\",engine=\"(other)\"} 5";
        assert!(text.contains(others));
    }

    #[test]
    fn no_engine_is_exact_while_the_server_is_away() {
        let exact = |happens: fn(&BridgeMetrics, &EngineMetrics)| {
            let mut kept = None;
            let text = rendered(|| {
                let bridge = BridgeMetrics::new();
                let engine = bridge.of_engine("m", "a/0");
                engine.set_exact(true);
                // Another part of the bridge has handles of the same engine.
                let other = bridge.of_engine("m", "a/0");
                happens(&bridge, &engine);
                kept = Some((engine, other));
            });
            drop(kept);
            text.contains("kvatlas_bridge_engine_exact{namespace=\"m\",engine=\"a/0\"} 1")
        };
        assert!(exact(|_, _| ()));
        assert!(!exact(|bridge, _| bridge.set_away(true)));
        assert!(!exact(|bridge, engine| {
            bridge.set_away(true);
            engine.set_exact(false);
            engine.set_exact(true);
        }));
        assert!(exact(|bridge, _| [true, false]
            .map(|is_away| bridge.set_away(is_away))
            .into_iter()
            .collect()));
        assert!(!exact(|bridge, engine| {
            bridge.set_away(true);
            engine.set_exact(false);
            bridge.set_away(false);
        }));
    }

    #[test]
    fn an_engine_that_has_left_has_no_series_and_takes_no_place() {
        let mut kept = Vec::new();
        let text = rendered(|| {
            let bridge = BridgeMetrics::new();
            for number in 0..ENGINES_MAX + 5 {
                let engine = bridge.of_engine("m", &number.to_string());
                engine.set_exact(true);
            }
            // The same engine name in two namespaces means two engines. An engine of which two handles exist keeps its
            // series until both handles are dropped.
            for namespace in ["m", "n", "n"] {
                kept.push(bridge.of_engine(namespace, "a/0"));
            }
            kept[0].set_exact(true);
            drop(kept.pop());
        });
        let exact: Vec<&str> = text
            .lines()
            .filter(|line| line.contains("engine_exact{"))
            .collect();
        let expected = [
            "kvatlas_bridge_engine_exact{namespace=\"m\",engine=\"a/0\"} 1",
            "kvatlas_bridge_engine_exact{namespace=\"n\",engine=\"a/0\"} 0",
        ];
        assert_eq!(exact, expected);
    }
}
