//! Dynamo's router events. An event is `{worker_id, storage_tier, residency_domain, event: {event_id, data,
//! dp_rank}}`. A payload is a single event or a list of events. Either of them may come in an envelope
//! `{publisher_id, sequence, published_at, topic, payload}`.
//!
//! `data` is `"cleared"`, or a map with `stored` or `removed`. Each block has two hashes. `tokens_hash` is the block
//! hash, which covers images, adapter and salt already. `block_hash` is the engine's name for the block.

use kvatlas_core::wire::{DecodeError, Rank, Reader, Tier, Value};

use crate::batch::{
    Content, EngineBatch, EngineChange, EngineEvent, EngineRemoved, EngineStored, Envelope, EventNumber,
    Group, Span,
};
use crate::limits::DecodeLimits;
use crate::reason::Reason;

use super::event::push_owner;
use super::media::tier_of_medium;
use super::{BatchError, Verdict, array_or_nil, decode_each, entries_of, field, json};

/// Decodes a payload, which may be an envelope.
pub(super) fn decode(
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    scratch: &mut Vec<u64>,
    enveloped: &mut Vec<u8>,
    limits: &DecodeLimits,
) -> Result<(), BatchError> {
    let Some(envelope) = open_envelope(reader, enveloped, limits)? else {
        return Ok(decode_events(reader, batch, scratch, limits)?);
    };
    batch.envelope = Some(envelope.head);
    let inner = match envelope.payload {
        EnvelopePayload::Blob(bytes) => bytes,
        EnvelopePayload::Listed => enveloped.as_slice(),
    };
    let mut transcoded = Vec::new();
    let inner = match json::is_json(inner) {
        true => {
            json::transcode(inner, limits.payload_bytes_max, &mut transcoded)?;
            transcoded.as_slice()
        }
        false => inner,
    };
    let mut inner = Reader::new(inner, inner.len())?;
    if has_payload(&inner)? {
        return Err(BatchError::Nested);
    }
    decode_events(&mut inner, batch, scratch, limits)?;
    Ok(inner.finish()?)
}

/// Decodes the events of a payload, which is a list of events or a single event.
fn decode_events(
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    scratch: &mut Vec<u64>,
    limits: &DecodeLimits,
) -> Result<(), DecodeError> {
    let count = match reader.clone().value()? {
        Value::Array(_) => reader.array("events", limits.events_max)?,
        Value::Map(_) => 1,
        other => return Err(DecodeError::wrong_type("the payload", "router events", other)),
    };
    decode_each(reader, batch, count, |reader, batch| {
        decode_event(reader, batch, scratch, limits)
    })
}

enum EnvelopePayload<'a> {
    Blob(&'a [u8]),
    /// The payload came as a list of numbers. Its bytes are in a buffer of the caller.
    Listed,
}

struct OpenEnvelope<'a> {
    head: Envelope,
    payload: EnvelopePayload<'a>,
}

/// Whether the value is a map with a payload in it, that is, an envelope.
fn has_payload(reader: &Reader<'_>) -> Result<bool, DecodeError> {
    let mut reader = reader.clone();
    let Value::Map(entries) = reader.value()? else {
        return Ok(false);
    };
    for _ in 0..entries {
        if matches!(reader.value()?, Value::Text(b"payload")) {
            return Ok(true);
        }
        reader.skip()?;
    }
    Ok(false)
}

fn open_envelope<'a>(
    reader: &mut Reader<'a>,
    listed: &mut Vec<u8>,
    limits: &DecodeLimits,
) -> Result<Option<OpenEnvelope<'a>>, DecodeError> {
    if !has_payload(reader)? {
        return Ok(None);
    }
    let (mut publisher, mut sequence, mut payload) = (None, None, None);
    for _ in 0..entries_of(reader, "the envelope")? {
        match reader.value()? {
            Value::Text(b"publisher_id") => publisher = Some(reader.unsigned("publisher_id")?),
            Value::Text(b"sequence") => sequence = Some(reader.unsigned("sequence")?),
            Value::Text(b"payload") => payload = Some(read_payload(reader, listed, limits)?),
            _ => reader.skip()?,
        }
    }
    // Without a number, each envelope would look like a repeated one and would be dropped silently.
    let missing = |field| DecodeError::Missing { field };
    let head = Envelope {
        publisher: publisher.ok_or(missing("publisher_id"))?,
        sequence: sequence.ok_or(missing("sequence"))?,
    };
    let payload = payload.ok_or(missing("payload"))?;
    Ok(Some(OpenEnvelope { head, payload }))
}

