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

/// Point at which a holder dropped out of a query: the first block that the holder lacks.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct DropOut {
    /// Position of the first block that the holder does not have.
    pub position: u32,
    /// Lineage hash of the block at `position`.
    pub lineage_hash: PositionalLineageHash,
    /// Number of other holders that have the query up to and including the block at `position`.
    pub other_holders: u32,
}

worded! {
    /// Reason why a request cannot reuse more blocks of a holder.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum Limit {
        /// Full attention needs the next block, which the holder does not have.
        FullAttention => "full_attention",
        /// A sliding window needs blocks that the holder no longer has.
        Window => "window",
        /// A recurrent layer needs its state, which the holder does not have after this block.
        State => "state",
        /// The holder lacks blocks of a sliding window, or a recurrent state. The daemon cannot say which of the two,
        /// because the model has layers of both kinds or does not tell its kinds.
        WindowOrState => "window_or_state",
        /// The next block contains the last token of the prompt, which a request always computes.
        LastToken => "last_token",
        /// A reason that this release does not know.
        #[serde(other)]
        Other => "other",
    }
}

/// A holder of a prefix of the query, as a reply lists it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct HolderMatch {
    /// Name of the worker.
    pub worker: WorkerName,
    /// The worker's data-parallel rank.
    pub rank: Rank,
    /// Number of leading blocks of the query that the holder has, without a hole. For a compressed chain this is the
    /// lower bound.
    pub matched_blocks: u32,
    /// Upper bound on the matched blocks, for a compressed chain. Absent if it equals `matched_blocks`.
    #[serde(default)]
    pub matched_blocks_max: Option<u32>,
    /// Number of leading blocks that a request can reuse. It counts the blocks up to the last resumable one within
    /// `matched_blocks` that ends before the prompt's last token. Absent if it equals `matched_blocks`. For a
    /// compressed chain this is a lower bound.
    #[serde(default)]
    pub usable_blocks: Option<u32>,
    /// Number of leading blocks that the holder has on the device. The count stops at the first block that is
    /// elsewhere. Only with the option `tiers`.
    #[serde(default)]
    pub device_blocks: Option<u32>,
    /// Number of leading blocks that the holder has on the device or the host. The count stops at the first block
    /// that is elsewhere. Only with the option `tiers`.
    #[serde(default)]
    pub host_blocks: Option<u32>,
    /// Number of the `device_blocks` that a request can reuse, counted like `usable_blocks`. Absent if it equals
    /// `device_blocks`.
    #[serde(default)]
    pub device_usable_blocks: Option<u32>,
    /// Number of the `host_blocks` that a request can reuse, counted like `usable_blocks`. Absent if it equals
    /// `host_blocks`.
    #[serde(default)]
    pub host_usable_blocks: Option<u32>,
    /// Whether `matched_blocks` and the other facts about the holder are known for certain. If not, `degraded` gives
    /// the reasons. A reason about a tier beyond the device leaves the facts about nearer tiers certain: see
    /// [`Self::is_exact_up_to`].
    pub exact: bool,
    /// Reasons why the state is not certain. Absent if the state is certain.
    #[serde(default)]
    pub degraded: DegradedReasons,
    /// Point at which the holder dropped out. Only with the option `explain`. Absent if the holder has the whole
    /// query.
    #[serde(default)]
    pub dropped_out: Option<DropOut>,
    /// Reason why no more blocks are usable. Only with the option `explain`. Absent if the whole query is usable.
    #[serde(default)]
    pub limited_by: Option<Limit>,
    /// Address for requests to the holder. Absent if it is not known.
    #[serde(default, deserialize_with = "lenient_address")]
    pub address: Option<Address>,
    /// The holder's labels.
    #[serde(default, deserialize_with = "lenient_labels")]
    pub labels: Labels,
}

/// Shards whose replies were combined into a reply. Only in replies that a gateway or a gathering client has
/// combined.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Gathered {
    /// Number of shards.
    pub shards: u32,
    /// Numbers, from 0, of the shards that did not answer in time. Nothing is known of their workers. Absent if all
    /// answered.
    #[serde(default)]
    pub missing: Vec<u32>,
}

impl Gathered {
    /// Returns the missing shards in words: `shard 2 of 3`, or `shards 0 and 2 of 3`.
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

/// Answer to one query.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct QueryReply {
    /// Version of the contract.
    pub v: u64,
    /// Number of blocks in the query. For a compressed chain, it is the number of blocks up to the last chosen one.
    pub query_blocks: u32,
    /// Number of tokens in a block of the namespace. 0 or absent if the daemon does not tell it.
    #[serde(default)]
    pub block_size: u32,
    /// The holders, in the order of [`ReplyOrder`].
    pub holders: Vec<HolderMatch>,
    /// Number of holders that matched, including those that `limit` cut off.
    pub holders_total: u32,
    /// Number of the namespace's holders that this query cannot find, because their engines do not use the contract's
    /// hashes. To find them, query by the engine's own hashes, or set the namespace to `recompute`. Absent if it is 0.
    #[serde(default)]
    pub foreign_holders: u32,
    /// Number of holders that the query asked about, that are not in `holders`, and that may have more of the query
    /// than the daemon knows: their state is not certain, or the daemon drops their batches. If the number is 0 or
    /// absent, every holder in the list is certainly at least as good as every other holder.
    #[serde(default)]
    pub doubtful_holders: u32,
    /// Shards whose replies were combined into this reply. Absent in a daemon's own reply.
    #[serde(default)]
    pub gathered: Option<Gathered>,
    /// First chosen position of a compressed chain. A holder without any chosen block is not found, and has at most
    /// this number of leading blocks. Absent if it is 0.
    #[serde(default)]
    pub unseen_blocks_max: u32,
    /// Age of the oldest event of the namespace that the daemon has not applied yet, in microseconds. Only events that
    /// the daemon knows of count. 0 or absent if all events are applied.
    #[serde(default)]
    pub behind_us: u64,
    /// Holders to which routers have sent requests that share the prompt's beginning, according to the routers' hints.
    /// These holders will soon have more of the prompt than the daemon knows. The holder with the most blocks comes
    /// first. There are at most [`PREDICTED_MAX`]. The list is present only with the option `predicted`, and does not
    /// change the rest of the reply.
    #[serde(default)]
    pub predicted: Vec<PredictedHolder>,
}

