//! Replies: what the daemon answers.

use serde::{Deserialize, Serialize};

use crate::hash::PositionalLineageHash;
use crate::tracking::DegradedReasons;

use super::error::WireError;
use super::name::{Rank, WorkerName};

/// A lineage hash in a reply: 16 bytes, big-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LineageBytes(#[serde(with = "serde_bytes")] pub [u8; 16]);

impl From<PositionalLineageHash> for LineageBytes {
    fn from(hash: PositionalLineageHash) -> Self {
        Self(hash.to_be_bytes())
    }
}

/// Where a holder dropped out of a query.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropOut {
    /// Position of the first block that the holder does not have.
    pub position: u32,
    /// That block's lineage hash.
    pub lineage_hash: LineageBytes,
    /// How many holders do have that block.
    pub other_holders: u32,
}

/// One holder of a prefix.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderMatch {
    /// The worker.
    pub worker: WorkerName,
    /// Its data-parallel rank.
    pub rank: Rank,
    /// How many leading blocks of the query it holds, without a hole; of a compressed chain, at least so many.
    pub matched_blocks: u32,
    /// Of a compressed chain: how many it holds at most. Absent where that is `matched_blocks`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matched_blocks_max: Option<u32>,
    /// Whether the daemon knows the holder's state for certain. Where it does not, `degraded` says why.
    pub exact: bool,
    /// Why the state is not certain; absent where it is.
    #[serde(default, skip_serializing_if = "DegradedReasons::is_empty")]
    pub degraded: DegradedReasons,
    /// Where the holder dropped out; only with `explain`, and absent where it holds the whole query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped_out: Option<DropOut>,
}

/// What a reply was gathered from; only in replies that a gateway or a gathering client put together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gathered {
    /// How many shards there are.
    pub shards: u32,
    /// The shards, from 0, that did not answer in time: nothing is known of their workers. Absent where all answered.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<u32>,
}

/// The answer to one query.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueryReply {
    /// Version of the contract.
    pub v: u64,
    /// How many blocks were asked for; of a compressed chain, how many it stands for.
    pub query_blocks: u32,
    /// The holders, most matched blocks first, then by the upper bound, then by worker and rank.
    pub holders: Vec<HolderMatch>,
    /// How many holders matched before `limit` cut the list.
    pub holders_total: u32,
    /// How many holders of the namespace a query in this form cannot find, because their engines' hashes are not the
    /// contract's chain; ask by the engine's own hashes, or set the namespace to `recompute`. Absent where it is 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub foreign_holders: u32,
    /// Which shards the reply was gathered from; absent in a daemon's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gathered: Option<Gathered>,
    /// Of a compressed chain: how many leading blocks a holder that has none of the blocks chosen can hold at most, which is the
    /// first position chosen. Such holders are not found. Absent where it is 0.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub unseen_blocks_max: u32,
}

impl HolderMatch {
    /// The upper bound on the leading blocks that it holds; `matched_blocks` where that is exact.
    pub fn blocks_max(&self) -> u32 {
        self.matched_blocks_max.unwrap_or(self.matched_blocks)
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature is serde's")]
fn is_zero(value: &u32) -> bool {
    *value == 0
}

/// An error within a reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// The number; see [`ErrorCode`](super::ErrorCode).
    pub code: u16,
    /// What to change.
    pub text: String,
}

impl From<&WireError> for ErrorBody {
    fn from(error: &WireError) -> Self {
        Self {
            code: error.code.as_u16(),
            text: error.text.clone(),
        }
    }
}

/// The answer to one query of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueryResult {
    /// It was answered.
    Reply(QueryReply),
    /// It was not.
    Error(ErrorBody),
}

/// The answers to a batch of queries, in their order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchReply {
    /// Version of the contract.
    pub v: u64,
    /// One answer a query.
    pub results: Vec<QueryResult>,
}

/// How far the daemon has followed one holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderStatusReply {
    /// The worker.
    pub worker: WorkerName,
    /// Its data-parallel rank.
    pub rank: Rank,
    /// Epoch of the last batch applied.
    pub epoch: u64,
    /// Number of the last batch applied.
    pub seq: u64,
    /// Blocks that it holds.
    pub blocks: u64,
    /// Stored events that wait for their parent.
    pub parked_events: u32,
    /// Whether the engine's hashes are not the contract's chain.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub foreign_chain: bool,
    /// Whether its state is certain.
    pub exact: bool,
    /// Why it is not; absent where it is.
    #[serde(default, skip_serializing_if = "DegradedReasons::is_empty")]
    pub degraded: DegradedReasons,
}

/// The answer on a status subject.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusReply {
    /// Version of the contract.
    pub v: u64,
    /// Tokens in a block.
    pub block_size: u32,
    /// Distinct blocks that some holder can be asked for.
    pub distinct_blocks: u64,
    /// Batches, of all namespaces, that have been received but not applied yet.
    pub batches_waiting: u64,
    /// All holders, by worker and rank.
    pub holders: Vec<HolderStatusReply>,
    /// Which shards the reply was gathered from; absent in a daemon's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gathered: Option<Gathered>,
}

impl QueryReply {
    /// The reply as a MessagePack map.
    pub fn encode(&self) -> Result<Vec<u8>, rmp_serde::encode::Error> {
        // About what it takes, so that it is allocated once.
        let mut payload = Vec::with_capacity(64 + 80 * self.holders.len());
        rmp_serde::encode::write_named(&mut payload, self)?;
        Ok(payload)
    }

    /// Decodes a reply.
    pub fn decode(payload: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        rmp_serde::from_slice(payload)
    }
}

impl BatchReply {
    /// The reply as a MessagePack map.
    pub fn encode(&self) -> Result<Vec<u8>, rmp_serde::encode::Error> {
        rmp_serde::to_vec_named(self)
    }

    /// Decodes a reply.
    pub fn decode(payload: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        rmp_serde::from_slice(payload)
    }
}

impl StatusReply {
    /// The reply as a MessagePack map.
    pub fn encode(&self) -> Result<Vec<u8>, rmp_serde::encode::Error> {
        rmp_serde::to_vec_named(self)
    }

    /// Decodes a reply.
    pub fn decode(payload: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        rmp_serde::from_slice(payload)
    }
}
