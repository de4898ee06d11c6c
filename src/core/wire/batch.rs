//! Event batches, which publishers send.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};

use crate::hash::BlockSize;

use super::entries::{Entries, Message, serialize_entries};
use super::error::DecodeError;
use super::event::Event;
use super::human::deserialize_fields;
use super::limits::WireLimits;
use super::profile::Profile;
use super::profile_fields::{decode_address, decode_labels};
use super::reader::{Reader, check_version, set_once};
use super::subject::Rank;
use super::tier::Tier;
use super::writer::encode;

mod usual;

/// Number of events for which the list of a batch allocates room before its first event is read.
const EVENTS_AT_FIRST: usize = 16;

/// One message on an events subject: changes of one holder, in order. A holder's batches are numbered without gaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventBatch {
    /// The publisher's incarnation. A batch of a higher epoch replaces everything that the holder had.
    pub epoch: u64,
    /// Number of the batch in its epoch: 1, 2, 3, … without a gap. A heartbeat has a number too.
    pub seq: u64,
    /// Data-parallel rank of the holder.
    pub rank: Rank,
    /// Time at which the publisher made the batch, in microseconds since the Unix epoch.
    ///
    /// The daemon computes from it how late the batch is. The time also tells a redelivered batch from a batch after a
    /// restart. A publisher that restarts in the same epoch numbers its batches from 1 again, and its times are later
    /// than those of all earlier batches.
    pub time_us: Option<u64>,
    /// Tier of the stored and removed blocks. [`Tier::DEVICE`] if the message has no tier.
    pub tier: Tier,
    /// Number of tokens in each of the holder's blocks, if the publisher tells it. A publisher tells it in every batch,
    /// or in none.
    ///
    /// A namespace that the configuration does not name takes its block size from its first batch. If the publisher
    /// does not tell the size, the daemon takes the configured size.
    pub block_size: Option<BlockSize>,
    /// The holder's address and labels, if the batch gives them. They replace the earlier ones. At the beginning of an
    /// epoch, a holder has neither.
    pub profile: Option<Profile>,
    /// The changes, applied in this order. A batch without changes is a heartbeat.
    pub events: Vec<Event>,
}

impl EventBatch {
    /// Encodes the batch as the payload for an events subject.
    pub fn encode(&self) -> Vec<u8> {
        encode(self)
    }

    /// Decodes a payload within `limits`.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the payload is not a batch of this version, or exceeds a limit.
    pub fn decode(payload: &[u8], limits: &WireLimits) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(payload, limits.message_bytes_max)?;
        let Some((head, events)) = usual::head(&mut reader) else {
            return Self::decode_any_form(payload, limits);
        };
        let count = reader.checked_count("events", events, limits.events_max)?;
        let events = decode_events(&mut reader, count, |reader| usual::event(reader, limits))?;
        reader.finish()?;
        Ok(Self { events, ..head })
    }

    /// Decodes the fields of a batch without its events, from a payload of any length. The result has no events, and
    /// the events are not checked.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the payload is not a batch of this version.
    pub fn decode_head(payload: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(payload, payload.len())?;
        if let Some((head, _)) = usual::head(&mut reader) {
            return Ok(head);
        }
        let mut reader = Reader::new(payload, payload.len())?;
        let (mut fields, limits) = (BatchFields::default(), WireLimits::default());
        reader.map("the batch", |reader, key| match key {
            b"events" => reader.skip(),
            _ => fields.read(reader, key, &limits),
        })?;
        fields.into_batch()
    }

    /// Whether the publisher takes its leave with this batch. A goodbye is the last event of its batch.
    pub fn says_goodbye(&self) -> bool {
        matches!(self.events.last(), Some(Event::Goodbye))
    }

    /// Decodes a batch as [`Self::decode`] does, but without the fast path for the usual form.
    pub(super) fn decode_any_form(payload: &[u8], limits: &WireLimits) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(payload, limits.message_bytes_max)?;
        let mut fields = BatchFields::default();
        reader.map("the batch", |reader, key| fields.read(reader, key, limits))?;
        reader.finish()?;
        fields.into_batch()
    }
}

