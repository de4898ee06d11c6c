//! What is counted, and logged, about the events stream of JetStream.

use std::fmt::Display;

use metrics::{Counter, Gauge};

use super::labels::{ConsumerReset, LabelValue, PerLabel};
use super::{LogGate, names};

static RESET_GATES: [LogGate; ConsumerReset::COUNT] = [const { LogGate::new() }; ConsumerReset::COUNT];

/// The handles for the events stream.
pub struct StreamMetrics {
    sequence: Gauge,
    lag: Gauge,
    lost: Counter,
    resets: PerLabel<ConsumerReset, Counter>,
}

impl StreamMetrics {
    /// Looks the handles up.
    #[expect(
        clippy::new_without_default,
        reason = "it registers series with the recorder, which a default should not"
    )]
    pub fn new() -> Self {
        Self {
            sequence: names::STREAM_SEQUENCE.with([]),
            lag: names::STREAM_LAG.with([]),
            lost: names::STREAM_MESSAGES_LOST.with([]),
            resets: PerLabel::new(|reason: ConsumerReset| {
                names::STREAM_CONSUMER_RESETS.with([reason.as_str()])
            }),
        }
    }

    /// Publishes how far the stream has been read, and how much of it is left.
    pub fn set_progress(&self, sequence: u64, messages_left: u64) {
        self.sequence.set(sequence as f64);
        self.lag.set(messages_left as f64);
    }

    /// Counts messages that were gone before they were read, and logs it. `expected` is the one that should have come next.
    pub fn lost(&self, messages: u64, expected: u64) {
        self.lost.increment(messages);
        tracing::warn!(
            messages,
            expected,
            "messages are gone from the events stream; holders are unverified until their next batch"
        );
    }

    /// Counts a consumer that has to be made anew, and logs why.
    pub fn reset(&self, reason: ConsumerReset, detail: &dyn Display) {
        self.resets.get(reason).increment(1);
        if let Some(suppressed) = RESET_GATES[reason.index()].admit() {
            tracing::info!(%reason, %detail, suppressed, "the consumer of the events stream is made anew");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::metrics::tests::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            let metrics = StreamMetrics::new();
            metrics.set_progress(7, 3);
            metrics.lost(5, 2);
            metrics.reset(ConsumerReset::Skipped, &"2 after 0");
        });
        for line in [
            "kvatlas_stream_sequence 7",
            "kvatlas_stream_lag_messages 3",
            "kvatlas_stream_messages_lost_total 5",
            "kvatlas_stream_consumer_resets_total{reason=\"skipped\"} 1",
            "kvatlas_stream_consumer_resets_total{reason=\"stream\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "missing: {line}\n{text}");
        }
    }
}
