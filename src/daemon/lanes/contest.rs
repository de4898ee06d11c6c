//! Contested holders: two publishers claim one holder. The publisher with the highest epoch is *believed*, but batches
//! of another epoch come too: of a lower one, or of one so far ahead of the clock that nobody believes it.
//!
//! There are two possible causes. Either a publisher whose clock was ahead has died, and has come back with a lower
//! epoch. Or two processes publish under the same name. In both cases nobody knows which publisher's blocks the holder
//! has. The holder is *contested* until an epoch above both begins, or until one of the two has been silent for 3
//! seconds. If that is the believed one, and the other one's epoch is lower, the other one is believed from then on, and
//! asked for all that it has. If the first one comes back, the holder is contested again at once.

use kvatlas_core::stream::SILENT_US;
use kvatlas_core::wire::{BatchCursor, DegradedReason, DegradedReasons, EventBatch};

use super::clock::now_us;
use super::holder::{Context, Holder, JobClocks};
use super::liveness::{LivenessLimits, Silence, silence};
use super::sequence::cursor_of;
use super::settings::epoch_ahead_s;

/// Age in microseconds beyond which a batch of another epoch may be a redelivery.
const FRESH_US: u64 = 10_000_000;

/// Record of the dropped batches of another publisher. Their epoch is lower than the epoch of the batches that the
/// holder applies, or too far ahead of the clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct OtherPublisher {
    /// Epoch and number of the other publisher's last batch.
    last: BatchCursor,
    /// Time at which the other publisher's last batch came, in microseconds of listening time (time in which messages
    /// could be received).
    last_us: u64,
    /// Listening time at which one of the other publisher's batches first showed that it is alive.
    since_us: u64,
    /// Number of the other publisher's batches since one of them first showed that it is alive. 0 means that only one
    /// publisher claims the holder.
    batches: u64,
    /// Whether the believed publisher had been silent for so long that the holder was stale when this one was heard of.
    replaces_stale: bool,
}

impl OtherPublisher {
    /// Whether a batch of another epoch shows that another publisher is alive. `clocks` are of the job that has the
    /// batch.
    ///
    /// A batch that was made recently shows this. So does any batch during a contest (two publishers claim the
    /// holder). Any other batch shows nothing if it may have waited, as in a stream that is read again: there it is of
    /// an ended process. If it has just come, it shows this in two cases:
    ///
    /// - It does not tell when it was made.
    /// - It has the same epoch as the other publisher's last batch, and a higher number. It is no redelivery then: the
    ///   other publisher's clock may be slow.
    ///
    /// A batch that the stream has kept may count like one that has just come. The server must have taken it at most 10
    /// seconds before `now_us`, which is a reading of [`now_us`].
    fn is_alive(&self, batch: &EventBatch, clocks: &JobClocks, now_us: u64) -> bool {
        let goes_on = self.last.epoch == batch.epoch && self.last.seq < batch.seq;
        let has_just_come = clocks.is_new || now_us.saturating_sub(clocks.seen_us) < FRESH_US;
        let is_recent = match batch.time_us {
            Some(_) => is_fresh(batch, clocks.unix_us) || (goes_on && has_just_come),
            None => has_just_come,
        };
        is_recent || self.batches > 0
    }

    /// Whether the holder is contested, and the other publisher was heard of recently, by the same limits as the believed
    /// one.
    pub(super) fn is_heard(&self, listening_us: u64, limits: &LivenessLimits) -> bool {
        self.batches > 0 && silence(self.last_us, listening_us, limits) == Silence::Alive
    }

    /// Whether the other publisher of a contested holder has been silent for 3 seconds at `listening_us`, so that the
    /// contest is over.
    fn is_over(&self, listening_us: u64) -> bool {
        self.batches > 0 && listening_us.saturating_sub(self.last_us) >= SILENT_US
    }
}

/// Whether a batch was made in the last 10 seconds, or has no time.
pub(super) fn is_fresh(batch: &EventBatch, unix_us: u64) -> bool {
    batch
        .time_us
        .is_none_or(|made_us| made_us.saturating_add(FRESH_US) >= unix_us)
}

