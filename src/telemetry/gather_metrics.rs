//! Metrics and log lines about shards: for a daemon that is a shard, and for a gateway that gathers their replies.

use metrics::Counter;

use super::declare::metric_group;
use super::labels::{GatherOutcome, PerLabel};
use super::log_gated;

metric_group! {
    /// Metrics about a shard: a daemon that takes a part of the workers.
    ShardMetrics::new() {
        /// Event messages that were ignored because their worker belongs to another shard.
        pub other_shard_messages: Counter = "kvatlas_other_shard_messages_total", Count;
    }
}

metric_group! {
    /// Metrics about a gateway, which gathers the replies of shards.
    GatherMetrics::new() {
        /// Requests for which a gateway asked the shards, by outcome.
        gathers: PerLabel<GatherOutcome, Counter> = "kvatlas_gathers_total", Count;
        /// Replies of shards that reached a gateway after it had answered.
        pub replies_late: Counter = "kvatlas_shard_replies_late_total", Count;
    }
}

metric_group! {
    /// Metrics about a shard that a gateway asks.
    MissingShardMetrics::for_shard(shard: usize) {
        /// Answers that a gateway gave without the reply of a shard, by the shard's index.
        replies_missing: Counter = "kvatlas_shard_replies_missing_total", Count;
    }
}

impl GatherMetrics {
    /// Counts a request for which a gateway asked the shards, by the outcome. Logs only the outcomes that an operator should look
    /// at: `Unanswered` and `Overloaded`.
    pub fn gathered(&self, outcome: GatherOutcome) {
        self.gathers.get(outcome).increment(1);
        if !matches!(outcome, GatherOutcome::Unanswered | GatherOutcome::Overloaded) {
            return;
        }
        log_gated!(warn "a request could not be gathered" per GatherOutcome(outcome); %outcome);
    }

    /// Counts and logs a reply that a gateway gave without an answer from the shard `index`. The caller bounds the number of
    /// shards.
    pub fn shard_missing(&self, index: u32) {
        MissingShardMetrics::for_shard(index as usize)
            .replies_missing
            .increment(1);
        log_gated!(warn "a shard did not answer in time"; shard = index);
    }
}

#[cfg(test)]
mod tests {
    use super::super::recorder::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            ShardMetrics::new().other_shard_messages.increment(1);
            let gathers = GatherMetrics::new();
            gathers.gathered(GatherOutcome::Partial);
            gathers.gathered(GatherOutcome::Overloaded);
            gathers.shard_missing(2);
            gathers.replies_late.increment(3);
        });
        for line in [
            "kvatlas_other_shard_messages_total 1",
            "kvatlas_gathers_total{outcome=\"partial\"} 1",
            "kvatlas_gathers_total{outcome=\"overloaded\"} 1",
            "kvatlas_gathers_total{outcome=\"complete\"} 0",
            "kvatlas_shard_replies_missing_total{shard=\"2\"} 1",
            "kvatlas_shard_replies_late_total 3",
        ] {
            assert!(
                text.lines().any(|candidate| candidate == line),
                "missing: {line}\n{text}"
            );
        }
    }
}
