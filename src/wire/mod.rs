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
//!
//! Every payload is one MessagePack map with text keys. `v` names the version of the contract and may be
//! left out (it is 1 then); a decoder rejects a version it does not know and ignores keys it does not know,
//! so that the contract can grow. A list of hashes is either one `bin` blob (little-endian u64, or 16 bytes
//! big-endian for a lineage hash) or an array; a list of tokens is a `bin` blob of little-endian u32, or an array.
//!
//! Decoding never recurses and never allocates more than the limits in [`WireLimits`] allow: a length is
//! checked against its limit and against the bytes that are really there before memory is taken for it.

mod batch;
mod error;
mod limits;
mod list;
mod name;
mod query;
mod reader;
mod reply;
mod subject;
mod writer;

#[cfg(test)]
mod tests;

pub use batch::{BlockContent, BlockNames, Event, EventBatch, RemovedBlocks, StoredBlocks, Tier};
pub use error::{DecodeError, ERROR_CODE_HEADER, ERROR_HEADER, ErrorCode, WireError};
pub use limits::WireLimits;
pub use name::{HolderId, NameError, NamespaceName, Rank, WorkerName};
pub use query::{QueryKey, QueryOptions, QueryRequest, SingleQuery};
pub use reply::{
    BatchReply, DropOut, ErrorBody, HolderMatch, HolderStatusReply, LineageBytes, QueryReply, QueryResult,
    StatusReply,
};
pub use subject::{SubjectError, Subjects};

/// The version of the contract that this build speaks; the `v1` in subjects and the `v` in payloads.
pub const PROTOCOL_VERSION: u64 = 1;
