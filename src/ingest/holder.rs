//! One holder on its lane: sequence tracking in front of the index.

use crate::index::{Applied, HolderWriter, RejectReason, RestoredRun, WalkedHolder};
use crate::snapshot::{HolderFrame, SnapshotFormat};
use crate::telemetry::labels::DropReason;
use crate::telemetry::{AppliedBatch, EventMetrics};
use crate::tracking::{
    Admission, BatchCursor, DegradedReason, DegradedReasons, Liveness, SequenceTracker, StreamGeneration,
};
use crate::wire::{EventBatch, NamespaceName, Tier};

use super::dump::{DUMP_EVENT_BLOCKS_MAX, HolderDump, Revisited};
use super::held::{Held, HoldingLimits, ReceivedBatch};

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
    /// Microseconds in which messages could be heard.
    pub(crate) listening_us: u64,
}

/// What a lane gives a holder to work with.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) clocks: Clocks,
    pub(crate) metrics: &'a EventMetrics,
    pub(crate) holding: &'a HoldingLimits,
}

/// One holder of a lane.
#[derive(Debug)]
pub(crate) struct Holder {
    pub(super) writer: HolderWriter,
    pub(super) tracker: SequenceTracker,
    /// Whether the blocks are exactly those that the publisher had at the tracker's cursor, so that the batches after it make them
    /// exact again.
    pub(super) is_whole: bool,
    /// What waits until it is known what came before it.
    pub(super) held: Option<Held>,
    pub(super) asked: Asked,
    pub(super) liveness: Liveness,
    /// The largest time, by the publisher's clock, at which an applied batch was made; 0 where none says, and the largest number
    /// where it cannot be known.
    pub(super) made_us: u64,
    /// Whether it has been counted that there was no room for some of its blocks: eviction, which marks the holder, counts nothing.
    is_known_short: bool,
}

/// What is known of the holder's publisher from asking it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Asked {
    /// How often it has been asked.
    pub(super) times: u64,
    /// Whether it may answer; no once it turned out that nobody listens.
    pub(super) may_answer: bool,
    /// Whether its numbers have begun again within the epoch, so that its cursor may be behind ours.
    pub(super) has_restarted: bool,
    /// Whether the blocks are those of an epoch that has ended, kept until it is known what the new one has.
    pub(super) has_outlived: bool,
}

impl Holder {
    pub(crate) fn new(writer: HolderWriter, clocks: Clocks) -> Self {
        Self {
            writer,
            tracker: SequenceTracker::default(),
            is_whole: true,
            held: None,
            asked: Asked {
                times: 0,
                may_answer: true,
                has_restarted: false,
                has_outlived: false,
            },
            liveness: Liveness::heard_at(clocks.listening_us),
            made_us: 0,
            is_known_short: false,
        }
    }

    pub(super) fn worker(&self) -> &str {
        self.writer.record().id.worker.as_str()
    }

    /// Whether batches are kept back until it is known what came before them.
    pub(crate) fn is_waiting(&self) -> bool {
        self.held.is_some()
    }

    /// Applies a batch, skips it, or keeps it back, by its number.
    pub(crate) fn apply(&mut self, received: ReceivedBatch, context: Context<'_>) -> Afterwards {
        if self.held.is_some() {
            return self.apply_while_holding(received, context);
        }
        let next = cursor_of(&received.batch);
        let admission = self.tracker.classify(next);
        let is_gap = matches!(
            admission,
            Admission::Gap { .. } | Admission::NewEpoch { missed: 1.. }
        );
        let has_begun_again = admission == Admission::Duplicate
            && received.batch.time_us.is_some_and(|made| made > self.made_us);
        if has_begun_again {
            self.begin_again(next, context.metrics);
        }
        if (is_gap || has_begun_again) && context.holding.is_enabled && self.asked.may_answer {
            return self.hold_at_gap(received, context);
        }
        self.apply_now(received, context)
    }

