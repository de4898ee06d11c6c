//! One holder on its lane. It checks the numbers of its batches, and then changes the index.

use std::sync::Arc;

use kvatlas_core::index::{Applied, HolderWriter, RejectReason};
use kvatlas_core::stream::SequenceGap;
use kvatlas_core::wire::{
    BatchCursor, BlockContent, DegradedReason, DegradedReasons, Event, EventBatch, Profile,
};
use kvatlas_telemetry::labels::DropReason;
use kvatlas_telemetry::{AppliedBatch, EventMetrics};

use super::clock::LaneClock;
use super::contest::OtherPublisher;
use super::flow::{NamespaceFlow, OpenStep};
use super::held::HoldingLimits;
use super::liveness::{LivenessLimits, Silence, silence};
use super::phase::Phase;
use super::sequence::{BatchAdmission, HighWater, ReceivedBatch, SequenceTracker, cursor_of};
use super::standing::{BlocksChange, BlocksState, PublisherChange, PublisherState};
use super::tally::BatchTally;

/// Fate of a holder after a job: it stays or leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Afterwards {
    Stays,
    /// Holder is to be removed, because its publisher said goodbye.
    Leaves,
}

/// Times at which a job is done, by three clocks. The lane reads the clocks; a holder has none of its own.
#[derive(Debug, Clone, Copy)]
pub(super) struct JobClocks {
    /// Time in microseconds on a clock that does not run backwards.
    pub(super) monotonic_us: u64,
    /// Time in microseconds since the Unix epoch.
    pub(super) unix_us: u64,
    /// Listening time so far (time in which messages could be received), in microseconds.
    pub(super) listening_us: u64,
    /// Latest time at which the publisher can have sent the job's message, on the clock of
    /// [`now_us`](super::clock::now_us). 0 if the job has no message.
    pub(super) seen_us: u64,
    /// Whether the job has a message that did not wait in the socket or in the stream. Only such a message shows that
    /// the publisher is alive now.
    pub(super) is_new: bool,
}

/// Parts of a lane that its holders use.
pub(super) struct LaneParts {
    pub(super) holding: HoldingLimits,
    pub(super) clock: LaneClock,
    pub(super) tally: BatchTally,
}

impl LaneParts {
    /// Returns the parts for one job, which has the clock readings `clocks`.
    pub(super) fn context(&self, clocks: JobClocks) -> Context<'_> {
        Context {
            clocks,
            holding: &self.holding,
            clock: &self.clock,
            tally: &self.tally,
        }
    }
}

/// Parts of a lane that a holder uses during one job.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(super) clocks: JobClocks,
    pub(super) holding: &'a HoldingLimits,
    pub(super) clock: &'a LaneClock,
    pub(super) tally: &'a BatchTally,
}

/// Holder on its lane: the state of its blocks, its batch numbers, and its resync.
pub(crate) struct Holder {
    pub(super) writer: HolderWriter,
    pub(super) metrics: Arc<EventMetrics>,
    flow: Arc<NamespaceFlow>,
    pub(super) tracker: SequenceTracker,
    pub(super) blocks: BlocksState,
    pub(super) publisher: PublisherState,
    /// Number of resyncs that have begun for this holder.
    pub(super) resyncs: u64,
    /// Phase of the holder's resync, with the batches that wait for missing batches before them.
    pub(super) phase: Phase,
    /// Reasons for doubt that came after the batch that is being applied had been received. This batch cannot end
    /// these doubts. Empty unless the batch was held first.
    pub(super) later_doubts: DegradedReasons,
    /// Record of the dropped batches of another publisher, which claims the same holder.
    pub(super) other: OtherPublisher,
    /// Epoch of the publisher that was believed before it fell silent and the other one, with a lower epoch, went on.
    pub(super) outlived: Option<u64>,
    /// Time at which the publisher was last heard of, in microseconds of listening time.
    pub(super) heard_us: u64,
    /// Time at which the publisher was last seen to be alive, on the clock of [`now_us`](super::clock::now_us). That
    /// clock goes on while no messages can be received. 0 if the publisher has not been seen.
    pub(super) seen_us: u64,
    /// Time at which the publisher was last seen before the daemon was restarted, on the clock of the server that has
    /// the stream. `None` once `seen_us` includes it, and without a stream.
    pub(super) restored_us: Option<u64>,
    /// High-water marks: the newest batch that the holder has received, and the latest time of a batch. A resync
    /// answer that ends before this batch is not believed. An older batch that comes later does not confirm the
    /// holder.
    pub(super) high_water: HighWater,
    /// Whether the metrics have counted that there is no room for some of the holder's blocks. The code that evicts
    /// blocks puts the holder in doubt, but does not count this.
    pub(super) is_known_short: bool,
    /// Epoch of the batch from which the holder's present address and labels come.
    pub(super) profile_epoch: u64,
}

