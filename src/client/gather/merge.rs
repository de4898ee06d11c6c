//! Merging of the shards' answers into one answer, without I/O.
//!
//! Every holder belongs to one shard. Lists of holders are joined, put into the order of the contract, and only then cut to the
//! limit. This is exact: the best `limit` holders of all shards are among the best `limit` holders of each.
//!
//! A shard that does not know a namespace has no workers of it, and answers with an error. If another shard knows the
//! namespace, that error counts as an answer without holders. Any other error is about the request and is the same on every
//! shard, so it becomes the answer.

use std::collections::BTreeMap;

use kvatlas_core::wire::{
    ErrorBody, ErrorCode, Gathered, PREDICTED_MAX, QueryOptions, QueryReply, QueryResult, SingleQuery,
    StatusReply, WireError,
};

/// The answer of one shard to a request: its reply, or an error.
pub(super) type ShardAnswer<T> = Result<T, WireError>;

/// Returns the answers of the shards that know the namespace. Returns an error for the whole request in three cases:
/// all shards answered that they do not know the namespace; shards are missing, and no other shard knows the namespace;
/// a shard answered with any other error. `refused` has the error texts of missing shards.
pub(super) fn sort_out<T>(
    answers: Vec<ShardAnswer<T>>,
    gathered: &Gathered,
    refused: &BTreeMap<u32, String>,
) -> Result<Vec<T>, WireError> {
    let mut known = Vec::with_capacity(answers.len());
    let mut unknown = None;
    for answer in answers {
        match answer {
            Ok(answer) => known.push(answer),
            Err(error) if error.code == ErrorCode::UnknownNamespace => unknown = Some(error),
            Err(error) => return Err(error),
        }
    }
    match unknown {
        // A missing shard may know the namespace.
        _ if known.is_empty() && !gathered.missing.is_empty() => Err(incomplete(gathered, refused)),
        Some(error) if known.is_empty() => Err(error),
        _ => Ok(known),
    }
}

fn incomplete(gathered: &Gathered, refused: &BTreeMap<u32, String>) -> WireError {
    let missing = gathered.missing_in_words();
    let mut text = format!("no shard that answered has heard of the namespace, and {missing} did not answer");
    for (shard, words) in refused {
        text += &format!("; shard {shard} says: {words}");
    }
    WireError::new(ErrorCode::Unavailable, text + "; ask again")
}

fn disagreement(what: &str) -> WireError {
    let text = format!("the shards disagree on {what}; configure the namespace alike on all of them");
    WireError::new(ErrorCode::Unavailable, text)
}

/// Merges the answers to one query.
pub(super) fn merge_replies(
    replies: Vec<QueryReply>,
    options: &QueryOptions,
    gathered: &Gathered,
) -> Result<QueryReply, WireError> {
    let mut replies = replies.into_iter();
    let Some(mut merged) = replies.next() else {
        return Err(incomplete(gathered, &BTreeMap::new()));
    };
    for reply in replies {
        // An older shard does not tell the block size.
        let sizes = [reply.block_size, merged.block_size];
        let have_other_sizes = sizes[0] != sizes[1] && !sizes.contains(&0);
        if reply.query_blocks != merged.query_blocks || have_other_sizes {
            return Err(disagreement("how many tokens a block has"));
        }
        merged.block_size = merged.block_size.max(reply.block_size);
        merged.holders.extend(reply.holders);
        merged.holders_total = merged.holders_total.saturating_add(reply.holders_total);
        merged.foreign_holders = merged.foreign_holders.saturating_add(reply.foreign_holders);
        merged.doubtful_holders = merged.doubtful_holders.saturating_add(reply.doubtful_holders);
        merged.behind_us = merged.behind_us.max(reply.behind_us);
        merged.predicted.extend(reply.predicted);
    }
    merged
        .predicted
        .sort_by(|one, other| one.order().cmp(&other.order()));
    merged.predicted.truncate(PREDICTED_MAX);
    merged
        .holders
        .sort_by(|one, other| one.order().cmp(&other.order()));
    if let Some(limit) = options.limit {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let cut = merged.holders.split_off(limit.min(merged.holders.len()));
        let doubtful = cut.iter().filter(|holder| !holder.exact).count();
        let doubtful = u32::try_from(doubtful).unwrap_or(u32::MAX);
        merged.doubtful_holders = merged.doubtful_holders.saturating_add(doubtful);
    }
    merged.gathered = Some(gathered.clone());
    Ok(merged)
}

