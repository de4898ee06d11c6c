//! Outcomes: reports of how many cached blocks requests really found, and how many the answers had promised. In
//! production they show whether answers are exact, and which holders break promises.
//!
//! Routers send outcomes over NATS ([`start_outcomes`]) or HTTP. An outcome names the worker to which a request went,
//! the number of blocks that the answer promised, and the number that the engine found. Outcomes never change an
//! answer: a router that lies makes the reported numbers wrong, and nothing else. All memory is bounded. An outcome of
//! an unknown holder is left out and counted.

mod start;
mod tally;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;

use kvatlas_core::index::{Namespace, Namespaces};
use kvatlas_core::wire::{
    ErrorCode, HolderId, NamespaceName, OUTCOMES_MAX, Outcome, OutcomeReport, PROTOCOL_VERSION, Rank, Shard,
    WireError, WorkerName,
};

use kvatlas_telemetry::labels::{NAMESPACE_LABELS_MAX, OutcomeRefusal, namespace_label};
use kvatlas_telemetry::{CountedOutcome, HolderOutcomeMetrics, OutcomeErrorMetrics, OutcomeMetrics};

pub(crate) use start::start_outcomes;
pub(crate) use tally::PromiseTally;

use tally::Window;

/// Maximum size of a report, in bytes.
pub(crate) const REPORT_BYTES_MAX: usize = 64 << 10;
/// Maximum number of holders whose outcomes are kept. Each takes about 500 bytes, and four series of the metrics.
const HOLDERS_MAX: usize = 4096;
/// Time without outcomes after which a holder's record may be replaced by the record of another holder.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// Maximum number of a namespace's holders that are reported because requests found fewer of their blocks than answers
/// promised.
const BROKEN_MAX: usize = 8;
/// Maximum number of holders of a namespace for which the page compares promised with found blocks.
const TOLD_MAX: usize = 32;

/// Sums of the outcomes of one holder over the last one to two minutes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct HolderPromises {
    pub(crate) worker: WorkerName,
    pub(crate) rank: Rank,
    #[serde(flatten)]
    pub(crate) lately: PromiseTally,
}

/// Comparison for the holders of a namespace, over the last one to two minutes: their blocks that exact answers
/// promised, and their blocks that requests found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct NamespacePromises {
    /// Number of holders about which a router has reported an outcome.
    holders: usize,
    /// Up to 32 of these holders, sorted by the share of promised blocks that requests did not find. The largest share
    /// comes first.
    worst: Vec<HolderPromises>,
}

/// Reason why a report was refused as a whole.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReportError {
    /// Report has another version of the contract. The value is that version.
    #[error("version {0} is not known; this daemon speaks 1")]
    Version(u64),
    /// Report has too many outcomes. The value is their number.
    #[error("{0} outcomes are more than the {OUTCOMES_MAX} of a report; send several")]
    TooMany(usize),
    /// Namespace of the report is not known.
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

impl From<ReportError> for WireError {
    fn from(error: ReportError) -> Self {
        let code = match error {
            ReportError::Version(_) => ErrorCode::UnsupportedVersion,
            ReportError::TooMany(_) => ErrorCode::TooLarge,
            ReportError::UnknownNamespace(_) => ErrorCode::UnknownNamespace,
        };
        Self::new(code, error.to_string())
    }
}

/// Store of the outcomes that routers have reported: how many blocks requests really found.
pub(crate) struct Outcomes {
    namespaces: Arc<Namespaces>,
    /// Shard of the daemon, if it has one. Outcomes about workers of other shards are ignored.
    shard: Option<Shard>,
    errors: OutcomeErrorMetrics,
    kept: Mutex<KeptOutcomes>,
}

#[derive(Default)]
struct KeptOutcomes {
    namespaces: HashMap<NamespaceName, OutcomeMetrics>,
    holders: HashMap<NamespaceName, HashMap<HolderId, HolderOutcomes>>,
}

/// Outcomes of the requests that went to one holder.
struct HolderOutcomes {
    /// Sums of the last one to two minutes. Only exact answers are included, because an answer in doubt promises
    /// nothing.
    lately: Window,
    told_at: Instant,
    metrics: HolderOutcomeMetrics,
}