impl Holder {
    /// Returns a holder that has no blocks yet, and whose publisher has just been heard of.
    pub(super) fn new(
        writer: HolderWriter,
        metrics: Arc<EventMetrics>,
        flow: Arc<NamespaceFlow>,
        clocks: JobClocks,
    ) -> Self {
        let holder = Self {
            writer,
            metrics,
            flow,
            tracker: SequenceTracker::default(),
            blocks: BlocksState::Whole,
            publisher: PublisherState::Answers,
            resyncs: 0,
            phase: Phase::default(),
            later_doubts: DegradedReasons::default(),
            other: OtherPublisher::default(),
            outlived: None,
            heard_us: clocks.listening_us,
            seen_us: clocks.seen_us,
            restored_us: None,
            high_water: HighWater::default(),
            is_known_short: false,
            profile_epoch: 0,
        };
        holder.forget_size();
        holder
    }

    /// Marks the block size as unknown until a batch tells it, because a new process may have blocks of another size.
    /// If the namespace has taken its block size from batches, the size stays known: every batch for that namespace
    /// tells its block size.
    pub(super) fn forget_size(&self) {
        self.writer.set_size_known(self.writer.settings().is_size_told);
    }

    /// Notes that the holder's block size is known, if the batch tells how many tokens its blocks have.
    fn note_size(&self, batch: &EventBatch) {
        let has_tokens = |event: &Event| {
            let Event::Stored(stored) = event else {
                return false;
            };
            matches!(stored.content, Some(BlockContent::Tokens { .. }))
        };
        if batch.block_size.is_some() || batch.events.iter().any(has_tokens) {
            self.writer.set_size_known(true);
        }
    }

    /// Stores the address and labels `told` by a batch. If the batch tells none but begins a new epoch, clears the
    /// old ones, because they belong to another process.
    pub(super) fn note_profile(&mut self, told: Option<Profile>, epoch: u64) {
        if told.is_some() || self.profile_epoch != epoch {
            self.writer.status().set_profile(told.unwrap_or_default());
            self.profile_epoch = epoch;
        }
    }

    pub(super) fn worker(&self) -> &str {
        self.writer.record().id.worker.as_str()
    }

    /// Whether batches are held until the missing batches before them have come.
    pub(super) fn is_waiting(&self) -> bool {
        self.phase.held().is_some()
    }

    /// Takes a batch, and applies, skips or holds it according to its number.
    pub(crate) fn apply(&mut self, received: ReceivedBatch, context: Context<'_>) -> Afterwards {
        let next = cursor_of(&received.batch);
        if self.forget_outlived(&received.batch) {
            self.drop_batch(DropReason::StaleEpoch, next.epoch);
            return Afterwards::Stays;
        }
        if self.is_outlived(&received.batch, context) {
            self.believe_other(&received.batch, context);
        }
        let has_begun_again = self.note_received(&received.batch);
        if self.is_waiting() {
            return self.apply_while_holding(received, context);
        }
        let admission = self.tracker.classify(next);
        let is_gap = matches!(
            admission,
            BatchAdmission::Gap { .. } | BatchAdmission::NewEpoch { missed: 1.. }
        );
        if (is_gap || has_begun_again) && context.holding.is_enabled && self.publisher.may_answer() {
            return self.hold_at_gap(received, context);
        }
        self.apply_now(received, context)
    }

