//! Replies to status requests: how far a daemon has applied the events of a namespace's holders.

use serde::Deserialize;

use super::entries::{Entries, Message, serialize_entries};
use super::profile::{Address, Labels};
use super::profile_fields::{lenient_address, lenient_labels, write_profile};
use super::reasons::DegradedReasons;
use super::reply::{Gathered, HOLDER_BYTES, write_age, write_reasons};
use super::subject::{Rank, WorkerName};
use super::writer::encode_into;

/// Status of one holder: how far the daemon has applied its events, and whether its state is certain.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct HolderStatusReply {
    /// Name of the worker.
    pub worker: WorkerName,
    /// The worker's data-parallel rank.
    pub rank: Rank,
    /// Epoch of the last applied batch.
    pub epoch: u64,
    /// Number of the last applied batch.
    pub seq: u64,
    /// Number of blocks that the holder has.
    pub blocks: u64,
    /// Number of stored events that wait for their parent.
    pub parked_events: u32,
    /// Whether the engine's hashes differ from the contract's chain.
    #[serde(default)]
    pub foreign_chain: bool,
    /// Number of seconds by which the epoch is ahead of the daemon's clock. 0 or absent if the epoch is at most 5
    /// seconds ahead, which is normal between the clocks of two machines.
    #[serde(default)]
    pub epoch_ahead_s: u64,
    /// Whether the holder's state is certain.
    pub exact: bool,
    /// Reasons why the state is not certain. Absent if the state is certain.
    #[serde(default)]
    pub degraded: DegradedReasons,
    /// Time at which the state became uncertain, in microseconds since the Unix epoch. Absent if the state is certain,
    /// or if the time is not known.
    #[serde(default)]
    pub since_us: Option<u64>,
    /// Address for requests to the holder. Absent if it is not known.
    #[serde(default, deserialize_with = "lenient_address")]
    pub address: Option<Address>,
    /// The holder's labels.
    #[serde(default, deserialize_with = "lenient_labels")]
    pub labels: Labels,
}

/// Reply to a status request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct StatusReply {
    /// Version of the contract.
    pub v: u64,
    /// Number of tokens in a block.
    pub block_size: u32,
    /// Number of distinct blocks in the index. If a holder has a block but lacks blocks before it, the missing blocks
    /// count, too.
    pub distinct_blocks: u64,
    /// Number of batches, of all namespaces, that have been received but not applied yet.
    pub batches_waiting: u64,
    /// Number of holders whose block size is not known. Their blocks may have a number of tokens other than
    /// `block_size`. The holders' publishers do not tell the size, and the configuration does not name the namespace.
    /// Absent if it is 0.
    #[serde(default)]
    pub unsized_holders: u32,
    /// Number of holders that the daemon could not register, because it had no room for more holders. Absent if it is
    /// 0.
    #[serde(default)]
    pub refused_holders: u32,
    /// Whether further holders may exist, of which nothing has been heard or applied yet. A daemon counts all of them
    /// together as one, so this is at most 1, or the number of shards. Absent if it is 0.
    #[serde(default)]
    pub unheard_holders: u32,
    /// All holders, ordered by worker and rank.
    pub holders: Vec<HolderStatusReply>,
    /// Shards whose replies were combined into this reply. Absent in a daemon's own reply.
    #[serde(default)]
    pub gathered: Option<Gathered>,
    /// Age of the oldest event of the namespace that the daemon has not applied yet, in microseconds. Only events that
    /// the daemon knows of count. 0 or absent if all events are applied.
    #[serde(default)]
    pub behind_us: u64,
}

impl StatusReply {
    /// Encodes the reply as a MessagePack map.
    pub fn encode(&self) -> Vec<u8> {
        let bytes = HOLDER_BYTES * (1 + self.holders.len());
        encode_into(Vec::with_capacity(bytes), self)
    }

    /// Decodes a reply.
    ///
    /// # Errors
    ///
    /// The error of `rmp_serde` if the payload is not a status reply.
    pub fn decode(payload: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        rmp_serde::from_slice(payload)
    }
}

impl StatusReply {
    /// Whether the state of every holder is certain, all holders are registered and heard of, and no shard is missing.
    pub fn is_exact(&self) -> bool {
        let is_whole = |gathered: &Gathered| gathered.missing.is_empty();
        self.refused_holders == 0
            && self.unheard_holders == 0
            && self.gathered.as_ref().is_none_or(is_whole)
            && self.holders.iter().all(|holder| holder.exact)
    }
}

impl Message for HolderStatusReply {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.text("worker", self.worker.as_str())?;
        entries.number("rank", u64::from(self.rank))?;
        entries.number("epoch", self.epoch)?;
        entries.number("seq", self.seq)?;
        entries.number("blocks", self.blocks)?;
        entries.number("parked_events", u64::from(self.parked_events))?;
        if self.foreign_chain || entries.wants_defaults() {
            entries.flag("foreign_chain", self.foreign_chain)?;
        }
        if self.epoch_ahead_s != 0 || entries.wants_defaults() {
            entries.number("epoch_ahead_s", self.epoch_ahead_s)?;
        }
        entries.flag("exact", self.exact)?;
        write_reasons(self.degraded, entries)?;
        entries.optional_number("since_us", self.since_us)?;
        write_profile(self.address.as_ref(), &self.labels, entries)
    }
}

impl Message for StatusReply {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.number("v", self.v)?;
        entries.number("block_size", u64::from(self.block_size))?;
        entries.number("distinct_blocks", self.distinct_blocks)?;
        entries.number("batches_waiting", self.batches_waiting)?;
        if self.unsized_holders != 0 || entries.wants_defaults() {
            entries.number("unsized_holders", u64::from(self.unsized_holders))?;
        }
        if self.refused_holders != 0 || entries.wants_defaults() {
            entries.number("refused_holders", u64::from(self.refused_holders))?;
        }
        if self.unheard_holders != 0 || entries.wants_defaults() {
            entries.number("unheard_holders", u64::from(self.unheard_holders))?;
        }
        entries.maps("holders", &self.holders)?;
        if let Some(gathered) = &self.gathered {
            entries.map("gathered", gathered)?;
        }
        write_age(self.behind_us, entries)
    }
}

serialize_entries!(HolderStatusReply, StatusReply);
