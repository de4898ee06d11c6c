//! Holders with uncertain state that an answer does not list. They may hold more blocks than is known.

use std::collections::HashSet;

use kvatlas_core::index::HolderRecord;
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{QueryKey, Rank, Tier, WorkerName};

use super::super::whole::Seen;
use super::{DoubtFacts, saturating_u32, unsized_holders};

/// Holder that an answer lists.
#[derive(Debug, Clone, Copy)]
pub(super) struct Listed<'a> {
    pub(super) worker: &'a WorkerName,
    pub(super) rank: Rank,
    /// Whether the holder is exact for the query, that is, whether none of its doubts concerns the query.
    pub(super) is_exact: bool,
}

/// Returns the number of holders that are not `listed`, and that may hold more than is known. If `workers` is given,
/// only holders of these workers count. Four kinds of holders may hold more than is known:
///
/// - Holders with a doubt that concerns the query, even if it has ended since the search began.
/// - For a query by tokens, holders whose block size is not known for certain.
/// - Publishers whose batches are dropped, so that they are not registered.
/// - Holders of which nothing has been heard or applied yet. All of them together count as one.
pub(super) fn count_doubtful<'a>(
    trust: &StreamTrust,
    doubts: &DoubtFacts<'_, '_>,
    seen: &Seen,
    workers: Option<&[WorkerName]>,
    listed: impl Iterator<Item = Listed<'a>> + Clone,
) -> u32 {
    let unheard = u32::from(!doubts.is_listed);
    unheard.saturating_add(count_known(trust, doubts, seen, workers, listed))
}

/// Returns the same number as [`count_doubtful`], but without holders of which nothing has been heard yet.
fn count_known<'a>(
    trust: &StreamTrust,
    doubts: &DoubtFacts<'_, '_>,
    seen: &Seen,
    workers: Option<&[WorkerName]>,
    listed: impl Iterator<Item = Listed<'a>> + Clone,
) -> u32 {
    // For a query by tokens, the daemon cuts the prompt into blocks of the namespace's size. It cannot find a holder
    // whose blocks have another size.
    let is_by_tokens = matches!(doubts.key, QueryKey::Tokens { .. });
    let is_guessed = is_by_tokens && unsized_holders(doubts.namespace) > 0;
    let indexer = &doubts.namespace.indexer;
    let is_calm = !is_guessed
        && seen.is_whole()
        && !doubts.look.is_anybody_behind()
        && indexer.doubtful_holders(trust) == doubts.before;
    // For a holder that is not listed, even a doubt about a single tier concerns the query.
    let partial = doubts.before.partial.up_to(Tier::DEVICE);
    let is_simple = is_calm && partial.for_query(doubts.key, false).is_empty();
    let doubtful = doubts.before.count.saturating_add(doubts.before.beyond_device);
    if is_simple && doubtful == 0 {
        return 0;
    }
    if is_simple && workers.is_none() {
        // Nothing has changed since `before` was counted. That count includes the listed holders that are not exact, so
        // they are subtracted.
        let listed = listed.filter(|listed| !listed.is_exact).count();
        return doubtful.saturating_sub(saturating_u32(listed));
    }
    let listed: HashSet<_> = listed.map(|listed| (listed.worker, listed.rank)).collect();
    // Read before and after the holders. A refused holder that is registered meanwhile is in the first reading, and a
    // holder that is removed and refused meanwhile is in the last one.
    let count_refused = || indexer.refused().count(workers);
    let refused = count_refused();
    let asked = workers.map_or_else(|| indexer.holders(), |workers| indexer.holders_of(workers));
    let is_doubtful = |holder: &HolderRecord| {
        if is_guessed && !holder.status.is_size_known.load() {
            return true;
        }
        let reasons = indexer.reasons_since(&doubts.before, holder, trust);
        !doubts.of(holder, reasons, seen, false).is_empty()
    };
    let unlisted = asked
        .iter()
        .filter(|holder| !listed.contains(&(&holder.id.worker, holder.id.rank)) && is_doubtful(holder));
    let name = &doubts.namespace.name;
    let is_one_unapplied = doubts.is_listed && doubts.look.is_unheld_behind(name, workers, &asked);
    saturating_u32(unlisted.count() + refused.max(count_refused()) + usize::from(is_one_unapplied))
}
