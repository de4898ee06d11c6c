//! A holder's part in a resync. The holder holds batches, then applies the publisher's answer and after it the held
//! batches.

use kvatlas_core::stream::StreamGeneration;
use kvatlas_core::wire::{BatchCursor, DegradedReason, DegradedReasons, Event, EventBatch, ResyncAnswerKind};
use kvatlas_telemetry::labels::{DropReason, ResyncFailure};

use super::held::{HeldBatches, NoRoom, ResyncNumber, is_of_dropped};
use super::holder::{Afterwards, Context, Holder};
use super::replace::remove_surplus;
use super::sequence::{BatchAdmission, HighWater, ReceivedBatch, SequenceTracker, UNKNOWN_US, cursor_of};
use super::standing::{BlocksChange, BlocksState, PublisherChange};

/// Complete answer of a publisher to a resync request. Its chunks agree with each other and with the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResyncAnswer {
    /// Kind of the answer: the missing batches, or the full state.
    pub kind: ResyncAnswerKind,
    /// Cursor (epoch and batch number) of the holder once the answer has been applied.
    pub cursor: BatchCursor,
    /// Time at which the batch at the cursor was made, in microseconds since the Unix epoch. `None` if the publisher
    /// does not tell it.
    pub time_us: Option<u64>,
    /// Batches of the answer: the missing batches without a gap, or batches that store all blocks of the holder.
    pub batches: Vec<EventBatch>,
}

/// Resync that has begun, with the request that the publisher is to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResyncBegun {
    pub(crate) number: ResyncNumber,
    /// Epoch and number of the last applied batch. Nothing before this batch is missing.
    pub(crate) cursor: BatchCursor,
    /// Epoch and number of the newest received batch. An answer that ends before this batch contradicts it.
    pub(crate) seen: BatchCursor,
    /// Whether the publisher must be asked for its full state, because missing batches alone would not make the holder
    /// exact.
    pub(crate) full: bool,
}

/// Result of a resync.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResyncOutcome {
    /// Holder is exact, except for doubts about the whole event stream.
    Exact,
    /// Answer was applied, but reasons for doubt are left.
    Incomplete,
    /// Answer came too late: the holder no longer waited for it.
    Superseded,
}

impl Holder {
    /// Takes a batch while others are held. The first batch of a new epoch is applied, an old batch is dropped, and any
    /// other batch is held.
    pub(super) fn apply_while_holding(
        &mut self,
        received: ReceivedBatch,
        context: Context<'_>,
    ) -> Afterwards {
        let next = cursor_of(&received.batch);
        match self.tracker.classify(next) {
            // The first batch of a new epoch does not depend on held batches. Held batches that overtook it are applied
            // after it.
            BatchAdmission::NewEpoch { missed: 0 } => {
                let overtaking = self.phase.release();
                let mut afterwards = self.apply_now(received, context);
                if let Some(held) = overtaking {
                    afterwards = self.apply_held(afterwards, held, context);
                }
                self.end_resync();
                return afterwards;
            }
            BatchAdmission::StaleEpoch => {
                self.drop_batch(DropReason::StaleEpoch, next.epoch);
                self.contest(&received.batch, context);
                return Afterwards::Stays;
            }
            BatchAdmission::Duplicate => {
                self.drop_batch(DropReason::Duplicate, next.seq);
                return Afterwards::Stays;
            }
            BatchAdmission::Next | BatchAdmission::Gap { .. } | BatchAdmission::NewEpoch { .. } => {}
        }
        self.hear(context.clocks);
        let now_us = context.clocks.monotonic_us;
        match self.phase.hold(received, context.holding, now_us) {
            Ok(()) => Afterwards::Stays,
            Err(NoRoom(received)) => match self.release(context) {
                Afterwards::Leaves if next.epoch <= self.epoch() => {
                    self.drop_batch(DropReason::StaleEpoch, next.epoch);
                    Afterwards::Leaves
                }
                _ => self.apply_now(received, context),
            },
        }
    }

    /// Holds a batch because batches before it are missing. The batch is applied after the missing ones.
    pub(super) fn hold_at_gap(&mut self, received: ReceivedBatch, context: Context<'_>) -> Afterwards {
        let next = cursor_of(&received.batch);
        match self.tracker.classify(next) {
            BatchAdmission::Gap { missed } => self.note_gap(next, missed),
            BatchAdmission::NewEpoch { missed } => {
                // The gap stands for the doubts of the ended epoch, so it comes first.
                self.note_gap(next, missed);
                self.outlive_epoch(next, context);
            }
            // The restart of the numbering was noted when the batch was received.
            BatchAdmission::Next | BatchAdmission::Duplicate | BatchAdmission::StaleEpoch => {}
        }
        self.hear(context.clocks);
        let now_us = context.clocks.monotonic_us;
        match self.phase.hold(received, context.holding, now_us) {
            Ok(()) => Afterwards::Stays,
            Err(NoRoom(received)) => self.apply_now(received, context),
        }
    }

