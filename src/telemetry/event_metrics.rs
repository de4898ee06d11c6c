//! Metrics and log lines about the events of one namespace.

use std::fmt::Display;
use std::time::Duration;

use metrics::{Counter, Histogram};

use kvatlas_core::index::RejectReason;
use kvatlas_core::wire::DegradedReason;

use super::declare::{BATCH_BLOCKS, LAGS, LATENCIES, metric_group};
use super::histograms::Samples;
use super::labels::{DropReason, PerLabel, UNATTRIBUTED_NAMESPACE};
use super::log_gated;

/// Effect of one applied batch on the index.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AppliedBatch {
    /// Blocks that the batch stored.
    pub blocks_stored: u64,
    /// Blocks that the batch removed one by one.
    pub blocks_removed: u64,
    /// Number of times that the batch dropped all blocks of its holder.
    pub clears: u64,
    /// Time that the lane (a thread that applies events) took to decode and apply the batch.
    pub elapsed: Duration,
    /// Age of the batch, by its publisher's clock, when queries first saw its changes; `None` if the batch has no time.
    pub lag: Option<Duration>,
}

/// Sum of the effects of several batches of one namespace, until [`EventMetrics::batches_applied`] counts it.
#[derive(Debug)]
pub struct AppliedBatches {
    batches: u64,
    blocks_stored: u64,
    blocks_removed: u64,
    clears: u64,
    elapsed: Samples<{ LATENCIES.len() }>,
    lags: Samples<{ LAGS.len() }>,
    blocks: Samples<{ BATCH_BLOCKS.len() }>,
}

impl Default for AppliedBatches {
    fn default() -> Self {
        Self {
            batches: 0,
            blocks_stored: 0,
            blocks_removed: 0,
            clears: 0,
            elapsed: Samples::new(LATENCIES),
            lags: Samples::new(LAGS),
            blocks: Samples::new(BATCH_BLOCKS),
        }
    }
}

impl AppliedBatches {
    /// Adds the effect of one batch to the sum.
    pub fn add(&mut self, batch: &AppliedBatch) {
        self.batches += 1;
        self.blocks_stored += batch.blocks_stored;
        self.blocks_removed += batch.blocks_removed;
        self.clears += batch.clears;
        self.elapsed.add(batch.elapsed.as_secs_f64());
        if let Some(lag) = batch.lag {
            self.lags.add(lag.as_secs_f64());
        }
        let blocks = batch.blocks_stored.saturating_add(batch.blocks_removed);
        self.blocks.add(blocks as f64);
    }
}

metric_group! {
    /// Metrics about events of a namespace.
    EventMetrics::for_namespace(namespace: &str) keeping {
        /// Name of the namespace, for the log lines.
        namespace: Box<str> = namespace.into()
    } {
        /// Event messages received.
        messages_received: Counter = "kvatlas_event_messages_received_total", Count;
        /// Payload bytes of the event messages received.
        bytes_received: Counter = "kvatlas_event_received_bytes_total", Bytes;
        /// Event batches applied to the index.
        batches_applied: Counter = "kvatlas_batches_applied_total", Count;
        /// Blocks that applied events reported as stored.
        blocks_stored: Counter = "kvatlas_blocks_stored_total", Count;
        /// Blocks that applied events reported as removed, without those that a clear dropped.
        blocks_removed: Counter = "kvatlas_blocks_removed_total", Count;
        /// Times that all blocks of a holder were dropped because its publisher said so.
        clears: Counter = "kvatlas_holder_clears_total", Count;
        /// Event batches dropped whole, by reason.
        batches_dropped: PerLabel<DropReason, Counter> = "kvatlas_batches_dropped_total", Count;
        /// Blocks of applied batches that the index refused or changed, by reason.
        blocks_rejected: PerLabel<RejectReason, Counter> = "kvatlas_blocks_rejected_total", Count;
        /// Times that a batch arrived but batches before it were missing.
        sequence_gaps: Counter = "kvatlas_sequence_gaps_total", Count;
        /// Times that a publisher was replaced by a new incarnation.
        epoch_changes: Counter = "kvatlas_epoch_changes_total", Count;
        /// Transitions of a holder from exact to degraded, by reason.
        holders_degraded: PerLabel<DegradedReason, Counter> = "kvatlas_holders_degraded_total", Count;
        /// Holders removed because no message about them arrived for too long.
        holders_removed: Counter = "kvatlas_holders_removed_total", Count;
        /// Time that a lane (a thread that applies events) took to decode and apply one batch.
        apply_duration: Histogram = "kvatlas_batch_apply_duration_seconds", Seconds, LATENCIES;
        /// Time from a change in an engine, by the publisher's clock, until queries see the change.
        visible_lag: Histogram = "kvatlas_event_visible_lag_seconds", Seconds, LAGS;
        /// Blocks that one batch stored or removed.
        batch_blocks: Histogram = "kvatlas_batch_blocks", Count, BATCH_BLOCKS;
    }
}

