//! How many holders' states are not certain, without a look at each: they are counted again only after one of them has changed.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::atomic::AtomicCell;

use crate::stream::{StreamGeneration, StreamTrust};

use super::slots::Directory;

/// How many holders' states were not certain at a moment. Two that are equal are so at every moment in between, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DoubtfulHolders {
    /// How many.
    pub count: u32,
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
    /// Counted after each change of a holder's status, or of the directory.
    changes: Arc<AtomicU64>,
    last: AtomicCell<Option<DoubtfulHolders>>,
}

impl DoubtCounter {
    /// What each holder's status counts its changes with.
    pub(super) fn changes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.changes)
    }

    /// Notes that somebody has come or left.
    pub(super) fn note_change(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    /// How many holders' states are not certain. `load` gives the directory, where it is needed.
    pub(super) fn count<D: Deref<Target = Arc<Directory>>>(
        &self,
        trust: &StreamTrust,
        replacements: u64,
        load: impl FnOnce() -> D,
    ) -> DoubtfulHolders {
        // Before all looks: a change in between is noticed the next time.
        let now = DoubtfulHolders {
            count: 0,
            is_stalled: trust.is_stalled(),
            generation: trust.generation(),
            changes: self.changes.load(Ordering::Acquire),
            replacements,
        };
        if let Some(last) = self.last.load() {
            let count = last.count;
            if (DoubtfulHolders { count, ..now }) == last {
                return last;
            }
        }
        let directory = load();
        let doubtful = directory.holders().filter(|holder| {
            let reasons = holder.status.reasons_at(now.generation, now.is_stalled);
            !reasons.is_empty()
        });
        let count = u32::try_from(doubtful.count()).unwrap_or(u32::MAX);
        let counted = DoubtfulHolders { count, ..now };
        self.last.store(Some(counted));
        counted
    }
}
