//! One holder on its lane: sequence tracking in front of the index.

use crate::index::{Applied, HolderWriter, RejectReason};
use crate::snapshot::HolderFrame;
use crate::telemetry::labels::DropReason;
use crate::telemetry::{AppliedBatch, EventMetrics};
use crate::tracking::{
    Admission, BatchCursor, DegradedReason, DegradedReasons, SequenceTracker, StreamGeneration,
};
use crate::wire::{EventBatch, NamespaceName};

use super::dump::{DUMP_EVENT_BLOCKS_MAX, HolderDump};

/// What a holder is after a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Afterwards {
    Stays,
    /// It said goodbye.
    Leaves,
}

/// The clocks at the time of a batch, passed in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clocks {
    /// Microseconds on a clock that does not run backwards.
    pub(crate) monotonic_us: u64,
    /// Microseconds since the Unix epoch.
    pub(crate) unix_us: u64,
}

/// One holder of a lane.
#[derive(Debug)]
pub(crate) struct Holder {
    writer: HolderWriter,
    tracker: SequenceTracker,
}

impl Holder {
    pub(crate) fn new(writer: HolderWriter) -> Self {
        Self {
            writer,
            tracker: SequenceTracker::default(),
        }
    }

    fn worker(&self) -> &str {
        self.writer.record().id.worker.as_str()
    }

    /// Applies a batch, or skips it, by its number.
    pub(crate) fn apply(
        &mut self,
        batch: EventBatch,
        generation: StreamGeneration,
        clocks: Clocks,
        metrics: &EventMetrics,
    ) -> Afterwards {
        let before = self.tracker.cursor();
        let next = BatchCursor {
            epoch: batch.epoch,
            seq: batch.seq,
        };
        match self.tracker.admit(next) {
            Admission::Next => {}
            Admission::Gap { missed } => {
                metrics.sequence_gap(self.worker(), next.seq - missed, next.seq);
                self.degrade(DegradedReason::Gap, metrics);
            }
            Admission::NewEpoch { missed } => self.begin_epoch(before, next, missed, metrics),
            Admission::Duplicate => {
                metrics.batch_dropped(DropReason::Duplicate, self.worker(), &next.seq);
                return Afterwards::Stays;
            }
            Admission::StaleEpoch => {
                metrics.batch_dropped(DropReason::StaleEpoch, self.worker(), &next.epoch);
                return Afterwards::Stays;
            }
        }
        // All that came before this batch has been applied, or is known to be missing: the stream is trusted again. What the batch
        // itself changes is exact at every step.
        self.writer.status().confirm(generation);
        let afterwards = self.apply_events(batch, clocks, metrics);
        self.writer.status().set_cursor(next);
        afterwards
    }

    fn begin_epoch(
        &mut self,
        before: Option<BatchCursor>,
        next: BatchCursor,
        missed: u64,
        metrics: &EventMetrics,
    ) {
        self.writer.clear();
        self.writer.replace_reasons(DegradedReasons::default());
        if let Some(before) = before {
            metrics.epoch_changed(self.worker(), &before.epoch, &next.epoch);
        }
        if missed > 0 {
            metrics.sequence_gap(self.worker(), 1, next.seq);
            self.degrade(DegradedReason::Gap, metrics);
        }
    }

    fn apply_events(&mut self, batch: EventBatch, clocks: Clocks, metrics: &EventMetrics) -> Afterwards {
        let started = std::time::Instant::now();
        let mut total = AppliedBatch::default();
        let mut afterwards = Afterwards::Stays;
        for event in batch.events {
            let applied = self.writer.apply(event, batch.tier, clocks.monotonic_us);
            if applied.cleared {
                // The state is known for certain again: nothing.
                if !self.writer.status().lasting_reasons().is_empty() {
                    self.writer.replace_reasons(DegradedReasons::default());
                }
                total.clears += 1;
            }
            if applied.goodbye {
                afterwards = Afterwards::Leaves;
            }
            total.blocks_stored += applied.stored;
            total.blocks_removed += applied.removed;
            self.report_rejects(&applied, metrics);
        }
        total.elapsed = started.elapsed();
        metrics.batch_applied(&total);
        let lag_us = batch
            .time_us
            .map_or(0, |made_us| clocks.unix_us.saturating_sub(made_us));
        self.writer.status().set_applied(clocks.unix_us, lag_us);
        afterwards
    }