    /// Applies a batch, or skips it if its number shows that it is old. Does not wait for missing batches: they are
    /// counted, and the holder is in doubt.
    pub(super) fn apply_now(&mut self, received: ReceivedBatch, context: Context<'_>) -> Afterwards {
        let mut batch = received.batch;
        let before = self.tracker.cursor();
        let next = cursor_of(&batch);
        // The step ends when the batch has been applied.
        let _step = self.begin_step(&batch);
        match self.tracker.admit(next) {
            BatchAdmission::Next => {}
            BatchAdmission::Gap { missed } => {
                self.note_gap(next, missed);
                self.note_blocks(BlocksChange::Missed);
            }
            BatchAdmission::NewEpoch { missed } => self.begin_epoch(before, next, missed, context),
            BatchAdmission::Duplicate => {
                self.drop_batch(DropReason::Duplicate, next.seq);
                return Afterwards::Stays;
            }
            BatchAdmission::StaleEpoch => {
                self.drop_batch(DropReason::StaleEpoch, next.epoch);
                self.contest(&batch, context);
                return Afterwards::Stays;
            }
        }
        self.settle_contest(context);
        // Each earlier batch has been applied or is known to be missing, so this batch confirms the holder in its
        // generation of the stream. A batch before the high-water mark confirms nothing: it came late, and a batch that
        // overtook it may have been dropped.
        if next >= self.high_water.seen {
            self.writer.status().confirm(received.generation);
        }
        self.note_profile(batch.profile.take(), next.epoch);
        let afterwards = self.apply_events(batch, context);
        self.writer.status().cursor.store(next);
        self.hear(context.clocks);
        afterwards
    }

    /// Begins a *step* if queries must see `batch` whole or not at all. Returns `None` if they may see parts of it.
    ///
    /// A batch is a step in two cases: it both removes and adds blocks, or it begins a new epoch while the holder has
    /// blocks. Half applied, such a batch shows a state that the holder never had. That state is not even a lower bound
    /// of the state before or after.
    fn begin_step(&self, batch: &EventBatch) -> Option<OpenStep> {
        let takes = |event: &Event| match event {
            Event::Removed(_) | Event::Cleared => true,
            // Storing a block again can make it no longer resumable.
            Event::Stored(stored) => !stored.resumable.is_all(),
            Event::Resumable(blocks) => !blocks.resumable,
            Event::Doubted(_) | Event::Goodbye => false,
        };
        // A publisher's doubt is part of the new state, as a stored block is.
        let stores = |event: &Event| match event {
            Event::Stored(_) | Event::Doubted(_) => true,
            Event::Resumable(blocks) => blocks.resumable,
            Event::Removed(_) | Event::Cleared | Event::Goodbye => false,
        };
        let is_new_epoch = matches!(
            self.tracker.classify(cursor_of(batch)),
            BatchAdmission::NewEpoch { .. }
        );
        // Before its events are applied, a new epoch ends the old one's blocks and doubts.
        let ends_some = || self.writer.blocks() > 0 || !self.writer.status().own_reasons().is_empty();
        let doubts = |event: &Event| matches!(event, Event::Doubted(_));
        let is_mixed = (is_new_epoch && (ends_some() || batch.events.iter().any(doubts)))
            || (batch.events.iter().any(takes) && batch.events.iter().any(stores));
        is_mixed.then(|| self.flow.begin_step(&self.writer.record().id))
    }

    /// Notes a dropped batch. Only its `head` is known: its cursor and time, but not its events. The holder is
    /// unverified until this batch or a later one has been applied.
    ///
    /// If the holder holds batches, it stops waiting, and applies them. The answer to a resync under way may be older
    /// than the dropped batch.
    pub(super) fn note_lost(&mut self, head: &EventBatch, context: Context<'_>) -> Afterwards {
        let known = self.high_water.seen;
        // The publisher that was outlived has a higher epoch. Its next batch shows whether this one was its goodbye.
        let is_of_outlived = self.outlived == Some(head.epoch);
        if head.epoch < known.epoch || is_of_outlived {
            self.contest(head, context);
        }
        if is_of_outlived {
            self.writer.status().unconfirm();
            // A lower batch may be lost as well, of the publisher that is believed.
            return self.release(context);
        }
        if !self.note_received(head) && cursor_of(head) <= known {
            return Afterwards::Stays;
        }
        self.hear(context.clocks);
        self.writer.status().unconfirm();
        match self.release(context) {
            // The dropped batch is of the publisher's next process.
            Afterwards::Leaves if self.epoch() < head.epoch => Afterwards::Stays,
            afterwards => afterwards,
        }
    }

