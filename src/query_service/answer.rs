//! From a request's payload to a reply's: no I/O.

use std::sync::Arc;

use crate::hash::Position;
use crate::index::{
    Bounds, HolderRecord, Namespace, Namespaces, PositionalIndexer, QueryChain, Search, SparseChain,
};
use crate::telemetry::labels::QueryKind;
use crate::tracking::{DegradedReason, DegradedReasons, StreamTrust};
use crate::wire::{
    BatchReply, DecodeError, DropOut, ErrorCode, HolderMatch, HolderStatusReply, NamespaceName,
    PROTOCOL_VERSION, QueryKey, QueryOptions, QueryReply, QueryRequest, QueryResult, SingleQuery,
    StatusReply, Subjects, WireError, WireLimits,
};

use super::responder::{reply_too_large, unencodable};
use super::roster;

/// An encoded reply, and what it answers.
#[derive(Debug)]
pub struct Answer {
    /// The payload.
    pub payload: Vec<u8>,
    /// The form of the (first) query.
    pub kind: QueryKind,
    /// How many queries it answers.
    pub queries: usize,
    /// The namespace asked about.
    pub namespace: NamespaceName,
}

/// Answers requests from the index.
#[derive(Debug, Clone)]
pub struct Answerer {
    namespaces: Arc<Namespaces>,
    trust: Arc<StreamTrust>,
    subjects: Subjects,
    limits: WireLimits,
}

impl Answerer {
    /// Answers from `namespaces`; `trust` says which holders are verified.
    pub fn new(
        namespaces: Arc<Namespaces>,
        trust: Arc<StreamTrust>,
        subjects: Subjects,
        limits: WireLimits,
    ) -> Self {
        Self {
            namespaces,
            trust,
            subjects,
            limits,
        }
    }

    /// Answers a request on a query subject. `reply_bytes_max` is the longest reply that can be sent: one that cannot fit is
    /// given up before it takes the memory.
    pub fn answer_query(
        &self,
        subject: &str,
        payload: &[u8],
        reply_bytes_max: usize,
    ) -> Result<Answer, WireError> {
        let name = self.subjects.parse_query(subject, self.limits.name_bytes_max)?;
        let request = QueryRequest::decode(payload, &self.limits)?;
        let namespace = self.namespace(&name)?;
        let (payload, kind, queries) = match request {
            QueryRequest::Single(query) => {
                let reply = self.reply(&namespace.indexer, &query)?;
                (reply.encode(), kind_of(&query.key), 1)
            }
            QueryRequest::Batch(queries) => {
                let kind = queries
                    .first()
                    .map_or(QueryKind::SequenceHashes, |query| kind_of(&query.key));
                let results = self.replies(&namespace.indexer, &queries, reply_bytes_max)?;
                (
                    BatchReply {
                        v: PROTOCOL_VERSION,
                        results,
                    }
                    .encode(),
                    kind,
                    queries.len(),
                )
            }
        };
        let payload = payload.map_err(|error| unencodable(&error))?;
        Ok(Answer {
            payload,
            kind,
            queries,
            namespace: name,
        })
    }

    /// Answers a request on a status subject. `batches_waiting` is how many messages wait for a lane.
    pub fn answer_status(&self, subject: &str, batches_waiting: u64) -> Result<Answer, WireError> {
        let name = self.subjects.parse_status(subject, self.limits.name_bytes_max)?;
        let namespace = self.namespace(&name)?;
        let reply = status(&namespace, &self.trust, batches_waiting);
        let payload = reply.encode().map_err(|error| unencodable(&error))?;
        Ok(Answer {
            payload,
            kind: QueryKind::Status,
            queries: 1,
            namespace: name,
        })
    }

    /// Answers a replica that asks which holders are known.
    pub fn answer_roster(&self, payload: &[u8]) -> Result<Vec<u8>, WireError> {
        roster::answer(&self.namespaces, &self.trust, payload)
    }

    fn namespace(&self, name: &NamespaceName) -> Result<Arc<Namespace>, WireError> {
        self.namespaces.get(name).ok_or_else(|| {
            let text = format!(
                "no events have come for namespace {name:?} and no configuration names it; check the name, or ask \
                 again when a worker has published"
            );
            WireError::new(ErrorCode::UnknownNamespace, text)
        })
    }

