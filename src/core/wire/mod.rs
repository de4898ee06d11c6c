//! The wire contract, version 1: MessagePack over NATS.
//!
//! `deploy/wire-contract.md` describes the same contract for people who write a publisher or a router in another
//! language; this module is its implementation. The contract in short:
//!
//! | subject | who sends | payload |
//! |---|---|---|
//! | `PREFIX.v1.events.NAMESPACE.WORKER` | publisher | one [`EventBatch`] |
//! | `PREFIX.v1.query.NAMESPACE` | router, request-reply | a [`QueryRequest`], answered by [`QueryReply`] or [`BatchReply`] |
//! | `PREFIX.v1.status.NAMESPACE` | anyone, request-reply | empty, answered by [`StatusReply`] |
//! | `PREFIX.v1.status.~all` | gateway, request-reply | empty, answered by [`NamespacesReply`] |
//! | `PREFIX.v1.resync.NAMESPACE.WORKER.RANK` | daemon, request-reply | a [`ResyncRequest`], answered by [`ResyncChunk`]s |
//! | `PREFIX.v1.shards.query.NAMESPACE` | gathering clients, gateways | as for queries, answered by every [`Shard`] |
//! | `PREFIX.v1.shards.status.NAMESPACE` | gathering clients, gateways | as for status, answered by every [`Shard`] |
//! | `PREFIX.v1.outcome.NAMESPACE` | router | one [`OutcomeReport`]; a [`ReportReply`], if the message names a subject for it |
//! | `PREFIX.v1.hint.NAMESPACE` | router | one [`HintReport`]; a [`ReportReply`], if the message names a subject for it |
//! | `PREFIX.v1.roster.GROUP` | a starting replica, request-reply | one [`RosterRequest`], answered by [`RosterReply`] |
//!
//! Daemons without a shard, and gateways, answer on the subjects without `shards`. Sharded daemons answer only on the
//! subjects with `shards`. So no request is answered twice. Every reply of a sharded daemon has the header
//! [`SHARD_HEADER`].
//!
//! Every payload is one MessagePack map with text keys. The key `v` gives the version of the contract; if it is
//! absent, the version is 1. A decoder rejects a version that it does not know. It ignores keys that it does not
//! know, so that the contract can grow.
//!
//! - A list of hashes is an array, or one `bin` blob. In the blob, a hash is a little-endian u64; a lineage hash is
//!   16 bytes, big-endian.
//! - A list of tokens is an array, or one `bin` blob of little-endian u32.
//!
//! # Compressed chains
//!
//! A sequence or lineage hash names its whole prefix, so a query need not send every hash of a chain. A query with
//! `positions` sends the hashes of chosen blocks of one chain. Suppose that a holder has the chosen block at position
//! p, but not the next chosen block, at position q. The holder then holds between p + 1 and q leading blocks:
//! `matched_blocks` is the lower bound and `matched_blocks_max` the upper. The holder held a number within these bounds
//! at some instant between the query's arrival and its reply. A holder without any chosen block is not in the reply.
//! Such a holder holds at most `unseen_blocks_max` blocks, which is the first chosen position. To refine the bounds,
//! query these workers again with more positions, from `matched_blocks` to `matched_blocks_max` − 1. A query with all
//! of these positions gives equal bounds.
//!
//! A sequence hash alone does not tell its parent. If the query does not send the hash of the parent, the daemon looks
//! a block up by the block's position and the 64 bits of the block's hash. If hashes are not a chain, having a block
//! proves nothing about the blocks before it. The lower bound then ends at the first gap in the sent positions, counted
//! from position 0.
//!
//! Decoding never recurses and never allocates more than the limits in [`WireLimits`] allow. A length is checked
//! against its limit and against the bytes that are left, before memory is taken for it.

mod admin;
mod batch;
mod cursor;
mod entries;
mod error;
mod event;
mod hint;
mod human;
mod limits;
mod model;
mod namespaces;
mod outcome;
mod positions;
mod profile;
mod profile_fields;
mod query;
mod query_field;
mod reader;
mod reasons;
mod reply;
mod report;
mod resumable;
mod resync;
mod roster;
mod said_once;
mod shard;
mod status;
mod subject;
mod tier;
mod writer;

#[cfg(test)]
mod tests;

pub use admin::{AdminCommand, AdminHolder, AdminReply, AdminRequest};
pub use batch::EventBatch;
pub use cursor::BatchCursor;
pub use error::{DecodeError, ERROR_CODE_HEADER, ERROR_HEADER, ErrorCode, PositionsError, WireError};
pub use event::{BlockContent, BlockNames, Event, RUN_BYTES, RemovedBlocks, StoredBlocks};
pub use hint::{HINTS_MAX, Hint, HintReport};
pub use limits::WireLimits;
pub use model::{
    DEFAULT_TENANT, ModelKey, instance_among, instance_of_worker, is_pool, pool_of_instance, usual_number,
    worker_of_instance, workers_of_instance,
};
pub use namespaces::NamespacesReply;
pub use outcome::{OUTCOMES_MAX, Outcome, OutcomeReport};
pub(crate) use positions::check_positions;
pub use profile::{Address, LAYERS_LABEL, Labels, Profile, ProfileError, TROUBLE_LABEL};
pub use query::{QUERY_FIELDS, QueryField, QueryFields, QueryKey, QueryOptions, QueryRequest, SingleQuery};
pub use query_field::FieldKind;
pub use reader::{Reader, Value};
pub use reasons::{DegradedReason, DegradedReasons};
pub use reply::{
    BatchReply, DropOut, ErrorBody, Gathered, HolderMatch, Limit, PREDICTED_MAX, PredictedHolder, QueryReply,
    QueryResult, ReplyOrder,
};
pub use report::ReportReply;
pub use resumable::{Resumable, ResumableBlocks};
pub use resync::{ResyncAnswerKind, ResyncChunk, ResyncRequest};
pub use roster::{ROSTER_PAGE_MAX, RosterHolder, RosterKey, RosterReply, RosterRequest};
pub use shard::{SHARD_HEADER, SHARDS_MAX, Shard, ShardError};
pub use status::{HolderStatusReply, StatusReply};
pub use subject::{HolderId, NameError, NamespaceName, PROBE_NAME, Rank, SubjectError, Subjects, WorkerName};
pub use tier::{Tier, UnknownTier};

/// Version of the contract that this build uses: the `v1` in subjects and the `v` in payloads.
pub const PROTOCOL_VERSION: u64 = 1;

/// Maximum silence of a publisher. After that time, the publisher sends a heartbeat.
pub const HEARTBEAT_INTERVAL: std::time::Duration = std::time::Duration::from_secs(1);
