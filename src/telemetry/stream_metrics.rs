//! Counts and log lines about the events stream of JetStream.

use std::fmt::Display;

use metrics::{Counter, Gauge};

use super::declare::metric_group;
use super::labels::{ConsumerReset, PerLabel};
use super::log_gated;

metric_group! {
    /// Metrics about the events stream of JetStream.
    StreamMetrics::new() {
        /// Sequence number of the last message of the events stream that was read; 0 without JetStream.
        sequence: Gauge = "kvatlas_stream_sequence", Count;
        /// Messages of the events stream that are still to be read; 0 without JetStream.
        lag: Gauge = "kvatlas_stream_lag_messages", Count;
        /// Messages that were gone from the events stream before they were read.
        lost: Counter = "kvatlas_stream_messages_lost_total", Count;
        /// Times that the consumer of the events stream was made anew, by reason.
        resets: PerLabel<ConsumerReset, Counter> = "kvatlas_stream_consumer_resets_total", Count;
    }
}

impl StreamMetrics {
    /// Sets the metrics of the sequence number of the last message that was read, and of the number of messages still to be read.
    pub fn set_progress(&self, sequence: u64, messages_left: u64) {
        self.sequence.set(sequence as f64);
        self.lag.set(messages_left as f64);
    }

    /// Counts and logs messages that the stream had dropped before they were read. `expected` is the sequence number of
    /// the first dropped message.
    pub fn lost(&self, messages: u64, expected: u64) {
        self.lost.increment(messages);
        log_gated!(
            warn "messages are gone from the events stream; holders are unverified until their next batch";
            messages, expected
        );
    }

    /// Counts a reset of the stream's consumer, which has to be made anew. Logs the reason.
    pub fn reset(&self, reason: ConsumerReset, detail: &dyn Display) {
        self.resets.get(reason).increment(1);
        log_gated!(
            info "the consumer of the events stream is made anew" per ConsumerReset(reason);
            %reason, %detail
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::recorder::rendered;
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
