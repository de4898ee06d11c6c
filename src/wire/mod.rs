//! The wire contract, version 1: MessagePack over NATS.
//!
//! `deploy/README.md` describes the same contract for people who write a publisher or a router in
//! another language; this module is its implementation. The contract in short:
//!
//! | subject | who sends | payload |
//! |---|---|---|
//! | `PREFIX.v1.events.NAMESPACE.WORKER` | publisher | one [`EventBatch`] |
//! | `PREFIX.v1.query.NAMESPACE` | router, request-reply | a [`QueryRequest`], answered by [`QueryReply`] or [`BatchReply`] |
//! | `PREFIX.v1.status.NAMESPACE` | anyone, request-reply | empty, answered by [`StatusReply`] |
//! | `PREFIX.v1.resync.NAMESPACE.WORKER.RANK` | daemon, request-reply | a [`ResyncRequest`], answered by [`ResyncChunk`]s |
//! | `PREFIX.v1.shards.query.NAMESPACE`, `PREFIX.v1.shards.status.NAMESPACE` | gathering clients, gateways | as above, answered by every [`Shard`] |
//! | `PREFIX.v1.roster.GROUP` | a starting replica, request-reply | one [`RosterRequest`], answered by [`RosterReply`] |
//!
//! Daemons without a shard, and gateways, answer on the plain subjects; sharded daemons answer on the shards' subjects only, so
//! that no request is answered twice. Every reply of a sharded daemon has the header [`SHARD_HEADER`].
//!
//! Every payload is one MessagePack map with text keys. `v` names the version of the contract and may be
//! left out (it is 1 then); a decoder rejects a version it does not know and ignores keys it does not know,
//! so that the contract can grow. A list of hashes is either one `bin` blob (little-endian u64, or 16 bytes
//! big-endian for a lineage hash) or an array; a list of tokens is a `bin` blob of little-endian u32, or an array.
//!
//! # Compressed chains
//!
//! A sequence or lineage hash names its whole prefix, so a query need not send all of them. With `positions`, the hashes are those of
//! blocks chosen from one chain, and a holder that has the block at position p, but not the next one chosen, at position q, holds
//! between p + 1 and q leading blocks: `matched_blocks` is the lower bound and `matched_blocks_max` the upper. Each pair contains
//! the number that the holder held at some instant between the query's arrival and its reply. Who has none of the blocks chosen is
//! not found, and holds at most `unseen_blocks_max`: the first position chosen. To refine, ask for positions between the bounds,
//! `matched_blocks` to `matched_blocks_max` − 1, of these workers; a whole stretch of them closes the gap.
//!
//! A sequence hash without the one before it says nothing about its parent. It is looked up by its position and its own fragment:
//! 51 to 59 bits instead of twice as many. Where hashes are no chain, so that a block proves nothing about those before it, the
//! lower bound is what was sent without a gap from position 0 on.
//!
//! Decoding never recurses and never allocates more than the limits in [`WireLimits`] allow: a length is
//! checked against its limit and against the bytes that are really there before memory is taken for it.

mod batch;
mod error;
mod limits;
mod list;
mod name;
mod positions;
mod query;
mod reader;
mod reply;
mod resync;
mod roster;
mod shard;
mod subject;
mod writer;

#[cfg(test)]
mod tests;

pub use batch::{
    BlockContent, BlockNames, Event, EventBatch, RemovedBlocks, StoredBlocks, Tier, UnknownTier,
};
pub use error::{DecodeError, ERROR_CODE_HEADER, ERROR_HEADER, ErrorCode, WireError};
pub use limits::WireLimits;
pub use name::{HolderId, NameError, NamespaceName, Rank, WorkerName};
pub use positions::{PositionsError, check_positions};
pub use query::{QueryKey, QueryOptions, QueryRequest, SingleQuery};
pub use reply::{
    BatchReply, DropOut, ErrorBody, Gathered, HolderMatch, HolderStatusReply, LineageBytes, QueryReply,
    QueryResult, StatusReply,
};
pub use resync::{ResyncAnswerKind, ResyncChunk, ResyncRequest};
pub use roster::{ROSTER_PAGE_MAX, RosterHolder, RosterKey, RosterReply, RosterRequest};
pub use shard::{SHARD_HEADER, SHARDS_MAX, Shard, ShardError};
pub use subject::{SubjectError, Subjects};

/// The version of the contract that this build speaks; the `v1` in subjects and the `v` in payloads.
pub const PROTOCOL_VERSION: u64 = 1;
