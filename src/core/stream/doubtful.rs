//! How many holders' states are not certain, without a look at each: they are counted again only after one of them has changed.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwapOption;

use super::{HolderStatus, StreamGeneration, StreamTrust};
use crate::wire::{DegradedReasons, Tier};

/// How many holders' states were not certain at a moment. Two that are equal are so at every moment in between, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DoubtfulHolders {
    /// How many, for whatever query.
    pub count: u32,
    /// How many others', in tiers beyond the device alone.
    pub beyond_device: u32,
    /// The reasons of all of them that are reasons for some queries only.
    pub partial: DegradedReasons,
    /// Whether the stream was stalled: then it is all of them.
    pub is_stalled: bool,
    generation: StreamGeneration,
    /// Changes of what is known of any holder, and of who is there.
    changes: u64,
    /// Replacements of states.
    pub(crate) replacements: u64,
}

/// The last count, and what tells whether it still holds.
#[derive(Debug, Default)]
pub(crate) struct DoubtCounter {
    /// Counted before and after each change of a holder's status, and after each of who is there.
    changes: Arc<AtomicU64>,
    last: ArcSwapOption<DoubtfulHolders>,
}

impl DoubtCounter {
    /// The status of a new holder, whose changes are noticed.
    pub(crate) fn new_status(&self) -> HolderStatus {
        HolderStatus::counted_in(Arc::clone(&self.changes))
    }

    /// Notes that somebody has come or left.
    pub(crate) fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// How many holders' states are not certain; `replacements` is how many have been replaced. `count` says how many there are for whom this
    /// holds. It is asked only where something has changed.
    pub(crate) fn count(
        &self,
        trust: &StreamTrust,
        replacements: u64,
        count: impl FnOnce(&dyn Fn(&HolderStatus) -> bool) -> usize,
    ) -> DoubtfulHolders {
        // Before all looks: a change in between is noticed the next time.
        let now = DoubtfulHolders {
            count: 0,
            beyond_device: 0,
            partial: DegradedReasons::default(),
            is_stalled: trust.is_stalled(),
            generation: trust.generation(),
            changes: self.changes.load(Ordering::Acquire),
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
        let count = u32::try_from(count(&is_doubtful)).unwrap_or(u32::MAX);
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
