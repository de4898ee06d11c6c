//! Search for all holders of a prefix, tier by tier, for listeners that answer in other protocols than the contract's.

use kvatlas_core::index::{NearBlocks, QueryChain, Search, TierDepth};
use kvatlas_core::wire::{
    Address, ErrorCode, HolderId, NamespaceName, QueryKey, QueryReply, Tier, WireError, WorkerName,
};

use kvatlas_config::Depth;
use kvatlas_telemetry::AnsweredPrompt;
use kvatlas_telemetry::labels::AnswerState;

use super::super::whole::search_whole;
use super::{
    Answerer, DoubtFacts, Doubted, Listed, QueryLength, ahead, count_doubtful, foreign_holders, profile_of,
    saturating_u32, spoken,
};

/// Tiers up to which [`FoundHolder::near_blocks`] counts.
const NEAR_TIERS: [Tier; 2] = [Tier::DEVICE, Tier::HOST];

/// Holder of a prefix, as [`Answerer::find`] returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundHolder {
    /// Worker and rank of the holder.
    pub(crate) id: HolderId,
    /// Number of leading blocks in all tiers together. The settings say which blocks count: those that a request can
    /// reuse, or those that full attention has.
    pub(crate) blocks: u32,
    /// Numbers of leading blocks, of the same kind as `blocks`: on the device only, and on device and host together.
    pub(crate) near_blocks: [u32; 2],
    /// Whether the holder's state is certain.
    pub(crate) is_exact: bool,
    /// Whether the state of the holder's device is certain, and whether the state of device and host together is
    /// certain.
    pub(crate) near_exact: [bool; 2],
    /// Address to which requests for the holder go. `None` if it is not known.
    pub(crate) address: Option<Address>,
}

/// Result of [`Answerer::find`]: the holders of a prefix, and what the search may lack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    /// Number of tokens in a block of the namespace.
    pub(crate) block_size: u32,
    /// Number of blocks in the prompt of the query.
    pub(crate) asked_blocks: u32,
    /// Holders that have at least the first block of the prompt.
    pub(crate) holders: Vec<FoundHolder>,
    /// Largest number of blocks that a single holder has, and largest number that a request can reuse from a single
    /// holder.
    pub(crate) most: NearBlocks,
    /// Number of holders of the namespace that a query of this form cannot find.
    pub(crate) foreign_holders: u32,
    /// Number of holders that are not listed although the query asks about them, and whose state is not certain.
    pub(crate) doubtful_holders: u32,
}

#[cfg(any(feature = "dynamo", feature = "grpc", feature = "redis", test))]
impl FoundHolder {
    /// Returns the holder with its certain blocks only, for protocols without a word for doubt. If a far tier is in
    /// doubt, the blocks on the nearer tiers stay. `None` if nothing is certain.
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

    /// Returns how much the holder has, for protocols that know no ranks and take one rank for all of an address. The
    /// rank with the greatest reach has the most blocks, and of equal ones the most on near tiers.
    #[cfg(any(feature = "grpc", feature = "redis"))]
    pub(crate) fn reach(&self) -> [u32; 3] {
        let [device, with_host] = self.near_blocks;
        [self.blocks, device, with_host]
    }
}

impl Found {
    /// Whether holders that the result does not list may hold more blocks than is known.
    pub(crate) fn lacks_some(&self) -> bool {
        self.foreign_holders > 0 || self.doubtful_holders > 0
    }

