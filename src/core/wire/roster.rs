//! Rosters: lists of the holders that a serving replica knows. A starting replica requests the roster, to learn when
//! it has caught up.
//!
//! The subject is `PREFIX.v1.roster.GROUP`, request-reply, where `GROUP` is the queue group of the queries. Only
//! daemons that answer queries subscribe to it. So the error "no responders" means that no replica serves. A roster
//! is sent in pages of holders, in order. The next page begins after the last holder of the previous page.

use serde::{Deserialize, Serialize};

use super::entries::coded;
use super::subject::{NamespaceName, Rank, WorkerName};

/// Maximum number of holders in one page. It keeps a page far smaller than the maximum message of a NATS server.
pub const ROSTER_PAGE_MAX: usize = 2048;

/// Request for one page of the roster, the list of the holders that a replica knows.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RosterRequest {
    /// Last holder of the previous page. If absent, the first page is requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<RosterKey>,
}

/// Key of a holder, which determines its place in a roster, the list of the holders that a replica knows.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RosterKey {
    /// Name of the namespace.
    pub namespace: NamespaceName,
    /// Name of the worker.
    pub worker: WorkerName,
    /// The worker's data-parallel rank.
    pub rank: Rank,
}

/// A holder that a serving replica knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterHolder {
    /// Key of the holder.
    pub key: RosterKey,
    /// Whether the serving replica is certain of the holder's state.
    pub exact: bool,
}

/// A page of the roster, the list of the holders that a replica knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RosterReply {
    /// Version of the contract.
    pub v: u64,
    /// Holders of the page, in the order of their keys.
    pub holders: Vec<RosterHolder>,
    /// Whether another page follows.
    pub more: bool,
}

coded!(RosterRequest, RosterReply);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_read_as_it_was_written() {
        let key = RosterKey {
            namespace: NamespaceName::new("llama").unwrap(),
            worker: WorkerName::new("gpu-0").unwrap(),
            rank: 3,
        };
        let request = RosterRequest {
            after: Some(key.clone()),
        };
        assert_eq!(RosterRequest::decode(&request.encode()).unwrap(), request);
        let first = RosterRequest::default();
        assert_eq!(RosterRequest::decode(&first.encode()).unwrap(), first);
        let reply = RosterReply {
            v: 1,
            holders: vec![RosterHolder { key, exact: true }],
            more: true,
        };
        assert_eq!(RosterReply::decode(&reply.encode()).unwrap(), reply);
        assert!(RosterReply::decode(b"garbage").is_err());
    }
}
