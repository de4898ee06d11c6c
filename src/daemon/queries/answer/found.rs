//! All holders of a prefix, tier by tier, for listeners that answer in other protocols than the contract's.

#[cfg(any(feature = "grpc", feature = "redis"))]
use std::collections::HashMap;

#[cfg(any(feature = "grpc", feature = "redis"))]
use kvatlas_core::wire::is_pool;
use kvatlas_core::wire::{
    Address, ErrorCode, HolderId, QueryKey, QueryOptions, QueryReply, SingleQuery, Tier, WireError,
    WorkerName,
};

use kvatlas_config::Depth;
use kvatlas_telemetry::AnsweredPrompt;

use super::super::prompts::prompt_of;
use super::saturating_u32;

/// Tiers that bound the counts of [`FoundHolder::near_blocks`]. The first count has the device's blocks, the second
/// the blocks on device and host.
const NEAR_TIERS: [Tier; 2] = [Tier::DEVICE, Tier::HOST];

/// Holder of a prefix, as [`Source::find`](super::super::Source::find) returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundHolder {
    /// Worker and rank of the holder.
    pub(crate) id: HolderId,
    /// Number of leading blocks in all tiers together. The settings say which blocks count: those that a request can
    /// reuse, or those that full attention has.
    pub(crate) blocks: u32,
    /// Numbers of leading blocks, of the same kind as `blocks`: on the device only, and on device and host together.
    pub(crate) near_blocks: [u32; 2],
    /// Number of leading blocks in all tiers together that full attention has.
    pub(crate) matched_blocks: u32,
    /// Numbers of leading blocks that full attention has: on the device only, and on device and host together.
    pub(crate) near_matched_blocks: [u32; 2],
    /// Whether the holder's state is certain.
    pub(crate) is_exact: bool,
    /// Whether the state of the holder's device is certain, and whether the state of device and host together is
    /// certain.
    pub(crate) near_exact: [bool; 2],
    /// Address to which requests for the holder go. `None` if it is not known.
    pub(crate) address: Option<Address>,
}

/// Result of [`Source::find`](super::super::Source::find): the holders of a prefix, and the numbers of holders that
/// the search may have missed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    /// Number of tokens in a block of the namespace.
    pub(crate) block_size: u32,
    /// Numbers of the prompt's blocks that were asked for and found, for the metrics.
    pub(crate) prompt: AnsweredPrompt,
    /// Holders that have at least the first block of the prompt.
    pub(crate) holders: Vec<FoundHolder>,
    /// Number of holders of the namespace that the query cannot find, because their engines hash in another way than
    /// the query.
    pub(crate) foreign_holders: u32,
    /// Number of holders that are not listed although the query asks about them, and whose state is not certain.
    pub(crate) doubtful_holders: u32,
}

#[cfg(any(feature = "dynamo", feature = "grpc", feature = "redis", test))]
impl FoundHolder {
    /// Returns the holder with only those blocks that it certainly has. Some protocols cannot express doubt. If only
    /// a far tier is in doubt, the blocks on the nearer tiers remain. `None` if nothing is certain.
    pub(crate) fn certain(&self) -> Option<Self> {
        let [device, with_host] = self.near_blocks;
        let (near_blocks, blocks) = match (self.is_exact, self.near_exact) {
            (true, _) => (self.near_blocks, self.blocks),
            (false, [_, true]) => (self.near_blocks, with_host),
            (false, [true, false]) => ([device; 2], device),
            (false, [false, false]) => return None,
        };
        Some(Self {
            near_blocks,
            blocks,
            ..self.clone()
        })
    }

    /// Returns a value by which the ranks of one address are compared. Some protocols have no ranks, so one rank must
    /// stand for the address. The greatest value belongs to the rank with the most blocks. Among ranks with equally
    /// many, the rank with the most blocks on near tiers is greater.
    #[cfg(any(feature = "grpc", feature = "redis"))]
    pub(crate) fn reach(&self) -> [u32; 3] {
        let [device, with_host] = self.near_blocks;
        [self.blocks, device, with_host]
    }
}

impl Found {
    /// Whether the result may lack blocks, because of holders that it does not list.
    pub(crate) fn lacks_some(&self) -> bool {
        self.foreign_holders > 0 || self.doubtful_holders > 0
    }

