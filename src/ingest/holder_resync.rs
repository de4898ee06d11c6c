//! What a holder does while its publisher is asked for what is missing.

use crate::telemetry::labels::DropReason;
use crate::tracking::{
    Admission, BatchCursor, DegradedReason, DegradedReasons, LivenessLimits, SequenceTracker, Silence,
    StreamGeneration,
};
use crate::wire::ResyncAnswerKind;

use super::held::{Held, NoRoom, ReceivedBatch, ResyncNumber};
use super::holder::{Afterwards, Context, Holder, cursor_of};
use super::replace::remove_surplus;
use super::resync::ResyncAnswer;

/// A resync that has begun: what to ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResyncBegun {
    pub(crate) number: ResyncNumber,
    /// Everything up to here has been applied.
    pub(crate) cursor: BatchCursor,
    /// Whether only the full state helps.
    pub(crate) full: bool,
}

/// What a resync led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResyncOutcome {
    /// The holder is exact, as far as the stream is trusted.
    Exact,
    /// The answer was applied, but there are reasons for doubt.
    Incomplete,
    /// The answer came too late: the holder no longer waited for it.
    Superseded,
}

impl Holder {
    /// Takes a batch that came while others wait.
    pub(super) fn apply_while_holding(
        &mut self,
        received: ReceivedBatch,
        context: Context<'_>,
    ) -> Afterwards {
        let next = cursor_of(&received.batch);
        match self.tracker.classify(next) {
            // The state is replaced by one that is known for certain, so nothing that waits matters.
            Admission::NewEpoch { missed: 0 } => {
                self.held = None;
                let afterwards = self.apply_now(received, context);
                self.end_resync();
                return afterwards;
            }
            Admission::StaleEpoch => {
                context
                    .metrics
                    .batch_dropped(DropReason::StaleEpoch, self.worker(), &next.epoch);
                return Afterwards::Stays;
            }
            Admission::Duplicate => {
                context
                    .metrics
                    .batch_dropped(DropReason::Duplicate, self.worker(), &next.seq);
                return Afterwards::Stays;
            }
            Admission::Next | Admission::Gap { .. } | Admission::NewEpoch { .. } => {}
        }
        self.hear(context.clocks);
        let Some(held) = &mut self.held else {
            return self.apply_now(received, context);
        };
        match held.push(received, context.holding) {
            Ok(()) => Afterwards::Stays,
            Err(NoRoom(received)) => match self.release(context) {
                Afterwards::Stays => self.apply_now(received, context),
                leaves @ Afterwards::Leaves => leaves,
            },
        }
    }

    /// Keeps back a batch before which others are missing, so that these can be applied before it.
    pub(super) fn hold_at_gap(&mut self, received: ReceivedBatch, context: Context<'_>) -> Afterwards {
        let next = cursor_of(&received.batch);
        match self.tracker.classify(next) {
            Admission::Gap { missed } => {
                context
                    .metrics
                    .sequence_gap(self.worker(), next.seq - missed, next.seq);
                self.degrade(DegradedReason::Gap, context.metrics);
            }
            Admission::NewEpoch { .. } => self.outlive_epoch(next, context),
            // The numbers have begun again, which has been noted.
            Admission::Next | Admission::Duplicate | Admission::StaleEpoch => {}
        }
        self.hear(context.clocks);
        let mut held = Held::new(context.holding, context.clocks.monotonic_us);
        match held.push(received, context.holding) {
            Ok(()) => {
                self.held = Some(held);
                Afterwards::Stays
            }
            Err(NoRoom(received)) => self.apply_now(received, context),
        }
    }

    /// A new epoch has begun, but its first batches are missing. What the last one had stays until it is known what the new one
    /// has: to a router it is worth more than nothing.
    fn outlive_epoch(&mut self, next: BatchCursor, context: Context<'_>) {
        let metrics = context.metrics;
        if let Some(before) = self.tracker.cursor() {
            metrics.epoch_changed(self.worker(), &before.epoch, &next.epoch);
            self.asked.has_outlived = true;
        }
        metrics.sequence_gap(self.worker(), 1, next.seq);
        self.degrade(DegradedReason::Gap, metrics);
        // An epoch begins with nothing: where there is nothing, that is its state before the first batch.
        self.is_whole = self.writer.blocks() == 0 && self.writer.status().parked_events() == 0;
        self.asked.has_restarted = false;
        self.made_us = 0;
        let start = BatchCursor { seq: 0, ..next };
        self.tracker = SequenceTracker::resuming(start);
        self.writer.status().set_cursor(start);
    }

    /// Begins a resync: what comes from now on is kept back.
    pub(crate) fn begin_resync(&mut self, context: Context<'_>) -> ResyncBegun {
        self.asked.times += 1;
        let number = ResyncNumber(self.asked.times);
        let now_us = context.clocks.monotonic_us;
        let held = self
            .held
            .get_or_insert_with(|| Held::new(context.holding, now_us));
        held.resync = Some(number);
        held.since_us = now_us;
        held.mark();
        self.degrade(DegradedReason::Resyncing, context.metrics);
        let cursor = self.tracker.cursor().unwrap_or_default();
        let (cursor, full) = match self.asked.has_restarted {
            true => (BatchCursor { seq: 0, ..cursor }, true),
            false => (cursor, !self.is_whole),
        };
        ResyncBegun { number, cursor, full }
    }

