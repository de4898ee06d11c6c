//! Number of holders whose states are not certain. A call usually reads no holder: holders are counted again only
//! after one of them has changed.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwapOption;

use super::{HolderStatus, RefusedHolders, StreamGeneration, StreamTrust};
use crate::wire::{DegradedReasons, Tier};

/// Holders whose states were not certain at some moment: their number, and state that shows later changes. Two equal
/// values mean that nothing changed between their moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DoubtfulHolders {
    /// Number of holders that are uncertain for every query.
    pub count: u32,
    /// Number of holders that are uncertain only in tiers other than the device. `count` does not include them.
    pub beyond_device: u32,
    /// Reasons for doubt, of all holders together, that make a holder uncertain only for some queries.
    pub partial: DegradedReasons,
    /// Whether the stream was stalled: received events had long waited to be applied. During a stall, all holders are
    /// uncertain.
    pub is_stalled: bool,
    generation: StreamGeneration,
    /// Sum of two change counters. The one counts changes of all holders' statuses, and registered holders that came or
    /// left. The other counts changes of the list of refused holders.
    changes: u64,
    /// Number of times that the whole state of a holder was replaced.
    pub(crate) replacements: u64,
}

/// Counter of uncertain holders. It keeps the last result, and a change counter that tells whether this result is still
/// valid.
#[derive(Debug, Default)]
pub(crate) struct DoubtCounter {
    /// Change counter. It is raised before and after each change of a holder's status, and after a registered holder
    /// has come or left.
    changes: Arc<AtomicU64>,
    /// Holders whose batches are dropped. They have no status and count as uncertain. They have a separate change
    /// counter.
    pub(crate) refused: RefusedHolders,
    last: ArcSwapOption<DoubtfulHolders>,
}

impl DoubtCounter {
    /// Makes the status of a new holder, whose changes raise this change counter.
    pub(crate) fn new_status(&self) -> HolderStatus {
        HolderStatus::counted_in(Arc::clone(&self.changes))
    }

    /// Records that a registered holder has come or left.
    pub(crate) fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// Returns the number of holders whose states are not certain. `replacements` is the number of states that have
    /// been replaced. `count` gets a predicate, and returns the number of registered holders that satisfy it. `count`
    /// is called only if something has changed since the last count.
    pub(crate) fn count(
        &self,
        trust: &StreamTrust,
        replacements: u64,
        count: impl FnOnce(&dyn Fn(&HolderStatus) -> bool) -> usize,
    ) -> DoubtfulHolders {
        // The counters are read before any status, so a change during the count is noticed the next time.
        let now = DoubtfulHolders {
            count: 0,
            beyond_device: 0,
            partial: DegradedReasons::default(),
            is_stalled: trust.is_stalled(),
            generation: trust.generation(),
            changes: self.changes.load(Ordering::Acquire) + self.refused.changes(),
            replacements,
        };
        let last = self.last.load().as_deref().copied();
        let is_now = |last: &DoubtfulHolders| {
            DoubtfulHolders {
                count: now.count,
                beyond_device: now.beyond_device,
                partial: now.partial,
                ..*last
            } == now
        };
        if let Some(last) = last.filter(is_now) {
            return last;
        }
        let (partial, beyond_device) = (Cell::new(now.partial), Cell::new(0));
        let is_doubtful = |status: &HolderStatus| {
            let reasons = status.reasons_at(now.generation, now.is_stalled);
            partial.set(partial.get().union(reasons.of_some_queries()));
            let is_doubtful = !reasons.of_all_queries().is_empty();
            if !is_doubtful && reasons.up_to(Tier::DEVICE) != reasons {
                beyond_device.set(beyond_device.get() + 1);
            }
            is_doubtful
        };
        let count = count(&is_doubtful) + self.refused.count(None);
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        let counted = DoubtfulHolders {
            count,
            beyond_device: beyond_device.get(),
            partial: partial.get(),
            ..now
        };
        self.last.store(Some(Arc::new(counted)));
        counted
    }
}
