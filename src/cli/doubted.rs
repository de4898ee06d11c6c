//! A holder that is not exact, as `/workers` of a daemon tells it.

use kvatlas_core::wire::DegradedReasons;
use kvatlas_daemon::costs::Cost;
use serde::Deserialize;

/// Holder that is not exact. Older daemons say less of it.
#[derive(Debug, Deserialize)]
pub(super) struct DoubtedHolder {
    pub(super) namespace: String,
    pub(super) worker: String,
    pub(super) rank: u32,
    #[serde(default)]
    pub(super) degraded: DegradedReasons,
    /// Beginning of its doubt, in microseconds since the Unix epoch.
    #[serde(default)]
    pub(super) since_us: Option<u64>,
    /// More of what the daemon knows about the reasons.
    #[serde(default)]
    pub(super) detail: Option<String>,
    /// The queries that its doubt concerns.
    #[serde(default)]
    pub(super) cost: Option<Cost>,
}
