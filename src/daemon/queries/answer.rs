//! Answering of requests: from the payload of a request to the payload of its reply, without I/O.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::hints::Hints;
use crate::lanes::{Freshness, Strays};
use kvatlas_config::Live;
use kvatlas_core::hash::Position;
use kvatlas_core::index::{
    HolderRecord, Match, Matches, Namespace, Namespaces, NearBlocks, PositionalIndexer, QueryChain, Search,
    SparseChain,
};
use kvatlas_core::stream::StreamTrust;
use kvatlas_core::wire::{
    DecodeError, DegradedReason, DegradedReasons, DropOut, ErrorCode, HolderId, HolderMatch, Limit,
    NamespaceName, PROTOCOL_VERSION, Profile, QueryKey, QueryOptions, QueryReply, QueryRequest, ReplyOrder,
    SingleQuery, StatusReply, Subjects, WireError, WireLimits,
};
use kvatlas_telemetry::labels::QueryKind;

use super::heavy::HeavyTurns;
use super::roster;
use super::sample::QuerySample;
use super::whole::{Seen, search_whole};

mod ahead;
mod any_reply;
mod beyond;
mod doubts;
mod found;
mod hinted;
mod known;
mod pairs;
mod pieces;
mod reuse;
mod spoken;
mod status;
mod unknown;
mod unlisted;

pub(super) use any_reply::Answer;
pub(crate) use any_reply::AnyReply;
use beyond::{Doubted, QueryLength};
use doubts::DoubtFacts;
pub(crate) use doubts::with_wait;
pub(crate) use found::{Found, FoundHolder, dialect_query};
#[cfg(any(feature = "grpc", feature = "redis"))]
pub(super) use known::is_used;
use pairs::OfPairs;
use pieces::BatchReplies;
use reuse::{of_pairs, usable_max, usable_max_of_pairs};
use spoken::spoken;
pub(super) use status::encode_status;
use status::status;
pub(crate) use status::{report, unsized_holders};
use unlisted::{Listed, count_doubtful};

/// Answerer of requests from the index.
#[derive(Debug, Clone)]
pub(crate) struct Answerer {
    pub(crate) namespaces: Arc<Namespaces>,
    pub(crate) trust: Arc<StreamTrust>,
    pub(crate) freshness: Arc<Freshness>,
    /// Record of namespaces that do not exist although messages for them came.
    pub(crate) strays: Arc<Strays>,
    pub(crate) subjects: Subjects,
    pub(crate) limits: Live<WireLimits>,
    /// Sample of recent queries, with counts of all answers by their certainty. `None` if queries are not sampled.
    pub(crate) sample: Option<Arc<QuerySample>>,
    /// Queues in which heavy requests, which take long, wait for their turns.
    pub(crate) heavy_turns: Arc<HeavyTurns>,
    /// Hints of routers (reports of where they have sent requests). `None` if hints are not taken.
    pub(crate) hints: Option<Arc<Hints>>,
}

impl Answerer {
    /// Makes an answerer from `namespaces`. `trust` says which holders are confirmed in the present event stream,
    /// `freshness` says how old their states are, and `strays` says for which missing namespaces messages came.
    pub(crate) fn new(
        namespaces: Arc<Namespaces>,
        trust: Arc<StreamTrust>,
        freshness: Arc<Freshness>,
        strays: Arc<Strays>,
        subjects: Subjects,
        limits: Live<WireLimits>,
    ) -> Self {
        Self {
            namespaces,
            trust,
            freshness,
            strays,
            subjects,
            limits,
            sample: None,
            heavy_turns: Arc::default(),
            hints: None,
        }
    }

    /// Returns an answerer whose answers are neither counted nor sampled.
    #[cfg(feature = "redis")]
    pub(super) fn uncounted(&self) -> Self {
        Self {
            sample: None,
            ..self.clone()
        }
    }

    /// Reads a request that came on a query subject.
    pub(super) fn read_query(
        &self,
        subject: &str,
        payload: &[u8],
    ) -> Result<(NamespaceName, QueryRequest), WireError> {
        let limits = self.limits.now();
        let name = self.subjects.parse_query(subject, limits.name_bytes_max)?;
        Ok((name, QueryRequest::decode(payload, &limits)?))
    }