impl Outcomes {
    /// Makes an empty store for the outcomes of holders in `namespaces`. With a `shard`, only outcomes about workers of
    /// that shard are kept.
    pub(crate) fn new(namespaces: Arc<Namespaces>, shard: Option<Shard>) -> Self {
        Self {
            namespaces,
            shard,
            errors: OutcomeErrorMetrics::new(),
            kept: Mutex::default(),
        }
    }

    /// Takes a report about the namespace `name`. Returns the number of counted outcomes. Only outcomes of known
    /// holders are counted.
    ///
    /// # Errors
    ///
    /// [`ReportError`] if the report is refused as a whole.
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
            // A namespace whose workers all belong to other shards need not be known here.
            let is_own = report.outcomes.iter().any(|outcome| self.is_own(outcome));
            if is_own || !matches!(error, ReportError::UnknownNamespace(_)) {
                self.errors.refused(error.refusal(), 1, error);
            }
        }
        taken
    }

    /// Counts a report that could not be decoded.
    pub(crate) fn undecodable(&self, error: &dyn std::fmt::Display) {
        self.errors.refused(OutcomeRefusal::Undecodable, 1, error);
    }

    /// Returns the sums of a holder's outcomes over the last one to two minutes. `None` if there was no outcome.
    pub(crate) fn lately(
        &self,
        name: &NamespaceName,
        holder: &HolderId,
        now: Instant,
    ) -> Option<PromiseTally> {
        let mut kept = self.kept.lock();
        let holder = kept.holders.get_mut(name)?.get_mut(holder)?;
        let lately = holder.lately.sum(now);
        (lately.requests > 0).then_some(lately)
    }

    /// Returns the number of holders that have broken promises: more than a twentieth of their blocks that exact
    /// answers recently promised were not found by the requests. Also returns at most [`BROKEN_MAX`] of these holders,
    /// the holder with the most missing blocks first. Holders with few promised blocks do not count.
    pub(crate) fn broken_promises(&self, name: &NamespaceName, now: Instant) -> (usize, Vec<HolderPromises>) {
        self.worst(name, now, BROKEN_MAX, PromiseTally::is_broken, |lately| {
            lately.missing_blocks
        })
    }

    /// Returns the comparison of promised and found blocks for a namespace, over the last one to two minutes. `None` if
    /// no outcome was reported.
    pub(crate) fn promises(&self, name: &NamespaceName, now: Instant) -> Option<NamespacePromises> {
        let has_outcomes = |lately: PromiseTally| lately.requests > 0;
        let (holders, worst) = self.worst(
            name,
            now,
            TOLD_MAX,
            has_outcomes,
            PromiseTally::missing_millionths,
        );
        (holders > 0).then_some(NamespacePromises { holders, worst })
    }

    /// Returns the number of holders of a namespace for which `is_wanted` holds. Also returns up to `max` of these
    /// holders, the one with the largest `badness` first.
    fn worst(
        &self,
        name: &NamespaceName,
        now: Instant,
        max: usize,
        is_wanted: impl Fn(PromiseTally) -> bool,
        badness: impl Fn(PromiseTally) -> u64,
    ) -> (usize, Vec<HolderPromises>) {
        let mut kept = self.kept.lock();
        let of_namespace = kept.holders.get_mut(name).into_iter().flatten();
        let sums = of_namespace.map(|(id, told)| (id, told.lately.sum(now)));
        let mut wanted: Vec<_> = sums.filter(|(_, lately)| is_wanted(*lately)).collect();
        let count = wanted.len();
        wanted.sort_unstable_by_key(|(id, lately)| (std::cmp::Reverse(badness(*lately)), *id));
        let worst = wanted.into_iter().take(max).map(|(id, lately)| HolderPromises {
            worker: id.worker.clone(),
            rank: id.rank,
            lately,
        });
        (count, worst.collect())
    }

    fn check(&self, name: &NamespaceName, report: &OutcomeReport) -> Result<Arc<Namespace>, ReportError> {
        if report.v != PROTOCOL_VERSION {
            return Err(ReportError::Version(report.v));
        }
        if report.outcomes.len() > OUTCOMES_MAX {
            return Err(ReportError::TooMany(report.outcomes.len()));
        }
        let namespace = self.namespaces.get(name);
        namespace.ok_or_else(|| ReportError::UnknownNamespace(name.clone()))
    }

    /// Whether an outcome is about a worker of the daemon's own shard.
    fn is_own(&self, outcome: &Outcome) -> bool {
        self.shard.is_none_or(|shard| shard.owns(&outcome.worker))
    }

    /// Counts one outcome. Returns false if its holder is unknown, or belongs to another shard.
    fn count(&self, kept: &mut KeptOutcomes, namespace: &Namespace, outcome: &Outcome, now: Instant) -> bool {
        if !self.is_own(outcome) {
            return false;
        }
        let id = HolderId {
            worker: outcome.worker.clone(),
            rank: outcome.rank,
        };
        if !is_known(namespace, &id) {
            self.errors.refused(OutcomeRefusal::UnknownHolder, 1, &id);
            return false;
        }
        let block_size = namespace.indexer.settings().block_size.as_u32();
        let counted = counted(outcome, block_size);
        kept.of_namespace(&namespace.name).told(counted);
        match kept.of_holder(&namespace.name, id, now) {
            Some(holder) => {
                holder.told_at = now;
                holder.metrics.told(counted);
                if counted.is_exact {
                    holder.lately.add(counted, now);
                }
            }
            None => self.errors.refused(OutcomeRefusal::NoRoom, 1, &outcome.worker),
        }
        true
    }

    /// Forgets the outcomes of holders that the index no longer knows.
    pub(crate) fn forget_gone(&self) {
        self.kept.lock().holders.retain(|name, holders| {
            let namespace = self.namespaces.get(name);
            holders.retain(|id, _| {
                namespace
                    .as_ref()
                    .is_some_and(|namespace| is_known(namespace, id))
            });
            !holders.is_empty()
        });
    }
}

