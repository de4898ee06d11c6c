//! Troubles that a daemon or gateway tells of itself, in its route `/index` and in the frames of its page.

use serde::{Deserialize, Serialize};

use super::explain::mend_of_alert;
use super::missing::{GatewayOutage, UnansweringShard};
use super::silence::BrokerSilence;
use super::strays::StrayNamespace;
use super::text::since;

/// Trouble in words, and the advice on it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Trouble {
    /// Part of the process that has the trouble.
    pub(super) part: &'static str,
    pub(super) what: String,
    pub(super) mend: String,
}

/// Troubles of a process that concern no single holder. An older process leaves some of them out.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(super) struct ProcessTroubles {
    /// Silence of the NATS server, or of the events stream.
    #[serde(flatten)]
    pub(super) silence: BrokerSilence,
    /// Outage of this gateway, which no shard answers; `None` if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shard_outage: Option<GatewayOutage>,
    /// Shards that do not answer this gateway.
    #[serde(default)]
    missing_shards: Vec<UnansweringShard>,
    /// Namespaces that do not exist although events of them come.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    strays: Vec<StrayNamespace>,
    /// Failure of the last attempt to write a snapshot; `None` if that attempt did not fail.
    #[serde(default, alias = "snapshots", skip_serializing_if = "Option::is_none")]
    snapshot_error: Option<SnapshotFailure>,
    /// Failure of the last attempt to send a snapshot to the Object Store; `None` if that attempt did not fail.
    #[serde(default, alias = "uploads", skip_serializing_if = "Option::is_none")]
    snapshot_upload_error: Option<SnapshotFailure>,
}

/// Ongoing failure to write snapshots, or to send them.
#[derive(Debug, Deserialize, Serialize)]
#[serde(untagged)]
enum SnapshotFailure {
    /// Error alone, as the route `/index` tells it.
    Error(String),
    /// Error and the beginning of the failures, in microseconds since the Unix epoch, as frames tell them.
    Since { error: String, since_us: u64 },
}

impl SnapshotFailure {
    fn trouble(&self, part: &'static str, says: &str, alert: &str, now_us: u64) -> Trouble {
        let (error, begun) = match self {
            Self::Error(error) => (error, String::new()),
            Self::Since { error, since_us } => (error, since(Some(*since_us), now_us)),
        };
        let (what, mend) = (format!("{says}{begun}: {error}"), mend_of_alert(alert));
        Trouble { part, what, mend }
    }
}

impl ProcessTroubles {
    /// Returns all troubles at the time `now_us`, the worst first.
    pub(super) fn told(&self, now_us: u64) -> Vec<Trouble> {
        let trouble = |part, what, mend| Trouble { part, what, mend };
        let silence = self.silence.told().into_iter();
        let silence = silence.map(|what| trouble("NATS server", what, self.silence.mend().to_owned()));
        let outage = self.shard_outage.iter();
        let outage = outage.map(|outage| trouble("shards", outage.describe(now_us), GatewayOutage::mend()));
        let shards = self.missing_shards.iter();
        let shards = shards.map(|shard| trouble("shards", shard.describe(now_us), shard.mend()));
        let strays = self.strays.iter();
        let strays = strays.map(|stray| trouble("strays", stray.describe(now_us), stray.mend()));
        let unwritten = self.snapshot_error.iter().map(|failure| {
            let says = "snapshots are not written";
            failure.trouble("snapshots", says, "KvatlasSnapshotsFail", now_us)
        });
        let unsent = self.snapshot_upload_error.iter().map(|failure| {
            let says = "snapshots are not sent to the Object Store";
            failure.trouble("uploads", says, "KvatlasSnapshotUploadsFail", now_us)
        });
        let of_gateway = outage.chain(shards);
        let of_daemon = strays.chain(unwritten).chain(unsent);
        silence.chain(of_gateway).chain(of_daemon).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indexes_and_frames_tell_the_same_troubles_the_worst_first() {
        let told = |snapshots: &str| {
            let text = format!(
                r#"{{"broker_silent_us":5000000,"missing_shards":[{{"shard":1,"shards":2,"since_us":0}}],{snapshots}}}"#
            );
            let troubles: ProcessTroubles = serde_json::from_str(&text).unwrap();
            troubles.told(1_000_000)
        };
        let index = told(r#""snapshot_error":"disk full","snapshot_upload_error":null"#);
        let frame = told(r#""snapshots":{"error":"disk full","since_us":0},"uploads":null"#);
        for told in [&index, &frame] {
            let parts: Vec<&str> = told.iter().map(|trouble| trouble.part).collect();
            assert_eq!(parts, ["NATS server", "shards", "snapshots"]);
        }
        assert_eq!(index[..2], frame[..2]);
        assert_eq!(index[2].what, "snapshots are not written: disk full");
        assert!(
            frame[2].what.starts_with("snapshots are not written since "),
            "{frame:?}"
        );
    }
}