    /// Answers a request about the namespace `name`. `reply_bytes_max` is the maximum length of the reply. A batch
    /// whose reply would be longer is given up early, before the reply takes much memory.
    pub(crate) fn answer_request(
        &self,
        name: &NamespaceName,
        request: &QueryRequest,
        reply_bytes_max: usize,
    ) -> Result<AnyReply, WireError> {
        Ok(match request {
            QueryRequest::Single(query) => AnyReply::Single(self.answer_one(name, query)?),
            QueryRequest::Batch(queries) => {
                let namespace = self.namespace(name)?;
                let mut replies = BatchReplies::new(queries.len(), reply_bytes_max);
                for query in queries {
                    replies.add(self, &namespace, query)?;
                }
                replies.finish()
            }
        })
    }

    /// Answers one query about the namespace `name`.
    pub(crate) fn answer_one(
        &self,
        name: &NamespaceName,
        query: &SingleQuery,
    ) -> Result<QueryReply, WireError> {
        self.reply(&*self.namespace(name)?, query, true)
    }

    /// Answers a query as [`Self::answer_one`] does, but lists holders with equal numbers of blocks in no particular
    /// order. That saves the comparison of their names.
    pub(crate) fn answer_unsorted(
        &self,
        name: &NamespaceName,
        query: &SingleQuery,
    ) -> Result<QueryReply, WireError> {
        self.reply(&*self.namespace(name)?, query, false)
    }

    /// Returns the namespaces from which requests are answered.
    pub(crate) fn namespaces(&self) -> &Namespaces {
        &self.namespaces
    }

    /// Returns the state of the event stream, which says which holders' states are confirmed.
    pub(crate) fn trust(&self) -> &StreamTrust {
        &self.trust
    }

    /// Returns the status of a namespace: facts about each holder, such as the last batch that has been applied.
    /// `batches_waiting` is the number of messages that wait for a lane.
    pub(crate) fn status(&self, namespace: &Namespace, batches_waiting: u64) -> StatusReply {
        // Read before the holders, which may lack a publisher that appears in between.
        let is_listed = self.trust.is_listed();
        let look = self.freshness.look(&namespace.name);
        status(namespace, &self.trust, &look, is_listed, batches_waiting)
    }

    /// Returns the present bounds on requests.
    pub(crate) fn limits(&self) -> WireLimits {
        WireLimits::clone(&self.limits.now())
    }

    /// Answers a request on a status subject. `batches_waiting` is the number of messages that wait for a lane, and
    /// `bytes_max` is the maximum length of the reply.
    pub(super) fn answer_status(
        &self,
        subject: &str,
        batches_waiting: u64,
        bytes_max: usize,
    ) -> Result<Answer, WireError> {
        let name = self
            .subjects
            .parse_status(subject, self.limits.now().name_bytes_max)?;
        let namespace = self.namespace(&name)?;
        let mut reply = self.status(&namespace, batches_waiting);
        let payload = encode_status(&mut reply, bytes_max);
        Ok(Answer {
            payload,
            kind: QueryKind::Status,
            namespace: name,
            reply: None,
        })
    }

    /// Returns the approximate length of the reply to a request on a status subject, in bytes.
    pub(super) fn status_bytes(&self, subject: &str) -> usize {
        let name = self
            .subjects
            .parse_status(subject, self.limits.now().name_bytes_max);
        let namespace = name.ok().and_then(|name| self.namespaces.get(&name));
        namespace.map_or(0, |namespace| {
            namespace.indexer.sizes().holders * HOLDER_STATUS_BYTES
        })
    }

    /// Answers a replica that asks for the roster, that is, the list of known holders.
    pub(super) fn answer_roster(&self, payload: &[u8]) -> Result<Vec<u8>, WireError> {
        roster::answer(&self.namespaces, &self.trust, payload)
    }

    fn reply(
        &self,
        namespace: &Namespace,
        query: &SingleQuery,
        is_sorted: bool,
    ) -> Result<QueryReply, WireError> {
        let spoken = spoken(namespace, &query.key)?;
        if let Some(positions) = &query.positions {
            return self.reply_with_bounds(namespace, query, positions);
        }
        let indexer = &namespace.indexer;
        let mut chain = self.chain(indexer, &spoken)?;
        let options = &query.options;
        let doubts = self.doubts(namespace, &query.key);
        let asked = QueryLength::of(query, chain.len(), indexer);
        let (searched, doubted) = self.searched(&doubts, query, is_sorted, asked, |search| {
            indexer.find_chain(&mut chain, search)
        });
        let mut reply = QueryReply {
            query_blocks: asked.blocks,
            block_size: indexer.settings().block_size.as_u32(),
            foreign_holders: foreign_holders(indexer, &spoken),
            ..searched
        };
        if options.explain {
            explain(query, indexer, &mut chain, asked.blocks, &mut reply.holders);
        }
        reply.predicted = self.predicted(namespace, options, &mut chain);
        self.add_ahead(&doubts, query, &mut reply, &doubted);
        if let Some(sample) = &self.sample {
            namespace.answers.count(reply.is_exact());
            sample.offer(&namespace.name, &mut chain, doubts.look.now_us);
        }
        Ok(reply)
    }

