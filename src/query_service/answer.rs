//! From a request's payload to a reply's: no I/O.

use std::sync::Arc;

use crate::index::{Namespace, Namespaces, PositionalIndexer, QueryChain, Search};
use crate::telemetry::labels::QueryKind;
use crate::tracking::{DegradedReason, DegradedReasons, StreamTrust};
use crate::wire::{
    BatchReply, DropOut, ErrorCode, HolderMatch, HolderStatusReply, NamespaceName, PROTOCOL_VERSION,
    QueryKey, QueryReply, QueryRequest, QueryResult, SingleQuery, StatusReply, Subjects, WireError,
    WireLimits,
};

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
        // Asked before the search: it may end before the events that waited are seen.
        let is_stalled = self.trust.is_stalled();
        let matches = indexer.find_chain(
            &mut chain,
            Search {
                workers: options.workers.as_deref(),
            },
        );
        let min_blocks = options.min_blocks.max(1);
        let mut found: Vec<_> = matches
            .holders()
            .filter(|found| found.matched_blocks >= min_blocks)
            .collect();
        found.sort_unstable_by(|one, other| {
            let deepest_first = other.matched_blocks.cmp(&one.matched_blocks);
            deepest_first.then_with(|| one.holder.id.cmp(&other.holder.id))
        });
        let holders_total = saturating_u32(found.len());
        let limit = options
            .limit
            .map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        found.truncate(limit);
        let holders = found.iter().map(|found| {
            let mut degraded = matches.reasons(found.holder, &self.trust);
            if is_stalled {
                degraded = degraded.with(DegradedReason::Unverified);
            }
            HolderMatch {
                worker: found.holder.id.worker.clone(),
                rank: found.holder.id.rank,
                matched_blocks: found.matched_blocks,
                exact: degraded.is_empty(),
                degraded,
                dropped_out: None,
            }
        });
        let mut holders: Vec<HolderMatch> = holders.collect();
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
        })
    }
}

/// No holder takes fewer bytes in a reply: its four keys, and the shortest values.
const HOLDER_BYTES_MIN: usize = 39;

/// The error in place of a reply of at least `bytes` that cannot be sent.
pub(super) fn reply_too_large(bytes: usize, bytes_max: usize) -> WireError {
    let text = format!(
        "the reply has {bytes} bytes or more, the server takes {bytes_max}; set limit or min_blocks, or ask for less at once"
    );
    WireError::new(ErrorCode::TooLarge, text)
}

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
    }
}

fn kind_of(key: &QueryKey) -> QueryKind {
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

fn unencodable(error: &rmp_serde::encode::Error) -> WireError {
    WireError::new(
        ErrorCode::TooLarge,
        format!("the reply cannot be encoded: {error}"),
    )
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
    fn the_shortest_holder_is_no_shorter_than_assumed() {
        let shortest = HolderMatch {
            worker: WorkerName::new("w").unwrap(),
            rank: 0,
            matched_blocks: 1,
            exact: true,
            degraded: DegradedReasons::default(),
            dropped_out: None,
        };
        let bytes = rmp_serde::to_vec_named(&shortest).unwrap();
        assert_eq!(bytes.len(), HOLDER_BYTES_MIN);
    }
}
