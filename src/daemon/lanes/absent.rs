//! The memory of workers and ranks without a holder, of all lanes, for a while:
//!
//! - Workers that have sent a message that could not be decoded. Such a message may have overtaken the first batch of a holder, and then
//!   nothing else shows that it was lost. The memory is a Bloom filter: each worker leaves four marks in a table, and no worker is
//!   forgotten early, however many there are. A worker that has all its marks from other workers is doubted for nothing.
//! - Holders that have said goodbye. A redelivered batch from before the goodbye would otherwise make a holder that nobody publishes for.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use kvatlas_core::wire::{EventBatch, Rank};

use kvatlas_telemetry::labels::DropReason;

use super::clock::now_us;
use super::lane::HolderKey;
use super::line::WorkerKey;
use super::liveness::ListeningClock;
use super::sequence::HighWater;

/// Time for which both are remembered, in microseconds. No batch comes so much later than a batch that overtook it.
const REMEMBERED_US: u64 = 60_000_000;
/// Most goodbyes that are remembered. Beyond that, the first ones are forgotten.
const GOODBYES_MAX: usize = 65_536;
/// Places of the table of marks: as many as 16 bits of a hash can name.
const MARKS: usize = 1 << 16;

/// The memory of workers and ranks without a holder.
#[derive(Debug)]
pub(super) struct Absent {
    hasher: RandomState,
    /// When each mark was last made, in seconds on the clock of [`now_us`].
    marks: Box<[AtomicU32]>,
    goodbyes: Mutex<Goodbyes>,
    listening: Mutex<ListeningClock>,
}

#[derive(Debug, Default)]
struct Goodbyes {
    by_holder: BTreeMap<HolderKey, Goodbye>,
    /// The goodbyes in the order in which they came, each with its time.
    order: VecDeque<(u64, HolderKey)>,
}

#[derive(Debug)]
struct Goodbye {
    at_us: u64,
    known: HighWater,
}

impl Absent {
    pub(super) fn new() -> Self {
        Self {
            hasher: RandomState::new(),
            marks: (0..MARKS).map(|_| AtomicU32::new(0)).collect(),
            goodbyes: Mutex::default(),
            listening: Mutex::default(),
        }
    }

    /// Counts the time since the last look, if messages could be received.
    pub(super) fn look(&self, is_listening: bool) {
        self.listening.lock().look(now_us(), is_listening);
    }

    /// The time in which messages could be received, in microseconds: silence is measured in it.
    pub(super) fn listened_us(&self) -> u64 {
        self.listening.lock().now_us()
    }

    /// Notes that a message of a worker could not be decoded.
    pub(super) fn note_undecodable(&self, worker: &WorkerKey) {
        self.note_undecodable_at(worker, now_us());
    }

    /// Whether a message of a worker, which may have been of any rank, could not be decoded.
    pub(super) fn is_in_doubt(&self, worker: &WorkerKey) -> bool {
        self.is_in_doubt_at(worker, now_us())
    }

    /// Notes that a holder has said goodbye. `known` is the high-water marks of its batches.
    pub(super) fn note_goodbye(&self, holder: HolderKey, known: HighWater) {
        self.goodbyes.lock().note(holder, known, now_us());
    }

    /// Returns why a batch without a holder is to be dropped: it is from before its publisher's goodbye. Returns `None` if it is to be
    /// taken.
    pub(super) fn is_over(&self, holder: &HolderKey, batch: &EventBatch) -> Option<DropReason> {
        self.goodbyes.lock().is_over(holder, batch, now_us())
    }

    /// Forgets the goodbyes of a worker's ranks.
    pub(super) fn forget_goodbyes(&self, ranks: std::ops::RangeInclusive<HolderKey>) {
        let mut goodbyes = self.goodbyes.lock();
        let found: Vec<HolderKey> = goodbyes
            .by_holder
            .range(ranks)
            .map(|(key, _)| key.clone())
            .collect();
        for key in found {
            goodbyes.by_holder.remove(&key);
        }
    }

    fn note_undecodable_at(&self, worker: &WorkerKey, at_us: u64) {
        for mark in self.marks_of(worker) {
            mark.store(seconds(at_us), Ordering::Release);
        }
    }

    fn is_in_doubt_at(&self, worker: &WorkerKey, now_us: u64) -> bool {
        let oldest = seconds(now_us).saturating_sub(seconds(REMEMBERED_US));
        let is_young = |mark: &AtomicU32| {
            let made = mark.load(Ordering::Acquire);
            made > 0 && made >= oldest
        };
        self.marks_of(worker).all(is_young)
    }