    fn replies(
        &self,
        indexer: &PositionalIndexer,
        queries: &[SingleQuery],
        reply_bytes_max: usize,
    ) -> Result<Vec<QueryResult>, WireError> {
        let mut results = Vec::with_capacity(queries.len());
        let mut holders = 0_usize;
        for query in queries {
            results.push(match self.reply(indexer, query) {
                Ok(reply) => {
                    holders += reply.holders.len();
                    QueryResult::Reply(reply)
                }
                Err(error) => QueryResult::Error((&error).into()),
            });
            let bytes = holders.saturating_mul(HOLDER_BYTES_MIN);
            if bytes > reply_bytes_max {
                return Err(reply_too_large(bytes, reply_bytes_max));
            }
        }
        Ok(results)
    }

    fn reply(&self, indexer: &PositionalIndexer, query: &SingleQuery) -> Result<QueryReply, WireError> {
        if let Some(positions) = &query.positions {
            return self.reply_with_bounds(indexer, query, positions);
        }
        let block_size = indexer.settings().block_size;
        let chain = QueryChain::new(&query.key, block_size);
        let mut chain = chain.map_err(|error| WireError::new(ErrorCode::TooLarge, error.to_string()))?;
        if chain.len() > self.limits.query_depth_max {
            let (blocks, max) = (chain.len(), self.limits.query_depth_max);
            let text =
                format!("the query has {blocks} blocks; at most {max} are allowed, ask for a shorter prefix");
            return Err(WireError::new(ErrorCode::TooLarge, text));
        }
        let options = &query.options;
        let was_stalled = self.trust.is_stalled();
        let matches = indexer.find_chain(&mut chain, search_of(options));
        let found = matches.holders().map(|found| Bounds {
            holder: found.holder,
            matched_blocks: found.matched_blocks,
            matched_blocks_max: found.matched_blocks,
        });
        let reasons = |holder: &HolderRecord| doubted(matches.reasons(holder, &self.trust), was_stalled);
        let (mut holders, holders_total) = best_of(found, options, reasons);
        if options.explain {
            explain(indexer, &mut chain, &mut holders);
        }
        let is_content = matches!(query.key, QueryKey::Tokens { .. } | QueryKey::BlockHashes(_));
        Ok(QueryReply {
            v: PROTOCOL_VERSION,
            query_blocks: saturating_u32(chain.len()),
            holders,
            holders_total,
            foreign_holders: if is_content { indexer.foreign_holders() } else { 0 },
            gathered: None,
            unseen_blocks_max: 0,
        })
    }

    /// The answer to a query that sends blocks chosen from a chain.
    fn reply_with_bounds(
        &self,
        indexer: &PositionalIndexer,
        query: &SingleQuery,
        positions: &[Position],
    ) -> Result<QueryReply, WireError> {
        let chain = SparseChain::new(&query.key, positions).map_err(DecodeError::from)?;
        let was_stalled = self.trust.is_stalled();
        let matches = indexer.find_bounds(&chain, search_of(&query.options));
        let matches = matches.map_err(|error| WireError::new(ErrorCode::BadRequest, error.to_string()))?;
        let reasons = |holder: &HolderRecord| doubted(matches.reasons(holder, &self.trust), was_stalled);
        let (holders, holders_total) = best_of(matches.holders(), &query.options, reasons);
        Ok(QueryReply {
            v: PROTOCOL_VERSION,
            query_blocks: chain.query_blocks(),
            holders,
            holders_total,
            foreign_holders: 0,
            unseen_blocks_max: chain.unseen_blocks_max(),
            gathered: None,
        })
    }
}

fn search_of(options: &QueryOptions) -> Search<'_> {
    Search {
        workers: options.workers.as_deref(),
    }
}

/// The reasons of now, and the doubt of a stall that was there before the search: it may have ended before the events that waited were
/// seen.
fn doubted(reasons: DegradedReasons, was_stalled: bool) -> DegradedReasons {
    if was_stalled {
        return reasons.with(DegradedReason::Unverified);
    }
    reasons
}

