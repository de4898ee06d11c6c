//! The list of a daemon's namespaces. A gateway needs it to list all workers.
//!
//! A request for the list is sent to `PREFIX.v1.status.~all`, or to the matching subject of the shards. No namespace
//! can be called `~all`.

use serde::{Deserialize, Serialize};

use super::entries::coded;
use super::subject::NamespaceName;

/// Reply with the names of all namespaces that a daemon has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespacesReply {
    /// Version of the contract.
    pub v: u64,
    /// Names of the namespaces, in no particular order.
    pub namespaces: Vec<NamespaceName>,
}

coded!(NamespacesReply);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_encoded_decodes_back() {
        let reply = NamespacesReply {
            v: super::super::PROTOCOL_VERSION,
            namespaces: vec!["a".parse().unwrap(), "b_dc".parse().unwrap()],
        };
        assert_eq!(NamespacesReply::decode(&reply.encode()).unwrap(), reply);
    }
}
