//! Outcomes: whether requests find what answers promised. It proves exactness where the product runs, and names who breaks it.
//!
//! Routers tell, over NATS ([`start_outcomes`]) or HTTP, which worker a request went to, what an answer promised of it, and what the engine then
//! found. Nothing here changes an answer: a router that lies makes figures wrong, and nothing else. All is bounded, and a report about a holder
//! that is not known is left out and counted.

mod start;
mod tally;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;

use kvatlas_core::index::{Namespace, Namespaces};
use kvatlas_core::wire::{
    HolderId, NamespaceName, OUTCOMES_MAX, Outcome, OutcomeReport, Rank, Shard, WorkerName,
};

use crate::daemon::metrics::labels::{NAMESPACE_LABELS_MAX, OutcomeRefusal, namespace_label};
use crate::daemon::metrics::{CountedOutcome, HolderOutcomeMetrics, OutcomeErrorMetrics, OutcomeMetrics};

pub(crate) use start::start_outcomes;
pub(crate) use tally::Tally;

use tally::Window;

/// Most bytes of a report.
pub(crate) const REPORT_BYTES_MAX: usize = 64 << 10;
/// Most holders with outcomes of their own; about 300 bytes each, and two series.
const HOLDERS_MAX: usize = 4096;
/// A holder of which nothing was told for so long makes room for others.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// Holders that are named for their promises, at most.
const BROKEN_MAX: usize = 8;

/// A holder of which exact answers promise more than requests find.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct BrokenPromise {
    pub(crate) worker: WorkerName,
    pub(crate) rank: Rank,
    #[serde(flatten)]
    pub(crate) lately: Tally,
}

/// Why a report was refused as a whole.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReportError {
    /// It speaks another version of the contract.
    #[error("version {0} is not known; this daemon speaks 1")]
    Version(u64),
    /// It has too many outcomes.
    #[error("{0} outcomes are more than the {OUTCOMES_MAX} of a report; send several")]
    TooMany(usize),
    /// No such namespace is known.
    #[error("namespace {0} is not known here")]
    UnknownNamespace(NamespaceName),
}

impl ReportError {
    fn refusal(&self) -> OutcomeRefusal {
        match self {
            Self::Version(_) => OutcomeRefusal::UnsupportedVersion,
            Self::TooMany(_) => OutcomeRefusal::TooMany,
            Self::UnknownNamespace(_) => OutcomeRefusal::UnknownNamespace,
        }
    }
}

/// What routers have told.
pub(crate) struct Outcomes {
    namespaces: Arc<Namespaces>,
    /// Outcomes of others' workers are passed over.
    shard: Option<Shard>,
    errors: OutcomeErrorMetrics,
    kept: Mutex<Kept>,
}

#[derive(Default)]
struct Kept {
    namespaces: HashMap<NamespaceName, OutcomeMetrics>,
    holders: HashMap<(NamespaceName, HolderId), HolderOutcomes>,
}

/// What was told of one holder.
struct HolderOutcomes {
    lately: Window,
    told_at: Instant,
    metrics: HolderOutcomeMetrics,
}

impl Outcomes {
    /// Nothing yet, about the holders of `namespaces` that belong to `shard`.
    pub(crate) fn new(namespaces: Arc<Namespaces>, shard: Option<Shard>) -> Self {
        Self {
            namespaces,
            shard,
            errors: OutcomeErrorMetrics::new(),
            kept: Mutex::default(),
        }
    }

    /// Takes a report about `name`. Gives back how many of its outcomes were counted: those of holders that are known here.
    ///
    /// # Errors
    ///
    /// [`ReportError`] where none was looked at.
    pub(crate) fn take(
        &self,
        name: &NamespaceName,
        report: &OutcomeReport,
        now: Instant,
    ) -> Result<usize, ReportError> {
        let taken = self.check(name, report).map(|namespace| {
            let mut kept = self.kept.lock();
            let outcomes = report.outcomes.iter();
            outcomes
                .filter(|outcome| self.count(&mut kept, &namespace, outcome, now))
                .count()
        });
        if let Err(error) = &taken {
            self.errors.refused(error.refusal(), 1, error);
        }
        taken
    }

    /// Counts a report that is none.
    pub(crate) fn undecodable(&self, error: &dyn std::fmt::Display) {
        self.errors.refused(OutcomeRefusal::Undecodable, 1, error);
    }

    /// What was told of a holder lately; none where nothing was.
    pub(crate) fn lately(&self, name: &NamespaceName, holder: &HolderId, now: Instant) -> Option<Tally> {
        let mut kept = self.kept.lock();
        let holder = kept.holders.get_mut(&(name.clone(), holder.clone()))?;
        let lately = holder.lately.sum(now);
        (lately.requests > 0).then_some(lately)
    }