/// The holders that the options ask for, best first, and how many there are without the limit.
fn best_of<'a>(
    found: impl Iterator<Item = Bounds<'a>>,
    options: &QueryOptions,
    reasons: impl Fn(&HolderRecord) -> DegradedReasons,
) -> (Vec<HolderMatch>, u32) {
    let blocks_min = options.min_blocks.max(1);
    let mut found: Vec<_> = found
        .filter(|found| found.matched_blocks_max >= blocks_min)
        .collect();
    found.sort_unstable_by(|one, other| {
        let blocks = |bounds: &Bounds<'_>| (bounds.matched_blocks, bounds.matched_blocks_max);
        let deepest_first = blocks(other).cmp(&blocks(one));
        deepest_first.then_with(|| one.holder.id.cmp(&other.holder.id))
    });
    let total = saturating_u32(found.len());
    let limit = options
        .limit
        .map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
    found.truncate(limit);
    let holders = found.iter().map(|found| {
        let degraded = reasons(found.holder);
        let is_bounded = found.matched_blocks_max > found.matched_blocks;
        HolderMatch {
            worker: found.holder.id.worker.clone(),
            rank: found.holder.id.rank,
            matched_blocks: found.matched_blocks,
            matched_blocks_max: is_bounded.then_some(found.matched_blocks_max),
            exact: degraded.is_empty(),
            degraded,
            dropped_out: None,
        }
    });
    (holders.collect(), total)
}

/// No holder takes fewer bytes in a reply: its four keys, and the shortest values.
const HOLDER_BYTES_MIN: usize = 39;

/// Says of every holder where it dropped out. Holders of one depth share the look-up.
fn explain(indexer: &PositionalIndexer, chain: &mut QueryChain<'_>, holders: &mut [HolderMatch]) {
    let mut last: Option<(u32, Option<DropOut>)> = None;
    for holder in holders {
        let depth = holder.matched_blocks;
        let dropped_out = match &last {
            Some((same, dropped_out)) if *same == depth => dropped_out.clone(),
            _ => {
                let position = usize::try_from(depth).unwrap_or(usize::MAX);
                indexer.block_at(chain, position).map(|(key, holders)| DropOut {
                    position: depth,
                    lineage_hash: key.into(),
                    other_holders: saturating_u32(holders),
                })
            }
        };
        holder.dropped_out.clone_from(&dropped_out);
        last = Some((depth, dropped_out));
    }
}

fn status(namespace: &Namespace, trust: &StreamTrust, batches_waiting: u64) -> StatusReply {
    let mut holders = namespace.indexer.holders();
    holders.sort_unstable_by(|one, other| one.id.cmp(&other.id));
    let holders = holders.iter().map(|holder| {
        let cursor = holder.status.cursor();
        let degraded: DegradedReasons = holder.status.reasons(trust);
        HolderStatusReply {
            worker: holder.id.worker.clone(),
            rank: holder.id.rank,
            epoch: cursor.epoch,
            seq: cursor.seq,
            blocks: holder.status.blocks(),
            parked_events: holder.status.parked_events(),
            foreign_chain: holder.status.has_foreign_chain(),
            exact: degraded.is_empty(),
            degraded,
        }
    });
    StatusReply {
        v: PROTOCOL_VERSION,
        block_size: namespace.indexer.settings().block_size.as_u32(),
        distinct_blocks: namespace.indexer.sizes().distinct_blocks,
        batches_waiting,
        holders: holders.collect(),
        gathered: None,
    }
}

pub(super) fn kind_of(key: &QueryKey) -> QueryKind {
    match key {
        QueryKey::Tokens { .. } => QueryKind::Tokens,
        QueryKey::BlockHashes(_) => QueryKind::BlockHashes,
        QueryKey::SequenceHashes(_) => QueryKind::SequenceHashes,
        QueryKey::LineageHashes(_) => QueryKind::LineageHashes,
    }
}