    /// Raises the high-water marks (newest batch and latest time) to a received batch. If the publisher has begun to
    /// count from 1 again without a new epoch, follows the new count and returns true.
    fn note_received(&mut self, batch: &EventBatch) -> bool {
        let is_numbered_anew = self.high_water.is_numbered_anew(batch);
        self.high_water.note(batch);
        if is_numbered_anew {
            self.begin_again(cursor_of(batch));
        }
        is_numbered_anew
    }

    /// Counts a batch that is not applied. `number` is the batch's number or its epoch, whichever `reason` is about.
    pub(super) fn drop_batch(&self, reason: DropReason, number: u64) {
        self.metrics.batch_dropped(reason, self.worker(), &number);
    }

    /// Counts `missed` batches that are missing before `next`, and degrades the holder.
    pub(super) fn note_gap(&self, next: BatchCursor, missed: u64) {
        let gap = SequenceGap {
            expected: next.seq - missed,
            received: next.seq,
        };
        self.metrics
            .sequence_gap(self.worker(), gap.expected, gap.received);
        self.writer.status().gap.store(gap);
        self.degrade(DegradedReason::Gap);
    }

    fn begin_epoch(
        &mut self,
        before: Option<BatchCursor>,
        next: BatchCursor,
        missed: u64,
        context: Context<'_>,
    ) {
        self.writer.clear();
        self.forget_size();
        self.outgrow_contest(next.epoch, context);
        // This is needed even if the holder has no reasons of its own, because this batch also ends doubts about the
        // stream.
        self.replace_reasons(context);
        self.note_epoch(next.epoch, context);
        self.note_blocks(BlocksChange::Replaced);
        self.note_publisher(PublisherChange::Reconsidered);
        if let Some(before) = before {
            self.metrics
                .epoch_changed(self.worker(), &before.epoch, &next.epoch);
        }
        if missed > 0 {
            self.note_gap(next, missed);
            self.note_blocks(BlocksChange::Missed);
        }
    }

    /// Changes the state of the blocks by `change`. The table of transitions in `standing.rs` says which state
    /// follows, and whether the blocks are cleared.
    pub(super) fn note_blocks(&mut self, change: BlocksChange) {
        let (state, is_cleared) = self.blocks.after(change);
        self.blocks = state;
        if is_cleared {
            self.writer.clear();
        }
    }

    /// Changes the state of the publisher by `change`. That state says whether the publisher answers.
    pub(super) fn note_publisher(&mut self, change: PublisherChange) {
        self.publisher = self.publisher.after(change);
    }

    /// Notes that the publisher has begun to count its batches from 1 again without a new epoch. Nobody knows how the
    /// new batches relate to the blocks of the old count.
    fn begin_again(&mut self, next: BatchCursor) {
        self.drop_held();
        self.forget_size();
        self.note_gap(next, next.seq.saturating_sub(1));
        self.note_blocks(BlocksChange::CountRestarted);
        self.high_water.seen = next;
        let start = BatchCursor { seq: 0, ..next };
        self.tracker = SequenceTracker::resuming(start);
        self.writer.status().cursor.store(start);
    }

    /// Withdraws the reasons for doubt, as [`Self::replace_reasons`] does, because the holder was cleared.
    fn forgive(&mut self, context: Context<'_>) {
        if !self.writer.status().own_reasons().is_empty() {
            self.replace_reasons(context);
        }
        self.note_blocks(BlocksChange::Replaced);
    }

