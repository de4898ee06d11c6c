//! Explanation of one prefix: its holders, the first block that each holder lacks, and the cost of losing the prefix.

use std::time::Instant;

use serde::Serialize;

use kvatlas_core::hash::PositionalLineageHash;
use kvatlas_core::wire::{
    Address, DegradedReasons, Limit, NamespaceName, QueryKey, QueryOptions, QueryReply, SingleQuery,
};

use crate::queries::SAMPLED_BLOCKS_MAX;

use super::held::{Below, below};
use super::questions::NodeQuestion;
use super::{Page, PageRefusal, asked};

/// Maximum number of holders that are listed. The answer also has the total number of holders.
const HOLDERS_MAX: u32 = 200;

#[derive(Serialize)]
struct Explanation {
    /// Position of the first block of the explained node of the tree. `end` is the position after its last block.
    start: usize,
    end: usize,
    block_size: u32,
    /// Holders that have at least the first block of the whole prefix. The holder with the most leading blocks comes
    /// first.
    holders: Vec<ExplainedHolder>,
    holders_total: u32,
    /// Number of holders that have the whole explained prefix.
    complete: u32,
    /// Number of holders that are not listed, and may have more of the prefix than is known.
    doubtful: u32,
    loss: Loss,
}

#[derive(Serialize)]
struct ExplainedHolder {
    worker: String,
    rank: u32,
    blocks: u32,
    usable: u32,
    /// Reason why a request cannot reuse more of the holder's blocks. `None` if a request can reuse all of them.
    limit: Option<&'static str>,
    degraded: DegradedReasons,
    address: Option<Address>,
    /// Position of the first block that the holder lacks, and the number of other holders that have that block.
    dropped_out: Option<(u32, u32)>,
}

/// Cost of losing the blocks of a node (a stretch of a prefix) at every holder.
#[derive(Serialize)]
struct Loss {
    /// Counts of the blocks that would be lost: the node's own blocks, and all blocks that continue them. The latter
    /// would be lost because no query finds them without the node's blocks.
    below: Below,
    /// Number of sampled queries that ask for the first `compared` blocks of the prefix. `sampled` counts all queries
    /// of the sample, and `seconds` is the time that the sample covers.
    asking: usize,
    /// Number of leading blocks of the prefix that were compared. Less than `end` if the prefix is longer than the part
    /// of a query that the sample keeps.
    compared: usize,
    sampled: usize,
    seconds: u64,
    /// Number of tokens that each of the queries counted in `asking` would compute again if the node's blocks were
    /// lost.
    tokens: u64,
}

impl Page {
    /// Explains a node of an atlas (a tree of hot prefixes). The question names the node by its last block.
    pub(super) fn explain(&self, question: &NodeQuestion) -> Result<String, PageRefusal> {
        let name = &question.namespace;
        let namespace = self.answerer.namespace(name)?;
        let is_wanted = |kept: &super::KeptAtlas| kept.namespace == *name && kept.lens == question.lens;
        let (start, prefix) = self.find_node(is_wanted, question.block)?;
        let end = prefix.len();
        let compared = prefix.get(..SAMPLED_BLOCKS_MAX).unwrap_or(&prefix);
        let reply = self.reply(
            name,
            &prefix,
            QueryOptions {
                limit: Some(HOLDERS_MAX),
                explain: true,
                ..QueryOptions::default()
            },
        )?;
        // Counts all holders of the whole prefix, including those that are not listed.
        let complete = self.reply(
            name,
            &prefix,
            QueryOptions {
                limit: Some(0),
                min_blocks: u32::try_from(end).unwrap_or(u32::MAX),
                ..QueryOptions::default()
            },
        )?;
        let queries = self.looked.sample.queries(name);
        let block_size = namespace.indexer.settings().block_size.as_u32();
        let below = prefix.get(start).map(|first| below(&namespace.indexer, *first));
        let holders = reply.holders.into_iter().map(|holder| ExplainedHolder {
            worker: holder.worker.as_str().to_owned(),
            rank: holder.rank,
            blocks: holder.matched_blocks,
            usable: holder.usable(),
            limit: holder.limited_by.map(Limit::as_str),
            degraded: holder.degraded,
            address: holder.address,
            dropped_out: holder.dropped_out.map(|at| (at.position, at.other_holders)),
        });
        let explanation = Explanation {
            start,
            end,
            block_size,
            complete: complete.holders_total,
            holders: holders.collect(),
            holders_total: reply.holders_total,
            doubtful: reply.doubtful_holders,
            loss: Loss {
                below: below.unwrap_or_default(),
                asking: asked::asking(&queries, compared),
                compared: compared.len(),
                sampled: queries.len(),
                seconds: asked::seconds(&queries, Instant::now()),
                tokens: (end - start) as u64 * u64::from(block_size),
            },
        };
        serde_json::to_string(&explanation).map_err(|_| PageRefusal::Failed)
    }

    fn reply(
        &self,
        name: &NamespaceName,
        prefix: &[PositionalLineageHash],
        options: QueryOptions,
    ) -> Result<QueryReply, PageRefusal> {
        let query = SingleQuery::new(QueryKey::LineageHashes(prefix.to_vec()));
        Ok(self
            .answerer
            .answer_one(name, &SingleQuery { options, ..query })?)
    }

    /// Finds the node whose last block is `block` in the kept trees of prefixes that `is_wanted` accepts. If several of
    /// these trees have the node, the newest tree counts. Returns the position of the node's first block, and all
    /// blocks from position 0 to the node's last block.
    fn find_node(
        &self,
        is_wanted: impl Fn(&super::KeptAtlas) -> bool,
        block: PositionalLineageHash,
    ) -> Result<(usize, Vec<PositionalLineageHash>), PageRefusal> {
        let atlases = self.atlases.lock();
        let mut wanted = atlases.iter().rev().filter(|kept| is_wanted(kept));
        let node = wanted.find_map(|kept| kept.atlas.node(block));
        let node = node.ok_or(PageRefusal::Outdated)?;
        Ok((node.start, node.prefix().to_vec()))
    }
}