    /// Takes note of a new epoch whose first batches are missing. The holder must have the reason `Gap` already.
    ///
    /// The blocks of the ended epoch stay until the blocks of the new epoch are known. For a router they are better
    /// than no blocks.
    fn outlive_epoch(&mut self, next: BatchCursor, context: Context<'_>) {
        self.outgrow_contest(next.epoch, context);
        self.note_epoch(next.epoch, context);
        if let Some(before) = self.tracker.cursor() {
            self.metrics
                .epoch_changed(self.worker(), &before.epoch, &next.epoch);
        }
        self.forget_epoch();
        // An epoch begins without blocks. So if the holder has no blocks, it is already in the state in which the new
        // epoch began.
        let is_empty = self.writer.blocks() == 0 && self.writer.status().parked_events.load() == 0;
        self.note_blocks(match is_empty {
            true => BlocksChange::Replaced,
            false => BlocksChange::EpochEnded,
        });
        let start = BatchCursor { seq: 0, ..next };
        self.tracker = SequenceTracker::resuming(start);
        self.writer.status().cursor.store(start);
    }

    /// Believes the publisher of `batch`, whose epoch is lower than that of the publisher that was believed. Nobody knows
    /// what the blocks of the one have to do with those of the other.
    pub(super) fn believe_other(&mut self, batch: &EventBatch, context: Context<'_>) {
        self.drop_held();
        let outlived = self.high_water.seen.epoch;
        self.high_water = HighWater::of(batch);
        let next = cursor_of(batch);
        // Batches that are missing are counted when the batch is applied.
        self.degrade(DegradedReason::Gap);
        self.outlive_epoch(next, context);
        self.outlived = Some(outlived);
        self.note_publisher(PublisherChange::Reconsidered);
        if !context.holding.is_enabled {
            self.note_blocks(BlocksChange::Released);
        }
    }

    /// Forgets facts about the process of an ended epoch: what it doubted itself, and how many tokens its blocks have.
    /// Another reason for doubt must stand for these doubts.
    fn forget_epoch(&mut self) {
        self.note_doubts(DegradedReasons::default());
        self.forget_size();
    }

    /// Begins a resync: batches are held from now on.
    pub(super) fn begin_resync(&mut self, context: Context<'_>) -> ResyncBegun {
        self.resyncs += 1;
        let number = ResyncNumber(self.resyncs);
        self.phase
            .ask(number, context.holding, context.clocks.monotonic_us);
        self.degrade(DegradedReason::Resyncing);
        let cursor = self.tracker.cursor().unwrap_or_default();
        let (cursor, full) = match self.blocks {
            BlocksState::Recounted => (BatchCursor { seq: 0, ..cursor }, true),
            // Later batches do not bring back blocks that were forgotten for lack of room. Only the full state does.
            state => (cursor, state != BlocksState::Whole || self.is_short()),
        };
        ResyncBegun {
            number,
            cursor,
            seen: self.high_water.seen,
            full,
        }
    }