    /// Withdraws the reasons for doubt after a batch has replaced or cleared the whole state. Searches that began
    /// before this call notice the change. These reasons stay:
    ///
    /// - `Resyncing` while a resync is under way, `Stale`, and `Contested` while two publishers claim the holder.
    /// - Reasons that came after the replacing batch had been received.
    /// - `Undecodable`, while the publisher may still be asked. The message that could not be decoded may be newer
    ///   than the replacing batch. The publisher's answer will settle this doubt.
    fn replace_reasons(&mut self, context: Context<'_>) {
        let mut kept = DegradedReasons::of(DegradedReason::Resyncing).with(DegradedReason::Stale);
        kept = kept.union(self.contested());
        if context.holding.is_enabled && !self.publisher.has_failed() {
            kept = kept.with(DegradedReason::Undecodable);
        }
        self.writer.replace_reasons(kept.union(self.later_doubts));
    }

    /// Gives the holder the doubts that the publisher has about its own state, and withdraws such doubts that the
    /// publisher no longer has. The blocks still count as complete: they are exactly the blocks that the publisher
    /// told.
    pub(super) fn note_doubts(&mut self, doubts: DegradedReasons) {
        for reason in doubts.upstream().iter() {
            self.degrade(reason);
        }
        let is_kept = |reason: DegradedReason| !reason.is_upstream() || doubts.contains(reason);
        let reasons = self.writer.status().own_reasons();
        if reasons.iter().any(|reason| !is_kept(reason)) {
            // Searches that began while the holder was in doubt notice the change.
            self.writer
                .replace_reasons(DegradedReasons::all().filtered(is_kept));
        }
    }

    /// Notes a message or an answer of the publisher as a sign of life. A message counts even if it cannot be applied.
    /// Otherwise the holder would count as gone, and no answer would list it.
    ///
    /// A message that may have waited for long does not show that the publisher is alive now.
    pub(super) fn hear(&mut self, clocks: JobClocks) {
        self.heard_us = clocks.listening_us;
        self.seen_us = self.seen_us.max(clocks.seen_us);
        if clocks.is_new {
            self.writer.status().recover(DegradedReason::Stale);
        }
    }

    /// Applies the events of a batch to the index, in order.
    pub(super) fn apply_events(&mut self, batch: EventBatch, context: Context<'_>) -> Afterwards {
        let clocks = context.clocks;
        let mut total = AppliedBatch::default();
        let mut afterwards = Afterwards::Stays;
        self.note_size(&batch);
        for event in batch.events {
            let applied = self.writer.apply(event, batch.tier, clocks.monotonic_us);
            if applied.cleared {
                // The state of a cleared holder is certain.
                self.forgive(context);
                total.clears += 1;
            }
            if let Some(doubts) = applied.doubted {
                self.note_doubts(doubts);
            }
            if applied.goodbye {
                afterwards = Afterwards::Leaves;
            }
            total.blocks_stored += applied.stored;
            total.blocks_removed += applied.removed;
            self.report_rejects(&applied);
        }
        total.elapsed = context.clock.lap();
        let lag_us = batch
            .time_us
            .map(|made_us| clocks.unix_us.saturating_sub(made_us));
        total.lag = lag_us.map(std::time::Duration::from_micros);
        context.tally.add(&self.metrics, &total);
        let status = self.writer.status();
        status.applied_at_us.store(clocks.unix_us);
        status.lag_us.store(lag_us.unwrap_or_default());
        afterwards
    }

    /// Gives up events that have waited too long for their parent block, and batches that have been held for too long.
    pub(super) fn tick(&mut self, context: Context<'_>) -> Afterwards {
        let applied = self.writer.expire_parked(context.clocks.monotonic_us);
        self.report_rejects(&applied);
        self.time_out_holding(context)
    }

