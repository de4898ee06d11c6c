//! Replies: what the daemon answers.

use std::cmp::Reverse;

use serde::Deserialize;

use crate::hash::PositionalLineageHash;

use super::Tier;
use super::entries::{Entries, Message, serialize_entries};
use super::error::WireError;
use super::model::is_pool;
use super::profile::{
    Address, LAYERS_LABEL, Labels, Profile, lenient_address, lenient_labels, write_profile,
};
use super::reasons::{DegradedReason, DegradedReasons};
use super::subject::{Rank, WorkerName};
use super::writer::{encode, encode_into};

/// The point at which a holder dropped out of a query.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct DropOut {
    /// Position of the first block that the holder does not have.
    pub position: u32,
    /// That block's lineage hash.
    pub lineage_hash: PositionalLineageHash,
    /// How many holders do have that block.
    pub other_holders: u32,
}

/// The reason why a request can reuse no more blocks of a holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Full attention: the holder lacks the next block.
    FullAttention,
    /// A sliding window, which has lost its blocks there.
    Window,
    /// A recurrent state, of which there is none there.
    State,
    /// One of both, of a model that has both, or of which it is not known what it has.
    WindowOrState,
    /// The last token of the prompt, which a request always computes.
    LastToken,
    /// A limit that this release doesn't know.
    #[serde(other)]
    Other,
}

impl Limit {
    /// The word on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FullAttention => "full_attention",
            Self::Window => "window",
            Self::State => "state",
            Self::WindowOrState => "window_or_state",
            Self::LastToken => "last_token",
            Self::Other => "other",
        }
    }
}

/// One holder of a prefix.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct HolderMatch {
    /// The worker.
    pub worker: WorkerName,
    /// Its data-parallel rank.
    pub rank: Rank,
    /// How many leading blocks of the query it holds, without a hole. For a compressed chain this is the lower bound.
    pub matched_blocks: u32,
    /// The upper bound for a compressed chain. Absent where it equals `matched_blocks`.
    #[serde(default)]
    pub matched_blocks_max: Option<u32>,
    /// How many leading blocks a request can reuse: up to the last resumable one within `matched_blocks`, and before the last token. Absent where
    /// it equals `matched_blocks`. Of a compressed chain this is a lower bound.
    #[serde(default)]
    pub usable_blocks: Option<u32>,
    /// How many of `matched_blocks` it has on the device, up to the first that lies elsewhere; only with `tiers`.
    #[serde(default)]
    pub device_blocks: Option<u32>,
    /// As `device_blocks`, on device and host together.
    #[serde(default)]
    pub host_blocks: Option<u32>,
    /// As `usable_blocks`, of `device_blocks`. Absent where it equals that.
    #[serde(default)]
    pub device_usable_blocks: Option<u32>,
    /// As `usable_blocks`, of `host_blocks`. Absent where it equals that.
    #[serde(default)]
    pub host_usable_blocks: Option<u32>,
    /// Whether `matched_blocks` and what else is said of the holder are known for certain. Where they are not, `degraded` says why. Reasons
    /// about a tier beyond the device leave what is said of nearer ones certain: see [`Self::is_exact_up_to`].
    pub exact: bool,
    /// Why the state is not certain; absent where it is.
    #[serde(default)]
    pub degraded: DegradedReasons,
    /// The point at which the holder dropped out; only with `explain`, and absent where it holds the whole query.
    #[serde(default)]
    pub dropped_out: Option<DropOut>,
    /// Why no more blocks are usable; only with `explain`, and absent where the whole query is.
    #[serde(default)]
    pub limited_by: Option<Limit>,
    /// The address for requests to it; absent where that is not known.
    #[serde(default, deserialize_with = "lenient_address")]
    pub address: Option<Address>,
    /// How it is labelled.
    #[serde(default, deserialize_with = "lenient_labels")]
    pub labels: Labels,
}

/// The shards that a reply was gathered from; only in replies that a gateway or a gathering client put together.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Gathered {
    /// How many shards there are.
    pub shards: u32,
    /// The shards, from 0, that did not answer in time: nothing is known of their workers. Absent where all answered.
    #[serde(default)]
    pub missing: Vec<u32>,
}

