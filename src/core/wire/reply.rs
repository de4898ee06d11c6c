//! The daemon's replies to queries.

use std::cmp::Reverse;

use serde::Deserialize;

use crate::hash::PositionalLineageHash;
use crate::worded;

use super::entries::{Entries, Message, serialize_entries};
use super::error::WireError;
use super::model::is_pool;
use super::profile::{Address, LAYERS_LABEL, Labels, Profile};
use super::profile_fields::{lenient_address, lenient_labels, write_profile};
use super::reasons::{DegradedReason, DegradedReasons};
use super::subject::{Rank, WorkerName};
use super::tier::Tier;
use super::writer::{encode, encode_into};

/// The point at which a holder dropped out of a query.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct DropOut {
    /// Position of the first block that the holder does not have.
    pub position: u32,
    /// The block's lineage hash.
    pub lineage_hash: PositionalLineageHash,
    /// Number of other holders that have the block.
    pub other_holders: u32,
}

worded! {
    /// The reason why a request can reuse no more blocks of a holder.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Limit {
        /// Full attention: the holder lacks the next block.
        FullAttention => "full_attention",
        /// A sliding window, whose blocks at that place are gone.
        Window => "window",
        /// A recurrent state, which the holder does not have at that place.
        State => "state",
        /// A sliding window or a recurrent state: the model has both, or its layers are not known.
        WindowOrState => "window_or_state",
        /// The last token of the prompt, which a request always computes.
        LastToken => "last_token",
        /// A reason that this release does not know.
        #[serde(other)]
        Other => "other",
    }
}

/// One holder of a prefix of the query.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct HolderMatch {
    /// Name of the worker.
    pub worker: WorkerName,
    /// The worker's data-parallel rank.
    pub rank: Rank,
    /// Number of leading blocks of the query that the holder has, without a hole. For a compressed chain this is the
    /// lower bound.
    pub matched_blocks: u32,
    /// The upper bound for a compressed chain. Absent if it equals `matched_blocks`.
    #[serde(default)]
    pub matched_blocks_max: Option<u32>,
    /// Number of leading blocks that a request can reuse: up to the last resumable block within `matched_blocks` that
    /// ends before the prompt's last token. Absent if it equals `matched_blocks`. For a compressed chain this is a
    /// lower bound.
    #[serde(default)]
    pub usable_blocks: Option<u32>,
    /// Number of the `matched_blocks` that the holder has on the device, up to the first block that is elsewhere.
    /// Only with `tiers`.
    #[serde(default)]
    pub device_blocks: Option<u32>,
    /// The same as `device_blocks`, for device and host together.
    #[serde(default)]
    pub host_blocks: Option<u32>,
    /// Number of the `device_blocks` that a request can reuse, as `usable_blocks`. Absent if it equals
    /// `device_blocks`.
    #[serde(default)]
    pub device_usable_blocks: Option<u32>,
    /// Number of the `host_blocks` that a request can reuse, as `usable_blocks`. Absent if it equals `host_blocks`.
    #[serde(default)]
    pub host_usable_blocks: Option<u32>,
    /// Whether `matched_blocks` and the other facts about the holder are known for certain. If not, `degraded` gives
    /// the reasons. A reason about a tier beyond the device leaves the facts about nearer tiers certain: see
    /// [`Self::is_exact_up_to`].
    pub exact: bool,
    /// The reasons for which the state is not certain. Absent if the state is certain.
    #[serde(default)]
    pub degraded: DegradedReasons,
    /// The point at which the holder dropped out. Only with `explain`, and absent if the holder has the whole query.
    #[serde(default)]
    pub dropped_out: Option<DropOut>,
    /// The reason why no more blocks are usable. Only with `explain`, and absent if the whole query is usable.
    #[serde(default)]
    pub limited_by: Option<Limit>,
    /// The address for requests to the holder. Absent if it is not known.
    #[serde(default, deserialize_with = "lenient_address")]
    pub address: Option<Address>,
    /// The holder's labels.
    #[serde(default, deserialize_with = "lenient_labels")]
    pub labels: Labels,
}

/// The shards that a reply was gathered from. Only in replies that a gateway or a gathering client put together.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Gathered {
    /// Number of shards.
    pub shards: u32,
    /// The shards, numbered from 0, that did not answer in time. Nothing is known of their workers. Absent if all
    /// answered.
    #[serde(default)]
    pub missing: Vec<u32>,
}

