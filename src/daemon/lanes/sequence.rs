//! Sequence tracking. The numbers of batches show whether a holder's state is complete.
//!
//! A publisher numbers the batches of one epoch 1, 2, 3, … without a gap. A batch that continues the count proves that
//! nothing before it was lost. A batch that does not continue the count proves a loss. This file does no I/O and reads
//! no clock.

use kvatlas_core::stream::StreamGeneration;
use kvatlas_core::wire::{BatchCursor, EventBatch};
use kvatlas_telemetry::labels::DropReason;

/// Time for which goodbyes and unreadable messages are remembered, in microseconds. Batches that come out of order are
/// assumed to come within this time.
pub(super) const REMEMBERED_US: u64 = 60_000_000;

/// Decoded batch, with the generation of the stream in which it came, and the length of its payload.
#[derive(Debug)]
pub(crate) struct ReceivedBatch {
    pub(super) batch: EventBatch,
    /// Generation of the stream in which the batch came.
    pub(super) generation: StreamGeneration,
    /// Length of the batch's payload, in bytes.
    pub(super) bytes: usize,
}

/// Returns the epoch and the number of a batch.
pub(super) fn cursor_of(batch: &EventBatch) -> BatchCursor {
    BatchCursor {
        epoch: batch.epoch,
        seq: batch.seq,
    }
}

/// Time of a batch that is not known. All earlier batches count as made before it.
pub(super) const UNKNOWN_US: u64 = u64::MAX;

/// High-water marks of a holder: the newest batch that it has received, whether applied or not, and the latest time of
/// a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct HighWater {
    /// Epoch and number of the newest batch. A resync answer that ends before this batch is not the whole state.
    pub(super) seen: BatchCursor,
    /// Latest time at which a batch of the newest epoch was made, by the publisher's clock, in microseconds. 0 if no
    /// batch of this epoch had a time. [`UNKNOWN_US`] if a snapshot or an answer does not tell the time: then the next
    /// batch that is newer tells it.
    pub(super) made_us: u64,
}

impl HighWater {
    /// Returns the high-water marks of a holder that has received a single batch.
    pub(super) fn of(batch: &EventBatch) -> Self {
        Self {
            seen: cursor_of(batch),
            made_us: batch.time_us.unwrap_or_default(),
        }
    }

    /// Raises the high-water marks to `batch`, if `batch` is newer.
    pub(super) fn note(&mut self, batch: &EventBatch) {
        let other = Self::of(batch);
        if other.seen.epoch > self.seen.epoch {
            *self = other;
        } else if other.seen.epoch == self.seen.epoch {
            self.made_us = match self.made_us {
                UNKNOWN_US if other.seen > self.seen && other.made_us > 0 => other.made_us,
                known_us => known_us.max(other.made_us),
            };
            self.seen = self.seen.max(other.seen);
        }
    }

    /// Whether `batch` shows that the publisher has begun to count from 1 again without a new epoch. A batch shows
    /// this if its number has been received before, but it was made later than all earlier batches.
    ///
    /// A redelivery has the time of the first delivery. If batches have no times, or the publisher's clock stands
    /// still, a restart of the count cannot be noticed.
    pub(super) fn is_numbered_anew(&self, batch: &EventBatch) -> bool {
        let at = cursor_of(batch);
        let is_number_known = at.epoch == self.seen.epoch && at.seq <= self.seen.seq;
        is_number_known && batch.time_us.is_some_and(|made| made > self.made_us)
    }

    /// Returns the reason why a batch is outdated, or `None` if the batch is new.
    pub(super) fn drop_reason(&self, batch: &EventBatch) -> Option<DropReason> {
        let at = cursor_of(batch);
        if at.epoch < self.seen.epoch {
            return Some(DropReason::StaleEpoch);
        }
        let is_repeated = at <= self.seen && !self.is_numbered_anew(batch);
        is_repeated.then_some(DropReason::Duplicate)
    }
}

/// Decision on a received batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BatchAdmission {
    /// Batch continues the count, so nothing before it was lost. Apply it.
    Next,
    /// At least one batch before this one never came. Apply this batch; the holder's state is no longer certain.
    Gap {
        /// Number of batches missing before this one.
        missed: u64,
    },
    /// Batch begins a new epoch. Drop the holder's blocks, then apply the batch. If `missed` is above 0, the first
    /// batches of the epoch never came.
    NewEpoch {
        /// Number of batches missing before this one.
        missed: u64,
    },
    /// Batch was applied before. Skip it.
    Duplicate,
    /// Batch belongs to an epoch that has ended. Skip it.
    StaleEpoch,
}

