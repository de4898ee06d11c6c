//! Steps: what a holder does from one state that queries may see to the next.
//!
//! A search reads what writers change at the same time. It is of one instant for a holder that made no step from the search's first
//! look to its last: a seqlock, with one clock for all. A step says whose it is and which runs it changes, and the last few are kept beside
//! the clock. So a search asks one word whether anything at all has happened, and then whether it was about a run that it has looked at.
//! Only where too much has happened, it asks each holder's stamp.
//!
//! Steps take turns: a holder makes one only in its turn at the runs.

use std::sync::OnceLock;

use crossbeam_utils::CachePadded;

use crate::index::directory::{HolderSlot, SlotBits};
use crate::sync::{AtomicU64, IS_MODEL, Ordering, fence};

/// Stamps that are made at once.
const SHELF: usize = if IS_MODEL { 2 } else { 1024 };
/// A stamp of a holder in a step.
const BUSY: u64 = 1 << 63;
/// How many steps are kept: with the clock they are two cache lines.
const RECENT: usize = if IS_MODEL { 2 } else { 15 };
/// Bits of a set of runs; above them is the slot.
const RUNS_BITS: u32 = 48;

/// A set of runs that may say of a run that it is in although it is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RunSet(u64);

impl RunSet {
    /// All runs.
    pub(crate) const ALL: Self = Self((1 << RUNS_BITS) - 1);

    /// Adds the run of this number.
    #[inline]
    pub(crate) fn insert(&mut self, run: u32) {
        // The upper half of the product is below the number of bits.
        let bit = (u64::from(run.wrapping_mul(0x9e37_79b1)) * u64::from(RUNS_BITS)) >> 32;
        self.0 |= 1 << bit;
    }

    #[inline]
    fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }
}

/// The clock, and the last steps: of each the slot and the runs.
#[derive(Debug)]
#[repr(C)]
struct Recent {
    /// How many steps have begun and ended: odd within one.
    clock: AtomicU64,
    steps: [AtomicU64; RECENT],
}

/// The clock and the stamps.
#[derive(Debug)]
pub(crate) struct Steps {
    recent: CachePadded<Recent>,
    stamps: Vec<OnceLock<Vec<AtomicU64>>>,
}

/// When a search began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment(u64);

impl Default for Steps {
    fn default() -> Self {
        Self {
            recent: CachePadded::new(Recent {
                clock: AtomicU64::new(0),
                steps: std::array::from_fn(|_| AtomicU64::new(0)),
            }),
            stamps: (0..HolderSlot::COUNT_MAX / SHELF)
                .map(|_| OnceLock::new())
                .collect(),
        }
    }
}

impl Recent {
    /// Where the step after so many others is.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "below the number of steps kept")]
    fn step(&self, number: u64) -> &AtomicU64 {
        &self.steps[(number % RECENT as u64) as usize]
    }
}

impl Steps {
    fn stamp(&self, slot: HolderSlot) -> Option<&AtomicU64> {
        let shelf = self.stamps.get(slot.index() / SHELF)?;
        let shelf = shelf.get_or_init(|| (0..SHELF).map(|_| AtomicU64::new(0)).collect());
        shelf.get(slot.index() % SHELF)
    }

    /// The holder begins a step that changes these runs. Only in its turn at the runs, and under its lock.
    pub(crate) fn begin(&self, slot: HolderSlot, runs: RunSet) {
        let now = self.recent.clock.load(Ordering::Relaxed);
        // Whoever sees this step in place of an older one sees that the one before has ended.
        fence(Ordering::Release);
        let step = (slot.index() as u64) << RUNS_BITS | runs.0;
        self.recent.step(now / 2).store(step, Ordering::Relaxed);
        if let Some(stamp) = self.stamp(slot) {
            stamp.store(BUSY | (now + 1), Ordering::Relaxed);
        }
        self.recent.clock.store(now + 1, Ordering::Release);
        // Whoever sees a change of the step sees that it has begun.
        fence(Ordering::Release);
    }