impl Gathered {
    /// The missing shards in words: `shard 2 of 3`, or `shards 0 and 2 of 3`.
    pub fn missing_in_words(&self) -> String {
        let shards = self.shards;
        match self.missing.as_slice() {
            [] => format!("no shard of {shards}"),
            [one] => format!("shard {one} of {shards}"),
            [others @ .., last] => {
                let others: Vec<String> = others.iter().map(u32::to_string).collect();
                format!("shards {} and {last} of {shards}", others.join(", "))
            }
        }
    }
}

/// The answer to one query.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct QueryReply {
    /// Version of the contract.
    pub v: u64,
    /// Number of blocks that were asked for. For a compressed chain, the number of blocks that it stands for.
    pub query_blocks: u32,
    /// Tokens in a block of the namespace. 0 or absent if the daemon does not tell it.
    #[serde(default)]
    pub block_size: u32,
    /// The holders, in the order of [`ReplyOrder`].
    pub holders: Vec<HolderMatch>,
    /// Number of holders that matched before `limit` cut the list.
    pub holders_total: u32,
    /// Number of holders of the namespace that a query in this form cannot find, because their engines' hashes are not
    /// the contract's chain. Query by the engine's own hashes, or set the namespace to `recompute`. Absent if it is 0.
    #[serde(default)]
    pub foreign_holders: u32,
    /// Number of the holders asked about that are not in `holders`, but may hold more of the query than is known. Their
    /// state is not certain, or their batches are dropped. If it is 0 or absent, every holder that is not in the list
    /// certainly belongs after the list.
    #[serde(default)]
    pub doubtful_holders: u32,
    /// The shards that the reply was gathered from. Absent in a daemon's own reply.
    #[serde(default)]
    pub gathered: Option<Gathered>,
    /// The first chosen position of a compressed chain. A holder without any chosen block is not found, and holds at
    /// most this number of leading blocks. Absent if it is 0.
    #[serde(default)]
    pub unseen_blocks_max: u32,
    /// The age of the oldest event of the namespace that the daemon knows of and has not applied, in microseconds. 0 or
    /// absent if all events are applied.
    #[serde(default)]
    pub behind_us: u64,
    /// Holders that will soon have more of the prompt than is known of them, according to hints from routers. Only with
    /// `predicted`. The holder with the most blocks comes first. The list changes nothing in the rest of the reply.
    #[serde(default)]
    pub predicted: Vec<PredictedHolder>,
}

/// A holder to which a router has sent a request that begins with the same blocks. No event has reported these blocks
/// yet. Never exact.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PredictedHolder {
    /// Name of the worker.
    pub worker: WorkerName,
    /// The worker's data-parallel rank.
    pub rank: Rank,
    /// Number of leading blocks of the query that the holder should have soon.
    pub blocks: u32,
    /// The address for requests to the holder. Absent if it is not known.
    #[serde(default, deserialize_with = "lenient_address")]
    pub address: Option<Address>,
}

impl PredictedHolder {
    /// Sort key for the order in a reply; the least comes first.
    pub fn order(&self) -> (Reverse<u32>, &WorkerName, Rank) {
        (Reverse(self.blocks), &self.worker, self.rank)
    }
}

impl QueryReply {
    /// Whether the answer is certain. Then every listed holder is exact, and no other holder may hold more than is
    /// known. The query's form can find every holder, and every shard has answered.
    pub fn is_exact(&self) -> bool {
        self.foreign_holders == 0
            && self.doubtful_holders == 0
            && self
                .gathered
                .as_ref()
                .is_none_or(|gathered| gathered.missing.is_empty())
            && self.holders.iter().all(|holder| holder.exact)
    }
}

impl HolderMatch {
    /// A holder whose state is certain, with `matched_blocks` blocks that are all usable. Nothing else is known of
    /// it.
    pub fn new(worker: WorkerName, rank: Rank, matched_blocks: u32) -> Self {
        Self {
            worker,
            rank,
            matched_blocks,
            matched_blocks_max: None,
            usable_blocks: None,
            device_blocks: None,
            host_blocks: None,
            device_usable_blocks: None,
            host_usable_blocks: None,
            exact: true,
            degraded: DegradedReasons::default(),
            dropped_out: None,
            limited_by: None,
            address: None,
            labels: Labels::NONE,
        }
    }

