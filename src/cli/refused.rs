//! Publishers whose batches are dropped, as a daemon's `/index` names them.

use serde::{Deserialize, Serialize};

/// Such a publisher, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct Refused {
    pub(super) worker: String,
    pub(super) reason: String,
    /// The time of its first dropped batch, in microseconds since the Unix epoch. An older daemon does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) since_us: Option<u64>,
}

/// The reason for which batches of `worker` are dropped; none where the daemon does not say it.
pub(super) fn reason_of<'r>(refused: &'r [Refused], worker: &str) -> Option<&'r str> {
    let known = refused.iter().find(|known| known.worker == worker);
    known.map(|known| known.reason.as_str())
}
