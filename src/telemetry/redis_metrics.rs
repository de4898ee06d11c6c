//! Metrics and log lines about the listener for llm-d's routers.

use std::fmt::Display;

use metrics::{Counter, Gauge};

use super::connection_counts::count_connections;
use super::declare::metric_group;
use super::labels::{GuessDrop, PerLabel, RedisCommand, RedisRefusal};
use super::log_gated;

metric_group! {
    /// Metrics about commands of llm-d's routers.
    RedisMetrics::new() {
        /// Commands of the listener for llm-d's routers that were carried out.
        pub commands: PerLabel<RedisCommand, Counter> = "kvatlas_redis_commands_total", Count;
        /// Commands of the listener for llm-d's routers that were refused, by reason.
        refused: PerLabel<RedisRefusal, Counter> = "kvatlas_redis_refused_total", Count;
    }
}

impl RedisMetrics {
    /// Counts a command that was refused. Also writes a log line at level debug.
    pub fn refused(&self, reason: RedisRefusal, detail: &dyn Display) {
        self.refused.get(reason).increment(1);
        log_gated!(
            debug "a command of a router of llm-d was refused" per RedisRefusal(reason);
            %reason, %detail
        );
    }
}

metric_group! {
    /// Metrics about connections of llm-d's routers.
    RedisConnectionMetrics::new() {
        /// Connections to the listener for llm-d's routers that are open.
        open: Gauge = "kvatlas_redis_connections", Count;
        /// Connections to the listener for llm-d's routers that were closed because too many were open: the new connection, or
        /// the oldest one that waited for its client.
        refused: Counter = "kvatlas_redis_connections_refused_total", Count;
    }
}

count_connections!(
    RedisConnectionMetrics,
    "connection of a router of llm-d refused: too many are open"
);

metric_group! {
    /// Metrics about speculative entries of llm-d's routers.
    RedisGuessMetrics::new() {
        /// Speculative entries of llm-d's routers that are kept.
        pub kept: Gauge = "kvatlas_redis_speculative_entries", Count;
        /// Speculative entries of llm-d's routers that were dropped before the router took them back, by reason.
        pub dropped: PerLabel<GuessDrop, Counter> = "kvatlas_redis_speculative_dropped_total", Count;
    }
}

#[cfg(test)]
mod tests {
    use super::super::ConnectionCounts;
    use super::super::recorder::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            let metrics = RedisMetrics::new();
            metrics.commands.get(RedisCommand::Hkeys).increment(64);
            metrics.refused(RedisRefusal::UnknownCommand, &"GET");
            let connections = RedisConnectionMetrics::new();
            connections.opened();
            connections.opened();
            connections.closed();
            connections.refused(7);
            let guesses = RedisGuessMetrics::new();
            guesses.kept.set(3.0);
            guesses.dropped.get(GuessDrop::Room).increment(1);
        });
        for line in [
            "kvatlas_redis_commands_total{command=\"hkeys\"} 64",
            "kvatlas_redis_commands_total{command=\"write\"} 0",
            "kvatlas_redis_refused_total{reason=\"unknown_command\"} 1",
            "kvatlas_redis_connections 1",
            "kvatlas_redis_connections_refused_total 1",
            "kvatlas_redis_speculative_entries 3",
            "kvatlas_redis_speculative_dropped_total{reason=\"room\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "missing: {line}\n{text}");
        }
    }
}
