//! Searches, and readings of a holder's status, that see certain batches either whole or not at all. These are the
//! batches that both remove and add blocks, and those that begin a new epoch.
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
pub(crate) struct Seen {
    pub(crate) found: Matches,
    changing: SeenInParts,
}

/// Repeats a search, within bounds, until it has certainly seen no batch half applied. Returns the result of the last
/// search.
pub(crate) fn search_whole(look: &FreshnessReading<'_>, search: impl FnMut() -> Matches) -> Seen {
    let (found, changing) = read_whole(look, |changing| *changing == SeenInParts::Nobody, search);
    Seen { found, changing }
}

/// Repeats the reading of one holder's state, within bounds, until it has certainly seen no batch of `holder` half
/// applied. Returns the result of the last reading, and whether it may have seen such a batch.
pub(super) fn read_holder_whole<T>(
    look: &FreshnessReading<'_>,
    holder: &HolderId,
    read: impl FnMut() -> T,
) -> (T, bool) {
    let (read, changing) = read_whole(look, |changing| !changing.contains(holder), read);
    (read, changing.contains(holder))
}

/// Repeats `read`, within bounds, until `is_whole` holds for the holders whose batches it may have seen half applied.
/// Returns the result of the last repetition, and these holders.
fn read_whole<T>(
    look: &FreshnessReading<'_>,
    is_whole: impl Fn(&SeenInParts) -> bool,
    mut read: impl FnMut() -> T,
) -> (T, SeenInParts) {
    let mut tries = 0;
    let mut started = None;
    loop {
        let mark = look.mark_search();
        let found = read();
        let changing = look.seen_in_parts(mark);
        tries += 1;
        if is_whole(&changing) {
            return (found, changing);
        }
        // The clock is read only if a batch was applied during the search.
        let started: &Instant = started.get_or_insert_with(Instant::now);
        if tries > REPEATED_MIN && started.elapsed() >= REPEATED_FOR {
            return (found, changing);
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
    pub(crate) fn is_changing(&self, holder: &HolderId) -> bool {
        self.changing.contains(holder)
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use kvatlas_core::hash::SequenceHash;
    use kvatlas_core::stream::StreamTrust;
    use kvatlas_core::wire::{
        DegradedReason, DegradedReasons, Event, EventBatch, NamespaceName, StoredBlocks,
    };

    use super::*;
    use crate::lanes::LanePool;
    use crate::lanes::tests::{batch, namespaces, settings};
    use crate::queries::report;

    /// Returns the only batch of an epoch. The publisher doubts its state, and has `blocks`.
    fn doubted(epoch: u64, blocks: u64) -> Vec<u8> {
        let hashes = (0..blocks).map(SequenceHash).collect();
        let events = vec![
            Event::Doubted(DegradedReasons::of(DegradedReason::UpstreamGap)),
            Event::Stored(StoredBlocks::by_sequence(None, None, hashes)),
        ];
        let batch = EventBatch {
            epoch,
            ..batch(1, events)
        };
        batch.encode()
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_status_never_shows_half_of_a_new_epoch() {
        let namespaces = Arc::new(namespaces());
        let pool = LanePool::start(&settings(), Arc::clone(&namespaces)).unwrap();
        let trust = StreamTrust::default();
        let (name, worker) = (NamespaceName::new("n").unwrap(), WorkerName::new("w").unwrap());
        let generation = trust.generation();
        let hear = async |epoch, blocks| {
            let payload = doubted(epoch, blocks);
            let dispatched = pool.dispatch(&name, worker.clone(), &payload, generation);
            dispatched.await.unwrap();
        };
        hear(1, 0).await;
        pool.drain().await.unwrap();
        let holders = namespaces.get(&name).unwrap().indexer.holders();
        let is_over = AtomicBool::new(false);
        let freshness = pool.freshness();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut exact = 0;
                while !is_over.load(Ordering::Relaxed) {
                    let status = report(&holders[0], &trust, &freshness.look(&name), &name);
                    exact += usize::from(status.exact);
                }
                exact
            });
            let runtime = tokio::runtime::Handle::current();
            tokio::task::block_in_place(|| {
                runtime.block_on(async {
                    for epoch in 2..20_000 {
                        hear(epoch, epoch % 2 * 3).await;
                    }
                    pool.drain().await.unwrap();
                });
            });
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(reader.join().unwrap(), 0);
        });
    }
}
