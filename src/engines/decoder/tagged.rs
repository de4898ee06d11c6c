//! Batches of tagged events: vLLM, SGLang, Mooncake.
//!
//! A batch is an array `[ts, events, rank]` or a map. An event is a map with a `type`, or an array that begins with the type:
//!
//! ```text
//! BlockStored   1 block_hashes  2 parent_block_hash  3 token_ids  4 block_size  5 lora_id  6 medium  7 lora_name
//!               8 extra_keys  9 group_idx  10 kv_cache_spec_kind  11 kv_cache_spec_sliding_window
//!               12 locality  13 ownership  14 session_id  15 lookahead_token_ids
//! BlockRemoved  1 block_hashes  2 medium  3 group_idx  then texts and numbers, which are told apart by their values
//! ```

use kvatlas_core::wire::{DecodeError, Reader, Value};

use crate::batch::{EngineBatch, Untold};
use crate::limits::DecodeLimits;

use super::components;
use super::event::{EventField, Fields, Tag};
use super::media::tier_of_medium;
use super::pool::Pool;
use super::{BatchError, Format, Verdict, decode_each, field};

/// Fields of a stored event that is an array, from index 8 on. Indices 1 to 7 are read one by one.
const STORED_TAIL: [EventField; 8] = [
    EventField::ExtraKeys,
    EventField::GroupIndex,
    EventField::GroupKind,
    EventField::GroupWindow,
    EventField::Locality,
    EventField::Ownership,
    EventField::Other,
    EventField::Lookahead,
];
const STORED_HEAD: [EventField; 6] = [
    EventField::Names,
    EventField::Parent,
    EventField::Tokens,
    EventField::BlockSize,
    EventField::LoraId,
    EventField::Medium,
];
/// Index of the medium in the array of a stored event.
const MEDIUM_SLOT: usize = 6;
/// Index of the adapter's name in the array of a stored event.
const LORA_NAME_SLOT: usize = 7;
/// Indices in the array of a removed event at which the owner of the blocks can stand. The owner comes right after
/// the locality. In some versions, the kind and the window of the group come before the locality, so the index is 5
/// or 7.
const OWNER_SLOTS: [usize; 2] = [5, 7];
/// Index of the extra keys, with the salt among them, in the array of a stored event.
const EXTRA_KEYS_SLOT: usize = 8;
/// Index of the group's number in the array of a stored event. Older forks of vLLM by Dynamo have images at this
/// index, and the group's number at the next index.
const GROUP_SLOT: usize = 9;

/// Decodes one batch.
pub(super) fn decode_batch(
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    format: Format,
    limits: &DecodeLimits,
    pool: &mut Pool,
) -> Result<(), BatchError> {
    match reader.value()? {
        Value::Array(fields @ 2..) => {
            reader.skip()?;
            decode_events(reader, batch, format, limits, pool)?;
            if fields > 2 {
                batch.rank = field::rank(reader)?;
            }
            for _ in 3..fields {
                reader.skip()?;
            }
        }
        Value::Map(entries) => {
            let mut has_events = false;
            for _ in 0..entries {
                match reader.value()? {
                    Value::Text(b"events") => {
                        decode_events(reader, batch, format, limits, pool)?;
                        has_events = true;
                    }
                    Value::Text(b"data_parallel_rank" | b"dp_rank" | b"attn_dp_rank") => {
                        batch.rank = field::rank(reader)?.or(batch.rank);
                    }
                    _ => reader.skip()?,
                }
            }
            // A map without events comes from an engine of another format.
            if !has_events {
                return Err(DecodeError::Missing { field: "events" }.into());
            }
        }
        other => {
            return Err(DecodeError::wrong_type("the batch", "[ts, events, rank] or a map", other).into());
        }
    }
    Ok(())
}

fn decode_events(
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    format: Format,
    limits: &DecodeLimits,
    pool: &mut Pool,
) -> Result<(), DecodeError> {
    let count = reader.array("events", limits.events_max)?;
    decode_each(reader, batch, count, |reader, batch| {
        decode_event(reader, batch, format, limits, pool)
    })
}

fn decode_event(
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    format: Format,
    limits: &DecodeLimits,
    pool: &mut Pool,
) -> Result<Verdict, DecodeError> {
    match reader.value()? {
        Value::Map(entries) => {
            let mut fields = Fields::new(true);
            for _ in 0..entries {
                match reader.value()? {
                    Value::Text(key) => fields.read(EventField::of(key)?, reader, batch, limits)?,
                    other => return Err(DecodeError::wrong_type("an event", "text keys", other)),
                }
            }
            fields.finish(batch, format, limits, pool)
        }
        Value::Array(slots @ 1..) => {
            let tag = Tag::of(reader.text("type", limits.text_bytes_max)?.as_bytes());
            let mut fields = Fields::new(false);
            fields.tag = Some(tag);
            match tag {
                Tag::Stored => {
                    batch.untold = batch.untold.or(untold_by(slots, format));
                    read_stored_slots(slots, &mut fields, reader, batch, format, limits)?;
                }
                Tag::Removed => read_removed_slots(slots, &mut fields, reader, batch, limits)?,
                Tag::Cleared if slots > 1 => {
                    let key = match reader.clone().value()? {
                        Value::Text(b"LOCAL" | b"REMOTE") => EventField::Locality,
                        Value::Text(text) if tier_of_medium(text).is_some() => EventField::Medium,
                        _ => EventField::Ownership,
                    };
                    fields.read(key, reader, batch, limits)?;
                    skip(slots - 2, reader)?;
                }
                _ => skip(slots - 1, reader)?,
            }
            fields.finish(batch, format, limits, pool)
        }
        other => Err(DecodeError::wrong_type("an event", "a map or an array", other)),
    }
}