    /// Times out what waits for a parent.
    pub(crate) fn tick(&mut self, clocks: Clocks, metrics: &EventMetrics) {
        let applied = self.writer.expire_parked(clocks.monotonic_us);
        self.report_rejects(&applied, metrics);
    }

    /// Notes that a batch of the worker could not be decoded.
    pub(crate) fn note_undecodable(&self, metrics: &EventMetrics) {
        self.degrade(DegradedReason::Undecodable, metrics);
    }

    fn report_rejects(&self, applied: &Applied, metrics: &EventMetrics) {
        for reason in RejectReason::ALL {
            let blocks = applied.rejected(reason);
            if blocks == 0 {
                continue;
            }
            metrics.reject_blocks(reason, blocks, self.worker());
            if let Some(degraded) = degradation(reason) {
                self.degrade(degraded, metrics);
            }
        }
    }

    fn degrade(&self, reason: DegradedReason, metrics: &EventMetrics) {
        if self.writer.status().degrade(reason) {
            metrics.holder_degraded(reason, self.worker(), self.writer.record().id.rank);
        }
    }

    /// Takes up the cursor and the doubts of a snapshot; its blocks follow through [`Self::restore_blocks`].
    ///
    /// What the holder had goes: a snapshot can have a holder twice (it left and came back on another lane while the
    /// snapshot was written), and an older snapshot can follow one that could not be read to its end.
    ///
    /// In `generation` it counts as confirmed, unless it was in doubt when it was dumped.
    pub(crate) fn restore_cursor(&mut self, frame: &HolderFrame, generation: StreamGeneration) {
        self.writer.clear();
        self.writer.set_foreign_chain(frame.foreign_chain);
        let cursor = BatchCursor {
            epoch: frame.epoch,
            seq: frame.seq,
        };
        self.tracker = SequenceTracker::resuming(cursor);
        let status = self.writer.status();
        status.set_cursor(cursor);
        let reasons = DegradedReasons::from_bits(frame.degraded_bits);
        // Not a lasting reason: the next batch that continues the count takes it away.
        status.reset_reasons(reasons.without(DegradedReason::Unverified));
        if !reasons.contains(DegradedReason::Unverified) {
            status.confirm(generation);
        }
    }

    /// Stores blocks of a snapshot.
    pub(crate) fn restore_blocks(&mut self, batch: EventBatch, clocks: Clocks, metrics: &EventMetrics) {
        for event in batch.events {
            let applied = self.writer.apply(event, batch.tier, clocks.monotonic_us);
            self.report_rejects(&applied, metrics);
        }
    }

    /// The holder's state now; `generation` is the stream's, in which it may be unverified.
    pub(crate) fn dump(&self, namespace: &NamespaceName, generation: StreamGeneration) -> HolderDump {
        let id = &self.writer.record().id;
        let cursor = self.tracker.cursor().unwrap_or_default();
        let mut reasons = self.writer.status().lasting_reasons();
        if self.writer.status().parked_events() > 0 {
            // What waits for a parent is not dumped.
            reasons = reasons.with(DegradedReason::UnknownParent);
        }
        if !self.writer.status().is_confirmed(generation) {
            reasons = reasons.with(DegradedReason::Unverified);
        }
        let frame = HolderFrame {
            namespace: namespace.clone(),
            worker: id.worker.clone(),
            rank: id.rank,
            epoch: cursor.epoch,
            seq: cursor.seq,
            degraded_bits: reasons.bits(),
            blocks: self.writer.blocks() as u64,
            hashing: self.writer.settings().hashing,
            block_size: self.writer.settings().block_size.as_u32(),
            foreign_chain: self.writer.status().has_foreign_chain(),
        };
        HolderDump {
            events: self.writer.dump_events(DUMP_EVENT_BLOCKS_MAX).collect(),
            frame,
        }
    }

    /// Removes the holder from the index.
    pub(crate) fn retire(self) {
        self.writer.retire();
    }
}

/// What a reject means for the certainty of a holder's state; none where nothing is lost by it.
fn degradation(reason: RejectReason) -> Option<DegradedReason> {
    match reason {
        RejectReason::UnknownBlock | RejectReason::Moved | RejectReason::ForeignChain => None,
        RejectReason::PositionOutOfRange | RejectReason::MissingContent | RejectReason::ContentMismatch => {
            Some(DegradedReason::Rejected)
        }
        RejectReason::Capacity => Some(DegradedReason::Capacity),
        RejectReason::ParkingFull | RejectReason::ParkingExpired => Some(DegradedReason::UnknownParent),
    }
}
