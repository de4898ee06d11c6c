//! What is counted, and logged, about shards: by those who have one, and by those who gather their replies.

use metrics::Counter;

use super::labels::{GatherOutcome, LabelValue, PerLabel};
use super::{LogGate, names};

static MISSING_GATE: LogGate = LogGate::new();
static OUTCOME_GATES: [LogGate; GatherOutcome::COUNT] = [const { LogGate::new() }; GatherOutcome::COUNT];

/// The handle of a daemon that takes the workers of one shard.
pub struct ShardMetrics {
    other_shard_messages: Counter,
}

impl ShardMetrics {
    /// Looks the handle up.
    #[expect(
        clippy::new_without_default,
        reason = "it registers series with the recorder, which a default should not"
    )]
    pub fn new() -> Self {
        Self {
            other_shard_messages: names::OTHER_SHARD_MESSAGES.with([]),
        }
    }

    /// Counts a message for a worker of another shard.
    pub fn message_passed_over(&self) {
        self.other_shard_messages.increment(1);
    }
}

/// The handles of a gateway.
pub struct GatherMetrics {
    gathers: PerLabel<GatherOutcome, Counter>,
    replies_late: Counter,
}

impl GatherMetrics {
    /// Looks the handles up.
    #[expect(
        clippy::new_without_default,
        reason = "it registers series with the recorder, which a default should not"
    )]
    pub fn new() -> Self {
        Self {
            gathers: PerLabel::new(|outcome: GatherOutcome| names::GATHERS.with([outcome.as_str()])),
            replies_late: names::SHARD_REPLIES_LATE.with([]),
        }
    }

    /// Counts a request, by how the gathering for it ended, and logs what a person should look at.
    pub fn gathered(&self, outcome: GatherOutcome) {
        self.gathers.get(outcome).increment(1);
        if !matches!(outcome, GatherOutcome::Unanswered | GatherOutcome::Overloaded) {
            return;
        }
        if let Some(suppressed) = OUTCOME_GATES[outcome.index()].admit() {
            tracing::warn!(%outcome, suppressed, "a request could not be gathered");
        }
    }

    /// Counts a shard that a reply lacks, and logs it. The caller bounds the number of shards.
    pub fn shard_missing(&self, index: u32) {
        names::SHARD_REPLIES_MISSING
            .with([&index.to_string()])
            .increment(1);
        if let Some(suppressed) = MISSING_GATE.admit() {
            tracing::warn!(shard = index, suppressed, "a shard did not answer in time");
        }
    }

    /// Counts replies that nobody waited for any more.
    pub fn replies_late(&self, count: u64) {
        self.replies_late.increment(count);
    }
}

#[cfg(test)]
mod tests {
    use super::super::metrics::tests::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            ShardMetrics::new().message_passed_over();
            let gathers = GatherMetrics::new();
            gathers.gathered(GatherOutcome::Partial);
            gathers.gathered(GatherOutcome::Overloaded);
            gathers.shard_missing(2);
            gathers.replies_late(3);
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