impl BatchAdmission {
    /// Whether the batch's events must be applied.
    pub(super) fn applies(self) -> bool {
        matches!(self, Self::Next | Self::Gap { .. } | Self::NewEpoch { .. })
    }
}

/// Tracker of the numbers of one holder's batches.
#[derive(Debug, Clone, Default)]
pub(crate) struct SequenceTracker {
    cursor: Option<BatchCursor>,
}

impl SequenceTracker {
    /// Makes a tracker whose last admitted batch is the one at `cursor`.
    pub(super) fn resuming(cursor: BatchCursor) -> Self {
        Self { cursor: Some(cursor) }
    }

    /// Returns the epoch and number of the last admitted batch, if any.
    pub(super) fn cursor(&self) -> Option<BatchCursor> {
        self.cursor
    }

    /// Decides what to do with the batch at the cursor `next`, without noting the batch.
    pub(crate) fn classify(&self, next: BatchCursor) -> BatchAdmission {
        match self.cursor {
            Some(last) if next.epoch < last.epoch => BatchAdmission::StaleEpoch,
            Some(last) if next.epoch == last.epoch && next.seq <= last.seq => BatchAdmission::Duplicate,
            Some(last) if next.epoch == last.epoch => match next.seq - last.seq - 1 {
                0 => BatchAdmission::Next,
                missed => BatchAdmission::Gap { missed },
            },
            _ => BatchAdmission::NewEpoch {
                missed: next.seq.saturating_sub(1),
            },
        }
    }

    /// Decides what to do with the batch at the cursor `next`. If it must be applied, notes it as the last admitted
    /// one.
    pub(super) fn admit(&mut self, next: BatchCursor) -> BatchAdmission {
        let admission = self.classify(next);
        if admission.applies() {
            self.cursor = Some(next);
        }
        admission
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(epoch: u64, seq: u64) -> BatchCursor {
        BatchCursor { epoch, seq }
    }

    #[test]
    fn a_count_without_gaps_is_certain() {
        let mut tracker = SequenceTracker::default();
        assert_eq!(tracker.admit(at(7, 1)), BatchAdmission::NewEpoch { missed: 0 });
        assert_eq!(tracker.admit(at(7, 2)), BatchAdmission::Next);
        assert_eq!(tracker.cursor(), Some(at(7, 2)));
    }

    #[test]
    fn what_was_missed_is_counted() {
        let mut tracker = SequenceTracker::default();
        assert_eq!(tracker.admit(at(7, 5)), BatchAdmission::NewEpoch { missed: 4 });
        assert_eq!(tracker.admit(at(7, 9)), BatchAdmission::Gap { missed: 3 });
        assert_eq!(tracker.admit(at(8, 1)), BatchAdmission::NewEpoch { missed: 0 });
    }

    #[test]
    fn a_time_that_an_answer_does_not_tell_is_that_of_the_next_newer_batch() {
        let made = |seq, time_us| EventBatch {
            time_us,
            ..super::super::tests::batch(seq, Vec::new())
        };
        let mut known = HighWater {
            seen: cursor_of(&made(18, None)),
            made_us: UNKNOWN_US,
        };
        assert!(!known.is_numbered_anew(&made(17, Some(100))), "it may come late");
        known.note(&made(17, Some(100)));
        known.note(&made(19, None));
        assert_eq!(known.made_us, UNKNOWN_US);
        known.note(&made(20, Some(110)));
        assert!(!known.is_numbered_anew(&made(17, Some(100))));
        assert!(
            known.is_numbered_anew(&made(1, Some(111))),
            "the count has begun again"
        );
    }

    #[test]
    fn what_came_before_does_not_move_the_cursor() {
        let mut tracker = SequenceTracker::resuming(at(7, 5));
        assert_eq!(tracker.admit(at(7, 5)), BatchAdmission::Duplicate);
        assert_eq!(tracker.admit(at(7, 1)), BatchAdmission::Duplicate);
        assert_eq!(tracker.admit(at(6, 99)), BatchAdmission::StaleEpoch);
        assert_eq!(tracker.admit(at(7, 6)), BatchAdmission::Next);
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let mut tracker = SequenceTracker::resuming(at(u64::MAX, u64::MAX - 1));
        assert_eq!(tracker.admit(at(u64::MAX, u64::MAX)), BatchAdmission::Next);
        assert_eq!(tracker.admit(at(u64::MAX, u64::MAX)), BatchAdmission::Duplicate);
    }
}