    fn marks_of(&self, worker: &WorkerKey) -> impl Iterator<Item = &AtomicU32> {
        let hash = self.hasher.hash_one(worker).to_le_bytes();
        let places = [
            [hash[0], hash[1]],
            [hash[2], hash[3]],
            [hash[4], hash[5]],
            [hash[6], hash[7]],
        ];
        let places = places
            .into_iter()
            .map(|bytes| usize::from(u16::from_le_bytes(bytes)));
        places.filter_map(|place| self.marks.get(place))
    }
}

/// Whole seconds, from 1.
fn seconds(micros: u64) -> u32 {
    u32::try_from(micros / 1_000_000).unwrap_or(u32::MAX).max(1)
}

impl Goodbyes {
    fn note(&mut self, holder: HolderKey, known: HighWater, at_us: u64) {
        self.by_holder.insert(holder.clone(), Goodbye { at_us, known });
        self.order.push_back((at_us, holder));
        let is_old = |at_us: u64, now_us: u64| now_us.saturating_sub(at_us) >= REMEMBERED_US;
        while let Some((first_us, _)) = self.order.front()
            && (is_old(*first_us, at_us) || self.order.len() > GOODBYES_MAX)
            && let Some((first_us, holder)) = self.order.pop_front()
        {
            // A later goodbye of the same holder is remembered on.
            if self
                .by_holder
                .get(&holder)
                .is_some_and(|goodbye| goodbye.at_us == first_us)
            {
                self.by_holder.remove(&holder);
            }
        }
    }

    fn is_over(&self, holder: &HolderKey, batch: &EventBatch, now_us: u64) -> Option<DropReason> {
        let goodbye = self.by_holder.get(holder)?;
        if now_us.saturating_sub(goodbye.at_us) >= REMEMBERED_US {
            return None;
        }
        goodbye.known.drop_reason(batch)
    }
}

/// The key of a worker's first rank and that of its last one.
pub(super) fn ranks_of(worker: &WorkerKey) -> std::ops::RangeInclusive<HolderKey> {
    (worker.clone(), Rank::MIN)..=(worker.clone(), Rank::MAX)
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::{BatchCursor, NamespaceName, WorkerName};

    use super::super::tests::batch;
    use super::*;

    fn worker(number: usize) -> WorkerKey {
        WorkerKey {
            namespace: NamespaceName::new("n").unwrap(),
            worker: WorkerName::new(&format!("w{number}")).unwrap(),
        }
    }

    fn known(seq: u64) -> HighWater {
        HighWater {
            seen: BatchCursor { epoch: 1, seq },
            made_us: 0,
        }
    }

    #[test]
    fn nobody_who_sent_what_cannot_be_read_is_forgotten_early() {
        let absent = Absent::new();
        for number in 0..100_000 {
            absent.note_undecodable_at(&worker(number), 7_000_000);
        }
        assert!((0..100_000).all(|number| absent.is_in_doubt_at(&worker(number), 67_000_000)));
        assert!((0..100_000).all(|number| !absent.is_in_doubt_at(&worker(number), 69_000_000)));
    }

    #[test]
    fn others_are_not_doubted() {
        let absent = Absent::new();
        for number in 0..1_000 {
            absent.note_undecodable_at(&worker(number), 7_000_000);
        }
        let doubted = (1_000..2_000).filter(|number| absent.is_in_doubt_at(&worker(*number), 8_000_000));
        assert!(doubted.count() < 10);
    }

    #[test]
    fn goodbyes_are_forgotten_in_time_and_the_first_for_want_of_room() {
        let mut goodbyes = Goodbyes::default();
        for number in 0..GOODBYES_MAX {
            goodbyes.note((worker(number), 0), known(5), 10);
        }
        goodbyes.note((worker(0), 0), known(9), 20);
        let over = |goodbyes: &Goodbyes, number, seq, now_us| {
            goodbyes
                .is_over(&(worker(number), 0), &batch(seq, Vec::new()), now_us)
                .is_some()
        };
        assert!(over(&goodbyes, 0, 9, 30) && over(&goodbyes, 1, 5, 30));
        assert!(!over(&goodbyes, 1, 6, 30), "it goes on behind the goodbye");
        goodbyes.note((worker(GOODBYES_MAX), 0), known(5), 30);
        assert!(!over(&goodbyes, 1, 5, 30) && over(&goodbyes, 2, 5, 30));
        assert!(!over(&goodbyes, 0, 9, 20 + REMEMBERED_US));
        goodbyes.note((worker(0), 1), known(5), 20 + REMEMBERED_US);
        assert_eq!((goodbyes.order.len(), goodbyes.by_holder.len()), (2, 2));
    }
}