/// Merges the answers to a batch of `queries`; `lists` has one list from each shard.
pub(super) fn merge_results(
    lists: Vec<Vec<QueryResult>>,
    queries: &[SingleQuery],
    gathered: &Gathered,
) -> Result<Vec<QueryResult>, WireError> {
    if lists.iter().any(|list| list.len() != queries.len()) {
        return Err(disagreement("how many queries were asked"));
    }
    let mut lists: Vec<_> = lists.into_iter().map(Vec::into_iter).collect();
    let merge_next = |query: &SingleQuery| {
        let results = lists.iter_mut().filter_map(Iterator::next);
        merge_result(results.collect(), &query.options, gathered)
    };
    Ok(queries.iter().map(merge_next).collect())
}

fn merge_result(results: Vec<QueryResult>, options: &QueryOptions, gathered: &Gathered) -> QueryResult {
    let mut replies = Vec::with_capacity(results.len());
    for result in results {
        match result {
            QueryResult::Reply(reply) => replies.push(reply),
            QueryResult::Error(error) => return QueryResult::Error(error),
        }
    }
    match merge_replies(replies, options, gathered) {
        Ok(reply) => QueryResult::Reply(reply),
        Err(error) => QueryResult::Error(ErrorBody::from(&error)),
    }
}

/// Merges the answers to a status request. A block that several shards know is counted several times in the merged
/// answer.
pub(super) fn merge_statuses(
    statuses: Vec<StatusReply>,
    gathered: &Gathered,
) -> Result<StatusReply, WireError> {
    let mut statuses = statuses.into_iter();
    let Some(mut merged) = statuses.next() else {
        return Err(incomplete(gathered, &BTreeMap::new()));
    };
    for status in statuses {
        if status.block_size != merged.block_size {
            return Err(disagreement("how many tokens a block has"));
        }
        merged.distinct_blocks = merged.distinct_blocks.saturating_add(status.distinct_blocks);
        merged.batches_waiting = merged.batches_waiting.saturating_add(status.batches_waiting);
        merged.behind_us = merged.behind_us.max(status.behind_us);
        merged.unsized_holders = merged.unsized_holders.saturating_add(status.unsized_holders);
        merged.refused_holders = merged.refused_holders.saturating_add(status.refused_holders);
        merged.unheard_holders = merged.unheard_holders.saturating_add(status.unheard_holders);
        merged.holders.extend(status.holders);
    }
    merged
        .holders
        .sort_by(|one, other| (&one.worker, one.rank).cmp(&(&other.worker, other.rank)));
    merged.gathered = Some(gathered.clone());
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use kvatlas_core::wire::{HolderMatch, PROTOCOL_VERSION, PredictedHolder, QueryKey, Shard, WorkerName};

    use super::*;

    const WHOLE: Gathered = Gathered {
        shards: 3,
        missing: Vec::new(),
    };

    fn reply(mut holders: Vec<HolderMatch>, limit: Option<u32>) -> QueryReply {
        holders.sort_by(|one, other| {
            let key = |holder: &HolderMatch| {
                (
                    std::cmp::Reverse(holder.matched_blocks),
                    holder.worker.clone(),
                    holder.rank,
                )
            };
            key(one).cmp(&key(other))
        });
        let total = u32::try_from(holders.len()).unwrap();
        let cut = holders.split_off(
            holders
                .len()
                .min(limit.map_or(usize::MAX, |limit| limit as usize)),
        );
        let doubtful = cut.iter().filter(|holder| !holder.exact).count();
        QueryReply {
            behind_us: 0,
            predicted: Vec::new(),
            v: PROTOCOL_VERSION,
            query_blocks: 8,
            block_size: 16,
            holders,
            holders_total: total,
            foreign_holders: 1,
            doubtful_holders: u32::try_from(doubtful).unwrap(),
            unseen_blocks_max: 0,
            gathered: None,
        }
    }

    fn holder(name: u8, rank: u32, matched_blocks: u32) -> HolderMatch {
        HolderMatch {
            // A third of the holders are doubtful.
            exact: !name.is_multiple_of(3),
            ..HolderMatch::new(
                WorkerName::new(&format!("gpu-{name}")).unwrap(),
                rank,
                matched_blocks,
            )
        }
    }

    fn options(limit: Option<u32>) -> QueryOptions {
        QueryOptions {
            limit,
            ..QueryOptions::default()
        }
    }

    fn query() -> SingleQuery {
        SingleQuery::new(QueryKey::SequenceHashes(Vec::new()))
    }

    fn error(code: ErrorCode) -> WireError {
        WireError::new(code, "no")
    }

    proptest! {
        /// Tests the property that the merged answers of shards equal the answer of one daemon that has all workers.
        #[test]
        fn the_merged_reply_is_that_of_one_daemon(
            depths in prop::collection::btree_map((0..20_u8, 0..2_u32), 1..=8_u32, 0..30),
            limit in prop::option::of(0..10_u32),
            count in 1..5_u32,
        ) {
            let holders = || depths.iter().map(|((name, rank), depth)| holder(*name, *rank, *depth));
            let parts = (0..count).map(|index| {
                let shard = Shard::new(index, count).unwrap();
                reply(holders().filter(|holder| shard.owns(&holder.worker)).collect(), limit)
            });
            let merged = merge_replies(parts.collect(), &options(limit), &WHOLE).unwrap();
            let whole = reply(holders().collect(), limit);
            let expected = QueryReply {
                foreign_holders: count,
                doubtful_holders: whole.doubtful_holders,
                gathered: Some(WHOLE),
                ..whole
            };
            prop_assert_eq!(merged, expected);
        }
    }

    #[test]
    fn an_unknown_namespace_is_an_answer_unless_nobody_knows_it() {
        let unknown = || Err(error(ErrorCode::UnknownNamespace));
        assert_eq!(
            sort_out(vec![unknown(), Ok(1)], &WHOLE, &BTreeMap::new()),
            Ok(vec![1])
        );
        assert_eq!(
            sort_out::<u8>(vec![unknown(), unknown()], &WHOLE, &BTreeMap::new()),
            unknown().map(|_: u8| Vec::new())
        );
        let partial = Gathered {
            shards: 3,
            missing: vec![2],
        };
        assert_eq!(
            sort_out(vec![unknown(), Ok(1)], &partial, &BTreeMap::new()),
            Ok(vec![1])
        );
        let refused = sort_out::<u8>(vec![unknown(), unknown()], &partial, &BTreeMap::new()).unwrap_err();
        assert_eq!(
            refused.code,
            ErrorCode::Unavailable,
            "the missing shard may know it"
        );
        let refused = sort_out(
            vec![Ok(1), Err(error(ErrorCode::BadRequest))],
            &WHOLE,
            &BTreeMap::new(),
        )
        .unwrap_err();
        assert_eq!(refused.code, ErrorCode::BadRequest);
        let words = BTreeMap::from([(2, "gpu-0 has another block size".to_owned())]);
        let refused = sort_out::<u8>(vec![unknown()], &partial, &words).unwrap_err();
        assert!(
            refused.text.contains("shard 2 says: gpu-0 has another"),
            "{refused}"
        );
    }

    #[test]
    fn no_more_predictions_are_merged_than_a_reply_has() {
        let predicted = |rank, blocks| PredictedHolder {
            worker: WorkerName::new("gpu-0").unwrap(),
            rank,
            blocks,
            address: None,
        };
        let of = |rank| QueryReply {
            predicted: (1..=40).map(|blocks| predicted(rank, blocks)).collect(),
            ..reply(Vec::new(), None)
        };
        let merged = merge_replies(vec![of(0), of(1)], &options(None), &WHOLE).unwrap();
        let blocks: Vec<u32> = merged.predicted.iter().map(|found| found.blocks).collect();
        assert_eq!(
            (blocks.len(), blocks.first(), blocks.last()),
            (64, Some(&40), Some(&9))
        );
    }

    #[test]
    fn shards_that_disagree_are_no_answer() {
        let other = QueryReply {
            query_blocks: 4,
            block_size: 16,
            ..reply(Vec::new(), None)
        };
        let merged = merge_replies(vec![reply(Vec::new(), None), other], &options(None), &WHOLE);
        assert_eq!(merged.unwrap_err().code, ErrorCode::Unavailable);
        // The first shard does not tell its block size.
        let sized = |block_size| QueryReply {
            block_size,
            ..reply(Vec::new(), None)
        };
        let merged = merge_replies([0, 16, 32].map(sized).into(), &options(None), &WHOLE);
        assert_eq!(merged.unwrap_err().code, ErrorCode::Unavailable);
        let merged = merge_results(vec![Vec::new()], &[query()], &WHOLE);
        assert_eq!(merged.unwrap_err().code, ErrorCode::Unavailable);
    }

    #[test]
    fn each_query_of_a_batch_is_merged_by_itself() {
        let list = |name| {
            vec![
                QueryResult::Reply(reply(vec![holder(name, 0, 2)], None)),
                QueryResult::Error((&error(ErrorCode::TooLarge)).into()),
            ]
        };
        let merged = merge_results(vec![list(1), list(0)], &[query(), query()], &WHOLE).unwrap();
        let [QueryResult::Reply(first), QueryResult::Error(second)] = &merged[..] else {
            panic!("{merged:?}");
        };
        assert_eq!(first.holders, [holder(0, 0, 2), holder(1, 0, 2)]);
        assert_eq!(second.code, 413);
    }
}