/// Reads a payload, which is a blob, or a list with one number for each byte. JSON has the second form.
fn read_payload<'a>(
    reader: &mut Reader<'a>,
    listed: &mut Vec<u8>,
    limits: &DecodeLimits,
) -> Result<EnvelopePayload<'a>, DecodeError> {
    match reader.value()? {
        Value::Blob(bytes) | Value::Text(bytes) => Ok(EnvelopePayload::Blob(bytes)),
        Value::Array(count) => {
            reader.checked_count("payload", count, limits.payload_bytes_max)?;
            listed.clear();
            listed.reserve(count);
            for _ in 0..count {
                let value = reader.unsigned("payload")?;
                let byte = u8::try_from(value).map_err(|_| DecodeError::OutOfRange {
                    field: "payload",
                    value,
                    max: u64::from(u8::MAX),
                })?;
                listed.push(byte);
            }
            Ok(EnvelopePayload::Listed)
        }
        other => Err(DecodeError::wrong_type("payload", "a blob", other)),
    }
}

/// The fields of one router event.
#[derive(Default)]
struct RouterEventFields<'a> {
    worker: Option<Value<'a>>,
    tier: Option<&'a str>,
    domain: Option<&'a str>,
    id: Option<u64>,
    rank: Option<Rank>,
    data: Option<Data>,
}

#[derive(Clone, Copy)]
enum Data {
    Stored {
        names: Span,
        block_hashes: Span,
        parent: Option<u64>,
        position: Option<u64>,
    },
    Removed(Span),
    Cleared,
    Unknown,
}

fn decode_event(
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    scratch: &mut Vec<u64>,
    limits: &DecodeLimits,
) -> Result<Verdict, DecodeError> {
    let text = limits.text_bytes_max;
    let mut fields = RouterEventFields::default();
    for _ in 0..entries_of(reader, "a router event")? {
        match reader.value()? {
            Value::Text(b"worker_id") => fields.worker = Some(reader.value()?),
            Value::Text(b"storage_tier") => fields.tier = reader.optional_text("storage_tier", text)?,
            Value::Text(b"residency_domain") => {
                fields.domain = reader.optional_text("residency_domain", text)?;
            }
            Value::Text(b"event") => read_cache_event(&mut fields, reader, batch, scratch)?,
            _ => reader.skip()?,
        }
    }
    let verdict = finish(&fields, batch)?;
    // The number of an event that is left out counts, too.
    if let Some(id) = fields.id {
        batch.numbers.push(EventNumber {
            rank: fields.rank,
            id,
        });
    }
    Ok(verdict)
}

fn finish(fields: &RouterEventFields<'_>, batch: &mut EngineBatch) -> Result<Verdict, DecodeError> {
    let data = fields.data.ok_or(DecodeError::Missing { field: "data" })?;
    if matches!(data, Data::Unknown) {
        return Ok(Verdict::LeftOut(Reason::UnknownEvent));
    }
    if fields.domain.is_some_and(|domain| domain != "worker") {
        return Ok(Verdict::LeftOut(Reason::OtherOwner));
    }
    let tier = fields
        .tier
        .map_or(Some(Tier::DEVICE), |tier| tier_of_medium(tier.as_bytes()));
    let Some(tier) = tier else {
        return Ok(match data {
            // A medium without a tier counts as the farthest tier.
            Data::Stored { .. } => Verdict::LeftOutOf(Tier::EXTERNAL, Reason::UnknownMedium),
            _ => Verdict::LeftOut(Reason::UnknownMedium),
        });
    };
    if matches!(data, Data::Cleared) && tier != Tier::DEVICE {
        // The device's blocks stay. It is unknown whether the clear reaches beyond its own tier.
        return Ok(Verdict::LeftOutOf(tier, Reason::UnclearTier));
    }
    let owner = push_owner(fields.worker, batch)?;
    let change = match data {
        Data::Stored { names, .. } if names.is_empty() => return Ok(Verdict::LeftOut(Reason::Ignored)),
        Data::Stored {
            names,
            block_hashes,
            parent,
            position,
        } => EngineChange::Stored(EngineStored {
            names,
            parent,
            position,
            block_size: None,
            content: Content::BlockHashes(block_hashes),
            tier,
            group: Group::default(),
            lora_name: None,
            lora_id: None,
            cache_salt: None,
            objects: Span::default(),
        }),
        Data::Removed(names) => EngineChange::Removed(EngineRemoved {
            names,
            tier: Some(tier),
            group: Group::default(),
            left: None,
        }),
        Data::Cleared | Data::Unknown => EngineChange::Cleared,
    };
    batch.push(EngineEvent {
        owner,
        rank: fields.rank,
        id: fields.id,
        change,
    });
    Ok(Verdict::Taken)
}

