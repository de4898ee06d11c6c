//! Missing shards: shards that did not answer a gateway. The gateway's route `/index` lists them.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::text::since;

/// Shard that does not answer its gateway.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(super) struct SilentShard {
    /// Index of the shard, from 0.
    shard: u32,
    shards: u32,
    since_us: u64,
}

impl SilentShard {
    /// Returns the text ` does not answer since …`, with the time until `now_us`.
    pub(super) fn describe(&self, now_us: u64) -> String {
        format!("does not answer{}", since(Some(self.since_us), now_us))
    }
}

impl fmt::Display for SilentShard {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "shard {}/{}", self.shard, self.shards)
    }
}
