//! Answers of the dialects: numbers of tokens for each instance, tier and rank.
//!
//! Tiers are cumulative. The host's number counts leading tokens on device and host together, and the disk's number
//! counts all tiers together.

use std::collections::BTreeMap;

use serde::ser::{Serialize, SerializeMap, Serializer};

use kvatlas_core::wire::{Address, Rank, WorkerName, instance_among, is_pool};

use crate::queries::FoundHolder;

/// Dialect of an answer: the other indexer whose format the answer has. Both formats count tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScoreDialect {
    Mooncake,
    Dynamo,
}

/// Holders that a query has found, for an answer in a dialect (the protocol of another indexer).
pub(super) struct Scores {
    pub(super) block_size: u32,
    /// Holders in order, so that the ranks of a worker stand together.
    holders: Vec<FoundHolder>,
    /// Names of the workers in the answer, in the order of the holders. No two workers have the same name.
    names: Vec<String>,
    /// Whether a holder that is not in the answer may still have leading blocks of the prompt.
    lacks_some: bool,
}

impl Scores {
    /// Makes an answer of `holders`. `is_known` tells whether there is a worker, also one that has nothing of the
    /// prompt: it decides by which name another worker goes.
    pub(super) fn new(
        block_size: u32,
        mut holders: Vec<FoundHolder>,
        mut lacks_some: bool,
        is_known: impl Fn(&WorkerName) -> bool,
    ) -> Self {
        // A pool is left out: a gateway would send requests to it. Its doubt counts, whether it has the prompt or not.
        let mut pools = holders.iter().filter(|holder| is_pool(&holder.id.worker));
        lacks_some |= pools.any(|pool| !pool.is_exact);
        holders.retain(|holder| !is_pool(&holder.id.worker));
        holders.sort_unstable_by(|one, other| one.id.cmp(&other.id));
        let is_found = |worker: &WorkerName| {
            let place = holders.binary_search_by(|holder| holder.id.worker.cmp(worker));
            place.is_ok()
        };
        let workers = workers_of(&holders).filter_map(<[FoundHolder]>::first);
        let named = workers
            .map(|holder| instance_among(&holder.id.worker, &|other| is_found(other) || is_known(other)));
        let names = named.collect();
        Self {
            block_size,
            holders,
            names,
            lacks_some,
        }
    }

    /// Whether the answer is certain: the state of every listed holder is certain, and no other holder may have leading
    /// blocks of the prompt.
    pub(super) fn are_exact(&self) -> bool {
        !self.lacks_some && self.holders.iter().all(|holder| holder.is_exact)
    }

    /// Returns `{INSTANCE: value}`. `told` makes the value from the instance's ranks. If `told` returns `None`, the
    /// instance is left out.
    fn of_instances<'a, T>(&'a self, told: impl Fn(Ranks<'a>) -> Option<T>) -> BTreeMap<&'a str, T> {
        let ranks = workers_of(&self.holders).map(|holders| Ranks {
            holders,
            block_size: self.block_size,
        });
        let names = self.names.iter().map(String::as_str);
        let named = names
            .zip(ranks)
            .filter_map(|(name, ranks)| Some((name, told(ranks)?)));
        named.collect()
    }

    /// Leaves out all workers but the one that the answer calls `instance`.
    pub(super) fn keep(&mut self, instance: &str) {
        let named = self.names.iter().zip(workers_of(&self.holders));
        let kept = named.filter(|(name, _)| *name == instance);
        let kept = kept.flat_map(|(_, holders)| holders).cloned().collect();
        self.holders = kept;
        self.names.retain(|name| name == instance);
    }

    /// Returns `{INSTANCE: {RANK: n}}`, where `n` is the number of tokens on the device.
    pub(super) fn by_rank(&self) -> impl Serialize {
        self.of_instances(|ranks| Some(ranks.on_device()))
    }

    /// Returns `{INSTANCE: {RANK: address}}` for the ranks whose address is known. `None` if no address is known.
    pub(super) fn addresses(&self) -> Option<impl Serialize> {
        let known = self.of_instances(|ranks| Some(ranks.addresses()).filter(|known| !known.is_empty()));
        Some(known).filter(|known| !known.is_empty())
    }

    /// Returns `{INSTANCE: {…}}`. The inner object has the numbers of tokens in all tiers, under the names that the
    /// dialect `words` uses.
    pub(super) fn by_instance(&self, words: ScoreDialect) -> impl Serialize {
        self.of_instances(|ranks| Some(Figures { ranks, words }))
    }

    /// Returns `{INSTANCE: [location, n]}` in the format of LMCache's controller. `n` is the number of leading tokens
    /// that the instance has. The location is the nearest tier whose depth is `n`, where the depth of a tier counts the
    /// tokens on this tier and all nearer tiers. Instances with no leading tokens are left out.
    pub(super) fn by_location(&self) -> impl Serialize {
        self.of_instances(|ranks| Some(ranks.location()).filter(|(_, tokens)| *tokens > 0))
    }
}

/// Returns the ranks of each worker. The holders are in order.
fn workers_of(holders: &[FoundHolder]) -> impl Iterator<Item = &[FoundHolder]> {
    holders.chunk_by(|one, other| one.id.worker == other.id.worker)
}

/// Ranks of one instance.
#[derive(Clone, Copy)]
struct Ranks<'a> {
    holders: &'a [FoundHolder],
    block_size: u32,
}