    /// Applies a batch, or skips it, by its number. What is missing before it stays missing.
    pub(super) fn apply_now(&mut self, received: ReceivedBatch, context: Context<'_>) -> Afterwards {
        let (batch, metrics) = (received.batch, context.metrics);
        let before = self.tracker.cursor();
        let next = cursor_of(&batch);
        match self.tracker.admit(next) {
            Admission::Next => {}
            Admission::Gap { missed } => self.note_gap(next, missed, metrics),
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
        self.made_us = self.made_us.max(batch.time_us.unwrap_or_default());
        // All that came before this batch has been applied, or is known to be missing: the stream is trusted again. What the batch
        // itself changes is exact at every step.
        self.writer.status().confirm(received.generation);
        let afterwards = self.apply_events(batch, context);
        self.writer.status().set_cursor(next);
        self.hear(context.clocks);
        afterwards
    }

    pub(super) fn note_gap(&mut self, next: BatchCursor, missed: u64, metrics: &EventMetrics) {
        metrics.sequence_gap(self.worker(), next.seq - missed, next.seq);
        self.degrade(DegradedReason::Gap, metrics);
        self.is_whole = false;
    }

    pub(super) fn begin_epoch(
        &mut self,
        before: Option<BatchCursor>,
        next: BatchCursor,
        missed: u64,
        metrics: &EventMetrics,
    ) {
        self.writer.clear();
        self.forgive();
        self.asked.may_answer = true;
        self.made_us = 0;
        if let Some(before) = before {
            metrics.epoch_changed(self.worker(), &before.epoch, &next.epoch);
        }
        if missed > 0 {
            metrics.sequence_gap(self.worker(), 1, next.seq);
            self.degrade(DegradedReason::Gap, metrics);
            self.is_whole = false;
        }
    }

    /// The publisher counts from the start again without having taken a new epoch: what it had before is nothing any more that its
    /// batches could be added to. That it was made later than what has been applied tells such a batch from one that came twice.
    fn begin_again(&mut self, next: BatchCursor, metrics: &EventMetrics) {
        metrics.sequence_gap(self.worker(), 1, next.seq);
        self.degrade(DegradedReason::Gap, metrics);
        self.note_restart();
        self.tracker = SequenceTracker::resuming(BatchCursor { seq: 0, ..next });
        self.writer.status().set_cursor(BatchCursor { seq: 0, ..next });
    }

    /// The state has been replaced as a whole: no reason for doubt is left, but that a resync is under way.
    fn forgive(&mut self) {
        if !self.writer.status().own_reasons().is_empty() {
            let kept = DegradedReasons::of(DegradedReason::Resyncing).with(DegradedReason::Stale);
            self.writer.replace_reasons(kept);
        }
        self.is_whole = true;
        self.asked.has_restarted = false;
        self.asked.has_outlived = false;
    }

    /// Notes that the publisher lives.
    pub(super) fn hear(&mut self, clocks: Clocks) {
        self.liveness.hear(clocks.listening_us);
        self.writer.status().recover(DegradedReason::Stale);
    }

    pub(super) fn apply_events(&mut self, batch: EventBatch, context: Context<'_>) -> Afterwards {
        let Context { clocks, metrics, .. } = context;
        let started = std::time::Instant::now();
        let mut total = AppliedBatch::default();
        let mut afterwards = Afterwards::Stays;
        for event in batch.events {
            let applied = self.writer.apply(event, batch.tier, clocks.monotonic_us);
            if applied.cleared {
                // The state is known for certain again: nothing.
                self.forgive();
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

    /// Times out what waits for a parent, or for an answer.
    pub(crate) fn tick(&mut self, context: Context<'_>) -> Afterwards {
        let applied = self.writer.expire_parked(context.clocks.monotonic_us);
        self.report_rejects(&applied, context.metrics);
        self.time_out_holding(context)
    }

    /// Notes that a batch of the worker could not be decoded.
    pub(crate) fn note_undecodable(&self, metrics: &EventMetrics) {
        self.degrade(DegradedReason::Undecodable, metrics);
    }

    pub(super) fn report_rejects(&mut self, applied: &Applied, metrics: &EventMetrics) {
        for reason in RejectReason::ALL {
            let blocks = applied.rejected(reason);
            if blocks == 0 {
                continue;
            }
            metrics.reject_blocks(reason, blocks, self.worker());
            match degradation(reason) {
                None => {}
                Some(DegradedReason::Capacity) => {
                    self.writer.status().degrade(DegradedReason::Capacity);
                    self.is_whole = false;
                }
                Some(degraded) => {
                    self.degrade(degraded, metrics);
                    self.is_whole = false;
                }
            }
        }
        self.count_shortage(metrics);
    }

    /// Counts that there is no room for some of the holder's blocks, whoever found out.
    fn count_shortage(&mut self, metrics: &EventMetrics) {
        let is_short = self
            .writer
            .status()
            .own_reasons()
            .contains(DegradedReason::Capacity);
        if is_short && !self.is_known_short {
            metrics.holder_degraded(
                DegradedReason::Capacity,
                self.worker(),
                self.writer.record().id.rank,
            );
        }
        self.is_known_short = is_short;
    }

    pub(super) fn degrade(&self, reason: DegradedReason, metrics: &EventMetrics) {
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
        self.held = None;
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
        // Where it counts as unverified, the next batch that continues the count takes that away: it is not lasting.
        let lasting = reasons.filtered(DegradedReason::is_lasting);
        status.reset_reasons(lasting);
        self.is_known_short = lasting.contains(DegradedReason::Capacity);
        self.is_whole = lasting.is_empty();
        // A stream gives batches again that are part of the snapshot. Without the time there is no telling them from those of a
        // publisher that counts from the start again.
        self.made_us = frame.made_us.unwrap_or(u64::MAX);
        if frame.made_us.is_some() && !reasons.contains(DegradedReason::Unverified) {
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

    /// Stores runs of a snapshot's forest.
    pub(crate) fn restore_runs<'r>(
        &mut self,
        tier: Tier,
        runs: impl Iterator<Item = RestoredRun<'r>>,
        metrics: &EventMetrics,
    ) {
        let applied = self.writer.restore_runs(tier, runs);
        self.report_rejects(&applied, metrics);
    }

    /// The holder's state now, for a file of this format; `generation` is the stream's, in which it may be unverified.
    pub(crate) fn dump(
        &mut self,
        namespace: &NamespaceName,
        generation: StreamGeneration,
        format: SnapshotFormat,
    ) -> HolderDump {
        let walked = match format {
            SnapshotFormat::Forest => self.writer.as_walked(),
            SnapshotFormat::Events => None,
        };
        // Before the frame: it makes up for what has been evicted.
        let events = match &walked {
            Some(_) => Vec::new(),
            None => self.writer.dump_events(DUMP_EVENT_BLOCKS_MAX).collect(),
        };
        let frame = self.frame(namespace, generation);
        HolderDump {
            frame,
            events,
            walked,
        }
    }

    /// What has become of the holder since it was dumped as `before`, to be met on a walk that is over now.
    pub(crate) fn revisit(
        &mut self,
        before: &WalkedHolder,
        dumped: &HolderFrame,
        generation: StreamGeneration,
    ) -> Revisited {
        let is_same = self.writer.as_walked().is_some_and(|now| now.is_same_as(before));
        // Eviction, and what else no batch brings back.
        let known = DegradedReasons::from_bits(dumped.degraded_bits);
        let is_as_certain = self
            .writer
            .status()
            .lasting_reasons()
            .filtered(|reason| !known.contains(reason))
            .is_empty();
        if is_same && is_as_certain {
            return Revisited::Unchanged;
        }
        Revisited::Changed(Box::new(self.dump(
            &dumped.namespace,
            generation,
            SnapshotFormat::Events,
        )))
    }

    fn frame(&self, namespace: &NamespaceName, generation: StreamGeneration) -> HolderFrame {
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
        HolderFrame {
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
            made_us: Some(self.made_us),
            forest: None,
        }
    }

    /// Removes the holder from the index.
    pub(crate) fn retire(self) {
        self.writer.retire();
    }
}

/// Where a batch stands.
pub(super) fn cursor_of(batch: &EventBatch) -> BatchCursor {
    BatchCursor {
        epoch: batch.epoch,
        seq: batch.seq,
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
