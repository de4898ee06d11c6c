//! Rosters: what a replica that serves tells one that starts, so that the second knows when it has caught up.
//!
//! `PREFIX.v1.roster.GROUP`, request-reply, where `GROUP` is the queue group of the queries: only daemons that take queries subscribe
//! to it, so "no responders" says that nobody serves. Pages of holders in their order; the next page begins behind the last.

use serde::Deserialize;

use super::entries::{Entries, Message, coded};
use super::subject::{NamespaceName, Rank, WorkerName};

/// Most holders in one page; keeps a page far below what a NATS server takes.
pub const ROSTER_PAGE_MAX: usize = 2048;

/// Which page of the roster is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
pub struct RosterRequest {
    /// The last holder of the page before; the first page where it is absent.
    #[serde(default)]
    pub after: Option<RosterKey>,
}

/// A holder's place in the order of a roster.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub struct RosterKey {
    /// The namespace.
    pub namespace: NamespaceName,
    /// The worker.
    pub worker: WorkerName,
    /// Its data-parallel rank.
    pub rank: Rank,
}

/// A holder that a serving replica knows.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RosterHolder {
    /// The holder's key.
    pub key: RosterKey,
    /// Whether its state is certain there.
    pub exact: bool,
}

/// A page of the roster.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RosterReply {
    /// Version of the contract.
    pub v: u64,
    /// The holders, in their order.
    pub holders: Vec<RosterHolder>,
    /// Whether there is a page behind this one.
    pub more: bool,
}

impl Message for RosterRequest {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        match &self.after {
            Some(key) => entries.map("after", key),
            None => Ok(()),
        }
    }
}

impl Message for RosterKey {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.text("namespace", self.namespace.as_str())?;
        entries.text("worker", self.worker.as_str())?;
        entries.number("rank", u64::from(self.rank))
    }
}

impl Message for RosterHolder {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.map("key", &self.key)?;
        entries.flag("exact", self.exact)
    }
}

impl Message for RosterReply {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.number("v", self.v)?;
        entries.maps("holders", &self.holders)?;
        entries.flag("more", self.more)
    }
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
