//! Holders in doubt, that is, holders that are not exact, from a daemon's route `/workers`.

use kvatlas_core::wire::DegradedReasons;
use kvatlas_daemon::costs::Cost;
use serde::Deserialize;

/// Holder that is not exact. An older daemon leaves out the optional fields.
#[derive(Debug, Deserialize)]
pub(super) struct DoubtedHolder {
    pub(super) namespace: String,
    pub(super) worker: String,
    pub(super) rank: u32,
    #[serde(default)]
    pub(super) degraded: DegradedReasons,
    /// Time since which the holder is not exact, in microseconds since the Unix epoch.
    #[serde(default)]
    pub(super) since_us: Option<u64>,
    /// Details of the reasons for doubt; `None` if the daemon knows no details.
    #[serde(default)]
    pub(super) detail: Option<String>,
    /// Numbers of recent answers: all about the namespace, those that list the holder as not exact, and those that are
    /// not exact. `None` if an older daemon leaves them out.
    #[serde(default)]
    pub(super) cost: Option<Cost>,
}
