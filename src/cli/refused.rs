//! Publishers whose batches are dropped, as a daemon's `/index` names them.

use serde::{Deserialize, Serialize};

/// Such a publisher, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct Refused {
    worker: String,
    reason: String,
}

/// The reason for which batches of `worker` are dropped; none where the daemon does not say it.
pub(super) fn reason_of<'r>(refused: &'r [Refused], worker: &str) -> Option<&'r str> {
    let known = refused.iter().find(|known| known.worker == worker);
    known.map(|known| known.reason.as_str())
}
