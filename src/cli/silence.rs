//! Silence of the NATS server: a daemon receives nothing from it, not even the messages that the daemon sends to
//! itself. The daemon's route `/index` reports how long the silence has lasted.

use std::time::Duration;

/// Advice on a NATS server that is silent.
pub(super) const MEND: &str = "see whether the NATS server runs and answers others, and the network to it; until then all holders are \
                               behind, and more lanes do not help";

/// Returns the silence in words. `silent_us` is its length in microseconds.
pub(super) fn describe(silent_us: u64) -> String {
    let silent = Duration::from_micros(silent_us);
    format!("nothing has come from the NATS server for {silent:.1?}, not even the daemon's own messages")
}
