//! Refused publishers: publishers whose batches a daemon drops. The daemon's route `/index` lists them.

use serde::{Deserialize, Serialize};

/// Publisher whose batches are dropped, with the reason.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct PublisherRefusal {
    pub(super) worker: String,
    pub(super) reason: String,
    /// Time of the publisher's first dropped batch, in microseconds since the Unix epoch. An older daemon leaves the time out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) since_us: Option<u64>,
}

/// Returns the reason for which batches of `worker` are dropped; `None` if the daemon does not tell it.
pub(super) fn reason_of<'r>(refused: &'r [PublisherRefusal], worker: &str) -> Option<&'r str> {
    let known = refused.iter().find(|known| known.worker == worker);
    known.map(|known| known.reason.as_str())
}
