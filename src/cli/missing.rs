//! Missing shards: shards that do not answer their gateway, or refuse to. The gateway's answers then lack the workers
//! of these shards. The gateway's route `/index` lists the missing shards.

use kvatlas_daemon::runbook::{AdviceTable, mend_of};
use serde::{Deserialize, Serialize};

use super::explain::mend_of_alert;
use super::text::since;

/// Shard that does not answer its gateway, or refuses to answer about a namespace.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct UnansweringShard {
    /// Index of the shard, from 0.
    shard: u32,
    shards: u32,
    since_us: u64,
    /// Namespace about which the shard refuses to answer; `None` if the shard does not answer at all, or if an older
    /// gateway leaves the namespace out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    namespace: Option<String>,
    /// Reason of the refusal, in the shard's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    refusal: Option<String>,
}

/// Outage of a gateway: no shard answers it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct GatewayOutage {
    since_us: u64,
    /// Error of the last request that no shard has answered.
    error: String,
}

impl GatewayOutage {
    /// Returns the outage in words. The text says since when it lasts, and how long that is at the time `now_us`.
    pub(super) fn describe(&self, now_us: u64) -> String {
        let since = since(Some(self.since_us), now_us);
        format!("no shard has an answer{since}: {}", self.error)
    }

    /// Returns the advice on what to do.
    pub(super) fn mend() -> String {
        mend_of([UnansweringShard::ALERT].into_iter(), AdviceTable::OtherTroubles)
    }
}

impl UnansweringShard {
    /// Name of the alert that reports missing shards.
    const ALERT: &str = "KvatlasShardMissing";

    /// Returns the trouble in words: that the shard does not answer, or what it refuses and why. The text says since
    /// when this has been so, and how long that is at the time `now_us`.
    pub(super) fn describe(&self, now_us: u64) -> String {
        let Self { shard, shards, .. } = self;
        let since = since(Some(self.since_us), now_us);
        match &self.namespace {
            None => format!("shard {shard}/{shards} does not answer{since}"),
            Some(namespace) => format!(
                "shard {shard}/{shards} refuses to answer about {namespace}{since}: {}",
                self.refusal.as_deref().unwrap_or_default()
            ),
        }
    }

    /// Returns the advice on what to do. For a shard that does not answer, that includes the command that says more.
    pub(super) fn mend(&self) -> String {
        match self.namespace {
            None => mend_of_alert(Self::ALERT),
            Some(_) => "mend what the shard says; kvatlas status at its admin listener says more".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_that_refuses_is_not_to_be_started() {
        let told = |text: &str| serde_json::from_str::<UnansweringShard>(text).unwrap();
        let silent = told(r#"{"shard":0,"shards":2,"since_us":1800000000000000}"#);
        assert!(silent.mend().starts_with("start a daemon"), "{}", silent.mend());
        let refusing = told(
            r#"{"shard":0,"shards":2,"since_us":1800000000000000,"namespace":"llama","refusal":"all is dropped"}"#,
        );
        assert_eq!(
            refusing.describe(1_800_000_060_000_000),
            "shard 0/2 refuses to answer about llama since 08:00:00 UTC (60 s): all is dropped"
        );
        assert!(!refusing.mend().contains("start a daemon"), "{}", refusing.mend());
    }
}