    /// The holders of which exact answers promised more than requests found lately, the worst first; not those of which little was told.
    pub(crate) fn broken_promises(&self, name: &NamespaceName, now: Instant) -> Vec<BrokenPromise> {
        let mut kept = self.kept.lock();
        let of_namespace = kept.holders.iter_mut().filter(|((of, _), _)| of == name);
        let mut broken: Vec<BrokenPromise> = of_namespace
            .map(|((_, holder), told)| BrokenPromise {
                worker: holder.worker.clone(),
                rank: holder.rank,
                lately: told.lately.sum(now),
            })
            .filter(|broken| broken.lately.is_broken())
            .collect();
        broken.sort_by_key(|broken| std::cmp::Reverse(broken.lately.missing_blocks));
        broken.truncate(BROKEN_MAX);
        broken
    }

    fn check(&self, name: &NamespaceName, report: &OutcomeReport) -> Result<Arc<Namespace>, ReportError> {
        if report.v != 1 {
            return Err(ReportError::Version(report.v));
        }
        if report.outcomes.len() > OUTCOMES_MAX {
            return Err(ReportError::TooMany(report.outcomes.len()));
        }
        let namespace = self.namespaces.get(name);
        namespace.ok_or_else(|| ReportError::UnknownNamespace(name.clone()))
    }

    /// Counts one outcome; says whether its holder is known here.
    fn count(&self, kept: &mut Kept, namespace: &Namespace, outcome: &Outcome, now: Instant) -> bool {
        if self.shard.is_some_and(|shard| !shard.owns(&outcome.worker)) {
            return false;
        }
        let id = HolderId {
            worker: outcome.worker.clone(),
            rank: outcome.rank,
        };
        let known = namespace.indexer.holders_of(std::slice::from_ref(&id.worker));
        if known.iter().all(|holder| holder.id != id) {
            self.errors.refused(OutcomeRefusal::UnknownHolder, 1, &id);
            return false;
        }
        let block_size = namespace.indexer.settings().block_size.as_u32();
        let counted = counted(outcome, block_size);
        kept.of_namespace(&namespace.name).told(counted);
        if !counted.is_exact {
            return true;
        }
        match kept.of_holder(&namespace.name, id, now) {
            Some(holder) => {
                holder.told_at = now;
                holder.lately.add(counted, now);
                holder.metrics.told(counted);
            }
            None => self.errors.refused(OutcomeRefusal::NoRoom, 1, &outcome.worker),
        }
        true
    }

    /// Forgets holders that the index no longer knows.
    pub(crate) fn forget_gone(&self) {
        let is_known = |(name, id): &(NamespaceName, HolderId)| {
            self.namespaces.get(name).is_some_and(|namespace| {
                let known = namespace.indexer.holders_of(std::slice::from_ref(&id.worker));
                known.iter().any(|holder| holder.id == *id)
            })
        };
        self.kept.lock().holders.retain(|key, _| is_known(key));
    }
}

impl Kept {
    fn of_namespace(&mut self, name: &NamespaceName) -> &OutcomeMetrics {
        // Some of them have gone since.
        if self.namespaces.len() >= NAMESPACE_LABELS_MAX && !self.namespaces.contains_key(name) {
            self.namespaces.clear();
        }
        self.namespaces
            .entry(name.clone())
            .or_insert_with(|| OutcomeMetrics::for_namespace(namespace_label(name.as_str())))
    }

    /// What is kept of a holder; none where there is no room for another one.
    fn of_holder(&mut self, name: &NamespaceName, id: HolderId, now: Instant) -> Option<&mut HolderOutcomes> {
        let key = (name.clone(), id);
        if self.holders.len() >= HOLDERS_MAX && !self.holders.contains_key(&key) {
            self.holders
                .retain(|_, holder| now.saturating_duration_since(holder.told_at) < FORGOTTEN_AFTER);
            if self.holders.len() >= HOLDERS_MAX {
                return None;
            }
        }
        let holder = key.1.to_string();
        Some(self.holders.entry(key).or_insert_with(|| HolderOutcomes {
            lately: Window::new(now),
            told_at: now,
            metrics: HolderOutcomeMetrics::of_holder(namespace_label(name.as_str()), &holder),
        }))
    }
}

/// What an outcome says in blocks.
fn counted(outcome: &Outcome, block_size: u32) -> CountedOutcome {
    let found = u64::from(outcome.found_tokens / block_size.max(1));
    // An engine always computes the last token: of a prompt that is in the cache as a whole, it reuses all but the last block.
    let most = outcome
        .prompt_tokens
        .map_or(u32::MAX, |tokens| tokens.saturating_sub(1) / block_size.max(1));
    let promised = u64::from(outcome.promised_blocks.min(most));
    CountedOutcome {
        promised_blocks: promised,
        missing_blocks: promised.saturating_sub(found),
        unpromised_blocks: found.saturating_sub(promised),
        is_exact: outcome.exact,
    }
}

#[cfg(test)]
mod tests;
