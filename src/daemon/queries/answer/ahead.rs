//! Answers about engines that look ahead. Such an engine hashes each block together with the token after it. A query by
//! tokens is also hashed in this way, and both answers are merged.
//!
//! The two chains of hashes differ from the first block on, so each holder is in only one of the two answers.

use std::borrow::Cow;
use std::collections::HashSet;

use kvatlas_core::index::{Namespace, PositionalIndexer, QueryChain};
use kvatlas_core::wire::{
    DegradedReason, HolderMatch, PREDICTED_MAX, PredictedHolder, QueryKey, QueryReply, SingleQuery,
};

use crate::lanes::SeenInParts;

use super::{Answerer, DoubtFacts, Doubted, QueryLength, explain, most_of, saturating_u32};

/// Returns the key of a query in `namespace`, hashed in the way of engines that look ahead (they hash each block with
/// the token after it). `None` if the query has no tokens, or if it is not known how such engines hash them.
pub(super) fn key_ahead<'k>(namespace: &Namespace, key: &'k QueryKey) -> Option<Cow<'k, QueryKey>> {
    let QueryKey::Tokens {
        tokens, cache_salt, ..
    } = key
    else {
        return None;
    };
    let Some(chains) = &namespace.chains else {
        return Some(Cow::Borrowed(key));
    };
    let size = namespace.indexer.settings().block_size;
    let hashes = chains.hashes_ahead(tokens, size, cache_salt.as_deref())?;
    Some(Cow::Owned(QueryKey::SequenceHashes(hashes)))
}

/// Returns the chain of blocks for a key that [`key_ahead`] has returned.
pub(super) fn chain_ahead<'k>(indexer: &PositionalIndexer, key: &'k QueryKey) -> Option<QueryChain<'k>> {
    // This chain is not deeper than the query's own chain, whose depth has been checked.
    QueryChain::looking_ahead(key, indexer.settings().block_size).ok()
}

impl Answerer {
    /// Adds to `reply` the holders that have blocks of the same prompt and whose engines look ahead, that is, hash each
    /// block with the token after it. `doubted` has the holders of the reply whose farther tiers are in doubt.
    pub(super) fn add_ahead(
        &self,
        doubts: &DoubtFacts<'_, '_>,
        query: &SingleQuery,
        reply: &mut QueryReply,
        doubted: &Doubted,
    ) {
        if !doubts.before.partial.contains(DegradedReason::LooksAhead) {
            return;
        }
        let (indexer, options) = (&doubts.namespace.indexer, &query.options);
        let key = key_ahead(doubts.namespace, doubts.key);
        let Some(mut chain) = key.as_deref().and_then(|key| chain_ahead(indexer, key)) else {
            return;
        };
        let asked = QueryLength::of(query, chain.len(), indexer);
        let mark = doubts.look.mark_search();
        let (mut ahead, ahead_doubted) = self.searched(doubts, query, true, asked, |search| {
            indexer.find_chain(&mut chain, search)
        });
        if options.explain {
            explain(query, indexer, &mut chain, reply.query_blocks, &mut ahead.holders);
        }
        let is_calm = doubts.look.seen_in_parts(mark) == SeenInParts::Nobody
            && indexer.doubtful_holders(&self.trust) == doubts.before;
        let listed = Listing::new(std::mem::take(&mut reply.holders), doubted);
        let added = Listing::new(std::mem::take(&mut ahead.holders), &ahead_doubted);
        if !is_calm {
            // A holder that was exact may be missing in the later answer `ahead`, which counts it. Each answer also
            // counts the holders in doubt that only the other one lists. These are not taken off: between the answers,
            // one doubt may have ended and another one begun. So the count is 0 only if it is 0 in both answers.
            let most = reply.doubtful_holders.max(ahead.doubtful_holders);
            reply.doubtful_holders = most.saturating_add(added.count_doubtful());
        }
        merge(reply, listed, added, ahead.holders_total, most_of(options));
        let predicted = self.predicted(doubts.namespace, options, &mut chain);
        add_predicted(&mut reply.predicted, predicted);
    }
}

/// Holders of an answer. Each has a flag that is true if it counts among the doubtful holders of an answer that does
/// not list it.
struct Listing(Vec<(HolderMatch, bool)>);

impl Listing {
    fn new(holders: Vec<HolderMatch>, doubted: &Doubted) -> Self {
        let holders = holders.into_iter().enumerate().map(|(place, holder)| {
            let is_doubtful = !holder.exact || doubted.has(place);
            (holder, is_doubtful)
        });
        Self(holders.collect())
    }

    fn count_doubtful(&self) -> u32 {
        saturating_u32(self.0.iter().filter(|(_, is_doubtful)| *is_doubtful).count())
    }
}

/// Puts the holders of two answers, `listed` and `added`, into `reply`, and keeps at most `limit` holders. `added` is
/// from the answer about engines that hash each block together with the token after it. That answer has `added_total`
/// holders without the limit.
fn merge(reply: &mut QueryReply, listed: Listing, mut added: Listing, added_total: u32, limit: usize) {
    let place = |holder: &HolderMatch| (holder.worker.clone(), holder.rank);
    let known: HashSet<_> = listed.0.iter().map(|(holder, _)| place(holder)).collect();
    let found = added.0.len();
    added.0.retain(|(holder, _)| !known.contains(&place(holder)));
    let twice = saturating_u32(found - added.0.len());
    // `reply.doubtful_holders` still counts those of the added holders that are in doubt. They are listed from now on,
    // so they must not count there.
    let doubtful = reply.doubtful_holders.saturating_sub(added.count_doubtful());
    let Listing(mut holders) = listed;
    holders.append(&mut added.0);
    holders.sort_by(|(one, _), (other, _)| one.order().cmp(&other.order()));
    let dropped = Listing(holders.split_off(limit.min(holders.len())));
    reply.holders = holders.into_iter().map(|(holder, _)| holder).collect();
    reply.doubtful_holders = doubtful.saturating_add(dropped.count_doubtful());
    reply.holders_total += added_total.saturating_sub(twice);
}

/// Adds the holders `added` to the `predicted` ones, and keeps at most [`PREDICTED_MAX`]. A holder that is in both
/// lists stays once, with more blocks.
fn add_predicted(predicted: &mut Vec<PredictedHolder>, mut added: Vec<PredictedHolder>) {
    if added.is_empty() {
        return;
    }
    predicted.append(&mut added);
    predicted.sort_by(|one, other| one.order().cmp(&other.order()));
    let mut known = HashSet::new();
    predicted.retain(|holder| known.insert((holder.worker.clone(), holder.rank)));
    predicted.truncate(PREDICTED_MAX);
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::WorkerName;

    use super::*;

    #[test]
    fn both_chains_together_predict_as_many_holders_as_one() {
        let holders = |name: &str, blocks| -> Vec<_> {
            let holder = |rank| PredictedHolder {
                worker: WorkerName::new(name).unwrap(),
                rank,
                blocks,
                address: None,
            };
            (0..64).map(holder).collect()
        };
        let mut predicted = holders("plain", 2);
        add_predicted(&mut predicted, holders("ahead", 3));
        assert_eq!(predicted, holders("ahead", 3));
    }
}