    /// The holder ends its step.
    pub(crate) fn end(&self, slot: HolderSlot) {
        let now = self.recent.clock.load(Ordering::Relaxed) + 1;
        self.recent.clock.store(now, Ordering::Release);
        if let Some(stamp) = self.stamp(slot) {
            stamp.store(now, Ordering::Release);
        }
    }

    #[inline]
    pub(crate) fn now(&self) -> Moment {
        Moment(self.recent.clock.load(Ordering::Acquire))
    }

    /// The holders that may have been in a step from `moment` to now which changes one of these runs; none where too much has happened
    /// to say.
    #[inline]
    pub(crate) fn changed<S: SlotBits>(&self, moment: Moment, runs: RunSet) -> Option<S> {
        fence(Ordering::Acquire);
        let now = self.recent.clock.load(Ordering::Acquire);
        let mut changed = S::default();
        let (first, end) = (moment.0 / 2, now.div_ceil(2));
        if first == end {
            return Some(changed);
        }
        if end - first >= RECENT as u64 {
            return None;
        }
        for number in first..end {
            let step = self.recent.step(number).load(Ordering::Relaxed);
            if RunSet(step & RunSet::ALL.0).meets(runs) {
                #[allow(clippy::cast_possible_truncation, reason = "16 bits are left")]
                changed.insert(HolderSlot::from_bits((step >> RUNS_BITS) as u16));
            }
        }
        // The oldest has not been replaced yet.
        fence(Ordering::Acquire);
        let now = self.recent.clock.load(Ordering::Relaxed);
        (now < (first + RECENT as u64) * 2).then_some(changed)
    }

    /// Whether a holder may have been in a step from `moment` to now.
    pub(crate) fn has_changed(&self, slot: HolderSlot, moment: Moment) -> bool {
        fence(Ordering::Acquire);
        let stamp = self.stamp(slot).map_or(0, |stamp| stamp.load(Ordering::Relaxed));
        stamp > moment.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(number: usize) -> HolderSlot {
        HolderSlot::new(number).unwrap()
    }

    fn runs(numbers: &[u32]) -> RunSet {
        let mut runs = RunSet::default();
        numbers.iter().for_each(|number| runs.insert(*number));
        runs
    }

    #[test]
    fn a_step_counts_from_its_beginning_to_its_end_where_a_run_is_looked_at() {
        let steps = Steps::default();
        let before = steps.now();
        assert_eq!(steps.changed::<u64>(before, RunSet::ALL), Some(0));
        steps.begin(slot(3), runs(&[7]));
        let within = steps.now();
        for moment in [before, within] {
            assert_eq!(steps.changed::<u64>(moment, runs(&[7, 8])), Some(1 << 3));
            assert_eq!(steps.changed::<u64>(moment, RunSet::default()), Some(0));
            assert!(steps.has_changed(slot(3), moment) && !steps.has_changed(slot(4), moment));
        }
        steps.end(slot(3));
        assert_eq!(steps.changed::<u64>(within, runs(&[7])), Some(1 << 3));
        let after = steps.now();
        assert_eq!(steps.changed::<u64>(after, RunSet::ALL), Some(0));
        assert!(!steps.has_changed(slot(3), after));
    }

    #[test]
    fn as_many_steps_are_told_as_are_kept() {
        let steps = Steps::default();
        for made in 0..40 {
            let moment = steps.now();
            for number in 0..made {
                steps.begin(slot(number % 60), runs(&[1]));
                steps.end(slot(number % 60));
            }
            let changed = steps.changed::<u64>(moment, RunSet::ALL);
            let is_kept = made < RECENT;
            assert_eq!(changed, is_kept.then_some((1 << made) - 1), "{made}");
            assert!((0..made).all(|number| steps.has_changed(slot(number), moment)));
        }
    }
}