    /// Applies the publisher's answer, then the held batches. `generation` is the generation of the stream in which
    /// the publisher was asked. A new generation begins when messages may have been lost.
    pub(super) fn finish_resync(
        &mut self,
        number: ResyncNumber,
        answer: ResyncAnswer,
        generation: StreamGeneration,
        context: Context<'_>,
    ) -> (ResyncOutcome, Afterwards) {
        let Some(held) = self.phase.end(number) else {
            return (ResyncOutcome::Superseded, Afterwards::Stays);
        };
        self.catch_up();
        // The answer mends or replaces the state, so it ends the reasons for doubt. Until it is applied, `Resyncing`
        // stands for these reasons. An answer with missing batches does not bring back evicted blocks, so it leaves
        // `Capacity`.
        let resyncing = DegradedReasons::of(DegradedReason::Resyncing);
        // The publisher may have made the answer before the causes of these doubts.
        let later = held.doubts();
        if self
            .tracker
            .cursor()
            .is_some_and(|known| known.epoch < answer.cursor.epoch)
        {
            self.outgrow_contest(answer.cursor.epoch, context);
            self.note_epoch(answer.cursor.epoch, context);
            self.forget_epoch();
        }
        let kept = match answer.kind {
            // Of the later doubts, those about dropped messages stay. The others are about events from before the
            // request, and the full state includes the blocks of these events.
            ResyncAnswerKind::Full => resyncing.union(later.filtered(is_of_dropped)),
            // An answer with missing batches does not end doubts that the publisher has told about its own state.
            ResyncAnswerKind::Missing => {
                let own = self.writer.status().own_reasons();
                let kept = resyncing.with(DegradedReason::Capacity).union(later);
                kept.union(own.upstream())
            }
        };
        self.writer.status().retain_reasons(kept.union(self.contested()));
        self.note_publisher(PublisherChange::Answered);
        let cursor = answer.cursor;
        let doubts = later.filtered(is_of_dropped);
        let afterwards =
            self.before_doubts(doubts, |holder| holder.apply_answer(answer, generation, context));
        // Applying the held batches raises the high-water mark again.
        self.high_water.seen = cursor;
        let afterwards = self.apply_held(afterwards, held, context);
        if self.tracker.cursor() == Some(cursor) {
            self.writer.status().cursor.store(cursor);
        }
        self.hear(context.clocks);
        let remaining = self.end_resync();
        self.writer.status().confirm(generation);
        let outcome = if remaining {
            ResyncOutcome::Incomplete
        } else {
            ResyncOutcome::Exact
        };
        (outcome, afterwards)
    }

    fn apply_answer(
        &mut self,
        mut answer: ResyncAnswer,
        generation: StreamGeneration,
        context: Context<'_>,
    ) -> Afterwards {
        if answer.kind == ResyncAnswerKind::Full {
            let is_foreign = self.writer.status().has_foreign_chain.load();
            let batches = answer.batches.iter();
            let state = batches.flat_map(|batch| batch.events.iter().map(|event| (batch.tier, event)));
            let state = state.filter(|(_, event)| !matches!(event, Event::Doubted(_)));
            remove_surplus(&mut self.writer, state, context.clocks.monotonic_us);
            // The full state has no content from which a foreign chain could be recognised, so the mark is kept. It is
            // even kept in a new epoch: the same engine usually hashes as before.
            self.writer.set_foreign_chain(is_foreign);
            self.tracker = SequenceTracker::resuming(answer.cursor);
            self.note_blocks(BlocksChange::Replaced);
            self.high_water.made_us = answer.time_us.unwrap_or(UNKNOWN_US);
            let mut told = answer.batches.iter_mut().rev();
            let profile = told.find_map(|batch| batch.profile.take());
            self.note_profile(profile, answer.cursor.epoch);
            for batch in answer.batches {
                self.apply_events(batch, context);
            }
            return Afterwards::Stays;
        }
        if self.tracker.cursor().is_some_and(|cursor| cursor.seq == 0) && self.writer.blocks() == 0 {
            // The answer has the epoch from its beginning, with the content from which a foreign chain is recognised.
            self.writer.set_foreign_chain(false);
        }
        for batch in answer.batches {
            // The batch may come once more on the events subject. Then it must not look like a restart.
            self.high_water.note(&batch);
            let received = ReceivedBatch {
                batch,
                generation,
                bytes: 0,
            };
            if self.apply_now(received, context) == Afterwards::Leaves {
                return Afterwards::Leaves;
            }
        }
        Afterwards::Stays
    }

    /// Runs `apply` for batches that were received before `doubts` arose. Such batches cannot end these doubts.
    fn before_doubts(
        &mut self,
        doubts: DegradedReasons,
        apply: impl FnOnce(&mut Self) -> Afterwards,
    ) -> Afterwards {
        self.later_doubts = doubts;
        let afterwards = apply(self);
        self.later_doubts = DegradedReasons::default();
        afterwards
    }

    /// Returns the epoch of the last applied batch.
    pub(super) fn epoch(&self) -> u64 {
        self.tracker.cursor().unwrap_or_default().epoch
    }

    /// Applies the held batches in order. If a batch between two held batches is still missing, the later ones are held
    /// again. Batches of an epoch that has ended are dropped. `before` says whether a batch before them had a goodbye.
    fn apply_held(&mut self, before: Afterwards, held: HeldBatches, context: Context<'_>) -> Afterwards {
        let current = self.epoch();
        self.for_each_held(before, held, |holder, received, later| {
            let epoch = received.batch.epoch;
            if epoch < current {
                holder.drop_batch(DropReason::StaleEpoch, epoch);
                return Afterwards::Stays;
            }
            let afterwards = holder.before_doubts(later, |holder| holder.apply(received, context));
            if let Some(held_again) = holder.phase.held_mut() {
                held_again.note_dropped(later);
            }
            afterwards
        })
    }