    /// The same holder, with the address and labels of `profile`.
    #[must_use]
    pub fn with_profile(self, profile: Profile) -> Self {
        let Profile { address, labels } = profile;
        Self {
            address,
            labels,
            ..self
        }
    }

    /// The reason why no more of the query's `query_blocks` blocks are usable, if at most `usable_max` can be. `None`
    /// if all are usable.
    pub fn limit(&self, query_blocks: u32, usable_max: u32) -> Option<Limit> {
        let usable = self.usable();
        if usable < self.matched_blocks.min(usable_max) {
            Some(match self.labels.get(LAYERS_LABEL) {
                Some("windows") => Limit::Window,
                Some("states") => Limit::State,
                _ => Limit::WindowOrState,
            })
        } else if usable == usable_max && usable < query_blocks {
            Some(Limit::LastToken)
        } else {
            (usable < query_blocks).then_some(Limit::FullAttention)
        }
    }

    /// Number of leading blocks that a request can reuse.
    pub fn usable(&self) -> u32 {
        self.usable_blocks.unwrap_or(self.matched_blocks)
    }

    /// Upper bound on the leading blocks that the holder has. Equals `matched_blocks` if that number is exact.
    pub fn blocks_max(&self) -> u32 {
        self.matched_blocks_max.unwrap_or(self.matched_blocks)
    }

    /// Whether the facts about `tier` and nearer tiers are certain: `device_blocks` for the device, `host_blocks` for
    /// the host.
    pub fn is_exact_up_to(&self, tier: Tier) -> bool {
        self.exact || !self.degraded.is_empty() && self.degraded.up_to(tier).is_empty()
    }

    /// Sort key of the holder among the holders of a reply.
    pub fn order(&self) -> ReplyOrder<'_> {
        let blocks = [self.usable(), self.matched_blocks, self.blocks_max()];
        ReplyOrder::new(blocks, &self.worker, self.rank)
    }
}

/// Sort key of a holder among the holders of a reply. The least comes first.
///
/// The order is: most usable blocks first, then most matched blocks, then the highest upper bound, then worker and
/// rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplyOrder<'a> {
    /// Number of usable blocks, of matched blocks, and the upper bound on matched blocks.
    blocks: Reverse<[u32; 3]>,
    worker: &'a WorkerName,
    rank: Rank,
}

impl<'a> ReplyOrder<'a> {
    /// The sort key of a holder. `blocks` are its usable blocks, its matched blocks, and the upper bound on matched
    /// blocks.
    pub fn new(blocks: [u32; 3], worker: &'a WorkerName, rank: Rank) -> Self {
        Self {
            blocks: Reverse(blocks),
            worker,
            rank,
        }
    }
}

/// An error within a reply.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ErrorBody {
    /// The number; see [`ErrorCode`](super::ErrorCode).
    pub code: u16,
    /// The text, which tells the client what to change.
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
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueryResult {
    /// The answer to the query.
    Reply(QueryReply),
    /// The error in place of an answer.
    Error(ErrorBody),
}

/// The answers to a batch of queries, in their order.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct BatchReply {
    /// Version of the contract.
    pub v: u64,
    /// One answer per query.
    pub results: Vec<QueryResult>,
}

impl Message for DropOut {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.number("position", u64::from(self.position))?;
        entries.lineage("lineage_hash", self.lineage_hash)?;
        entries.number("other_holders", u64::from(self.other_holders))
    }
}

impl Message for HolderMatch {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.text("worker", self.worker.as_str())?;
        entries.number("rank", u64::from(self.rank))?;
        if is_pool(&self.worker) {
            entries.text("kind", "pool")?;
        }
        entries.number("matched_blocks", u64::from(self.matched_blocks))?;
        if self.matched_blocks_max.is_some() || entries.wants_defaults() {
            entries.number("matched_blocks_max", u64::from(self.blocks_max()))?;
        }
        let says_all = entries.wants_defaults();
        if self.usable_blocks.is_some() || says_all {
            entries.number("usable_blocks", u64::from(self.usable()))?;
        }
        let near = [
            ("device_blocks", self.device_blocks),
            ("host_blocks", self.host_blocks),
            (
                "device_usable_blocks",
                self.device_usable_blocks
                    .or(self.device_blocks.filter(|_| says_all)),
            ),
            (
                "host_usable_blocks",
                self.host_usable_blocks.or(self.host_blocks.filter(|_| says_all)),
            ),
        ];
        for (key, blocks) in near {
            entries.optional_number(key, blocks.map(u64::from))?;
        }
        entries.flag("exact", self.exact)?;
        write_reasons(self.degraded, entries)?;
        if let Some(limit) = self.limited_by {
            entries.text("limited_by", limit.as_str())?;
        }
        if let Some(drop_out) = &self.dropped_out {
            entries.map("dropped_out", drop_out)?;
        }
        write_profile(self.address.as_ref(), &self.labels, entries)
    }
}