impl Message for EventBatch {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        entries.number("v", super::PROTOCOL_VERSION)?;
        entries.number("epoch", self.epoch)?;
        entries.number("seq", self.seq)?;
        entries.number("rank", u64::from(self.rank))?;
        entries.optional_number("time_us", self.time_us)?;
        if self.tier != Tier::DEVICE {
            entries.number("tier", u64::from(self.tier.as_u8()))?;
        }
        entries.optional_number("block_size", self.block_size.map(|size| u64::from(size.as_u32())))?;
        if let Some(profile) = &self.profile {
            profile.write_told(entries)?;
        }
        entries.maps("events", &self.events)
    }
}

/// All fields that a batch may have, filled while they are read.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct BatchFields {
    v: Option<u64>,
    epoch: Option<u64>,
    seq: Option<u64>,
    rank: Option<Rank>,
    time_us: Option<Option<u64>>,
    tier: Option<Tier>,
    block_size: Option<Option<BlockSize>>,
    address: Option<Option<String>>,
    labels: Option<Option<BTreeMap<String, String>>>,
    events: Option<Vec<Event>>,
}

impl BatchFields {
    fn read(&mut self, reader: &mut Reader<'_>, key: &[u8], limits: &WireLimits) -> Result<(), DecodeError> {
        match key {
            b"v" => set_once(&mut self.v, "v", reader.unsigned("v")?),
            b"epoch" => set_once(&mut self.epoch, "epoch", reader.unsigned("epoch")?),
            b"seq" => set_once(&mut self.seq, "seq", reader.unsigned("seq")?),
            b"rank" => set_once(&mut self.rank, "rank", reader.unsigned_32("rank")?),
            b"time_us" => set_once(&mut self.time_us, "time_us", reader.optional_unsigned("time_us")?),
            b"tier" => set_once(&mut self.tier, "tier", Tier::decode(reader)?),
            b"block_size" => set_once(&mut self.block_size, "block_size", decode_block_size(reader)?),
            b"address" => set_once(&mut self.address, "address", decode_address(reader)?),
            b"labels" => set_once(&mut self.labels, "labels", decode_labels(reader)?),
            b"events" => {
                let count = reader.array("events", limits.events_max)?;
                let events = decode_events(reader, count, |reader| Event::decode(reader, limits))?;
                set_once(&mut self.events, "events", events)
            }
            _ => reader.skip(),
        }
    }

    fn into_batch(self) -> Result<EventBatch, DecodeError> {
        check_version(self.v)?;
        let seq = self.seq.ok_or(DecodeError::Missing { field: "seq" })?;
        if seq == 0 {
            return Err(DecodeError::Combination(
                "seq is 0; number the batches of an epoch from 1",
            ));
        }
        Ok(EventBatch {
            epoch: self.epoch.ok_or(DecodeError::Missing { field: "epoch" })?,
            seq,
            rank: self.rank.unwrap_or_default(),
            time_us: self.time_us.flatten(),
            tier: self.tier.unwrap_or_default(),
            block_size: self.block_size.flatten(),
            profile: Profile::told(self.address.flatten().as_deref(), self.labels.flatten())?,
            events: self.events.unwrap_or_default(),
        })
    }
}

fn decode_block_size(reader: &mut Reader<'_>) -> Result<Option<BlockSize>, DecodeError> {
    let value = reader.optional_unsigned("block_size")?;
    let size = |value| BlockSize::new(u32::try_from(value).ok()?).ok();
    let out_of_range = |value| DecodeError::OutOfRange {
        field: "block_size",
        value,
        max: u64::from(BlockSize::TOKENS_MAX),
    };
    value
        .map(|value| size(value).ok_or_else(|| out_of_range(value)))
        .transpose()
}

/// Reads the events of a batch: the next `count` values. `decode` reads one event.
fn decode_events<'a>(
    reader: &mut Reader<'a>,
    count: usize,
    decode: impl Fn(&mut Reader<'a>) -> Result<Event, DecodeError>,
) -> Result<Vec<Event>, DecodeError> {
    // Fewer events may come than are announced, so no memory is taken for all of them in advance.
    let mut list = Vec::with_capacity(count.min(EVENTS_AT_FIRST));
    for _ in 0..count {
        list.push(decode(reader)?);
    }
    Ok(list)
}

serialize_entries!(EventBatch);

impl<'de> Deserialize<'de> for EventBatch {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_fields(deserializer, BatchFields::into_batch)
    }
}