impl Holder {
    /// Notes a batch of another epoch, which is dropped. If the batch shows that another publisher is alive, the holder
    /// counts as contested from now on.
    pub(super) fn contest(&mut self, batch: &EventBatch, context: Context<'_>) {
        if batch.says_goodbye() {
            // The other publisher has gone by its own word. If the believed one has been silent as well, the contest
            // lasts until its next batch.
            if self.other.last.epoch == batch.epoch {
                let silent_us = context.clocks.listening_us.saturating_sub(self.heard_us);
                match silent_us >= SILENT_US || self.other.replaces_stale {
                    true => self.other.last_us = 0,
                    false => self.end_contest(),
                }
            }
            return;
        }
        let is_alive = self.other.is_alive(batch, &context.clocks, now_us());
        if is_alive && self.other.batches == 0 {
            let believed = self.tracker.cursor().unwrap_or_default().epoch;
            let rank = self.writer.record().id.rank;
            self.metrics
                .contest_begun(self.worker(), rank, believed, batch.epoch);
        }
        self.other = OtherPublisher {
            last: cursor_of(batch),
            last_us: context.clocks.listening_us,
            since_us: match self.is_contested() {
                true => self.other.since_us,
                false => context.clocks.listening_us,
            },
            batches: self.other.batches + u64::from(is_alive),
            replaces_stale: self.other.replaces_stale,
        };
        if is_alive {
            self.degrade(DegradedReason::Contested);
            let status = self.writer.status();
            self.other.replaces_stale |= status.own_reasons().contains(DegradedReason::Stale);
            // A publisher has been heard of, so the holder is not stale, even if the believed publisher is silent.
            status.recover(DegradedReason::Stale);
        }
    }

    /// Whether the holder is contested, that is, whether batches of another publisher come.
    pub(super) fn is_contested(&self) -> bool {
        self.other.batches > 0
    }

    /// Returns the epoch and number of the other publisher's last batch, if it claims the holder too. If the believed
    /// publisher says goodbye, the other one is left.
    pub(super) fn other_left(&self) -> Option<BatchCursor> {
        self.is_contested().then_some(self.other.last)
    }

    /// Forgets the publisher that was believed before it fell silent, if `batch` is its goodbye. Its place is taken already.
    /// Returns whether it is.
    pub(super) fn forget_outlived(&mut self, batch: &EventBatch) -> bool {
        batch.says_goodbye()
            && self
                .outlived
                .take_if(|outlived| *outlived == batch.epoch)
                .is_some()
    }

    /// Returns the reason `Contested` while two publishers claim the holder, and no reason otherwise.
    ///
    /// If the publisher with the highest epoch replaces or clears its state, the reason stays: that publisher's state
    /// does not tell which blocks the other publisher has.
    pub(super) fn contested(&self) -> DegradedReasons {
        match self.is_contested() {
            true => DegradedReasons::of(DegradedReason::Contested),
            false => DegradedReasons::default(),
        }
    }

    /// Ends a contest (two publishers claim the holder) if the other publisher has fallen silent. Must be called with
    /// each batch that is applied.
    pub(super) fn settle_contest(&mut self, context: Context<'_>) {
        if self.other.is_over(context.clocks.listening_us) {
            self.end_contest();
        }
    }

    /// Whether a batch of a lower epoch shows that the believed publisher is gone: it has been silent for 3 seconds, and
    /// the other one, whose batch this is, has gone on for as long.
    pub(super) fn is_outlived(&self, batch: &EventBatch, context: Context<'_>) -> bool {
        let has_passed = |since_us: u64| context.clocks.listening_us.saturating_sub(since_us) >= SILENT_US;
        let goes_on = self.other.batches > 1 && self.other.last < cursor_of(batch);
        // The batches of both may have waited for the lane, so the times count at which they came, too.
        let apart_us = context.clocks.seen_us.saturating_sub(self.seen_us);
        context.clocks.is_new
            && goes_on
            && apart_us >= SILENT_US
            && self.other.last.epoch == batch.epoch
            && batch.epoch < self.high_water.seen.epoch
            && has_passed(self.other.since_us)
            && has_passed(self.heard_us)
    }

    /// Ends a contest (two publishers claim the holder), because `epoch` begins. Does nothing if the other publisher's
    /// epoch is higher: then nobody has begun an epoch above both. If a publisher that had fallen silent goes on with its
    /// epoch, a contest begins instead.
    pub(super) fn outgrow_contest(&mut self, epoch: u64, context: Context<'_>) {
        let last = self.writer.status().cursor.load();
        match self.outlived.take_if(|outlived| epoch >= *outlived) {
            Some(outlived) if outlived == epoch => {
                let rank = self.writer.record().id.rank;
                self.metrics.contest_begun(self.worker(), rank, epoch, last.epoch);
                self.other = OtherPublisher {
                    last,
                    last_us: context.clocks.listening_us,
                    since_us: context.clocks.listening_us,
                    batches: 1,
                    replaces_stale: false,
                };
                self.degrade(DegradedReason::Contested);
            }
            _ if self.other.last.epoch <= epoch => self.end_contest(),
            _ => {}
        }
    }