impl<'a> Ranks<'a> {
    /// Returns the addresses of the ranks whose address is known.
    fn addresses(&self) -> BTreeMap<Rank, &'a Address> {
        let known = self.holders.iter();
        known
            .filter_map(|holder| Some((holder.id.rank, holder.address.as_ref()?)))
            .collect()
    }

    fn tokens(&self, blocks: u32) -> u64 {
        u64::from(blocks) * u64::from(self.block_size)
    }

    /// Returns the largest number of tokens that a rank has. `blocks` gives the number of blocks of a rank.
    fn longest(&self, blocks: impl Fn(&FoundHolder) -> u32) -> u64 {
        let blocks = self.holders.iter().map(blocks).max();
        self.tokens(blocks.unwrap_or_default())
    }

    /// Returns LMCache's word for a tier, and the number of leading tokens that the instance has. The tier is the
    /// nearest one that has all these tokens, counted together with the nearer tiers. LMCache has no word for the
    /// device, so kvatlas uses its own word `GPU`.
    fn location(&self) -> (&'static str, u64) {
        let longest = self.longest(|holder| holder.blocks);
        let reaches = |step: usize| self.longest(|holder| holder.near_blocks[step]) == longest;
        let location = match (reaches(0), reaches(1)) {
            (true, _) => "GPU",
            (false, true) => "LocalCPUBackend",
            (false, false) => "LocalDiskBackend",
        };
        (location, longest)
    }

    /// Returns the number of tokens that each rank has on the device.
    fn on_device(&self) -> BTreeMap<Rank, u64> {
        let of_rank = |holder: &FoundHolder| {
            let [device, _] = holder.near_blocks;
            (holder.id.rank, self.tokens(device))
        };
        self.holders.iter().map(of_rank).collect()
    }
}

struct Figures<'a> {
    ranks: Ranks<'a>,
    words: ScoreDialect,
}

