//! Estimate of the work of a request, and answering of heavy requests in pieces.

use std::time::Instant;

use crate::responder::reply_too_large;
use kvatlas_core::index::{Namespace, PositionalIndexer};
use kvatlas_core::wire::{
    BatchReply, NamespaceName, PROTOCOL_VERSION, QueryKey, QueryRequest, QueryResult, SingleQuery, WireError,
};

use super::super::heavy::{HeavyRequest, PIECE};
use super::{Answerer, AnyReply, HOLDER_BYTES_MIN};

#[cfg(test)]
mod tests;

/// Approximate number of blocks after which a search looks at each holder again, for estimates. A search looks at
/// holders where the chains of the index branch.
const BLOCKS_PER_LOOK: usize = 64;
/// Approximate number of ranks of a worker, for estimates.
const RANKS: usize = 8;

impl Answerer {
    /// Registers a request to wait for its turn, if it is heavy (takes long). Returns `None` if the request is not
    /// heavy, or if its namespace is unknown.
    ///
    /// # Errors
    ///
    /// An error if too much work waits.
    pub(crate) fn enter_if_heavy(
        &self,
        name: &NamespaceName,
        request: &QueryRequest,
    ) -> Result<Option<HeavyRequest>, WireError> {
        let Some(namespace) = self.namespaces.get(name) else {
            return Ok(None);
        };
        let work = match request {
            QueryRequest::Batch(queries) => work_of(&namespace.indexer, queries),
            // The search of a single query is one piece, however long it takes.
            QueryRequest::Single(_) => 0,
        };
        self.heavy_turns.enter_if_heavy(name, work)
    }

    /// Answers a heavy request (one that takes long) in pieces, when its turn comes. Between the pieces, other requests
    /// can be answered.
    pub(crate) async fn answer_in_pieces(
        &self,
        name: &NamespaceName,
        request: &QueryRequest,
        reply_bytes_max: usize,
        heavy: &HeavyRequest,
    ) -> Result<AnyReply, WireError> {
        let _turn = heavy.turn().await;
        let namespace = self.namespace(name)?;
        let mut piece = WorkPiece(Instant::now());
        let QueryRequest::Batch(queries) = request else {
            return self.answer_request(name, request, reply_bytes_max);
        };
        let mut replies = BatchReplies::new(queries.len(), reply_bytes_max);
        for query in queries {
            replies.add(self, &namespace, query)?;
            piece.end().await;
        }
        Ok(replies.finish())
    }
}

/// Time at which the present piece of a heavy request began. A heavy request is answered in pieces, so that others need
/// not wait.
struct WorkPiece(Instant);

impl WorkPiece {
    /// Ends the piece if it has lasted long enough: lets other tasks run, and then begins the next piece.
    async fn end(&mut self) {
        if self.0.elapsed() >= PIECE {
            tokio::task::yield_now().await;
            self.0 = Instant::now();
        }
    }
}

/// Replies so far to the queries of a batch.
pub(super) struct BatchReplies {
    results: Vec<QueryResult>,
    holders: usize,
    bytes_max: usize,
}

impl BatchReplies {
    pub(super) fn new(queries: usize, bytes_max: usize) -> Self {
        Self {
            results: Vec::with_capacity(queries),
            holders: 0,
            bytes_max,
        }
    }

    /// Answers the next query of the batch. Fails if all replies together would be longer than a reply can be.
    pub(super) fn add(
        &mut self,
        answerer: &Answerer,
        namespace: &Namespace,
        query: &SingleQuery,
    ) -> Result<(), WireError> {
        self.results.push(match answerer.reply(namespace, query, true) {
            Ok(reply) => {
                self.holders += reply.holders.len();
                QueryResult::Reply(reply)
            }
            Err(error) => QueryResult::Error((&error).into()),
        });
        let bytes = self.holders.saturating_mul(HOLDER_BYTES_MIN);
        match bytes > self.bytes_max {
            true => Err(reply_too_large(bytes, self.bytes_max)),
            false => Ok(()),
        }
    }

    pub(super) fn finish(self) -> AnyReply {
        let mut reply = BatchReply {
            v: PROTOCOL_VERSION,
            results: self.results,
        };
        reply.say_profiles_once();
        AnyReply::Batch(reply)
    }
}

/// Returns an estimate of the work of queries: the number of looks at holders that they cost the index. The estimate is
/// made before any query is answered.
fn work_of(indexer: &PositionalIndexer, queries: &[SingleQuery]) -> u64 {
    let (holders, size) = (
        indexer.holder_count(),
        indexer.settings().block_size.as_u32() as usize,
    );
    let work = queries.iter().map(|query| {
        let blocks = match &query.key {
            QueryKey::Tokens { tokens, .. } => tokens.len() / size.max(1),
            QueryKey::BlockHashes(hashes) => hashes.len(),
            QueryKey::SequenceHashes(hashes) => hashes.len(),
            QueryKey::LineageHashes(hashes) => hashes.len(),
        };
        let asked = query.options.workers.as_ref().map_or(holders, |workers| {
            holders.min(workers.len().saturating_mul(RANKS))
        });
        // Each of the chosen blocks is looked for by itself.
        let looks = match &query.positions {
            Some(positions) => 1 + positions.len(),
            None => 1 + blocks / BLOCKS_PER_LOOK,
        };
        let times = 1 + usize::from(query.options.explain) + usize::from(query.options.tiers);
        asked
            .saturating_mul(looks)
            .saturating_mul(times)
            .saturating_add(blocks)
    });
    work.fold(0_u64, |sum, work| sum.saturating_add(work as u64))
}
