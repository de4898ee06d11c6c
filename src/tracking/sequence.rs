//! Epochs and batch numbers of one holder.

/// The last batch applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct BatchCursor {
    /// The publisher's incarnation.
    pub epoch: u64,
    /// Number of the batch in its epoch, from 1.
    pub seq: u64,
}

/// What to do with a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// It continues the count: apply it; nothing before it was lost.
    Next,
    /// `missed` batches before it never came: apply it, but the holder's state is no longer certain.
    Gap {
        /// How many.
        missed: u64,
    },
    /// It begins a new epoch: drop all that the holder had, then apply it. Where `missed` is above 0, the
    /// epoch's first batches never came.
    NewEpoch {
        /// How many.
        missed: u64,
    },
    /// It was applied before: skip it.
    Duplicate,
    /// It comes from an incarnation that has been replaced: skip it.
    StaleEpoch,
}

impl Admission {
    /// Whether the batch's events are to be applied.
    pub fn applies(self) -> bool {
        matches!(self, Self::Next | Self::Gap { .. } | Self::NewEpoch { .. })
    }
}

/// Follows the numbers of one holder's batches.
#[derive(Debug, Clone, Default)]
pub struct SequenceTracker {
    cursor: Option<BatchCursor>,
}

impl SequenceTracker {
    /// A tracker that takes up where a snapshot left off.
    pub fn resuming(cursor: BatchCursor) -> Self {
        Self { cursor: Some(cursor) }
    }

    /// The last batch admitted, if any.
    pub fn cursor(&self) -> Option<BatchCursor> {
        self.cursor
    }

    /// What to do with the batch at `next`; the cursor stays.
    pub fn classify(&self, next: BatchCursor) -> Admission {
        match self.cursor {
            Some(last) if next.epoch < last.epoch => Admission::StaleEpoch,
            Some(last) if next.epoch == last.epoch && next.seq <= last.seq => Admission::Duplicate,
            Some(last) if next.epoch == last.epoch => match next.seq - last.seq - 1 {
                0 => Admission::Next,
                missed => Admission::Gap { missed },
            },
            _ => Admission::NewEpoch {
                missed: next.seq.saturating_sub(1),
            },
        }
    }

    /// Decides what to do with the batch at `next`, and moves the cursor to it where it applies.
    pub fn admit(&mut self, next: BatchCursor) -> Admission {
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
        assert_eq!(tracker.admit(at(7, 1)), Admission::NewEpoch { missed: 0 });
        assert_eq!(tracker.admit(at(7, 2)), Admission::Next);
        assert_eq!(tracker.cursor(), Some(at(7, 2)));
    }

    #[test]
    fn what_was_missed_is_counted() {
        let mut tracker = SequenceTracker::default();
        assert_eq!(tracker.admit(at(7, 5)), Admission::NewEpoch { missed: 4 });
        assert_eq!(tracker.admit(at(7, 9)), Admission::Gap { missed: 3 });
        assert_eq!(tracker.admit(at(8, 1)), Admission::NewEpoch { missed: 0 });
    }

    #[test]
    fn what_came_before_does_not_move_the_cursor() {
        let mut tracker = SequenceTracker::resuming(at(7, 5));
        assert_eq!(tracker.admit(at(7, 5)), Admission::Duplicate);
        assert_eq!(tracker.admit(at(7, 1)), Admission::Duplicate);
        assert_eq!(tracker.admit(at(6, 99)), Admission::StaleEpoch);
        assert_eq!(tracker.admit(at(7, 6)), Admission::Next);
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let mut tracker = SequenceTracker::resuming(at(u64::MAX, u64::MAX - 1));
        assert_eq!(tracker.admit(at(u64::MAX, u64::MAX)), Admission::Next);
        assert_eq!(tracker.admit(at(u64::MAX, u64::MAX)), Admission::Duplicate);
    }
}
