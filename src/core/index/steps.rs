//! Steps: what a holder does from one state that queries may see to the next.
//!
//! A search reads what writers change at the same time. It is of one instant for a holder that made no step from the search's first
//! look to its last: a seqlock for each holder, with one clock for all. So a search asks one word whether anything at all has
//! happened, and only then each holder's stamp.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crossbeam_utils::CachePadded;

use crate::index::directory::HolderSlot;

const SHELF: usize = 1024;
/// One holder more is in a step: above the count of beginnings and ends.
const OPEN: u64 = 1 << 48;
const COUNT_MASK: u64 = OPEN - 1;
/// A stamp of a holder in a step.
const BUSY: u64 = 1 << 63;

/// The clock and the stamps.
#[derive(Debug)]
pub(crate) struct Steps {
    clock: CachePadded<AtomicU64>,
    stamps: Vec<OnceLock<Vec<AtomicU64>>>,
}

/// When a search began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Moment(u64);

impl Default for Steps {
    fn default() -> Self {
        Self {
            clock: CachePadded::new(AtomicU64::new(0)),
            stamps: (0..HolderSlot::COUNT_MAX / SHELF)
                .map(|_| OnceLock::new())
                .collect(),
        }
    }
}

impl Steps {
    fn stamp(&self, slot: HolderSlot) -> Option<&AtomicU64> {
        let shelf = self.stamps.get(slot.index() / SHELF)?;
        let shelf = shelf.get_or_init(|| (0..SHELF).map(|_| AtomicU64::new(0)).collect());
        shelf.get(slot.index() % SHELF)
    }

    /// The holder begins a step. Only under its lock.
    pub(crate) fn begin(&self, slot: HolderSlot) {
        let now = self.clock.fetch_add(OPEN + 1, Ordering::AcqRel) + 1;
        if let Some(stamp) = self.stamp(slot) {
            stamp.store(BUSY | now & COUNT_MASK, Ordering::Relaxed);
        }
        // Whoever sees a change of the step sees its stamp.
        fence(Ordering::Release);
    }

    /// The holder ends its step.
    pub(crate) fn end(&self, slot: HolderSlot) {
        let now = self.clock.fetch_sub(OPEN - 1, Ordering::AcqRel) + 1;
        if let Some(stamp) = self.stamp(slot) {
            stamp.store(now & COUNT_MASK, Ordering::Release);
        }
    }

    #[inline]
    pub(crate) fn now(&self) -> Moment {
        Moment(self.clock.load(Ordering::Acquire))
    }

    /// Whether no holder was in a step from `moment` to now.
    #[inline]
    pub(crate) fn is_quiet_since(&self, moment: Moment) -> bool {
        fence(Ordering::Acquire);
        moment.0 < OPEN && self.clock.load(Ordering::Relaxed) == moment.0
    }

    /// Whether a holder may have been in a step from `moment` to now.
    pub(crate) fn has_changed(&self, slot: HolderSlot, moment: Moment) -> bool {
        fence(Ordering::Acquire);
        let stamp = self.stamp(slot).map_or(0, |stamp| stamp.load(Ordering::Relaxed));
        stamp > moment.0 & COUNT_MASK
    }
}