    /// Gives each rank without an address the address of its worker's other ranks: the listed ones, and those whose
    /// addresses `elsewhere` returns. If these have different addresses, the rank stays without an address.
    #[cfg(any(feature = "grpc", feature = "redis"))]
    pub(crate) fn lend_addresses(&mut self, elsewhere: impl Fn(&WorkerName) -> Vec<Address>) {
        let mut told: HashMap<WorkerName, Vec<Address>> = HashMap::new();
        for FoundHolder { id, address, .. } in &self.holders {
            if address.is_none() && !is_pool(&id.worker) && !told.contains_key(&id.worker) {
                told.insert(id.worker.clone(), elsewhere(&id.worker));
            }
        }
        if told.is_empty() {
            return;
        }
        for FoundHolder { id, address, .. } in &self.holders {
            if let (Some(told), Some(address)) = (told.get_mut(&id.worker), address) {
                told.push(address.clone());
            }
        }
        for FoundHolder { id, address, .. } in &mut self.holders {
            if address.is_none()
                && let Some([first, rest @ ..]) = told.get(&id.worker).map(Vec::as_slice)
                && rest.iter().all(|other| other == first)
            {
                *address = Some(first.clone());
            }
        }
    }

    /// Makes the result from the `reply` to a [`dialect_query`]. `depth` says which blocks count: those that a
    /// request can reuse, or those that full attention has.
    ///
    /// # Errors
    ///
    /// An error if the shards do not tell the number of tokens in a block.
    pub(crate) fn of_reply(reply: QueryReply, depth: Depth) -> Result<Self, WireError> {
        if reply.block_size == 0 {
            let text = "the shards do not say how many tokens a block has; upgrade them";
            return Err(WireError::new(ErrorCode::Unavailable, text));
        }
        let prompt = prompt_of(&reply);
        let missing = reply.gathered.map_or(0, |gathered| gathered.missing.len());
        let deep = |usable: Option<u32>, matched: u32| match depth {
            Depth::Usable => usable.unwrap_or(matched),
            Depth::Matched => matched,
        };
        let holders = reply.holders.into_iter().map(|holder| {
            let near = [
                (holder.device_usable_blocks, holder.device_blocks),
                (holder.host_usable_blocks, holder.host_blocks),
            ];
            FoundHolder {
                blocks: deep(holder.usable_blocks, holder.matched_blocks),
                near_blocks: near.map(|(usable, matched)| deep(usable, matched.unwrap_or_default())),
                matched_blocks: holder.matched_blocks,
                near_matched_blocks: near.map(|(_, matched)| matched.unwrap_or_default()),
                is_exact: holder.exact,
                near_exact: NEAR_TIERS.map(|tier| holder.is_exact_up_to(tier)),
                address: holder.address,
                id: HolderId {
                    worker: holder.worker,
                    rank: holder.rank,
                },
            }
        });
        Ok(Self {
            block_size: reply.block_size,
            prompt,
            holders: holders.collect(),
            foreign_holders: reply.foreign_holders,
            doubtful_holders: reply.doubtful_holders.saturating_add(saturating_u32(missing)),
        })
    }
}

/// Returns the query of a listener in another protocol: all holders of a prefix of `key`, with their depths in each
/// tier. With `workers`, only these workers' holders.
pub(crate) fn dialect_query(key: &QueryKey, workers: Option<Vec<WorkerName>>) -> SingleQuery {
    SingleQuery {
        // Clients of the dialects subtract a prompt's last token themselves. So the prompt is asked for as one token
        // longer here.
        token_count: match key {
            QueryKey::Tokens { tokens, .. } => Some(tokens.len() as u64 + 1),
            _ => None,
        },
        options: QueryOptions {
            workers,
            tiers: true,
            ..QueryOptions::default()
        },
        ..SingleQuery::new(key.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_doubt_about_a_far_tier_leaves_what_is_certain_of_nearer_tiers() {
        let depths = |is_exact, near_exact| {
            let holder = FoundHolder {
                id: HolderId {
                    worker: WorkerName::new("w").unwrap(),
                    rank: 0,
                },
                blocks: 9,
                near_blocks: [3, 5],
                matched_blocks: 9,
                near_matched_blocks: [3, 5],
                is_exact,
                near_exact,
                address: None,
            };
            holder
                .certain()
                .map(|certain| (certain.near_blocks, certain.blocks))
        };
        assert_eq!(depths(true, [true, true]), Some(([3, 5], 9)));
        assert_eq!(depths(false, [true, true]), Some(([3, 5], 5)));
        assert_eq!(depths(false, [true, false]), Some(([3, 3], 3)));
        assert_eq!(depths(false, [false, false]), None);
    }
}
