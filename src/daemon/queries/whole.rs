//! Searches that see certain batches either whole or not at all. These are the batches that both remove and add
//! blocks, and those that begin a new epoch.
//!
//! A search that runs while such a batch is being applied may see a state that the holder never had. So a search is
//! repeated until no such batch was applied during it, as with a seqlock. The repetitions are bounded in number and
//! time. If the bound is reached, a holder is called *changing* if such a batch of it was applied during the last
//! search.

use std::time::{Duration, Instant};

use kvatlas_core::index::Matches;
use kvatlas_core::wire::{HolderId, WorkerName};

use crate::lanes::{FreshnessReading, SeenInParts};

/// Minimum number of repetitions of a search before it may be given up.
const REPEATED_MIN: usize = 3;

/// Minimum time for which a search is repeated before it may be given up. Most batches are applied in less time.
const REPEATED_FOR: Duration = Duration::from_micros(500);

/// Result of a search, with the holders whose batches the search may have seen half applied.
pub(super) struct Seen {
    pub(super) found: Matches,
    changing: SeenInParts,
}

/// Repeats a search, within bounds, until it has certainly seen no batch half applied. Returns the result of the last
/// search.
pub(super) fn search_whole(look: &FreshnessReading<'_>, mut search: impl FnMut() -> Matches) -> Seen {
    let mut tries = 0;
    let mut started = None;
    loop {
        let mark = look.mark_search();
        let found = search();
        let changing = look.seen_in_parts(mark);
        tries += 1;
        if changing == SeenInParts::Nobody {
            return Seen { found, changing };
        }
        // The clock is read only if a batch was applied during the search.
        let started: &Instant = started.get_or_insert_with(Instant::now);
        if tries > REPEATED_MIN && started.elapsed() >= REPEATED_FOR {
            return Seen { found, changing };
        }
        // The lane may need this processor to come to the end of its batch.
        std::thread::yield_now();
    }
}

impl Seen {
    /// Whether the search has certainly seen no batch half applied.
    pub(super) fn is_whole(&self) -> bool {
        self.changing == SeenInParts::Nobody
    }

    /// Whether the search may have seen a batch of `holder` half applied.
    pub(super) fn is_changing(&self, holder: &HolderId) -> bool {
        match &self.changing {
            SeenInParts::Nobody => false,
            SeenInParts::These(holders) => holders.contains(holder),
            SeenInParts::Any => true,
        }
    }

    /// Returns the holders that the search did not find, although a batch of theirs may have been half applied at
    /// that time. If `workers` is given, returns only holders of these workers. The list is empty if any holder's
    /// batch may have been half applied.
    pub(super) fn missed(
        &self,
        workers: Option<&[WorkerName]>,
        is_found: impl Fn(&HolderId) -> bool,
    ) -> Vec<&HolderId> {
        let changing = match &self.changing {
            SeenInParts::These(holders) => holders.as_slice(),
            SeenInParts::Nobody | SeenInParts::Any => &[],
        };
        let is_asked = |id: &HolderId| workers.is_none_or(|asked| asked.contains(&id.worker));
        let missed = changing.iter().filter(|id| is_asked(id) && !is_found(id));
        missed.collect()
    }
}

#[cfg(test)]
impl Seen {
    /// Makes the result of a search during which batches of `holders` were applied.
    pub(super) fn while_changing(found: Matches, holders: Vec<HolderId>) -> Self {
        let changing = SeenInParts::These(holders);
        Self { found, changing }
    }
}
