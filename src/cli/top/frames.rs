//! Frames from the route `/page/frames` of the admin listener, with the fields that `kvatlas top` shows.

use serde::Deserialize;

use crate::cli::promises::BrokenPromise;
use crate::cli::refused::PublisherRefusal;
use crate::cli::trouble::ProcessTroubles;

/// First event of the stream: facts that stay the same while the daemon runs.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Hello {
    pub(super) version: String,
    /// Bits that can be set in a holder's reasons for doubt, each with the reason's word.
    pub(super) reasons: Vec<(u32, String)>,
    /// Words for reasons of doubt, each with the advice on it. An older daemon leaves this list out.
    #[serde(default)]
    pub(super) mends: Vec<(String, String)>,
}

/// Message of the stream that the daemon sends every second: its state, and the changes of holders since the previous
/// message.
#[derive(Debug, Deserialize)]
pub(super) struct DaemonFrame {
    /// Time of the frame, in microseconds since the Unix epoch.
    #[serde(default)]
    pub(super) now_us: u64,
    pub(super) ready: bool,
    /// Reasons why the daemon is not ready; empty if it is ready.
    pub(super) reasons: Vec<String>,
    pub(super) namespaces: Vec<NamespaceFrame>,
    pub(super) rates: Option<FrameRates>,
    pub(super) fleet: HolderChanges,
    #[serde(flatten)]
    pub(super) troubles: ProcessTroubles,
    /// Holders in doubt that affect the most queries. Each has the holder's number and the share of affected queries in
    /// words. An older daemon leaves this list out.
    #[serde(default)]
    pub(super) costs: Vec<(u64, String)>,
}

/// Size of a namespace, and troubles of the namespace that are not the state of a holder. An older daemon leaves some
/// troubles out.
#[derive(Debug, Deserialize)]
pub(super) struct NamespaceFrame {
    pub(super) name: String,
    /// Numbers of exact and of degraded holders, including holders that the daemon does not send. An older daemon
    /// leaves them out.
    #[serde(default)]
    pub(super) exact: Option<usize>,
    #[serde(default)]
    pub(super) degraded: Option<usize>,
    pub(super) distinct_blocks: u64,
    pub(super) held_blocks: u64,
    /// Publishers whose batches are dropped, each with the reason.
    #[serde(default)]
    pub(super) refused: Vec<PublisherRefusal>,
    /// Holders whose epoch, read as a time, is later than the daemon's clock. The clocks of their publishers are fast.
    #[serde(default)]
    pub(super) ahead: Vec<String>,
    /// Time at which the daemon first saw that an epoch is ahead of its clock, in microseconds since the Unix epoch.
    #[serde(default)]
    pub(super) ahead_since_us: Option<u64>,
    /// Holders of which exact answers promise more blocks than requests find.
    #[serde(default)]
    pub(super) broken_promises: Vec<BrokenPromise>,
}

/// Rates per second, a share, and latencies of queries.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub(super) struct FrameRates {
    pub(super) batches: f64,
    pub(super) stored: f64,
    pub(super) removed: f64,
    pub(super) dropped: f64,
    pub(super) queries: f64,
    pub(super) failed: f64,
    pub(super) exact: f64,
    pub(super) degraded: f64,
    /// Share of matched blocks that requests can reuse. An older daemon leaves the share out.
    #[serde(default)]
    pub(super) usable: Option<f64>,
    pub(super) query_p50_us: Option<f64>,
    pub(super) query_p99_us: Option<f64>,
}

/// Changes of the holders since the previous message of the stream.
#[derive(Debug, Deserialize)]
pub(super) struct HolderChanges {
    pub(super) whole: bool,
    /// New holders: number, namespace, worker, rank.
    pub(super) added: Vec<(u64, String, String, u32)>,
    /// Profiles of holders: number, address, labels. An older daemon leaves them out.
    #[serde(default)]
    pub(super) profiles: Vec<(u64, String, serde_json::Value)>,
    /// Times at which holders became doubtful, each with the holder's number. Times are in microseconds since the Unix
    /// epoch, and 0 if the holder is exact. An older daemon leaves this list out.
    #[serde(default)]
    pub(super) since: Vec<(u64, u64)>,
    /// Facts about holders: number, blocks, bits of the reasons, lag in microseconds, time of the last batch in
    /// microseconds, events that wait for their parent block.
    pub(super) facts: Vec<(u64, u64, u32, u64, u64, u32)>,
    pub(super) gone: Vec<u64>,
}
