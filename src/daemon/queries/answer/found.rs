//! All holders of a prefix, tier by tier: for listeners that answer in other words than the contract's.

use std::collections::HashMap;

use kvatlas_core::index::{HolderRecord, Matches, PositionalIndexer, QueryChain, Search, TierDepth};
use kvatlas_core::wire::{HolderId, NamespaceName, QueryKey, QueryOptions, WireError, WorkerName};

use crate::daemon::metrics::AnsweredPrompt;

use super::super::prompts::state_of;
use super::super::whole::search_whole;
use super::{Answerer, saturating_u32, search_of};

/// One holder of a prefix, as [`Answerer::find`] gives it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundHolder {
    /// Who it is.
    pub(crate) id: HolderId,
    /// How many leading blocks it holds, in whichever tiers.
    pub(crate) matched_blocks: u32,
    /// How many of them on the device, and how many on device and host together, each up to the first that lies elsewhere.
    pub(crate) near_blocks: [u32; 2],
    /// Whether its state is certain.
    pub(crate) is_exact: bool,
}

/// What [`Answerer::find`] has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    /// Tokens in a block of the namespace.
    pub(crate) block_size: u32,
    /// The prompt's blocks.
    pub(crate) asked_blocks: u32,
    /// The holders.
    pub(crate) holders: Vec<FoundHolder>,
}

impl Found {
    /// The same, for metrics.
    pub(crate) fn prompt(&self) -> AnsweredPrompt {
        let best = self.holders.iter().map(|holder| holder.matched_blocks).max();
        AnsweredPrompt {
            asked_blocks: self.asked_blocks,
            matched_blocks: best.unwrap_or_default(),
            state: state_of(self.holders.iter().map(|holder| holder.is_exact)),
        }
    }
}

/// What was found over all tiers, and on the device, and on device and host, where some holder has blocks elsewhere.
struct TierMatches {
    all: Matches,
    near: Option<[Matches; 2]>,
}

impl TierMatches {
    fn search(indexer: &PositionalIndexer, chain: &mut QueryChain<'_>, search: Search<'_>) -> Self {
        let all = indexer.find_chain(chain, search);
        let has_others = all
            .holders()
            .any(|found| found.holder.status.has_lower_tiers.load());
        let steps = [TierDepth::Device, TierDepth::Host];
        let near =
            has_others.then(|| steps.map(|tiers| indexer.find_chain(chain, Search { tiers, ..search })));
        Self { all, near }
    }

    /// For each holder, how many blocks each of the near searches found; none where all that is matched lies on the device.
    fn near_blocks(&self) -> Option<HashMap<&HolderId, [u32; 2]>> {
        let mut blocks: HashMap<&HolderId, [u32; 2]> = HashMap::new();
        for (step, matches) in self.near.as_ref()?.iter().enumerate() {
            for found in matches.holders() {
                blocks.entry(&found.holder.id).or_default()[step] = found.matched_blocks;
            }
        }
        Some(blocks)
    }
}

impl Answerer {
    /// All holders of a prefix of `key` in the namespace `name`, in no particular order. With `worker`, only its own.
    pub(crate) fn find(
        &self,
        name: &NamespaceName,
        key: &QueryKey,
        worker: Option<WorkerName>,
    ) -> Result<Found, WireError> {
        let namespace = self.namespace(name)?;
        let mut chain = self.chain(&namespace.indexer, key)?;
        let options = QueryOptions {
            workers: worker.map(|worker| vec![worker]),
            ..QueryOptions::default()
        };
        let doubts = self.doubts(name);
        let seen = search_whole(&doubts.look, || {
            TierMatches::search(&namespace.indexer, &mut chain, search_of(&options))
        });
        let matches = &seen.found.all;
        let near = seen.found.near_blocks();
        let reasons = |holder| doubts.of(holder, matches.reasons(holder, &self.trust), &seen);
        // A holder that changes between the searches is in doubt, and still no deeper near than anywhere.
        let near_of = |holder: &HolderRecord, all: u32| match &near {
            None => [all; 2],
            Some(near) => near
                .get(&holder.id)
                .map_or([0; 2], |near| near.map(|blocks| blocks.min(all))),
        };
        let holders = matches.holders().map(|found| FoundHolder {
            id: found.holder.id.clone(),
            matched_blocks: found.matched_blocks,
            near_blocks: near_of(found.holder, found.matched_blocks),
            is_exact: reasons(found.holder).is_empty(),
        });
        let mut holders: Vec<FoundHolder> = holders.collect();
        // Nothing is known of what those have that were seen in parts, and not found.
        let is_missing = |id: &&HolderId| {
            let is_asked = options
                .workers
                .as_ref()
                .is_none_or(|asked| asked.contains(&id.worker));
            is_asked && holders.iter().all(|holder| holder.id != **id)
        };
        let missing: Vec<HolderId> = seen.changing().iter().filter(is_missing).cloned().collect();
        holders.extend(missing.into_iter().map(|id| FoundHolder {
            id,
            matched_blocks: 0,
            near_blocks: [0; 2],
            is_exact: false,
        }));
        if let Some(sample) = &self.sample {
            sample.answered(state_of(holders.iter().map(|holder| holder.is_exact)));
            sample.offer(name, &mut chain, doubts.look.now_us);
        }
        Ok(Found {
            block_size: namespace.indexer.settings().block_size.as_u32(),
            asked_blocks: saturating_u32(chain.len()),
            holders,
        })
    }
}