/// Maximum number of predicted holders in a reply.
pub const PREDICTED_MAX: usize = 64;

/// A predicted holder: a router has sent it a request that begins with the blocks of the query. No event has reported
/// these blocks yet. A predicted holder is never exact.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct PredictedHolder {
    /// Name of the worker.
    pub worker: WorkerName,
    /// The worker's data-parallel rank.
    pub rank: Rank,
    /// Number of leading blocks of the query that the holder will probably have soon.
    pub blocks: u32,
    /// Address for requests to the holder. Absent if it is not known.
    #[serde(default, deserialize_with = "lenient_address")]
    pub address: Option<Address>,
}

impl PredictedHolder {
    /// Returns the sort key for the order in a reply. The smallest key comes first.
    pub fn order(&self) -> (Reverse<u32>, &WorkerName, Rank) {
        (Reverse(self.blocks), &self.worker, self.rank)
    }
}

impl QueryReply {
    /// Whether the answer is certain:
    ///
    /// - Every listed holder is exact, and no other holder may have more than is known.
    /// - The query's form can find every holder.
    /// - Every shard has answered.
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
    /// Makes a holder whose state is certain, with `matched_blocks` blocks that are all usable. All other fields are
    /// empty.
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

    /// Returns the same holder, with the address and labels of `profile`.
    #[must_use]
    pub fn with_profile(self, profile: Profile) -> Self {
        let Profile { address, labels } = profile;
        Self {
            address,
            labels,
            ..self
        }
    }

    /// Returns the reason why a request cannot reuse all of the query's `query_blocks` blocks at this holder. `None` if
    /// it can reuse all of them. `usable_max` is the number of blocks that end before the prompt's last token, which a
    /// request always computes.
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

    /// Returns the upper bound on the leading blocks that the holder has. Equals `matched_blocks` if that number is
    /// exact.
    pub fn blocks_max(&self) -> u32 {
        self.matched_blocks_max.unwrap_or(self.matched_blocks)
    }

    /// Whether the numbers about `tier` and nearer tiers are certain. For the device this number is `device_blocks`,
    /// for the host it is `host_blocks`.
    pub fn is_exact_up_to(&self, tier: Tier) -> bool {
        self.exact || !self.degraded.is_empty() && self.degraded.up_to(tier).is_empty()
    }

    /// Returns the sort key of the holder among the holders of a reply.
    pub fn order(&self) -> ReplyOrder<'_> {
        let blocks = [self.usable(), self.matched_blocks, self.blocks_max()];
        ReplyOrder::new(blocks, &self.worker, self.rank)
    }
}

/// Sort key of a holder among the holders of a reply. The smallest key comes first.
///
/// Holders with the most usable blocks come first, then those with the most matched blocks, then those with the
/// highest upper bound. Ties are ordered by worker and rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplyOrder<'a> {
    /// Number of usable blocks, number of matched blocks, and upper bound on matched blocks.
    blocks: Reverse<[u32; 3]>,
    worker: &'a WorkerName,
    rank: Rank,
}

impl<'a> ReplyOrder<'a> {
    /// Makes the sort key of a holder. `blocks` are its number of usable blocks, its number of matched blocks, and
    /// the upper bound on matched blocks.
    pub fn new(blocks: [u32; 3], worker: &'a WorkerName, rank: Rank) -> Self {
        Self {
            blocks: Reverse(blocks),
            worker,
            rank,
        }
    }
}

/// Error that a batch reply has in place of the answer to one query.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ErrorBody {
    /// Number of the error; see [`ErrorCode`](super::ErrorCode).
    pub code: u16,
    /// Text that tells the client what to change.
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

/// Result of one query of a batch: an answer or an error.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueryResult {
    /// The answer to the query.
    Reply(QueryReply),
    /// Error in place of the answer.
    Error(ErrorBody),
}

/// Results of a batch of queries, in the order of the queries.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct BatchReply {
    /// Version of the contract.
    pub v: u64,
    /// Results of the queries, one for each query.
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

/// Approximate number of bytes of a holder in a reply.
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
    /// The error of `rmp_serde` if the payload is not a reply to one query.
    pub fn decode(payload: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        rmp_serde::from_slice(payload)
    }
}

impl BatchReply {
    /// Encodes the reply as a MessagePack map.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Decodes a reply, and copies each holder's address and labels to every result that has the holder.
    ///
    /// # Errors
    ///
    /// The error of `rmp_serde` if the payload is not a batch reply.
    pub fn decode(payload: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        let mut reply: Self = rmp_serde::from_slice(payload)?;
        reply.repeat_profiles();
        Ok(reply)
    }
}