    /// Counts an answer that lists `holder`, if the holder is not exact. The counts tell what the holder's doubt costs.
    fn count_doubt(&self, holder: &HolderRecord, is_exact: bool) {
        if !is_exact && self.sample.is_some() {
            holder.status.doubtful_answers.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Makes the reply from a search. It has the found holders with their doubts, and the numbers of holders that the
    /// search may have missed. Also returns which of the found holders are in doubt about tiers beyond the device.
    fn searched(
        &self,
        doubts: &DoubtFacts<'_, '_>,
        query: &SingleQuery,
        is_sorted: bool,
        asked: QueryLength,
        mut search: impl FnMut(Search<'_>) -> Matches,
    ) -> (QueryReply, Doubted) {
        let (options, wanted) = (&query.options, doubts.search_of(query));
        let mut of_pairs = None;
        // No search sees a batch half applied, or the holders whose batches are being applied are known.
        let seen = search_whole(&doubts.look, || {
            let found = search(wanted);
            let hashes_pairs = |holder: &HolderRecord| {
                let stated = found.reasons(holder, &self.trust);
                stated.contains(DegradedReason::HashesPairs)
            };
            of_pairs = asked.bound_of_pairs().and_then(|bound| {
                OfPairs::find(&found, bound, hashes_pairs, |bound| {
                    search(Search {
                        usable_max: Some(bound),
                        ..wanted
                    })
                })
            });
            found
        });
        let matches = &seen.found;
        let mut doubted = Doubted::default();
        let reasons = |found: &Match<'_>, near: Option<[NearBlocks; 2]>| {
            let stated = matches.reasons(found.holder, &self.trust);
            let reasons = doubts.of(found.holder, stated, &seen, true);
            let asked = match stated.contains(DegradedReason::HashesPairs) {
                true => asked.of_pairs(),
                false => asked,
            };
            let concerning = doubted.judge(reasons, near, asked);
            self.count_doubt(found.holder, concerning.is_empty());
            concerning
        };
        let of_pairs = of_pairs.as_ref();
        let (mut holders, mut holders_total) = best_of(matches, of_pairs, options, is_sorted, reasons);
        holders_total += add_changing(&mut holders, &seen, of_pairs, options, &doubts.namespace.indexer);
        let listed = holders.iter().enumerate().map(|(place, holder)| Listed {
            worker: &holder.worker,
            rank: holder.rank,
            is_exact: holder.exact && !doubted.has(place),
        });
        let workers = options.workers.as_deref();
        let doubtful_holders = count_doubtful(&self.trust, doubts, &seen, workers, listed);
        let reply = QueryReply {
            v: PROTOCOL_VERSION,
            query_blocks: 0,
            block_size: 0,
            holders,
            holders_total,
            foreign_holders: 0,
            doubtful_holders,
            gathered: None,
            unseen_blocks_max: 0,
            behind_us: doubts.look.behind_us,
            predicted: Vec::new(),
        };
        (reply, doubted)
    }

    /// Makes the chain of the blocks for which `key` asks. Fails if the chain is longer than the limits allow.
    fn chain<'k>(&self, indexer: &PositionalIndexer, key: &'k QueryKey) -> Result<QueryChain<'k>, WireError> {
        let chain = QueryChain::new(key, indexer.settings().block_size);
        let chain = chain.map_err(|error| WireError::new(ErrorCode::TooLarge, error.to_string()))?;
        let (blocks, max) = (chain.len(), self.limits.now().query_depth_max);
        if blocks > max {
            let text =
                format!("the query has {blocks} blocks; at most {max} are allowed, ask for a shorter prefix");
            return Err(WireError::new(ErrorCode::TooLarge, text));
        }
        Ok(chain)
    }