/// Returns the facts (salts, adapters) that a stored event of `slots` elements has no room for. Only events in array
/// form can lack this room: versions that write maps have fields for all facts.
fn untold_by(slots: usize, format: Format) -> Untold {
    match format {
        // The slot of the adapter's name has the salt instead.
        Format::Sglang => Untold {
            salts: slots <= LORA_NAME_SLOT,
            adapters: true,
        },
        _ => Untold {
            salts: slots <= EXTRA_KEYS_SLOT,
            adapters: slots <= LORA_NAME_SLOT,
        },
    }
}

fn is_component(value: &Value<'_>) -> bool {
    matches!(value, Value::Text(name) if components::named(name).is_some())
}

fn is_medium(value: &Value<'_>) -> bool {
    matches!(value, Value::Text(name) if tier_of_medium(name).is_some())
}

fn skip(values: usize, reader: &mut Reader<'_>) -> Result<(), DecodeError> {
    (0..values).try_for_each(|_| reader.skip())
}

fn read_stored_slots<'a>(
    slots: usize,
    fields: &mut Fields<'a>,
    reader: &mut Reader<'a>,
    batch: &mut EngineBatch,
    format: Format,
    limits: &DecodeLimits,
) -> Result<(), DecodeError> {
    // Number of slots by which images have pushed the later fields back.
    let mut pushed = 0;
    for slot in 1..slots {
        let has_images = slot == GROUP_SLOT && matches!(reader.clone().value()?, Value::Array(_));
        let is_sglang = format == Format::Sglang && (MEDIUM_SLOT..=EXTRA_KEYS_SLOT).contains(&slot);
        let value = if is_sglang {
            Some(reader.clone().value()?)
        } else {
            None
        };
        if let Some(key) = value.and_then(|value| sglang_key(slot, &value)) {
            fields.read(key, reader, batch, limits)?;
        } else if let Some(Value::Map(_)) = value {
            fields.read_lora_name_or_metadata(reader, batch, limits)?;
        } else if let Some(key) = STORED_HEAD.get(slot - 1) {
            fields.read(*key, reader, batch, limits)?;
        } else if slot == LORA_NAME_SLOT {
            fields.read_lora_name_or_metadata(reader, batch, limits)?;
        } else if has_images {
            pushed = 1;
            fields.read(EventField::Objects, reader, batch, limits)?;
        } else if let Some(key) = STORED_TAIL.get(slot - LORA_NAME_SLOT - 1 - pushed) {
            fields.read(*key, reader, batch, limits)?;
        } else {
            reader.skip()?;
        }
    }
    Ok(())
}

/// Returns the field that SGLang has at index `slot` of an event's array, if vLLM has another field there; else
/// `None`. The type of `value` shows which of SGLang's fields it is: a medium, a component or a list of components.
fn sglang_key(slot: usize, value: &Value<'_>) -> Option<EventField> {
    match value {
        Value::Text(_) if is_component(value) => Some(EventField::Component),
        Value::Text(_) if slot == LORA_NAME_SLOT && is_medium(value) => Some(EventField::Medium),
        Value::Array(_) | Value::Unsigned(_) if slot == LORA_NAME_SLOT => Some(EventField::Components),
        _ => None,
    }
}

fn read_removed_slots<'a>(
    slots: usize,
    fields: &mut Fields<'a>,
    reader: &mut Reader<'a>,
    batch: &mut EngineBatch,
    limits: &DecodeLimits,
) -> Result<(), DecodeError> {
    for slot in 1..slots {
        let key = match slot {
            1 => EventField::Names,
            // SGLang's component stands in one of these slots, before the medium or behind it.
            2 | 3 if is_component(&reader.clone().value()?) => EventField::Component,
            2 => EventField::Medium,
            3 if is_medium(&reader.clone().value()?) => EventField::Medium,
            3 => EventField::GroupIndex,
            // The rest is a group's kind, its window, the locality and the owner. Each version of an engine has some of
            // them.
            _ => match reader.clone().value()? {
                Value::Text(b"LOCAL" | b"REMOTE") => EventField::Locality,
                Value::Text(kind) if kind.ends_with(b"attention") || kind.starts_with(b"sliding_window") => {
                    EventField::GroupKind
                }
                Value::Text(b"mamba") => EventField::GroupKind,
                Value::Text(_) if OWNER_SLOTS.contains(&slot) => EventField::Ownership,
                // A text at another index is no owner. If it were read as one, the removal would seem to be about
                // blocks of another system.
                Value::Text(_) => {
                    return Err(DecodeError::Combination("a text in a removal that nobody knows"));
                }
                _ => EventField::Other,
            },
        };
        fields.read(key, reader, batch, limits)?;
    }
    Ok(())
}