pub(super) fn write_reasons<E: Entries>(degraded: DegradedReasons, entries: &mut E) -> Result<(), E::Error> {
    if degraded.is_empty() && !entries.wants_defaults() {
        return Ok(());
    }
    entries.texts(
        "degraded",
        DegradedReason::ALL
            .iter()
            .filter(move |reason| degraded.contains(**reason))
            .map(|reason| reason.as_str()),
    )
}

pub(super) fn write_age<E: Entries>(behind_us: u64, entries: &mut E) -> Result<(), E::Error> {
    if behind_us == 0 && !entries.wants_defaults() {
        return Ok(());
    }
    entries.number("behind_us", behind_us)
}

impl Message for Gathered {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.number("shards", u64::from(self.shards))?;
        if self.missing.is_empty() && !entries.wants_defaults() {
            return Ok(());
        }
        entries.numbers("missing", &self.missing)
    }
}

impl Message for QueryReply {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.number("v", self.v)?;
        entries.number("query_blocks", u64::from(self.query_blocks))?;
        if self.block_size != 0 || entries.wants_defaults() {
            entries.number("block_size", u64::from(self.block_size))?;
        }
        entries.maps("holders", &self.holders)?;
        entries.number("holders_total", u64::from(self.holders_total))?;
        if self.foreign_holders != 0 || entries.wants_defaults() {
            entries.number("foreign_holders", u64::from(self.foreign_holders))?;
        }
        if self.doubtful_holders != 0 || entries.wants_defaults() {
            entries.number("doubtful_holders", u64::from(self.doubtful_holders))?;
        }
        if let Some(gathered) = &self.gathered {
            entries.map("gathered", gathered)?;
        }
        if self.unseen_blocks_max != 0 || entries.wants_defaults() {
            entries.number("unseen_blocks_max", u64::from(self.unseen_blocks_max))?;
        }
        write_age(self.behind_us, entries)?;
        match self.predicted.is_empty() {
            true => Ok(()),
            false => entries.maps("predicted", &self.predicted),
        }
    }
}

impl Message for PredictedHolder {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.text("worker", self.worker.as_str())?;
        entries.number("rank", u64::from(self.rank))?;
        entries.number("blocks", u64::from(self.blocks))?;
        write_profile(self.address.as_ref(), &Labels::NONE, entries)
    }
}

impl Message for ErrorBody {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.number("code", u64::from(self.code))?;
        entries.text("text", &self.text)
    }
}

impl Message for QueryResult {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        match self {
            Self::Reply(reply) => entries.map("reply", reply),
            Self::Error(error) => entries.map("error", error),
        }
    }
}

impl Message for BatchReply {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.number("v", self.v)?;
        entries.maps("results", &self.results)
    }
}

serialize_entries!(
    DropOut,
    HolderMatch,
    Gathered,
    QueryReply,
    ErrorBody,
    QueryResult,
    BatchReply,
);

/// Approximate size of a holder in a reply, in bytes.
pub(super) const HOLDER_BYTES: usize = 80;

impl QueryReply {
    /// Encodes the reply as a MessagePack map.
    pub fn encode(&self) -> Vec<u8> {
        let bytes = HOLDER_BYTES * (1 + self.holders.len());
        encode_into(Vec::with_capacity(bytes), self)
    }

    /// Decodes a reply.
    ///
    /// # Errors
    ///
    /// The error of `rmp_serde` for a payload that is not such a reply.
    pub fn decode(payload: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        rmp_serde::from_slice(payload)
    }
}

impl BatchReply {
    /// Encodes the reply as a MessagePack map.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Decodes a reply, and repeats each holder's address and labels in every result.
    ///
    /// # Errors
    ///
    /// The error of `rmp_serde` for a payload that is not such a reply.
    pub fn decode(payload: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        let mut reply: Self = rmp_serde::from_slice(payload)?;
        reply.repeat_profiles();
        Ok(reply)
    }
}