fn saturating_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use crate::hash::SequenceHash;
    use crate::index::{IndexLimits, NamespaceSettings};
    use crate::wire::{Event, HolderId, StoredBlocks, Tier, WorkerName};

    use super::*;

    fn answerer() -> Answerer {
        let namespaces = Namespaces::new(
            NamespaceSettings::default(),
            Vec::new(),
            IndexLimits::default(),
            16,
        );
        let namespace = namespaces
            .get_or_create(&NamespaceName::new("n").unwrap())
            .unwrap();
        for rank in 0..2 {
            let worker = WorkerName::new("w").unwrap();
            let mut writer = namespace.indexer.register(&HolderId { worker, rank }).unwrap();
            let blocks = StoredBlocks::by_sequence(None, None, vec![SequenceHash(1)]);
            writer.apply(Event::Stored(blocks), Tier::DEVICE, 0);
            writer.status().confirm(StreamTrust::default().generation());
        }
        let subjects = Subjects::new("kvatlas").unwrap();
        Answerer::new(
            Arc::new(namespaces),
            Arc::default(),
            subjects,
            WireLimits::default(),
        )
    }

    #[test]
    fn a_batch_whose_reply_cannot_be_sent_is_given_up() {
        let query = SingleQuery::new(QueryKey::SequenceHashes(vec![SequenceHash(1)]));
        let payload = QueryRequest::Batch(vec![query; 100]).encode();
        let answer = |bytes_max| answerer().answer_query("kvatlas.v1.query.n", &payload, bytes_max);
        let whole = answer(usize::MAX).unwrap().payload;
        assert!(
            whole.len() >= 200 * HOLDER_BYTES_MIN,
            "a reply that could be sent must not be given up"
        );
        assert!(answer(whole.len()).is_ok());
        let error = answer(150 * HOLDER_BYTES_MIN).unwrap_err();
        assert_eq!(error.code, ErrorCode::TooLarge);
    }

    #[test]
    fn chosen_blocks_are_answered_with_bounds() {
        let answerer = answerer();
        let namespace = answerer.namespace(&NamespaceName::new("n").unwrap()).unwrap();
        for (worker, blocks) in [("a", 10), ("b", 5), ("c", 3)] {
            let worker = WorkerName::new(worker).unwrap();
            let mut writer = namespace.indexer.register(&HolderId { worker, rank: 0 }).unwrap();
            let hashes = (100..100 + blocks).map(SequenceHash).collect();
            let blocks = StoredBlocks::by_sequence(None, None, hashes);
            writer.apply(Event::Stored(blocks), Tier::DEVICE, 0);
        }
        let ask = |positions: &[u64], min_blocks| {
            let hashes = positions
                .iter()
                .map(|position| SequenceHash(100 + position))
                .collect();
            let positions = positions.iter().map(|position| Position::new(*position).unwrap());
            let query = SingleQuery {
                positions: Some(positions.collect()),
                options: QueryOptions {
                    min_blocks,
                    ..QueryOptions::default()
                },
                ..SingleQuery::new(QueryKey::SequenceHashes(hashes))
            };
            let payload = QueryRequest::Single(query).encode();
            let answer = answerer.answer_query("kvatlas.v1.query.n", &payload, usize::MAX);
            QueryReply::decode(&answer.unwrap().payload).unwrap()
        };
        let bounds = |reply: &QueryReply| -> Vec<(String, u32, u32)> {
            let bounds = |holder: &HolderMatch| {
                (
                    holder.worker.to_string(),
                    holder.matched_blocks,
                    holder.blocks_max(),
                )
            };
            reply.holders.iter().map(bounds).collect()
        };
        let reply = ask(&[0, 4, 8, 9], 0);
        let all = [("a", 10, 10), ("b", 5, 8), ("c", 1, 4)];
        assert_eq!(
            bounds(&reply),
            all.map(|(name, least, most)| (name.to_owned(), least, most))
        );
        assert_eq!((reply.query_blocks, reply.unseen_blocks_max), (10, 0));
        // Who may hold six blocks is kept, who cannot is not.
        assert_eq!(bounds(&ask(&[0, 4, 8, 9], 6)), bounds(&reply)[..2]);
        let refined = ask(&[5, 6, 7], 0);
        assert_eq!(bounds(&refined), [("a".to_owned(), 8, 8)]);
        assert_eq!(
            refined.unseen_blocks_max, 5,
            "so b holds exactly the five that it holds at least"
        );
    }

    #[test]
    fn the_shortest_holder_is_no_shorter_than_assumed() {
        let shortest = HolderMatch {
            worker: WorkerName::new("w").unwrap(),
            rank: 0,
            matched_blocks: 1,
            matched_blocks_max: None,
            exact: true,
            degraded: DegradedReasons::default(),
            dropped_out: None,
        };
        let bytes = rmp_serde::to_vec_named(&shortest).unwrap();
        assert_eq!(bytes.len(), HOLDER_BYTES_MIN);
    }
}