impl Serialize for Figures<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let [device, host, disk, ranks] = match self.words {
            ScoreDialect::Mooncake => ["GPU", "CPU", "DISK", "DP"],
            ScoreDialect::Dynamo => ["gpu", "cpu", "disk", "dp"],
        };
        let longest = self.ranks.longest(|holder| holder.blocks);
        let [on_device, with_host] = [0, 1].map(|step| self.ranks.longest(|holder| holder.near_blocks[step]));
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("longest_matched", &longest)?;
        map.serialize_entry(device, &on_device)?;
        map.serialize_entry(host, &with_host)?;
        map.serialize_entry(disk, &longest)?;
        map.serialize_entry(ranks, &self.ranks.on_device())?;
        // kvatlas adds the addresses. Mooncake's answer has no fields other than the instances, so they are in each
        // instance. Dynamo's answer has them at its top.
        let addresses = self.ranks.addresses();
        if self.words == ScoreDialect::Mooncake && !addresses.is_empty() {
            map.serialize_entry("addresses", &addresses)?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use kvatlas_core::wire::HolderId;

    use super::*;

    fn holder(worker: &str, rank: u32, matched_blocks: u32, near_blocks: [u32; 2]) -> FoundHolder {
        let worker = WorkerName::new(worker).unwrap();
        FoundHolder {
            id: HolderId { worker, rank },
            blocks: matched_blocks,
            matched_blocks,
            near_matched_blocks: near_blocks,
            is_exact: true,
            near_exact: [true; 2],
            near_blocks,
            address: None,
        }
    }

    #[test]
    fn figures_are_the_largest_of_the_ranks() {
        let holders = vec![
            holder("b_dc", 0, 4, [1, 3]),
            holder("a", 1, 2, [2, 2]),
            holder("a", 0, 3, [3, 3]),
            holder("_pstore", 0, 9, [0, 9]),
            holder("b_dc", 1, 2, [2, 2]),
            holder("c", 0, 2, [1, 2]),
            holder("d", 0, 0, [0, 0]),
        ];
        let scores = Scores::new(16, holders, false, |_| false);
        let mooncake = serde_json::to_value(scores.by_instance(ScoreDialect::Mooncake)).unwrap();
        let expected = json!({
            "a": {"longest_matched": 48, "GPU": 48, "CPU": 48, "DISK": 48, "DP": {"0": 48, "1": 32}},
            "b.c": {"longest_matched": 64, "GPU": 32, "CPU": 48, "DISK": 64, "DP": {"0": 16, "1": 32}},
            "c": {"longest_matched": 32, "GPU": 16, "CPU": 32, "DISK": 32, "DP": {"0": 16}},
            "d": {"longest_matched": 0, "GPU": 0, "CPU": 0, "DISK": 0, "DP": {"0": 0}},
        });
        assert_eq!(mooncake, expected);
        let dynamo = serde_json::to_value(scores.by_instance(ScoreDialect::Dynamo)).unwrap();
        let expected =
            json!({"longest_matched": 48, "gpu": 48, "cpu": 48, "disk": 48, "dp": {"0": 48, "1": 32}});
        assert_eq!(dynamo["a"], expected);
        let ranks = serde_json::to_value(scores.by_rank()).unwrap();
        assert_eq!(
            ranks,
            json!({"a": {"0": 48, "1": 32}, "b.c": {"0": 16, "1": 32}, "c": {"0": 16}, "d": {"0": 0}})
        );
        let located = serde_json::to_value(scores.by_location()).unwrap();
        assert_eq!(
            located,
            json!({"a": ["GPU", 48], "b.c": ["LocalDiskBackend", 64], "c": ["LocalCPUBackend", 32]})
        );
        assert!(scores.are_exact());
        assert!(scores.addresses().is_none());
    }

    #[test]
    fn a_name_means_the_same_worker_whoever_has_the_prompt() {
        let named = |workers: &[&str], known: &[&str]| {
            let holders = workers
                .iter()
                .map(|worker| holder(worker, 0, 1, [1, 1]))
                .collect();
            Scores::new(16, holders, false, |worker| known.contains(&worker.as_str())).names
        };
        assert_eq!(named(&["gpu_0", "gpu_u0"], &[]), ["gpu_0", "gpu_u0"]);
        assert_eq!(named(&["gpu_u0"], &["gpu_0", "gpu_u0"]), ["gpu_u0"]);
        assert_eq!(named(&["gpu_u0"], &["gpu_u0"]), ["gpu_0"]);
        let holders = vec![holder("gpu_u0", 0, 1, [1, 1])];
        let mut scores = Scores::new(16, holders, false, |worker| worker.as_str() == "gpu_0");
        scores.keep("gpu_0");
        assert!(scores.holders.is_empty() && scores.names.is_empty());
    }

    #[test]
    fn addresses_are_those_of_the_ranks_that_have_one() {
        let at = |worker, rank, address: &str| FoundHolder {
            address: address.parse().ok(),
            ..holder(worker, rank, 1, [1, 1])
        };
        let holders = vec![
            at("a", 0, "h:1"),
            at("a", 1, "h:2"),
            at("b_dc", 0, ""),
            at("_pstore", 0, "h:3"),
        ];
        let scores = Scores::new(16, holders, false, |_| false);
        let addresses = serde_json::to_value(scores.addresses()).unwrap();
        assert_eq!(addresses, json!({"a": {"0": "h:1", "1": "h:2"}}));
        let mooncake = serde_json::to_value(scores.by_instance(ScoreDialect::Mooncake)).unwrap();
        assert_eq!(mooncake["a"]["addresses"], json!({"0": "h:1", "1": "h:2"}));
        assert_eq!(mooncake["b.c"].get("addresses"), None);
        let dynamo = serde_json::to_value(scores.by_instance(ScoreDialect::Dynamo)).unwrap();
        assert_eq!(dynamo["a"].get("addresses"), None);
    }
}
