//! Header of a run, in one word. It has the position at which the run begins, its length, a bit that tells whether
//! the run has children, and its change counter. The change counter counts the steps that have changed which blocks
//! of the run holders have.
//!
//! ```text
//! bit 63    37 36         35    24 23     0
//!     ┌───────┬──────────┬────────┬────────┐
//!     │ steps │ followed │ length │ start  │
//!     └───────┴──────────┴────────┴────────┘
//! ```
//!
//! The change counter is a seqlock: it is odd within a step. A search reads the counter before and after it reads the
//! run's entries. If both reads give the same even count, the entries did not change between the two reads. The
//! counter goes on when another run gets the number. It begins anew only in new memory, after the chunk of runs was freed:
//! a search compares the counter of the memory that it has read. After 2^27 counts it wraps around; `wraps` in
//! `store.rs` counts the wrap-arounds.

use crate::sync::{AtomicU64, Ordering};

const LEN_SHIFT: u32 = 24;
const FOLLOWED: u64 = 1 << 36;
const STEPS_SHIFT: u32 = 37;
const START_MASK: u64 = (1 << LEN_SHIFT) - 1;
const LEN_MASK: u64 = FOLLOWED - 1 - START_MASK;
const STEPS_MASK: u64 = u64::MAX << STEPS_SHIFT;

/// Header of a run, in one word: start, length, change counter, and whether the run has children. Only one writer at a
/// time changes it.
#[derive(Debug, Default)]
pub(crate) struct Header(AtomicU64);

/// Value of a run's change counter at some instant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Version(u64);

impl Header {
    #[inline]
    fn get(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    #[inline]
    fn change(&self, cleared: u64, set: u64) {
        let now = self.0.load(Ordering::Relaxed);
        self.0.store(now & !cleared | set, Ordering::Release);
    }

    /// Position of the run's first block.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "masked to 24 bits")]
    pub(crate) fn start(&self) -> u32 {
        (self.get() & START_MASK) as u32
    }

    /// Number of blocks of the run.
    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "masked to 12 bits")]
    pub(crate) fn len(&self) -> u16 {
        ((self.get() & LEN_MASK) >> LEN_SHIFT) as u16
    }

    /// Whether the run has children, that is, whether other runs branch off some of its blocks.
    #[inline]
    pub(crate) fn is_followed(&self) -> bool {
        self.get() & FOLLOWED != 0
    }

    #[inline]
    pub(crate) fn version(&self) -> Version {
        Version(self.get() & STEPS_MASK)
    }

    /// Whether no step has changed the run since `version` was read: `version` is not from within a step, and the
    /// change counter still has this value. The caller puts a fence between its own reads and this call.
    #[inline]
    pub(crate) fn is_still(&self, version: Version) -> bool {
        let is_busy = version.0 >> STEPS_SHIFT & 1 == 1;
        !is_busy && self.version() == version
    }

    /// Makes the run empty, with its start at `position` and without children. The change counter stays as it is. The
    /// caller makes this a step of its own, because a search may have found the run that had this number before.
    pub(crate) fn begin_at(&self, position: u32) {
        self.change(!STEPS_MASK, u64::from(position) & START_MASK);
    }

    pub(crate) fn set_len(&self, len: u16) {
        self.change(LEN_MASK, u64::from(len) << LEN_SHIFT & LEN_MASK);
    }

    pub(crate) fn set_followed(&self, is_followed: bool) {
        self.change(FOLLOWED, if is_followed { FOLLOWED } else { 0 });
    }

    /// Raises the change counter. A writer calls this at the beginning and at the end of a step, a change that readers
    /// see as a whole. After the call at the beginning, the writer needs a fence before it changes anything.
    pub(crate) fn count_step(&self) {
        let now = self.0.load(Ordering::Relaxed);
        self.0
            .store(now.wrapping_add(1 << STEPS_SHIFT), Ordering::Release);
    }

    /// Sets the change counter to its largest value, so that the next count wraps it around.
    #[cfg(test)]
    pub(crate) fn set_last_step(&self) {
        self.0.fetch_or(STEPS_MASK, Ordering::Relaxed);
    }

    /// Whether the next count wraps the change counter around, so that it repeats earlier values.
    pub(crate) fn is_last_step(&self) -> bool {
        self.0.load(Ordering::Relaxed) & STEPS_MASK == STEPS_MASK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_part_changes_another() {
        let header = Header::default();
        let state = || (header.start(), header.len(), header.is_followed());
        header.begin_at((1 << 24) - 1);
        header.set_len(4032);
        header.set_followed(true);
        assert_eq!(state(), ((1 << 24) - 1, 4032, true));
        let before = header.version();
        header.count_step();
        let within = header.version();
        assert!(!header.is_still(within) && !header.is_still(before));
        header.count_step();
        assert!(header.is_still(header.version()) && !header.is_still(before) && !header.is_still(within));
        assert_eq!(state(), ((1 << 24) - 1, 4032, true));
        header.set_last_step();
        assert!(header.is_last_step() && !header.is_still(header.version()));
        header.count_step();
        assert_eq!(header.version(), before);
        assert_eq!(state(), ((1 << 24) - 1, 4032, true));
        header.begin_at(7);
        assert_eq!(state(), (7, 0, false));
    }
}
