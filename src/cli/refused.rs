//! Refused publishers: publishers whose batches a daemon drops. The daemon's route `/index` lists them.

use kvatlas_daemon::runbook::{AdviceTable, mend_for};
use serde::{Deserialize, Serialize};

/// Publisher whose batches are dropped, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct PublisherRefusal {
    pub(super) worker: String,
    pub(super) reason: String,
    /// Time of the publisher's first dropped batch, in microseconds since the Unix epoch. An older daemon leaves the
    /// time out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) since_us: Option<u64>,
}

impl PublisherRefusal {
    /// Returns the advice on what to do about this publisher of `namespace`.
    pub(super) fn mend(&self, namespace: &str) -> String {
        mend_of_drops(&self.reason, namespace, &self.worker)
    }
}

/// Returns the advice on a reason for which batches of `worker` of `namespace` are dropped.
pub(super) fn mend_of_drops(reason: &str, namespace: &str, worker: &str) -> String {
    let culprit = [namespace, worker, ""];
    mend_for([reason].into_iter(), AdviceTable::DropReasons, culprit)
}
