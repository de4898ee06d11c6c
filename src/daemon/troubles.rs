//! Troubles of a namespace that do not make any of its holders degraded, with the publishers and holders that cause them.

use serde::Serialize;

use kvatlas_core::index::Namespace;
use kvatlas_core::wire::WorkerName;

use super::lanes::epoch_ahead_s;

/// Most culprits that are named of each trouble.
const NAMED_MAX: usize = 8;

/// The publishers and holders that cause troubles.
#[derive(Debug, Serialize)]
pub(crate) struct Troubles {
    /// Publishers whose batches are dropped, so that they have no holder.
    refused_publishers: Vec<WorkerName>,
    /// The same publishers, each with the reason.
    refused: Vec<Refused>,
    /// Holders whose epochs lie ahead of the clock: `worker/rank`.
    ahead: Vec<String>,
    /// Number of all such holders.
    epochs_ahead: usize,
}

/// A publisher whose batches are dropped.
#[derive(Debug, Serialize)]
struct Refused {
    worker: WorkerName,
    /// The word by which metrics count its last batch.
    reason: &'static str,
}

impl Troubles {
    /// Returns the troubles of a namespace at the time `now_us`, in microseconds since the Unix epoch.
    pub(crate) fn of(namespace: &Namespace, now_us: u64) -> Self {
        let holders = namespace.indexer.holders();
        let ahead = holders
            .iter()
            .filter(|holder| epoch_ahead_s(holder.status.cursor.load().epoch, now_us) > 0);
        let mut ahead: Vec<_> = ahead.map(|holder| &holder.id).collect();
        ahead.sort_unstable();
        let refused = namespace.indexer.refused_workers(NAMED_MAX);
        Self {
            refused_publishers: refused.iter().map(|(worker, _)| worker.clone()).collect(),
            refused: refused
                .into_iter()
                .map(|(worker, reason)| Refused { worker, reason })
                .collect(),
            epochs_ahead: ahead.len(),
            ahead: ahead
                .into_iter()
                .take(NAMED_MAX)
                .map(ToString::to_string)
                .collect(),
        }
    }
}