    /// Returns the grade of the holder's silence: alive, stale (silent for long) or gone. Degrades a stale holder,
    /// and counts a holder that is gone.
    ///
    /// `now_us` is the time by [`now_us`](super::clock::now_us), or `None` while no messages can be received. Silence
    /// while no messages can be received has no effect until they can be received again. Even then it makes the
    /// holder stale at most, never gone.
    pub(super) fn check_liveness(
        &self,
        limits: &LivenessLimits,
        now_us: Option<u64>,
        context: Context<'_>,
    ) -> Silence {
        let silent = silence(self.heard_us, context.clocks.listening_us, limits);
        let unseen = now_us.map_or(Silence::Alive, |now_us| silence(self.seen_us, now_us, limits));
        let worst = match limits.stale_after {
            Some(_) => Silence::Stale,
            None => Silence::Alive,
        };
        let silence = silent.max(unseen.min(worst));
        match silence {
            Silence::Alive => {}
            // While another publisher is heard of, the holder is only `Contested`.
            Silence::Stale if self.other.is_heard(context.clocks.listening_us, limits) => {}
            Silence::Stale => self.degrade(DegradedReason::Stale),
            Silence::Gone => self
                .metrics
                .holder_removed(self.worker(), self.writer.record().id.rank),
        }
        silence
    }

    /// Degrades the holder, because a batch of its worker could not be decoded. A resync under way does not end this
    /// doubt, because the publisher's answer may be older than the undecodable batch.
    pub(super) fn note_undecodable(&mut self, clocks: JobClocks) {
        self.doubt(DegradedReason::Undecodable);
        self.hear(clocks);
    }

    /// Degrades the holder, because a batch was dropped whose epoch lies too far ahead to be believed. If that epoch
    /// was right, the blocks are outdated. The publisher that is believed does not know, so its answer does not end the
    /// contest.
    pub(super) fn note_unbelieved(&mut self, batch: &EventBatch, context: Context<'_>) {
        self.doubt(DegradedReason::Gap);
        self.contest(batch, context);
        self.hear(context.clocks);
    }

    /// Degrades the holder for `reason`. A resync under way does not end this doubt, because the publisher's answer
    /// may be older than the reason.
    fn doubt(&mut self, reason: DegradedReason) {
        if let Some(held) = self.phase.held_mut() {
            held.note_doubt(reason);
        }
        self.degrade(reason);
    }

    /// Adapts the holder to evictions since its last event, and counts the blocks that are dropped for that.
    pub(super) fn catch_up(&mut self) {
        let applied = self.writer.catch_up();
        self.report_rejects(&applied);
    }

    /// Counts rejected blocks. Degrades the holder if the rejections make its state uncertain.
    pub(super) fn report_rejects(&mut self, applied: &Applied) {
        for reason in RejectReason::ALL {
            let blocks = applied.rejected(reason);
            if blocks == 0 {
                continue;
            }
            self.metrics.reject_blocks(reason, blocks, self.worker());
            match reason.doubt() {
                None => {}
                Some(DegradedReason::Capacity) => {
                    self.writer.status().degrade(DegradedReason::Capacity);
                    self.note_blocks(BlocksChange::Missed);
                }
                Some(degraded) => {
                    self.doubt(degraded);
                    self.note_blocks(BlocksChange::Missed);
                }
            }
        }
        self.count_shortage();
    }

    /// Whether there was no room for some of the holder's blocks.
    pub(super) fn is_short(&self) -> bool {
        let reasons = self.writer.status().own_reasons();
        reasons.contains(DegradedReason::Capacity)
    }

    /// Counts in the metrics that there is no room for some of the holder's blocks, unless this has been counted
    /// already. The lack of room is noticed when an event is applied, or when blocks are evicted.
    fn count_shortage(&mut self) {
        let is_short = self.is_short();
        if is_short && !self.is_known_short {
            self.count_degraded(DegradedReason::Capacity);
        }
        self.is_known_short = is_short;
    }

    /// Degrades the holder for `reason`. Counts the reason if it is new for the holder.
    pub(super) fn degrade(&self, reason: DegradedReason) {
        if self.writer.status().degrade(reason) {
            self.count_degraded(reason);
        }
    }

    fn count_degraded(&self, reason: DegradedReason) {
        self.metrics
            .holder_degraded(reason, self.worker(), self.writer.record().id.rank);
    }

    /// Removes the holder from the index, and drops it.
    pub(super) fn retire(self) {
        self.writer.retire();
    }
}
