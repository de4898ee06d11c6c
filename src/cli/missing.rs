//! Shards that answers of a gateway lack, as its `/index` names them.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::text::since;

/// Such a shard.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct MissingShard {
    /// Its index, from 0.
    shard: u32,
    shards: u32,
    since_us: u64,
}

impl MissingShard {
    /// Since when, at a time, it does not answer.
    pub(super) fn describe(&self, now_us: u64) -> String {
        format!("does not answer{}", since(Some(self.since_us), now_us))
    }
}

impl fmt::Display for MissingShard {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "shard {}/{}", self.shard, self.shards)
    }
}
