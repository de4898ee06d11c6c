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
        commands: PerLabel<RedisCommand, Counter> = "kvatlas_redis_commands_total", Count;
        /// Commands of the listener for llm-d's routers that were refused, by reason.
        refused: PerLabel<RedisRefusal, Counter> = "kvatlas_redis_refused_total", Count;
    }
}

impl RedisMetrics {
    /// Counts commands of one kind that were carried out.
    pub fn answered(&self, command: RedisCommand, count: u64) {
        self.commands.get(command).increment(count);
    }

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
        kept: Gauge = "kvatlas_redis_speculative_entries", Count;
        /// Speculative entries of llm-d's routers that were dropped before the router took them back, by reason.
        dropped: PerLabel<GuessDrop, Counter> = "kvatlas_redis_speculative_dropped_total", Count;
    }
}

impl RedisGuessMetrics {
    /// Sets the number of speculative entries (routers' guesses of where blocks will be) that are kept.
    pub fn kept(&self, count: usize) {
        self.kept.set(count as f64);
    }

    /// Counts a speculative entry (a router's guess of where a block will be) that was dropped before its router took
    /// it back.
    pub fn dropped(&self, reason: GuessDrop) {
        self.dropped.get(reason).increment(1);
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
            metrics.answered(RedisCommand::Hkeys, 64);
            metrics.refused(RedisRefusal::UnknownCommand, &"GET");
            let connections = RedisConnectionMetrics::new();
            connections.opened();
            connections.opened();
            connections.closed();
            connections.refused(7);
            let guesses = RedisGuessMetrics::new();
            guesses.kept(3);
            guesses.dropped(GuessDrop::Room);
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
