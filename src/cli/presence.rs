//! Processes of kvatlas that say on NATS that they are there, as services of NATS.

use serde::Deserialize;

use super::admin_client::ProcessRole;

/// Subject on which the processes of kvatlas say that they are there.
pub(super) const PING: &str = "$SRV.PING.kvatlas";

/// Facts that a process sends about itself when it answers on [`PING`].
#[derive(Debug, Deserialize)]
pub(super) struct PresentProcess {
    pub(super) instance: String,
    pub(super) subjects_prefix: String,
    pub(super) role: String,
    pub(super) shard: Option<String>,
    /// Address of the process's admin listener, if it has one.
    pub(super) admin: Option<String>,
}

impl PresentProcess {
    /// Whether the process is a bridge.
    pub(super) fn is_bridge(&self) -> bool {
        self.role == ProcessRole::Bridge.as_str()
    }

    /// Reads an answer. Other programs may use the same service name. Their answers cannot be decoded, and `None` is
    /// returned for them.
    pub(super) fn decode(payload: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct PingReply {
            metadata: PresentProcess,
        }
        let reply: PingReply = serde_json::from_slice(payload).ok()?;
        Some(reply.metadata)
    }
}