impl Gathered {
    /// The shards that are missing, in words: `shard 2 of 3`, or `shards 0 and 2 of 3`.
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
    /// How many blocks were asked for; of a compressed chain, how many it stands for.
    pub query_blocks: u32,
    /// Tokens in a block of the namespace; 0, or absent, in the reply of a daemon that does not say.
    #[serde(default)]
    pub block_size: u32,
    /// The holders, in the order of [`ReplyOrder`].
    pub holders: Vec<HolderMatch>,
    /// How many holders matched before `limit` cut the list.
    pub holders_total: u32,
    /// How many holders of the namespace a query in this form cannot find: their engines' hashes are not the contract's chain. Ask by
    /// the engine's own hashes, or set the namespace to `recompute`. Absent where it is 0.
    #[serde(default)]
    pub foreign_holders: u32,
    /// How many of the holders that were asked about are not in `holders`, while their state is not certain, or their batches are dropped: they
    /// may hold more of the query than is known. Where it is 0, or absent, whoever is not in the list certainly belongs behind it.
    #[serde(default)]
    pub doubtful_holders: u32,
    /// Which shards the reply was gathered from; absent in a daemon's own.
    #[serde(default)]
    pub gathered: Option<Gathered>,
    /// The first position chosen of a compressed chain. Holders without any chosen block are not found, and hold at most so many
    /// leading blocks. Absent where it is 0.
    #[serde(default)]
    pub unseen_blocks_max: u32,
    /// The age of the oldest event of the namespace that the daemon knows of and has not applied, in microseconds; 0, or absent, where all are
    /// applied.
    #[serde(default)]
    pub behind_us: u64,
    /// Holders that will have more of the prompt soon than is known of them, by what routers have hinted; only with `predicted`, the most blocks
    /// first. It changes nothing of what else is said.
    #[serde(default)]
    pub predicted: Vec<PredictedHolder>,
}

/// A holder to which a router has sent a request with the same beginning, of which no event has told yet. Never exact.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PredictedHolder {
    /// The worker.
    pub worker: WorkerName,
    /// Its data-parallel rank.
    pub rank: Rank,
    /// How many leading blocks of the query it should have soon.
    pub blocks: u32,
    /// The address for requests to it; absent where that is not known.
    #[serde(default, deserialize_with = "lenient_address")]
    pub address: Option<Address>,
}

impl PredictedHolder {
    /// Its place among those of a reply: the least comes first.
    pub fn order(&self) -> (Reverse<u32>, &WorkerName, Rank) {
        (Reverse(self.blocks), &self.worker, self.rank)
    }
}

impl QueryReply {
    /// Whether the answer is certain. Then every holder in it is exact, and nobody else may hold more than is known. All can be found in the
    /// form of the query, and every shard has answered.
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
    /// A holder whose state is certain, and of which nothing is known beside its blocks, all of them usable.
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

    /// The same, with this profile.
    #[must_use]
    pub fn with_profile(self, profile: Profile) -> Self {
        let Profile { address, labels } = profile;
        Self {
            address,
            labels,
            ..self
        }
    }

    /// Why no more of `query_blocks` are usable, of which at most `usable_max` can be; none where all are.
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

    /// How many leading blocks a request can reuse.
    pub fn usable(&self) -> u32 {
        self.usable_blocks.unwrap_or(self.matched_blocks)
    }

    /// The upper bound on the leading blocks that it holds; `matched_blocks` where that is exact.
    pub fn blocks_max(&self) -> u32 {
        self.matched_blocks_max.unwrap_or(self.matched_blocks)
    }

    /// Whether what is said of `tier` and those nearer is certain: of the device `device_blocks`, of the host `host_blocks`.
    pub fn is_exact_up_to(&self, tier: Tier) -> bool {
        self.exact || !self.degraded.is_empty() && self.degraded.up_to(tier).is_empty()
    }

    /// Its place among the holders of a reply.
    pub fn order(&self) -> ReplyOrder<'_> {
        let blocks = [self.usable(), self.matched_blocks, self.blocks_max()];
        ReplyOrder::new(blocks, &self.worker, self.rank)
    }
}

/// A holder's place among the holders of a reply; the least comes first.
///
/// Most usable blocks first, then most matched blocks, then the highest upper bound, then worker and rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplyOrder<'a> {
    /// Usable, matched, and how many are matched at most.
    blocks: Reverse<[u32; 3]>,
    worker: &'a WorkerName,
    rank: Rank,
}

impl<'a> ReplyOrder<'a> {
    /// The place of a holder with so many usable blocks, so many matched, and at most so many.
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
    /// The text, which says what to change.
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
    /// One answer a query.
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

/// About what a holder takes in a reply, in bytes.
pub(super) const HOLDER_BYTES: usize = 80;

impl QueryReply {
    /// The reply as a MessagePack map.
    pub fn encode(&self) -> Vec<u8> {
        let bytes = HOLDER_BYTES * (1 + self.holders.len());
        encode_into(Vec::with_capacity(bytes), self)
    }

    /// Decodes a reply.
    ///
    /// # Errors
    ///
    /// What `rmp_serde` says of a payload that is no such reply.
    pub fn decode(payload: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        rmp_serde::from_slice(payload)
    }
}

impl BatchReply {
    /// The reply as a MessagePack map.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Decodes a reply, with each holder's address and labels in every result.
    ///
    /// # Errors
    ///
    /// What `rmp_serde` says of a payload that is no such reply.
    pub fn decode(payload: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        let mut reply: Self = rmp_serde::from_slice(payload)?;
        reply.repeat_profiles();
        Ok(reply)
    }
}
