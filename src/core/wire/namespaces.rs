//! The list of a daemon's namespaces. A gateway needs it to list all workers.
//!
//! A request for the list is sent to `PREFIX.v1.status.~all`, or to the matching subject of the shards. No namespace
//! can be called `~all`.

use std::collections::BTreeSet;

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
    /// Names of those `namespaces` that have neither a holder nor a publisher whose batches are dropped. Earlier versions
    /// of the contract do not tell them.
    #[serde(default)]
    pub unused: Option<Vec<NamespaceName>>,
    /// Whether no namespace is missing. Only namespaces with the contract's own hashes count. One may be missing while its
    /// events are dropped, or before every publisher has been heard of. Earlier versions of the contract do not tell it.
    #[serde(default)]
    pub complete: Option<bool>,
}

coded!(NamespacesReply);

impl NamespacesReply {
    /// Returns the names of the namespaces that are in use. A namespace that is not told to be unused counts as used.
    pub fn used(&self) -> BTreeSet<NamespaceName> {
        let unused: BTreeSet<_> = self.unused.iter().flatten().collect();
        let names = self.namespaces.iter();
        names.filter(|name| !unused.contains(name)).cloned().collect()
    }

    /// Whether it is certain that no namespace is missing.
    pub fn is_complete(&self) -> bool {
        self.complete == Some(true)
    }

    /// Returns the reply about the namespaces of several daemons together. Each name is in it once. A namespace is unused
    /// if all daemons that list it tell so.
    #[must_use]
    pub fn merged(replies: &[Self]) -> Self {
        let names: BTreeSet<_> = replies.iter().flat_map(|reply| &reply.namespaces).collect();
        let used: BTreeSet<_> = replies.iter().flat_map(Self::used).collect();
        let unused = names.iter().filter(|name| !used.contains(**name));
        Self {
            v: super::PROTOCOL_VERSION,
            unused: Some(unused.map(|name| (*name).clone()).collect()),
            namespaces: names.into_iter().cloned().collect(),
            complete: Some(replies.iter().all(Self::is_complete)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(names: &[&str], unused: Option<&[&str]>, complete: Option<bool>) -> NamespacesReply {
        let parsed = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect();
        NamespacesReply {
            v: super::super::PROTOCOL_VERSION,
            namespaces: parsed(names),
            unused: unused.map(parsed),
            complete,
        }
    }

    #[test]
    fn what_is_encoded_decodes_back() {
        for reply in [
            reply(&["a", "b_dc"], Some(&["a"]), Some(true)),
            reply(&["a"], None, None),
        ] {
            assert_eq!(NamespacesReply::decode(&reply.encode()).unwrap(), reply);
        }
    }

    #[test]
    fn an_earlier_version_tells_names_only() {
        #[derive(Serialize)]
        struct Earlier {
            v: u64,
            namespaces: Vec<NamespaceName>,
        }
        let earlier = Earlier {
            v: 1,
            namespaces: vec!["a".parse().unwrap()],
        };
        let decoded = NamespacesReply::decode(&rmp_serde::to_vec_named(&earlier).unwrap()).unwrap();
        assert_eq!(decoded, reply(&["a"], None, None));
        assert!(!decoded.is_complete());
        assert_eq!(decoded.used().len(), 1);
    }

    #[test]
    fn what_one_daemon_uses_or_may_lack_holds_for_all() {
        let one = reply(&["a", "b", "c"], Some(&["b", "c"]), Some(true));
        let two = reply(&["b", "c", "d"], Some(&["c"]), Some(true));
        let both = NamespacesReply::merged(&[one.clone(), two]);
        assert_eq!(both, reply(&["a", "b", "c", "d"], Some(&["c"]), Some(true)));
        for other in [reply(&["c"], None, None), reply(&["c"], Some(&[]), Some(false))] {
            let merged = NamespacesReply::merged(&[one.clone(), other]);
            assert_eq!(merged, reply(&["a", "b", "c"], Some(&["b"]), Some(false)));
        }
    }
}