impl KeptOutcomes {
    fn of_namespace(&mut self, name: &NamespaceName) -> &OutcomeMetrics {
        // Some of these namespaces may no longer exist, so all metric handles are dropped. A handle that is still
        // needed is made again.
        if self.namespaces.len() >= NAMESPACE_LABELS_MAX && !self.namespaces.contains_key(name) {
            self.namespaces.clear();
        }
        self.namespaces
            .entry(name.clone())
            .or_insert_with(|| OutcomeMetrics::for_namespace(namespace_label(name.as_str())))
    }

    /// Returns the record of a holder's outcomes. `None` if the holder is new, and there is no room for its record.
    fn of_holder(&mut self, name: &NamespaceName, id: HolderId, now: Instant) -> Option<&mut HolderOutcomes> {
        let is_new = self
            .holders
            .get(name)
            .is_none_or(|holders| !holders.contains_key(&id));
        if is_new && self.holder_count() >= HOLDERS_MAX {
            let is_told =
                |holder: &HolderOutcomes| now.saturating_duration_since(holder.told_at) < FORGOTTEN_AFTER;
            for holders in self.holders.values_mut() {
                holders.retain(|_, holder| is_told(holder));
            }
            if self.holder_count() >= HOLDERS_MAX {
                return None;
            }
        }
        let holder = id.to_string();
        let holders = self.holders.entry(name.clone()).or_default();
        Some(holders.entry(id).or_insert_with(|| HolderOutcomes {
            lately: Window::new(now),
            told_at: now,
            metrics: HolderOutcomeMetrics::of_holder(namespace_label(name.as_str()), &holder),
        }))
    }

    fn holder_count(&self) -> usize {
        self.holders.values().map(HashMap::len).sum()
    }
}

/// Whether the index knows a holder.
fn is_known(namespace: &Namespace, id: &HolderId) -> bool {
    let known = namespace.indexer.holders_of(std::slice::from_ref(&id.worker));
    known.iter().any(|holder| holder.id == *id)
}

/// Converts an outcome from tokens to blocks of `block_size` tokens.
fn counted(outcome: &Outcome, block_size: u32) -> CountedOutcome {
    let found = u64::from(outcome.found_tokens / block_size.max(1));
    // An engine always computes the last token. So if a whole prompt is cached, the engine reuses the blocks before that token only.
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
