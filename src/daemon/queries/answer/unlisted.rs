//! Holders whose state is not certain and that an answer does not list: they may hold more than is known.

use std::collections::HashSet;

use kvatlas_core::index::HolderRecord;
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{Rank, WorkerName};

use super::super::whole::Seen;
use super::{Doubts, saturating_u32, unsized_holders};

/// A holder in an answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Listed<'a> {
    pub(super) worker: &'a WorkerName,
    pub(super) rank: Rank,
    pub(super) is_exact: bool,
}

/// What a query asks about.
#[derive(Debug, Clone, Copy)]
pub(super) struct AskedAbout<'a> {
    /// These workers; all where they are absent.
    pub(super) workers: Option<&'a [WorkerName]>,
    /// Whether the daemon cuts the prompt into blocks. It finds nobody whose blocks have another size than it believes.
    pub(super) is_by_tokens: bool,
}

/// How many of those `asked` about are not `listed`, and may hold more than is known:
///
/// - Their state has not been certain since before the search.
/// - The query is by tokens, and how many tokens their blocks have is only guessed.
/// - Nothing has been heard of them yet: these count as one.
pub(super) fn count_doubtful<'a, T>(
    trust: &StreamTrust,
    doubts: &Doubts<'_, '_>,
    seen: &Seen<T>,
    asked: AskedAbout<'_>,
    listed: impl Iterator<Item = Listed<'a>> + Clone,
) -> u32 {
    let unheard = u32::from(!doubts.is_listed);
    unheard.saturating_add(count_known(trust, doubts, seen, asked, listed))
}

/// As [`count_doubtful`], of those that have been heard of.
fn count_known<'a, T>(
    trust: &StreamTrust,
    doubts: &Doubts<'_, '_>,
    seen: &Seen<T>,
    AskedAbout {
        workers,
        is_by_tokens,
    }: AskedAbout<'_>,
    listed: impl Iterator<Item = Listed<'a>> + Clone,
) -> u32 {
    let is_guessed = is_by_tokens && unsized_holders(doubts.namespace) > 0;
    let indexer = &doubts.namespace.indexer;
    let is_calm = !is_guessed
        && seen.is_whole()
        && !doubts.look.is_anybody_behind()
        && indexer.doubtful_holders(trust) == doubts.before;
    if is_calm && doubts.before.count == 0 {
        return 0;
    }
    if is_calm && workers.is_none() {
        // Nothing has changed since before the search: of those in the answer it was as it says.
        let listed = listed.filter(|listed| !listed.is_exact).count();
        return doubts.before.count.saturating_sub(saturating_u32(listed));
    }
    let listed: HashSet<_> = listed.map(|listed| (listed.worker, listed.rank)).collect();
    let asked = workers.map_or_else(|| indexer.holders(), |workers| indexer.holders_of(workers));
    let is_doubtful = |holder: &HolderRecord| {
        if is_guessed && !holder.status.is_size_known.load() {
            return true;
        }
        let reasons = indexer.reasons_since(&doubts.before, holder, trust);
        !doubts.of(holder, reasons, seen).is_empty()
    };
    let unlisted = asked
        .iter()
        .filter(|holder| !listed.contains(&(&holder.id.worker, holder.id.rank)) && is_doubtful(holder));
    saturating_u32(unlisted.count() + indexer.refused_holders(workers))
}