impl EventMetrics {
    /// Makes handles for messages whose subject is malformed or names a namespace that is not admitted.
    pub fn unattributed() -> Self {
        Self::for_namespace(UNATTRIBUTED_NAMESPACE)
    }

    /// Counts event messages received, and the sum of their payload bytes.
    pub fn messages_received(&self, messages: u64, payload_bytes: u64) {
        self.messages_received.increment(messages);
        self.bytes_received.increment(payload_bytes);
    }

    /// Counts batches that a lane applied, and resets `batches` to zero.
    pub fn batches_applied(&self, batches: &mut AppliedBatches) {
        self.batches_applied.increment(batches.batches);
        self.blocks_stored.increment(batches.blocks_stored);
        self.blocks_removed.increment(batches.blocks_removed);
        self.clears.increment(batches.clears);
        batches.elapsed.record(&self.apply_duration);
        batches.lags.record(&self.visible_lag);
        batches.blocks.record(&self.batch_blocks);
        (batches.batches, batches.clears) = (0, 0);
        (batches.blocks_stored, batches.blocks_removed) = (0, 0);
    }

    /// Counts and logs a batch that was dropped whole.
    ///
    /// `subject` is the subject of the message and may hold any text. Duplicates and stale epochs are signs of a
    /// redelivery, so their lines are at level debug.
    pub fn batch_dropped(&self, reason: DropReason, subject: &str, detail: &dyn Display) {
        self.batches_dropped.get(reason).increment(1);
        let namespace = &*self.namespace;
        let subject = subject.escape_debug();
        match reason {
            DropReason::Duplicate | DropReason::StaleEpoch => {
                log_gated!(debug "batch dropped" per DropReason(reason); namespace, %reason, %subject, %detail);
            }
            _ => {
                log_gated!(warn "batch dropped" per DropReason(reason); namespace, %reason, %subject, %detail)
            }
        }
    }

    /// Counts and logs blocks of an event that the index did not store or remove as the event says, with the reason.
    ///
    /// A removal of a block that the holder does not have is common after lost batches. Its line is therefore at level
    /// debug.
    pub fn reject_blocks(&self, reason: RejectReason, blocks: u64, worker: &str) {
        self.blocks_rejected.get(reason).increment(blocks);
        let (namespace, word) = (&*self.namespace, reason.as_str());
        match reason {
            RejectReason::UnknownBlock => {
                log_gated!(debug "blocks rejected"; namespace, reason = word, worker, blocks);
            }
            _ => {
                log_gated!(warn "blocks rejected" per RejectReason(reason); namespace, reason = word, worker, blocks)
            }
        }
    }

    /// Counts and logs a gap in a publisher's sequence numbers.
    pub fn sequence_gap(&self, worker: &str, expected: u64, received: u64) {
        self.sequence_gaps.increment(1);
        // Nobody has missed what was published before a start.
        if expected == 1 {
            log_gated!(info "batches from before the first one are missing"; namespace = &*self.namespace, worker, received);
        } else {
            log_gated!(warn "batches are missing"; namespace = &*self.namespace, worker, expected, received);
        }
    }

    /// Counts and logs a new incarnation of a publisher.
    pub fn epoch_changed(&self, worker: &str, previous: &dyn Display, current: &dyn Display) {
        self.epoch_changes.increment(1);
        log_gated!(
            info "publisher has a new epoch";
            namespace = &*self.namespace, worker, %previous, %current
        );
    }

