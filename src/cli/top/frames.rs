//! The admin listener's frames, as far as they are shown.

use serde::Deserialize;

use crate::cli::missing::MissingShard;
use crate::cli::promises::BrokenPromise;
use crate::cli::refused::Refused;
use crate::cli::strays::Stray;

/// The facts that do not change while the daemon runs.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Hello {
    pub(super) version: String,
    /// The words for the bits of a holder's reasons.
    pub(super) reasons: Vec<(u32, String)>,
    /// The mend for each word. An older daemon does not say it.
    #[serde(default)]
    pub(super) mends: Vec<(String, String)>,
}

/// One frame.
#[derive(Debug, Deserialize)]
pub(super) struct Frame {
    /// Microseconds since the Unix epoch.
    #[serde(default)]
    pub(super) now_us: u64,
    pub(super) ready: bool,
    /// Why it is not.
    pub(super) reasons: Vec<String>,
    pub(super) namespaces: Vec<NamespaceFrame>,
    pub(super) rates: Option<Rates>,
    pub(super) fleet: FleetChange,
    /// In a gateway: the shards that answers lack. An older daemon does not say it.
    #[serde(default)]
    pub(super) missing_shards: Vec<MissingShard>,
    /// Namespaces that do not exist although events of them come. An older daemon does not say it.
    #[serde(default)]
    pub(super) strays: Vec<Stray>,
    /// Why snapshots are not written. An older daemon does not say it.
    #[serde(default)]
    pub(super) snapshots: Option<FailingSnapshots>,
    /// The holders whose doubts cost most: number, and the cost in words. An older daemon does not say it.
    #[serde(default)]
    pub(super) costs: Vec<(u64, String)>,
}

/// Snapshots that are not written.
#[derive(Debug, Deserialize)]
pub(super) struct FailingSnapshots {
    pub(super) error: String,
    /// Since when, in microseconds since the Unix epoch.
    pub(super) since_us: u64,
}

/// The sizes of a namespace, and the troubles that are none of its holders'. An older daemon says fewer of these.
#[derive(Debug, Deserialize)]
pub(super) struct NamespaceFrame {
    pub(super) name: String,
    pub(super) distinct_blocks: u64,
    pub(super) held_blocks: u64,
    /// Publishers whose batches are dropped.
    #[serde(default)]
    pub(super) refused: Vec<Refused>,
    /// Holders whose publishers' clocks are ahead.
    #[serde(default)]
    pub(super) ahead: Vec<String>,
    /// Since when, in microseconds since the Unix epoch.
    #[serde(default)]
    pub(super) ahead_since_us: Option<u64>,
    /// Holders of which exact answers promise more than requests find.
    #[serde(default)]
    pub(super) broken_promises: Vec<BrokenPromise>,
}

/// The rates of a second.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub(super) struct Rates {
    pub(super) batches: f64,
    pub(super) stored: f64,
    pub(super) removed: f64,
    pub(super) dropped: f64,
    pub(super) queries: f64,
    pub(super) failed: f64,
    pub(super) exact: f64,
    pub(super) degraded: f64,
    /// The share of matched blocks that requests can reuse. An older daemon does not say it.
    #[serde(default)]
    pub(super) usable: Option<f64>,
    pub(super) query_p50_us: Option<f64>,
    pub(super) query_p99_us: Option<f64>,
}

/// The changes of the holders.
#[derive(Debug, Deserialize)]
pub(super) struct FleetChange {
    pub(super) whole: bool,
    /// Number, namespace, worker, rank.
    pub(super) added: Vec<(u64, String, String, u32)>,
    /// Number, address, labels. An older daemon does not say them.
    #[serde(default)]
    pub(super) profiles: Vec<(u64, String, serde_json::Value)>,
    /// Number, and since when it is not exact in microseconds since the Unix epoch, or 0. An older daemon does not say it.
    #[serde(default)]
    pub(super) since: Vec<(u64, u64)>,
    /// Number, blocks, bits of the reasons, lag, time of the last batch, parked events.
    pub(super) facts: Vec<(u64, u64, u32, u64, u64, u32)>,
    pub(super) gone: Vec<u64>,
}
