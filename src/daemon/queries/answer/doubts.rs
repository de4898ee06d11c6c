//! Facts about holders' doubts, as they were before a search.

use crate::lanes::FreshnessReading;
use kvatlas_core::index::{HolderRecord, Namespace};
use kvatlas_core::stream::DoubtfulHolders;
use kvatlas_core::wire::{DegradedReason, DegradedReasons, HolderId, NamespaceName, QueryKey};

use super::super::whole::Seen;
use super::Answerer;

/// Facts about the doubts of holders, together with the query's key. They must be read before the search, because a
/// doubt that ends during the search still concerns what the search has seen.
pub(super) struct DoubtFacts<'f, 'n> {
    pub(super) namespace: &'n Namespace,
    /// Key of the query, which names the blocks to find.
    pub(super) key: &'n QueryKey,
    pub(super) before: DoubtfulHolders,
    pub(super) look: FreshnessReading<'f>,
    /// Whether every publisher was known before the search. Otherwise an answer may lack holders.
    pub(super) is_listed: bool,
}

impl Answerer {
    pub(super) fn doubts<'n>(&self, namespace: &'n Namespace, key: &'n QueryKey) -> DoubtFacts<'_, 'n> {
        // Read before the search, which may miss a publisher that appears in between.
        let is_listed = self.trust.is_listed();
        DoubtFacts {
            namespace,
            key,
            before: namespace.indexer.doubtful_holders(&self.trust),
            look: self.freshness.look(&namespace.name),
            is_listed,
        }
    }
}

impl DoubtFacts<'_, '_> {
    /// Returns the holder's reasons for doubt that concern the query. They include the given `reasons`, and the
    /// reasons found before the search. A reason found before the search counts even if it has ended since, because
    /// the search may have missed the newest events. `is_listed` says whether the answer lists the holder.
    pub(super) fn of(
        &self,
        holder: &HolderRecord,
        reasons: DegradedReasons,
        seen: &Seen,
        is_listed: bool,
    ) -> DegradedReasons {
        let mut reasons = reasons.for_query(self.key, is_listed);
        if self.before.is_stalled {
            reasons = reasons.with(DegradedReason::Unverified);
        }
        if seen.is_changing(&holder.id) {
            reasons = reasons.with(DegradedReason::Changing);
        }
        with_wait(reasons, &self.look, &self.namespace.name, &holder.id)
    }
}

/// Adds `Behind` to the reasons if the holder's events have waited for too long. An unverified holder does not get
/// `Behind`, because nothing is known about its waiting events.
pub(crate) fn with_wait(
    reasons: DegradedReasons,
    look: &FreshnessReading<'_>,
    namespace: &NamespaceName,
    holder: &HolderId,
) -> DegradedReasons {
    if !reasons.contains(DegradedReason::Unverified) && look.is_behind(namespace, holder) {
        return reasons.with(DegradedReason::Behind);
    }
    reasons
}
