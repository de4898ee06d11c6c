//! The reply to a report of outcomes or hints. A report gets a reply only if its message has a reply subject. From
//! the replies, a gateway learns how many outcomes or hints the shards have accepted.

use serde::{Deserialize, Serialize};

use super::entries::coded;

/// Reply that tells how many of the outcomes or hints in a report a daemon has accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportReply {
    /// Version of the contract.
    pub v: u64,
    /// Number of outcomes that were counted, or of hints that were kept.
    pub taken: u64,
}

coded!(ReportReply);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_decodes_back() {
        let reply = ReportReply { v: 1, taken: 7 };
        assert_eq!(ReportReply::decode(&reply.encode()).unwrap(), reply);
    }
}