    /// Makes the result from the `reply` of shards that were asked for the blocks in each tier.
    ///
    /// # Errors
    ///
    /// An error if the shards do not tell the number of tokens in a block.
    pub(crate) fn of_reply(reply: QueryReply, depth: Depth) -> Result<Self, WireError> {
        if reply.block_size == 0 {
            let text = "the shards do not say how many tokens a block has; upgrade them";
            return Err(WireError::new(ErrorCode::Unavailable, text));
        }
        let missing = reply.gathered.map_or(0, |gathered| gathered.missing.len());
        let mut most = NearBlocks::default();
        let deep = |usable: Option<u32>, matched: u32| match depth {
            Depth::Usable => usable.unwrap_or(matched),
            Depth::Matched => matched,
        };
        let holders = reply.holders.into_iter().map(|holder| {
            most.matched_blocks = most.matched_blocks.max(holder.matched_blocks);
            most.usable_blocks = most.usable_blocks.max(holder.usable());
            let near = [
                (holder.device_usable_blocks, holder.device_blocks),
                (holder.host_usable_blocks, holder.host_blocks),
            ];
            FoundHolder {
                blocks: deep(holder.usable_blocks, holder.matched_blocks),
                near_blocks: near.map(|(usable, matched)| deep(usable, matched.unwrap_or_default())),
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
            asked_blocks: reply.query_blocks,
            holders: holders.collect(),
            most,
            foreign_holders: reply.foreign_holders,
            doubtful_holders: reply.doubtful_holders.saturating_add(saturating_u32(missing)),
        })
    }

    fn state(&self) -> AnswerState {
        let is_exact = !self.lacks_some() && self.holders.iter().all(|holder| holder.is_exact);
        AnswerState::of(is_exact, self.holders.is_empty())
    }

    /// Returns the numbers of blocks found, in the form that metrics count.
    pub(crate) fn prompt(&self) -> AnsweredPrompt {
        AnsweredPrompt {
            asked_blocks: self.asked_blocks,
            matched_blocks: self.most.matched_blocks,
            usable_blocks: self.most.usable_blocks,
            state: self.state(),
        }
    }
}

impl Answerer {
    /// Finds all holders of a prefix of `key` in the namespace `name`, in no particular order. With `worker`, finds
    /// only that worker's holders.
    pub(crate) fn find(
        &self,
        name: &NamespaceName,
        key: &QueryKey,
        worker: Option<&WorkerName>,
    ) -> Result<Found, WireError> {
        let namespace = self.namespace(name)?;
        let spoken = spoken(&namespace, key)?;
        let mut chain = self.chain(&namespace.indexer, &spoken)?;
        let doubts = self.doubts(&namespace, key);
        let mut found = self.found(&doubts, &mut chain, worker);
        let key_ahead = doubts.key_ahead();
        if let Some(mut ahead) = key_ahead.as_deref().and_then(|key| doubts.chain_ahead(key)) {
            let ahead = self.found(&doubts, &mut ahead, worker);
            ahead::merge_found(&mut found, ahead);
        }
        if let Some(sample) = &self.sample {
            sample.answered(&namespace, found.state());
            sample.offer(name, &mut chain, doubts.look.now_us);
        }
        Ok(found)
    }

    /// Finds all holders of a prefix of a single chain of blocks.
    fn found(
        &self,
        doubts: &DoubtFacts<'_, '_>,
        chain: &mut QueryChain<'_>,
        worker: Option<&WorkerName>,
    ) -> Found {
        let indexer = &doubts.namespace.indexer;
        let workers = worker.map(std::slice::from_ref);
        let tiers = TierDepth::Each;
        let seen = search_whole(&doubts.look, || {
            let search = Search {
                workers,
                tiers,
                // Routers with other protocols subtract the last token themselves.
                ..Search::default()
            };
            indexer.find_chain(chain, search)
        });
        let matches = &seen.found;
        let deep = |usable, matched| match self.dialect_depth {
            Depth::Usable => usable,
            Depth::Matched => matched,
        };
        let (asked, mut doubted) = (QueryLength::new(chain.len(), None), Doubted::default());
        let mut most = NearBlocks::default();
        let holders = matches.holders().map(|found| {
            let near = matches.near_blocks(found.holder);
            most.matched_blocks = most.matched_blocks.max(found.matched_blocks);
            most.usable_blocks = most.usable_blocks.max(found.usable_blocks);
            let reasons = matches.reasons(found.holder, &self.trust);
            let reasons = doubts.of(found.holder, reasons, &seen, true);
            let reasons = doubted.judge(reasons, near, asked);
            self.count_doubt(found.holder, reasons.is_empty());
            FoundHolder {
                id: found.holder.id.clone(),
                blocks: deep(found.usable_blocks, found.matched_blocks),
                near_blocks: near
                    .unwrap_or_default()
                    .map(|near| deep(near.usable_blocks, near.matched_blocks)),
                is_exact: reasons.is_empty(),
                near_exact: NEAR_TIERS.map(|tier| reasons.up_to(tier).is_empty()),
                address: found.holder.status.profile().address,
            }
        });
        let mut holders: Vec<FoundHolder> = holders.collect();
        let missed = seen.missed(workers, |id| holders.iter().any(|holder| holder.id == *id));
        holders.extend(missed.into_iter().map(|id| FoundHolder {
            id: id.clone(),
            blocks: 0,
            near_blocks: [0; 2],
            is_exact: false,
            near_exact: [false; 2],
            address: profile_of(indexer, id).address,
        }));
        let listed = holders.iter().enumerate().map(|(place, holder)| Listed {
            worker: &holder.id.worker,
            rank: holder.id.rank,
            is_exact: holder.is_exact && !doubted.has(place),
        });
        let doubtful_holders = count_doubtful(&self.trust, doubts, &seen, workers, listed);
        Found {
            block_size: indexer.settings().block_size.as_u32(),
            asked_blocks: saturating_u32(chain.len()),
            holders,
            most,
            foreign_holders: foreign_holders(indexer, doubts.key),
            doubtful_holders,
        }
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