    /// Logs that a holder's epoch lies `ahead_s` seconds ahead of the clock. If the publisher restarts after
    /// its clock was corrected, its new epoch is lower. Daemons then mistake the new incarnation for an outdated one.
    pub fn epoch_ahead(&self, worker: &str, epoch: u64, ahead_s: u64) {
        log_gated!(
            warn "epoch lies ahead of the clock: see to the clock of the worker's machine";
            namespace = &*self.namespace, worker, epoch, ahead_s
        );
    }

    /// Logs that two publishers claim the same holder. The daemon follows the publisher with the epoch `believed`, and
    /// drops the batches of the other. The epoch `other` is lower, or too far ahead of the clock. Call it once, when the
    /// second publisher appears. [`Self::contest_ended`] logs the end of this state.
    pub fn contest_begun(&self, worker: &str, data_parallel_rank: u32, believed: u64, other: u64) {
        let namespace = &*self.namespace;
        if other > believed {
            log_gated!(
                warn "two publishers claim a worker: batches of an epoch far ahead of the clock are dropped";
                namespace, worker, data_parallel_rank, believed_epoch = believed, higher_epoch = other
            );
        } else {
            log_gated!(
                warn "two publishers claim a worker: batches of a lower epoch are dropped";
                namespace, worker, data_parallel_rank, believed_epoch = believed, lower_epoch = other
            );
        }
    }

    /// Counts a batch that was dropped because its settings differ from those of the namespace. All later batches of its holder
    /// are dropped, too, so only the first is logged as a warning.
    pub fn settings_refused(
        &self,
        is_first: bool,
        worker: &str,
        data_parallel_rank: u32,
        detail: &dyn Display,
    ) {
        let reason = DropReason::OtherSettings;
        self.batches_dropped.get(reason).increment(1);
        let namespace = &*self.namespace;
        if is_first {
            log_gated!(
                warn "all batches of a worker are dropped: it has other settings";
                namespace, %reason, worker, data_parallel_rank, %detail
            );
        } else {
            log_gated!(debug "batch dropped"; namespace, %reason, worker, data_parallel_rank, %detail);
        }
    }

    /// Logs that only one publisher still claims the holder. Reports the number `batches` of dropped batches of the
    /// other publisher, whose epoch was `other`.
    pub fn contest_ended(&self, worker: &str, data_parallel_rank: u32, batches: u64, other: u64) {
        log_gated!(
            info "worker is claimed by one publisher again";
            namespace = &*self.namespace, worker, data_parallel_rank, batches, other_epoch = other
        );
    }

    /// Counts and logs that an exact holder becomes degraded.
    ///
    /// Call it only when the holder's state changes from exact to degraded, not for further faults of a degraded
    /// holder. The reason `Resyncing` is counted but not logged, because a resync repairs the holder. The reasons
    /// that holders have for a moment at each start are no warning: another line warns of holders that stay degraded.
    pub fn holder_degraded(&self, reason: DegradedReason, worker: &str, data_parallel_rank: u32) {
        self.holders_degraded.get(reason).increment(1);
        let (namespace, word) = (&*self.namespace, reason.as_str());
        match reason {
            DegradedReason::Resyncing => {}
            DegradedReason::Gap | DegradedReason::UpstreamLost => {
                log_gated!(info "holder is degraded" per DegradedReason(reason); namespace, reason = word, worker, data_parallel_rank);
            }
            _ => {
                log_gated!(warn "holder is degraded" per DegradedReason(reason); namespace, reason = word, worker, data_parallel_rank);
            }
        }
    }