    fn end_contest(&mut self) {
        let OtherPublisher { last, batches, .. } = std::mem::take(&mut self.other);
        if batches > 0 {
            let rank = self.writer.record().id.rank;
            self.metrics
                .contest_ended(self.worker(), rank, batches, last.epoch);
            self.writer.status().recover(DegradedReason::Contested);
        }
    }

    /// Notes the time at which a new epoch begins. Logs an epoch that lies ahead of the clock. After such an epoch, a
    /// restarted publisher with the right time would begin a lower epoch.
    pub(super) fn note_epoch(&self, epoch: u64, context: Context<'_>) {
        self.writer.status().epoch_since_us.store(context.clocks.unix_us);
        let ahead_s = epoch_ahead_s(epoch, context.clocks.unix_us);
        if ahead_s > 0 {
            self.metrics.epoch_ahead(self.worker(), epoch, ahead_s);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::tests::batch;
    use super::*;

    const NOW_US: u64 = 1_000_000_000;

    fn made(seq: u64, time_us: Option<u64>) -> EventBatch {
        EventBatch {
            time_us,
            ..batch(seq, Vec::new())
        }
    }

    #[test]
    fn a_contest_lasts_until_the_other_publisher_has_been_silent() {
        let other = OtherPublisher {
            last_us: 5_000_000,
            batches: 1,
            ..OtherPublisher::default()
        };
        assert!(!other.is_over(5_000_000) && !other.is_over(4_999_999 + SILENT_US));
        assert!(other.is_over(5_000_000 + SILENT_US));
        assert!(!OtherPublisher::default().is_over(u64::MAX), "there is none");
    }

    #[test]
    fn the_other_publisher_is_heard_until_it_would_be_stale() {
        let limits = LivenessLimits {
            stale_after: Some(Duration::from_secs(3)),
            remove_after: None,
        };
        let other = OtherPublisher {
            last_us: 5_000_000,
            batches: 1,
            ..OtherPublisher::default()
        };
        assert!(other.is_heard(7_000_000, &limits));
        assert!(!other.is_heard(8_000_000, &limits));
        assert!(!OtherPublisher::default().is_heard(0, &limits), "there is none");
    }

    /// Returns the clocks of a job whose message has just come, or may have waited.
    fn clocks(is_new: bool) -> JobClocks {
        JobClocks {
            monotonic_us: 0,
            unix_us: NOW_US,
            listening_us: 0,
            seen_us: 0,
            is_new,
        }
    }

    #[test]
    fn a_batch_that_comes_again_after_long_tells_of_nobody() {
        let none = OtherPublisher::default();
        let is_alive = |other: OtherPublisher, batch: &EventBatch| {
            [true, false].map(|is_new| other.is_alive(batch, &clocks(is_new), FRESH_US))
        };
        assert_eq!(
            is_alive(none, &made(9, None)),
            [true, false],
            "nobody knows when it was made"
        );
        let recent = made(9, Some(NOW_US - FRESH_US));
        assert_eq!(is_alive(none, &recent), [true; 2]);
        assert_eq!(is_alive(none, &made(9, Some(u64::MAX))), [true; 2]);
        let old = |seq| made(seq, Some(NOW_US - FRESH_US - 1));
        assert_eq!(is_alive(none, &old(9)), [false; 2]);
        // The other publisher's clock is behind. Its next batch shows that it is alive, unless the stream has kept it.
        let before = OtherPublisher {
            last: cursor_of(&old(9)),
            ..none
        };
        assert_eq!(is_alive(before, &old(10)), [true, false]);
        assert_eq!(is_alive(before, &old(9)), [false; 2]);
        let contested = OtherPublisher { batches: 1, ..none };
        assert_eq!(is_alive(contested, &old(9)), [true; 2]);
        // The stream has kept these since less than 10 s.
        let is_alive =
            |other: OtherPublisher, batch: &EventBatch| other.is_alive(batch, &clocks(false), FRESH_US - 1);
        assert!(is_alive(none, &made(9, None)) && is_alive(before, &old(10)));
        assert!(!is_alive(none, &old(9)) && !is_alive(before, &old(9)));
    }
}