fn read_cache_event(
    fields: &mut RouterEventFields<'_>,
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    scratch: &mut Vec<u64>,
) -> Result<(), DecodeError> {
    for _ in 0..entries_of(reader, "event")? {
        match reader.value()? {
            Value::Text(b"event_id") => fields.id = reader.optional_unsigned("event_id")?,
            Value::Text(b"dp_rank") => fields.rank = field::rank(reader)?,
            Value::Text(b"data") => fields.data = Some(read_data(reader, batch, scratch)?),
            _ => reader.skip()?,
        }
    }
    Ok(())
}

fn read_data(
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    scratch: &mut Vec<u64>,
) -> Result<Data, DecodeError> {
    match reader.value()? {
        Value::Text(b"cleared") => Ok(Data::Cleared),
        Value::Text(_) => Ok(Data::Unknown),
        Value::Map(1) => match reader.value()? {
            Value::Text(b"stored") => read_stored(reader, batch, scratch),
            Value::Text(b"removed") => read_removed(reader, batch),
            Value::Text(b"cleared") => reader.skip().map(|()| Data::Cleared),
            _ => reader.skip().map(|()| Data::Unknown),
        },
        other => Err(DecodeError::wrong_type(
            "data",
            "stored, removed or cleared",
            other,
        )),
    }
}

fn read_removed(reader: &mut Reader<'_>, batch: &mut EngineBatch) -> Result<Data, DecodeError> {
    let mut names = None;
    for _ in 0..entries_of(reader, "removed")? {
        match reader.value()? {
            Value::Text(b"block_hashes") => {
                let start = batch.hashes.len();
                field::names("block_hashes", reader, &mut batch.hashes)?;
                names = Some(batch.hashes_since(start));
            }
            _ => reader.skip()?,
        }
    }
    let names = names.ok_or(DecodeError::Missing {
        field: "block_hashes",
    })?;
    Ok(Data::Removed(names))
}

fn read_stored(
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    scratch: &mut Vec<u64>,
) -> Result<Data, DecodeError> {
    let (mut parent, mut position, mut names) = (None, None, None);
    let missing = |field| DecodeError::Missing { field };
    for _ in 0..entries_of(reader, "stored")? {
        match reader.value()? {
            Value::Text(b"parent_hash") => parent = Some(field::optional_name("parent_hash", reader)?),
            Value::Text(b"start_position") => position = reader.optional_unsigned("start_position")?,
            Value::Text(b"blocks") => names = Some(read_blocks(reader, batch, scratch)?),
            _ => reader.skip()?,
        }
    }
    let (names, block_hashes) = names.ok_or(missing("blocks"))?;
    Ok(Data::Stored {
        names,
        block_hashes,
        parent: parent.ok_or(missing("parent_hash"))?,
        position,
    })
}

/// Reads the names of the blocks and their block hashes.
fn read_blocks(
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    scratch: &mut Vec<u64>,
) -> Result<(Span, Span), DecodeError> {
    scratch.clear();
    let start = batch.hashes.len();
    for _ in 0..array_or_nil(reader, "blocks")?.unwrap_or_default() {
        let (mut name, mut tokens_hash) = (None, None);
        for _ in 0..entries_of(reader, "a block")? {
            match reader.value()? {
                Value::Text(b"block_hash") => name = Some(field::name("block_hash", reader.value()?)?),
                Value::Text(b"tokens_hash") => {
                    tokens_hash = Some(field::name("tokens_hash", reader.value()?)?);
                }
                _ => reader.skip()?,
            }
        }
        let missing = |field| DecodeError::Missing { field };
        batch.hashes.push(name.ok_or(missing("block_hash"))?);
        scratch.push(tokens_hash.ok_or(missing("tokens_hash"))?);
    }
    let names = batch.hashes_since(start);
    let start = batch.hashes.len();
    batch.hashes.extend_from_slice(scratch);
    Ok((names, batch.hashes_since(start)))
}
