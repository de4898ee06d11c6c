//! Answers about engines that look ahead. Such an engine hashes each block together with the token after it. A query by
//! tokens is also hashed in this way, and both answers are merged.
//!
//! The two chains of hashes differ from the first block on, so each holder is in only one of the two answers.

use std::borrow::Cow;
use std::collections::HashSet;

use kvatlas_core::index::QueryChain;
use kvatlas_core::wire::{DegradedReason, HolderMatch, QueryKey, QueryReply, SingleQuery};

use crate::lanes::SeenInParts;

use super::{Answerer, DoubtFacts, QueryLength, explain, most_of, saturating_u32};

impl<'n> DoubtFacts<'_, 'n> {
    /// Returns the query's key, hashed in the way of engines that look ahead (they hash each block with the token after
    /// it). `None` if the namespace has no such engine, or the query has no tokens.
    pub(super) fn key_ahead(&self) -> Option<Cow<'n, QueryKey>> {
        let is_known = self.before.partial.contains(DegradedReason::LooksAhead);
        let QueryKey::Tokens {
            tokens, cache_salt, ..
        } = self.key
        else {
            return None;
        };
        match &self.namespace.chains {
            _ if !is_known => None,
            None => Some(Cow::Borrowed(self.key)),
            Some(chains) => {
                let size = self.namespace.indexer.settings().block_size;
                let hashes = chains.hashes_ahead(tokens, size, cache_salt.as_deref())?;
                Some(Cow::Owned(QueryKey::SequenceHashes(hashes)))
            }
        }
    }

    /// Returns the chain of blocks for a key that [`Self::key_ahead`] has returned.
    pub(super) fn chain_ahead<'k>(&self, key: &'k QueryKey) -> Option<QueryChain<'k>> {
        let block_size = self.namespace.indexer.settings().block_size;
        // This chain is not deeper than the query's own chain, whose depth has been checked.
        QueryChain::looking_ahead(key, block_size).ok()
    }
}

impl Answerer {
    /// Adds to `reply` the holders that have blocks of the same prompt and whose engines look ahead, that is, hash each
    /// block with the token after it.
    pub(super) fn add_ahead(&self, doubts: &DoubtFacts<'_, '_>, query: &SingleQuery, reply: &mut QueryReply) {
        let key = doubts.key_ahead();
        let Some(mut chain) = key.as_deref().and_then(|key| doubts.chain_ahead(key)) else {
            return;
        };
        let (indexer, options) = (&doubts.namespace.indexer, &query.options);
        let asked = QueryLength::of(query, chain.len(), indexer);
        let mark = doubts.look.mark_search();
        let mut ahead = self.searched(doubts, options, true, asked, || {
            indexer.find_chain(&mut chain, doubts.search_of(query))
        });
        if options.explain {
            explain(query, indexer, &mut chain, &mut ahead.holders);
        }
        let is_calm = doubts.look.seen_in_parts(mark) == SeenInParts::Nobody
            && indexer.doubtful_holders(&self.trust) == doubts.before;
        if !is_calm {
            reply.doubtful_holders = doubtful_of_both(reply, &ahead);
        }
        merge(reply, ahead, most_of(options));
    }
}

/// Returns the number of doubtful holders for `reply`, if a holder may have changed since its search. A holder that was
/// exact then may be missing in the later answer `ahead`, which counts it.
fn doubtful_of_both(reply: &QueryReply, ahead: &QueryReply) -> u32 {
    let (listed, added) = (count_inexact(&reply.holders), count_inexact(&ahead.holders));
    // Each answer also counts the inexact holders that only the other one lists.
    let missing = ahead.doubtful_holders.saturating_sub(listed);
    reply.doubtful_holders.max(missing.saturating_add(added))
}

fn count_inexact(holders: &[HolderMatch]) -> u32 {
    saturating_u32(holders.iter().filter(|holder| !holder.exact).count())
}

/// Merges `ahead` into `reply`, and keeps at most `limit` holders. `ahead` is the answer about engines that hash each
/// block together with the token after it.
fn merge(reply: &mut QueryReply, ahead: QueryReply, limit: usize) {
    let place = |holder: &HolderMatch| (holder.worker.clone(), holder.rank);
    let known: HashSet<_> = reply.holders.iter().map(place).collect();
    let mut added = ahead.holders;
    let found = added.len();
    added.retain(|holder| !known.contains(&place(holder)));
    let twice = saturating_u32(found - added.len());
    // `reply.doubtful_holders` still counts those of the added holders that are not exact. They are listed from now on,
    // so they must not count there.
    let listed = count_inexact(&added);
    reply.holders.append(&mut added);
    reply
        .holders
        .sort_by(|one, other| one.order().cmp(&other.order()));
    let dropped = reply.holders.split_off(limit.min(reply.holders.len()));
    let doubtful = reply.doubtful_holders.saturating_sub(listed);
    reply.doubtful_holders = doubtful.saturating_add(count_inexact(&dropped));
    reply.holders_total += ahead.holders_total.saturating_sub(twice);
}
