//! Profiles in replies to several queries. Each profile is written once in a reply, and copied to the other results
//! when the reply is read.

use std::collections::{HashMap, HashSet};

use super::profile::{Labels, Profile};
use super::reply::{BatchReply, HolderMatch, QueryReply, QueryResult};
use super::status::StatusReply;

impl HolderMatch {
    /// Returns the holder's address and labels.
    pub fn profile(&self) -> Profile {
        Profile {
            address: self.address.clone(),
            labels: self.labels.clone(),
        }
    }

    fn has_profile(&self) -> bool {
        self.address.is_some() || !self.labels.is_empty()
    }

    fn drop_profile(&mut self) {
        (self.address, self.labels) = (None, Labels::NONE);
    }
}

impl QueryReply {
    /// Removes all addresses and labels from the reply, so that a reply that is too large becomes smaller.
    pub fn drop_profiles(&mut self) {
        self.holders.iter_mut().for_each(HolderMatch::drop_profile);
    }
}

impl StatusReply {
    /// Removes all addresses and labels from the reply, so that a reply that is too large becomes smaller.
    pub fn drop_profiles(&mut self) {
        for holder in &mut self.holders {
            (holder.address, holder.labels) = (None, Labels::NONE);
        }
    }
}

impl BatchReply {
    fn holders_mut(&mut self) -> impl Iterator<Item = &mut HolderMatch> {
        let replies = self.results.iter_mut().filter_map(|result| match result {
            QueryResult::Reply(reply) => Some(reply),
            QueryResult::Error(_) => None,
        });
        replies.flat_map(|reply| &mut reply.holders)
    }

    /// Removes all addresses and labels from the reply, so that a reply that is too large becomes smaller.
    pub fn drop_profiles(&mut self) {
        self.holders_mut().for_each(HolderMatch::drop_profile);
    }

    /// Removes a holder's profile (address and labels) from every result except the first one that has it.
    pub fn say_profiles_once(&mut self) {
        let mut said = HashSet::new();
        for holder in self.holders_mut().filter(|holder| holder.has_profile()) {
            if !said.insert((holder.worker.clone(), holder.rank)) {
                holder.drop_profile();
            }
        }
    }

    /// Copies the profiles (addresses and labels) back to every result from which [`Self::say_profiles_once`] removed
    /// them.
    pub fn repeat_profiles(&mut self) {
        let mut said = HashMap::new();
        for holder in self.holders_mut() {
            let key = (holder.worker.clone(), holder.rank);
            if holder.has_profile() {
                said.insert(key, holder.profile());
            } else if let Some(Profile { address, labels }) = said.get(&key) {
                (holder.address, holder.labels) = (address.clone(), labels.clone());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Address, PROTOCOL_VERSION, WorkerName};
    use super::*;

    fn holder(worker: &str, address: Option<&str>) -> HolderMatch {
        let profile = Profile {
            address: address.map(|text| Address::new(text).unwrap()),
            labels: Labels::NONE,
        };
        HolderMatch::new(WorkerName::new(worker).unwrap(), 0, 1).with_profile(profile)
    }

    fn batch(results: Vec<Vec<HolderMatch>>) -> BatchReply {
        let reply = |holders: Vec<HolderMatch>| QueryReply {
            v: PROTOCOL_VERSION,
            query_blocks: 1,
            block_size: 16,
            holders_total: 2,
            holders,
            foreign_holders: 0,
            doubtful_holders: 0,
            gathered: None,
            unseen_blocks_max: 0,
            behind_us: 0,
            predicted: Vec::new(),
        };
        BatchReply {
            v: PROTOCOL_VERSION,
            results: results
                .into_iter()
                .map(|holders| QueryResult::Reply(reply(holders)))
                .collect(),
        }
    }

    #[test]
    fn a_profile_is_said_once_and_read_in_every_result() {
        let (a, b, bare) = (
            || holder("a", Some("h:1")),
            || holder("b", Some("h:2")),
            || holder("c", None),
        );
        let whole = batch(vec![vec![a(), bare()], vec![b(), a()], vec![a(), b(), bare()]]);
        let mut said = whole.clone();
        said.say_profiles_once();
        let once = batch(vec![
            vec![a(), bare()],
            vec![b(), holder("a", None)],
            vec![holder("a", None), holder("b", None), bare()],
        ]);
        assert_eq!(said, once);
        assert_eq!(BatchReply::decode(&said.encode()).unwrap(), whole);
        said.drop_profiles();
        assert!(said.holders_mut().all(|holder| !holder.has_profile()));
    }
}