    /// Calls `apply` with each held batch, in order. Drops the batches behind a goodbye.
    ///
    /// If a batch of a higher epoch is held, a goodbye does not remove the holder: the publisher's next process has
    /// begun. `before` says whether a batch before the held ones had a goodbye.
    fn for_each_held(
        &mut self,
        before: Afterwards,
        held: HeldBatches,
        mut apply: impl FnMut(&mut Self, ReceivedBatch, DegradedReasons) -> Afterwards,
    ) -> Afterwards {
        let newest = held.newest_epoch();
        let unless_replaced = |afterwards, holder: &Self| match holder.epoch() < newest {
            true => Afterwards::Stays,
            false => afterwards,
        };
        let mut afterwards = unless_replaced(before, self);
        for (received, later) in held.into_batches() {
            if afterwards == Afterwards::Leaves {
                self.drop_batch(DropReason::StaleEpoch, received.batch.epoch);
                continue;
            }
            afterwards = apply(self, received, later);
            afterwards = unless_replaced(afterwards, self);
        }
        afterwards
    }

    /// Withdraws the reason `Resyncing`. Returns whether reasons for doubt are left that a further request to the
    /// publisher may end. Searches that began before this call notice the change.
    fn end_resync(&mut self) -> bool {
        let kept = DegradedReasons::all().without(DegradedReason::Resyncing);
        let left = self.writer.replace_reasons(kept);
        // A further request does not end the publisher's own doubts.
        !left.filtered(|reason| !reason.is_upstream()).is_empty()
    }

    /// Ends a resync that has failed. A failure of a resync that is no longer under way says nothing about the holder's
    /// present state.
    pub(super) fn abandon_resync(
        &mut self,
        number: ResyncNumber,
        failure: ResyncFailure,
        context: Context<'_>,
    ) -> Afterwards {
        if !self.phase.is_asking(number) {
            return Afterwards::Stays;
        }
        if failure == ResyncFailure::CursorBehind {
            self.note_contradiction();
        }
        self.note_publisher(match failure {
            ResyncFailure::NoResponder => PublisherChange::Refused,
            _ => PublisherChange::Failed,
        });
        self.release(context)
    }

    /// Degrades the holder, because the publisher's answer ended before a batch that has been received already.
    /// Nobody knows whether the answer or that batch is right. A full state that reaches the newest received batch
    /// ends this doubt.
    fn note_contradiction(&mut self) {
        self.degrade(DegradedReason::Gap);
        self.note_blocks(BlocksChange::Missed);
    }

    /// Puts the holder in doubt because an operator asked for it. The publisher is then asked for the full state.
    ///
    /// If the publisher has been asked already, its answer is no longer waited for: it may have the missing batches
    /// only, and would end this doubt.
    pub(super) fn note_operator_doubt(&mut self, context: Context<'_>) -> Afterwards {
        let afterwards = match self.phase.is_asking(ResyncNumber(self.resyncs)) {
            true => self.release(context),
            false => Afterwards::Stays,
        };
        self.note_publisher(PublisherChange::Reconsidered);
        self.note_blocks(BlocksChange::Missed);
        self.degrade(DegradedReason::Gap);
        afterwards
    }

    /// Drops the held batches, because their publisher has begun to count from 1 again. If a resync is under way,
    /// ends it.
    pub(super) fn drop_held(&mut self) {
        let Some(held) = self.phase.release() else {
            return;
        };
        for (received, _) in held.into_batches() {
            self.drop_batch(DropReason::StaleEpoch, received.batch.epoch);
        }
        self.end_resync();
    }

    /// Stops waiting for the missing batches, and applies the held batches without them.
    pub(super) fn release(&mut self, context: Context<'_>) -> Afterwards {
        let Some(held) = self.phase.release() else {
            return Afterwards::Stays;
        };
        self.note_blocks(BlocksChange::Released);
        let afterwards = self.for_each_held(Afterwards::Stays, held, |holder, received, later| {
            holder.before_doubts(later, |holder| holder.apply_now(received, context))
        });
        self.end_resync();
        afterwards
    }

    /// Applies batches that have been held for too long, although batches before them are missing.
    pub(super) fn time_out_holding(&mut self, context: Context<'_>) -> Afterwards {
        let now_us = context.clocks.monotonic_us;
        let is_over =
            |held: &HeldBatches| now_us.saturating_sub(held.since_us) >= context.holding.wait_us_max;
        if self.phase.held().is_some_and(is_over) {
            return self.release(context);
        }
        Afterwards::Stays
    }
}