    /// Applies an answer that was asked for in `generation` of the stream, and what was kept back meanwhile.
    pub(crate) fn finish_resync(
        &mut self,
        number: ResyncNumber,
        answer: ResyncAnswer,
        generation: StreamGeneration,
        context: Context<'_>,
    ) -> (ResyncOutcome, Afterwards) {
        let Some(held) = self.held.take_if(|held| held.resync == Some(number)) else {
            return (ResyncOutcome::Superseded, Afterwards::Stays);
        };
        // The reasons are about a state that is mended or replaced now. Until that is done, the first of these stands for them. What
        // the index has forgotten for want of room is not among the missing batches.
        let resyncing = DegradedReasons::of(DegradedReason::Resyncing);
        let kept = match answer.kind {
            ResyncAnswerKind::Full => resyncing,
            ResyncAnswerKind::Missing => resyncing.with(DegradedReason::Capacity),
        };
        self.writer.status().retain_reasons(kept);
        self.asked.may_answer = true;
        let cursor = answer.cursor;
        let afterwards = self.apply_answer(answer, generation, context);
        let afterwards = match afterwards {
            Afterwards::Stays => self.apply_held(held, cursor, context),
            Afterwards::Leaves => afterwards,
        };
        if self.tracker.cursor() == Some(cursor) {
            self.writer.status().set_cursor(cursor);
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
        answer: ResyncAnswer,
        generation: StreamGeneration,
        context: Context<'_>,
    ) -> Afterwards {
        if answer.kind == ResyncAnswerKind::Full {
            let is_foreign = self.writer.status().has_foreign_chain();
            let batches = answer.batches.iter();
            let state = batches.flat_map(|batch| batch.events.iter().map(|event| (batch.tier, event)));
            remove_surplus(&mut self.writer, state, context.clocks.monotonic_us);
            // The state has no content beside it that would show this again.
            self.writer.set_foreign_chain(is_foreign);
            self.tracker = SequenceTracker::resuming(answer.cursor);
            self.is_whole = true;
            self.asked.has_restarted = false;
            self.asked.has_outlived = false;
            self.made_us = answer.time_us.unwrap_or(u64::MAX);
            for batch in answer.batches {
                self.apply_events(batch, context);
            }
            return Afterwards::Stays;
        }
        for batch in answer.batches {
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

    /// Applies what was kept back; at a gap, the rest is kept back again.
    ///
    /// What had come before the question but has a higher number than the publisher knows of, nobody has published: it is left over
    /// from an earlier life of the publisher, or forged.
    fn apply_held(&mut self, held: Held, published: BatchCursor, context: Context<'_>) -> Afterwards {
        let marked = held.marked();
        for (index, received) in held.into_batches().into_iter().enumerate() {
            let at = cursor_of(&received.batch);
            if index < marked && at.epoch == published.epoch && at.seq > published.seq {
                context
                    .metrics
                    .batch_dropped(DropReason::NeverPublished, self.worker(), &at.seq);
                continue;
            }
            if self.apply(received, context) == Afterwards::Leaves {
                return Afterwards::Leaves;
            }
        }
        Afterwards::Stays
    }

    /// Ends the time in which the holder is resyncing: searches that began in it notice. Says whether reasons for doubt are left.
    fn end_resync(&mut self) -> bool {
        let kept = DegradedReasons::all().without(DegradedReason::Resyncing);
        !self.writer.replace_reasons(kept).is_empty()
    }

    /// Gives up on a resync; `may_answer` says whether the publisher may answer another time.
    pub(crate) fn abandon_resync(
        &mut self,
        number: ResyncNumber,
        may_answer: bool,
        context: Context<'_>,
    ) -> Afterwards {
        if self.held.as_ref().and_then(|held| held.resync) != Some(number) {
            return Afterwards::Stays;
        }
        self.asked.may_answer = may_answer;
        self.release(context)
    }

    /// Notes that the publisher is not where its earlier batches say that it is: its numbers have begun again.
    pub(crate) fn note_restart(&mut self) {
        self.asked.has_restarted = true;
        self.is_whole = false;
    }

    /// As [`Self::note_restart`], found out by asking.
    pub(crate) fn note_cursor_behind(&mut self, context: Context<'_>) {
        self.degrade(DegradedReason::Gap, context.metrics);
        self.note_restart();
    }

    /// Applies what was kept back as if nobody had been asked: what is missing before it stays missing.
    pub(super) fn release(&mut self, context: Context<'_>) -> Afterwards {
        let Some(held) = self.held.take() else {
            return Afterwards::Stays;
        };
        if std::mem::take(&mut self.asked.has_outlived) {
            self.writer.clear();
        }
        let mut afterwards = Afterwards::Stays;
        for received in held.into_batches() {
            afterwards = self.apply_now(received, context);
            if afterwards == Afterwards::Leaves {
                break;
            }
        }
        self.end_resync();
        afterwards
    }

    /// Releases what has waited for too long.
    pub(super) fn time_out_holding(&mut self, context: Context<'_>) -> Afterwards {
        let now_us = context.clocks.monotonic_us;
        let is_over = |held: &Held| now_us.saturating_sub(held.since_us) >= context.holding.wait_us_max;
        if self.held.as_ref().is_some_and(is_over) {
            return self.release(context);
        }
        Afterwards::Stays
    }

    /// How silent the holder is; one that is silent for too long is marked.
    pub(crate) fn check_liveness(&mut self, limits: &LivenessLimits, context: Context<'_>) -> Silence {
        let silence = self.liveness.silence(context.clocks.listening_us, limits);
        if silence == Silence::Stale {
            self.degrade(DegradedReason::Stale, context.metrics);
        }
        silence
    }
}