    /// Answers a query that gives the hashes of only some blocks of a chain, at positions chosen by the client. For
    /// each holder, the reply has bounds on the number of leading blocks.
    fn reply_with_bounds(
        &self,
        namespace: &Namespace,
        query: &SingleQuery,
        positions: &[Position],
    ) -> Result<QueryReply, WireError> {
        let chain = SparseChain::new(&query.key, positions).map_err(DecodeError::from)?;
        let doubts = self.doubts(namespace, &query.key);
        let indexer = &namespace.indexer;
        let search = |search: Search<'_>| indexer.find_bounds(&chain, search);
        let asked = QueryLength::of(query, chain.query_blocks(), indexer);
        let (searched, _) = self.searched(&doubts, query, true, asked, search);
        let reply = QueryReply {
            query_blocks: asked.blocks,
            block_size: indexer.settings().block_size.as_u32(),
            unseen_blocks_max: chain.unseen_blocks_max(),
            ..searched
        };
        if self.sample.is_some() {
            namespace.answers.count(reply.is_exact());
        }
        Ok(reply)
    }
}

/// Returns the number of holders of the namespace that a query by `key` cannot find, because the hashes of their
/// engines are not the contract's chain.
fn foreign_holders(indexer: &PositionalIndexer, key: &QueryKey) -> u32 {
    match key {
        QueryKey::Tokens { .. } | QueryKey::BlockHashes(_) => indexer.foreign_holders(),
        QueryKey::SequenceHashes(_) | QueryKey::LineageHashes(_) => 0,
    }
}

/// Adds the holders whose batches were applied during the search, so that the search may have missed them. Nothing is
/// known about their blocks. Returns how many there are, including those for which the limit leaves no room.
fn add_changing(
    holders: &mut Vec<HolderMatch>,
    seen: &Seen,
    of_pairs: Option<&OfPairs>,
    options: &QueryOptions,
    indexer: &PositionalIndexer,
) -> u32 {
    let is_found = |id: &HolderId| {
        let mut counted = counted(&seen.found, of_pairs, options);
        counted.any(|found| found.holder.id == *id)
    };
    let missed = seen.missed(options.workers.as_deref(), is_found);
    let room = most_of(options).saturating_sub(holders.len());
    let added = missed.iter().take(room).map(|id| HolderMatch {
        device_blocks: options.tiers.then_some(0),
        host_blocks: options.tiers.then_some(0),
        exact: false,
        degraded: DegradedReasons::of(DegradedReason::Changing),
        ..HolderMatch::new(id.worker.clone(), id.rank, 0).with_profile(profile_of(indexer, id))
    });
    holders.extend(added);
    saturating_u32(missed.len())
}

/// Returns the address and labels of a holder by its name. They are empty if the index does not have the holder.
fn profile_of(indexer: &PositionalIndexer, id: &HolderId) -> Profile {
    let ranks = indexer.holders_of(std::slice::from_ref(&id.worker));
    let holder = ranks.iter().find(|holder| holder.id == *id);
    holder.map(|holder| holder.status.profile()).unwrap_or_default()
}

/// Returns the maximum number of holders that the options allow in a reply.
fn most_of(options: &QueryOptions) -> usize {
    let limit = options.limit.map(usize::try_from);
    limit.and_then(Result::ok).unwrap_or(usize::MAX)
}

/// Returns the found holders that have at least the number of blocks that the query's options demand. `of_pairs` has what
/// differs for holders that hash pairs of tokens.
fn counted<'a>(
    matches: &'a Matches,
    of_pairs: Option<&'a OfPairs>,
    options: &QueryOptions,
) -> impl Iterator<Item = Match<'a>> + use<'a> {
    let blocks_min = options.min_blocks.max(1);
    let found = matches.holders().filter_map(move |found| match of_pairs {
        Some(of_pairs) => of_pairs.again(found),
        None => Some(found),
    });
    found.filter(move |found| found.matched_blocks_max >= blocks_min)
}

