//! How many blocks of a prompt a request can reuse at most, because of the tokens at the prompt's end.
//!
//! A request always computes the last token. Engines that hash overlapping pairs of tokens, as SGLang does with EAGLE,
//! compute the last pair of tokens.

use std::collections::HashSet;

use kvatlas_core::index::{Matches, PositionalIndexer};
use kvatlas_core::wire::{DegradedReason, QueryKey, Rank, SingleQuery, WorkerName};

/// Returns the maximum number of blocks that a request can reuse. `None` if the request's number of tokens is not
/// known. The block with the last token is never reused, because a request always computes its last token.
pub(super) fn usable_max(query: &SingleQuery, indexer: &PositionalIndexer) -> Option<u32> {
    blocks_before_the_last(1, query, indexer)
}

/// Returns the maximum number of blocks that a request can reuse at an engine that hashes pairs of tokens. Unlimited if
/// the request's number of tokens is not known.
pub(super) fn usable_max_of_pairs(query: &SingleQuery, indexer: &PositionalIndexer) -> u32 {
    blocks_before_the_last(2, query, indexer).unwrap_or(u32::MAX)
}

/// Returns the number of blocks that end before the last `computed` tokens of the query's prompt. `None` if the
/// prompt's number of tokens is not known.
fn blocks_before_the_last(computed: u64, query: &SingleQuery, indexer: &PositionalIndexer) -> Option<u32> {
    let tokens = match &query.key {
        QueryKey::Tokens { tokens, .. } => query.token_count.unwrap_or(tokens.len() as u64),
        _ => query.token_count?,
    };
    let blocks = tokens.saturating_sub(computed) / u64::from(indexer.settings().block_size.as_u32());
    Some(u32::try_from(blocks).unwrap_or(u32::MAX))
}

/// Returns the found holders whose engines hash pairs of tokens.
pub(super) fn of_pairs(found: &Matches) -> HashSet<(&WorkerName, Rank)> {
    let holders = found.holders().map(|found| &**found.holder);
    let of_pairs = holders.filter(|holder| {
        let reasons = holder.status.own_reasons();
        reasons.contains(DegradedReason::HashesPairs)
    });
    of_pairs
        .map(|holder| (&holder.id.worker, holder.id.rank))
        .collect()
}
