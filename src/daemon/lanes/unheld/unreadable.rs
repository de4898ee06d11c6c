//! Workers that have sent a message that could not be read. The message may have been a holder's first batch. In that
//! case nothing else shows that a batch was lost.
//!
//! The workers are kept in a Bloom filter: each worker sets four marks in a table of fixed size, so no worker is
//! forgotten early. A worker is put in doubt without cause if other workers happen to have set all of its four marks.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};

use super::super::line::WorkerKey;
use super::super::sequence::REMEMBERED_US;

/// Number of marks in the Bloom filter's table: one for each value of 16 bits of a hash.
const MARKS: usize = 1 << 16;

/// Workers that have recently sent a message that could not be read.
#[derive(Debug)]
pub(in super::super) struct Unreadable {
    hasher: RandomState,
    /// Marks of the Bloom filter. Each is the time at which it was last set, in seconds on the clock of `now_us`; 0
    /// if it was never set.
    marks: Box<[AtomicU32]>,
}

impl Default for Unreadable {
    fn default() -> Self {
        Self {
            hasher: RandomState::new(),
            marks: (0..MARKS).map(|_| AtomicU32::new(0)).collect(),
        }
    }
}

impl Unreadable {
    /// Notes that a message of a worker could not be read at `now_us`.
    pub(in super::super) fn note(&self, worker: &WorkerKey, now_us: u64) {
        for mark in self.marks_of(worker) {
            mark.store(seconds(now_us), Ordering::Release);
        }
    }

    /// Whether a message of a worker could not be read in the last minute. The message may have been for any rank.
    pub(in super::super) fn has(&self, worker: &WorkerKey, now_us: u64) -> bool {
        let oldest = seconds(now_us).saturating_sub(seconds(REMEMBERED_US));
        let is_young = |mark: &AtomicU32| {
            let made = mark.load(Ordering::Acquire);
            made > 0 && made >= oldest
        };
        self.marks_of(worker).all(is_young)
    }

    fn marks_of(&self, worker: &WorkerKey) -> impl Iterator<Item = &AtomicU32> {
        let hash = self.hasher.hash_one(worker);
        let place = move |shift: u32| usize::try_from((hash >> shift) & 0xffff).ok();
        let places = [0, 16, 32, 48].into_iter().filter_map(place);
        places.filter_map(|place| self.marks.get(place))
    }
}

/// Returns `micros` in whole seconds; at least 1.
fn seconds(micros: u64) -> u32 {
    u32::try_from(micros / 1_000_000).unwrap_or(u32::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::worker;
    use super::*;

    #[test]
    fn nobody_who_sent_what_cannot_be_read_is_forgotten_early() {
        let unreadable = Unreadable::default();
        for number in 0..100_000 {
            unreadable.note(&worker(number), 7_000_000);
        }
        assert!((0..100_000).all(|number| unreadable.has(&worker(number), 67_000_000)));
        assert!((0..100_000).all(|number| !unreadable.has(&worker(number), 69_000_000)));
    }

    #[test]
    fn others_are_not_doubted() {
        let unreadable = Unreadable::default();
        for number in 0..1_000 {
            unreadable.note(&worker(number), 7_000_000);
        }
        let doubted = (1_000..2_000).filter(|number| unreadable.has(&worker(*number), 8_000_000));
        assert!(doubted.count() < 10);
    }
}