/// Returns the holders for a reply, best first, at most as many as the query's options allow. Also returns how many
/// holders there would be without that limit. Unless `is_sorted`, holders with equal numbers of blocks are in no
/// particular order. `of_pairs` is as in [`counted`]. `reasons` also gets a holder's blocks in near tiers.
fn best_of(
    matches: &Matches,
    of_pairs: Option<&OfPairs>,
    options: &QueryOptions,
    is_sorted: bool,
    mut reasons: impl FnMut(&Match<'_>, Option<[NearBlocks; 2]>) -> DegradedReasons,
) -> (Vec<HolderMatch>, u32) {
    let mut found: Vec<_> = counted(matches, of_pairs, options).collect();
    // The search has found the deepest first.
    if is_sorted || of_pairs.is_some() {
        found.sort_unstable_by(|one, other| place(one).cmp(&place(other)));
    }
    let total = saturating_u32(found.len());
    found.truncate(most_of(options));
    let holders = found.iter().map(|found| {
        let near = match of_pairs {
            Some(of_pairs) => of_pairs.near_blocks(matches, found.holder),
            None => matches.near_blocks(found.holder),
        };
        let degraded = reasons(found, near);
        let near = near.filter(|_| options.tiers);
        let is_bounded = found.matched_blocks_max > found.matched_blocks;
        let id = &found.holder.id;
        HolderMatch {
            matched_blocks_max: is_bounded.then_some(found.matched_blocks_max),
            usable_blocks: differing(found.usable_blocks, found.matched_blocks),
            device_blocks: near.map(|[device, _]| device.matched_blocks),
            host_blocks: near.map(|[_, host]| host.matched_blocks),
            device_usable_blocks: near
                .and_then(|[device, _]| differing(device.usable_blocks, device.matched_blocks)),
            host_usable_blocks: near.and_then(|[_, host]| differing(host.usable_blocks, host.matched_blocks)),
            exact: degraded.is_empty(),
            degraded,
            ..HolderMatch::new(id.worker.clone(), id.rank, found.matched_blocks)
                .with_profile(found.holder.status.profile())
        }
    });
    (holders.collect(), total)
}

/// Returns the number of blocks that a request can reuse, if it differs from the number that the holder has
/// (`matched`). `None` if both are equal, because replies then send one number only.
fn differing(usable: u32, matched: u32) -> Option<u32> {
    (usable != matched).then_some(usable)
}

fn place<'a>(found: &Match<'a>) -> ReplyOrder<'a> {
    let id = &found.holder.id;
    let blocks = [
        found.usable_blocks,
        found.matched_blocks,
        found.matched_blocks_max,
    ];
    ReplyOrder::new(blocks, &id.worker, id.rank)
}

/// Minimum number of bytes that a holder takes in a reply: its four keys, and the shortest values.
const HOLDER_BYTES_MIN: usize = 39;

/// Approximate number of bytes that a holder takes in the reply to a status request.
const HOLDER_STATUS_BYTES: usize = 100;

/// Adds two facts to every holder: the first block that it lacks, and the reason why a request cannot reuse more of
/// its blocks. Neighboring holders with the same number of blocks lack the same block, so it is looked up once for
/// them. `blocks` is the number of the query's blocks. `chain` can have fewer: the token after the last block may not
/// be known.
fn explain(
    query: &SingleQuery,
    indexer: &PositionalIndexer,
    chain: &mut QueryChain<'_>,
    blocks: u32,
    holders: &mut [HolderMatch],
) {
    let usable_max = usable_max(query, indexer).unwrap_or(u32::MAX);
    let usable_max_of_pairs = usable_max_of_pairs(query, indexer);
    let found = indexer.find_chain(chain, Search::default());
    let of_pairs = of_pairs(&found);
    let mut last: Option<(u32, Option<DropOut>)> = None;
    for holder in holders {
        let depth = holder.matched_blocks;
        let dropped_out = match &last {
            Some((same, dropped_out)) if *same == depth => dropped_out.clone(),
            _ => {
                let position = usize::try_from(depth).unwrap_or(usize::MAX);
                let others = found.holders().filter(|other| other.matched_blocks > depth);
                (position < chain.len()).then(|| DropOut {
                    position: depth,
                    lineage_hash: chain.key(position),
                    other_holders: saturating_u32(others.count()),
                })
            }
        };
        holder.dropped_out.clone_from(&dropped_out);
        let limit = match holder.limit(blocks, usable_max) {
            // The holder has all blocks that the query's tokens determine.
            Some(Limit::FullAttention) if dropped_out.is_none() => Some(Limit::LastToken),
            limit => limit,
        };
        let is_at_the_end = of_pairs.contains(&(&holder.worker, holder.rank))
            && holder.usable() == usable_max_of_pairs
            && usable_max_of_pairs < blocks;
        holder.limited_by = if is_at_the_end {
            Some(Limit::LastToken)
        } else {
            limit
        };
        last = Some((depth, dropped_out));
    }
}

/// Returns the kind of a batch's first query. The batch is counted under this kind.
fn kind_of_batch(queries: &[SingleQuery]) -> QueryKind {
    queries
        .first()
        .map_or(QueryKind::SequenceHashes, |query| kind_of(&query.key))
}

/// Returns the kind of the first query of a request, and the number of queries in the request.
pub(crate) fn described(request: &QueryRequest) -> (QueryKind, usize) {
    match request {
        QueryRequest::Single(query) => (kind_of(&query.key), 1),
        QueryRequest::Batch(queries) => (kind_of_batch(queries), queries.len()),
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

#[cfg(test)]
mod tests;