    /// Counts and logs a holder that was removed because it was silent for too long.
    pub fn holder_removed(&self, worker: &str, data_parallel_rank: u32) {
        self.holders_removed.increment(1);
        log_gated!(
            warn "holder removed: nothing was heard of it for too long";
            namespace = &*self.namespace, worker, data_parallel_rank
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::LogFormat;
    use super::super::logging::tests::capture;
    use super::super::recorder::rendered;
    use super::*;

    #[track_caller]
    fn assert_line(text: &str, line: &str) {
        assert!(
            text.lines().any(|candidate| candidate == line),
            "missing: {line}\n{text}"
        );
    }

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            let metrics = EventMetrics::for_namespace("a");
            metrics.messages_received(1, 100);
            metrics.messages_received(1, 20);
            let mut batches = AppliedBatches::default();
            batches.add(&AppliedBatch {
                blocks_stored: 5,
                blocks_removed: 2,
                clears: 1,
                elapsed: Duration::from_micros(15),
                lag: Some(Duration::from_millis(20)),
            });
            metrics.batches_applied(&mut batches);
            metrics.batch_dropped(DropReason::StaleEpoch, "kv.a.w\n1", &"old");
            metrics.reject_blocks(RejectReason::Moved, 1, "w1");
            metrics.sequence_gap("w1", 4, 9);
            metrics.epoch_changed("w1", &"1", &"2");
            metrics.holder_degraded(DegradedReason::Gap, "w1", 0);
            metrics.holder_removed("w1", 0);
            EventMetrics::unattributed().batch_dropped(DropReason::BadSubject, "kv", &"no worker");
        });
        for line in [
            "kvatlas_event_messages_received_total{namespace=\"a\"} 2",
            "kvatlas_event_received_bytes_total{namespace=\"a\"} 120",
            "kvatlas_batches_applied_total{namespace=\"a\"} 1",
            "kvatlas_blocks_stored_total{namespace=\"a\"} 5",
            "kvatlas_blocks_removed_total{namespace=\"a\"} 2",
            "kvatlas_holder_clears_total{namespace=\"a\"} 1",
            "kvatlas_batch_blocks_bucket{namespace=\"a\",le=\"4\"} 0",
            "kvatlas_batch_blocks_bucket{namespace=\"a\",le=\"16\"} 1",
            "kvatlas_batch_apply_duration_seconds_bucket{namespace=\"a\",le=\"0.00001\"} 0",
            "kvatlas_batch_apply_duration_seconds_bucket{namespace=\"a\",le=\"0.00002\"} 1",
            "kvatlas_event_visible_lag_seconds_bucket{namespace=\"a\",le=\"0.01\"} 0",
            "kvatlas_event_visible_lag_seconds_bucket{namespace=\"a\",le=\"0.025\"} 1",
            "kvatlas_batches_dropped_total{namespace=\"a\",reason=\"stale_epoch\"} 1",
            "kvatlas_batches_dropped_total{namespace=\"a\",reason=\"bad_subject\"} 0",
            "kvatlas_batches_dropped_total{namespace=\"(none)\",reason=\"bad_subject\"} 1",
            "kvatlas_blocks_rejected_total{namespace=\"a\",reason=\"moved\"} 1",
            "kvatlas_sequence_gaps_total{namespace=\"a\"} 1",
            "kvatlas_epoch_changes_total{namespace=\"a\"} 1",
            "kvatlas_holders_degraded_total{namespace=\"a\",reason=\"gap\"} 1",
            "kvatlas_holders_removed_total{namespace=\"a\"} 1",
        ] {
            assert_line(&text, line);
        }
    }

    #[test]
    fn every_drop_is_counted_although_few_are_logged() {
        let text = rendered(|| {
            let metrics = EventMetrics::for_namespace("a");
            for _ in 0..5000 {
                metrics.batch_dropped(DropReason::Oversized, "kv.a.w1", &"2 MiB");
            }
        });
        assert_line(
            &text,
            "kvatlas_batches_dropped_total{namespace=\"a\",reason=\"oversized\"} 5000",
        );
    }

    #[test]
    fn a_burst_gives_one_line_that_a_subject_can_not_forge() {
        let log = capture(LogFormat::Text, "debug", false, || {
            let metrics = EventMetrics::for_namespace("a");
            for _ in 0..3 {
                // No other test drops a batch for this reason, so its gate has let no line pass yet.
                metrics.batch_dropped(DropReason::LaneStopped, "kv.a.w1\n2026 ERROR forged", &"draining");
            }
        });
        assert!(
            log.contains("batch dropped") && log.contains("reason=lane_stopped"),
            "{log}"
        );
        assert!(log.contains(r"subject=kv.a.w1\n2026 ERROR forged"), "{log}");
        // On a busy machine, a second may pass between the calls. Then there are more lines.
        assert!((1..=3).contains(&log.lines().count()), "{log}");
        assert!(log.lines().all(|line| line.contains("suppressed=")), "{log}");
    }
}
