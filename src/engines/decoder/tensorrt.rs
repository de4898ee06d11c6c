//! TensorRT-LLM's events: a JSON list of `{event_id, data, window_size}`.
//!
//! | `data.type` | meaning |
//! |---|---|
//! | `created` | a group of layers begins to have events; nothing is stored |
//! | `stored` | `parent_hash`, and `blocks` with `block_hash`, `tokens`, `cache_level`, `lora_id`, `mm_keys` |
//! | `removed` | `block_hashes`, in whichever level they lie |
//! | `updated` | a block has moved from one `cache_level` to another |
//!
//! Engines with sliding windows have events for each window size. Engines with cache manager V2 have events for each group of
//! layers (`layer_group_id`). A request reuses only a prefix that all these groups have. So each of these groups counts as
//! main attention: a request needs all its blocks of a prefix.

use kvatlas_core::hash::Token;
use kvatlas_core::wire::{DecodeError, Reader, Value};

use crate::batch::{
    Content, EngineBatch, EngineChange, EngineEvent, EngineRemoved, EngineStored, EventNumber, Group, Mark,
    Span,
};
use crate::facts::GroupKind;
use crate::limits::DecodeLimits;
use crate::reason::Reason;

use super::extra_keys::{identifier_hash, read_image_keys};
use super::media::tier_of_level;
use super::tokens::TEXT_TOKEN;
use super::{BatchError, Verdict, array_or_nil, decode_each, ends_sequence, entries_of, field};

/// Decodes a list of events, or a single event.
pub(super) fn decode(
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    limits: &DecodeLimits,
) -> Result<(), BatchError> {
    let count = match reader.clone().value()? {
        Value::Array(_) => reader.array("events", limits.events_max)?,
        _ => 1,
    };
    Ok(decode_each(reader, batch, count, |reader, batch| {
        decode_event(reader, batch, limits)
    })?)
}

/// Facts of a TensorRT-LLM event that are the same for all changes in the event.
#[derive(Default)]
struct EventHead {
    id: Option<u64>,
    rank: Option<u32>,
    window: Option<u32>,
    layer_group: Option<u32>,
}

impl EventHead {
    /// The group of layers that the event is about. Its number is the event's `layer_group_id`. Without that, the
    /// window size serves as the number. If the event has neither, the group has no number.
    fn group(&self) -> Group {
        let index = self.layer_group.or(self.window);
        Group {
            index,
            kind: index.map(|_| GroupKind::Main),
        }
    }
}

fn decode_event<'a>(
    reader: &mut Reader<'a>,
    batch: &mut EngineBatch,
    limits: &DecodeLimits,
) -> Result<Verdict, DecodeError> {
    let mut head = EventHead::default();
    let mut data: Option<Reader<'a>> = None;
    reader.map("an event", |reader, key| {
        match key {
            b"event_id" => head.id = reader.optional_unsigned("event_id")?,
            b"attention_dp_rank" => head.rank = field::rank(reader)?,
            b"window_size" => head.window = reader.optional_unsigned_32("window_size")?,
            b"layer_group_id" => head.layer_group = reader.optional_unsigned_32("layer_group_id")?,
            b"data" => data = Some(reader.defer()?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    if let Some(id) = head.id {
        batch.numbers.push(EventNumber { rank: head.rank, id });
    }
    let mut data = data.ok_or(DecodeError::Missing { field: "data" })?;
    decode_data(&head, &mut data, batch, limits)
}

/// The fields that the `data` of an event can have, for all types of events.
#[derive(Default)]
struct DataFields<'a> {
    kind: Option<&'a str>,
    /// The parent's name. The outer option is `None` if the field was absent. The inner option is `None` if the block
    /// has no parent.
    parent: Option<Option<u64>>,
    blocks: Option<Reader<'a>>,
    names: Option<Span>,
    name: Option<u64>,
    level: Option<Reader<'a>>,
}

fn decode_data<'a>(
    head: &EventHead,
    reader: &mut Reader<'a>,
    batch: &mut EngineBatch,
    limits: &DecodeLimits,
) -> Result<Verdict, DecodeError> {
    let mut data = DataFields::default();
    for _ in 0..entries_of(reader, "data")? {
        match reader.value()? {
            Value::Text(b"type") => data.kind = reader.optional_text("type", limits.text_bytes_max)?,
            Value::Text(b"parent_hash") => data.parent = Some(field::optional_name("parent_hash", reader)?),
            Value::Text(b"block_hash") => data.name = field::optional_name("block_hash", reader)?,
            Value::Text(b"block_hashes") => {
                let start = batch.hashes.len();
                field::names("block_hashes", reader, &mut batch.hashes)?;
                data.names = Some(batch.hashes_since(start));
            }
            Value::Text(b"blocks") => data.blocks = Some(reader.defer()?),
            Value::Text(b"cache_level") => data.level = Some(reader.defer()?),
            _ => reader.skip()?,
        }
    }
    let kind = data.kind.ok_or(DecodeError::Missing { field: "type" })?;
    match kind {
        "created" => Ok(take(head, EngineChange::Created(head.group()), batch)),
        "stored" => {
            let mut blocks = data.blocks.ok_or(DecodeError::Missing { field: "blocks" })?;
            let parent = data.parent.ok_or(DecodeError::Missing { field: "parent_hash" })?;
            StoredEvent::new(head, parent, batch).read(&mut blocks, batch, limits)
        }
        "removed" => {
            let names = data.names.ok_or(DecodeError::Missing {
                field: "block_hashes",
            })?;
            let change = EngineChange::Removed(EngineRemoved {
                names,
                tier: None,
                group: head.group(),
                left: None,
            });
            Ok(take(head, change, batch))
        }
        "updated" => updated(head, &data, batch),
        _ => Ok(Verdict::LeftOut(Reason::UnknownEvent)),
    }
}

fn take(head: &EventHead, change: EngineChange, batch: &mut EngineBatch) -> Verdict {
    batch.push(EngineEvent {
        owner: None,
        rank: head.rank,
        id: head.id,
        change,
    });
    Verdict::Taken
}

/// Reads a change of a block's cache level. Other changes, such as that of its priority, move no block and are left out.
fn updated(head: &EventHead, data: &DataFields<'_>, batch: &mut EngineBatch) -> Result<Verdict, DecodeError> {
    let name = data.name.ok_or(DecodeError::Missing { field: "block_hash" })?;
    let Some(level) = &data.level else {
        return Ok(Verdict::LeftOut(Reason::Ignored));
    };
    let mut level = level.clone();
    if matches!(level.clone().value()?, Value::Nil) {
        return Ok(Verdict::LeftOut(Reason::Ignored));
    }
    let (mut old, mut new) = (None, None);
    level.map("cache_level", |reader, key| {
        match key {
            b"old_value" => old = Some(reader.unsigned("old_value")?),
            b"new_value" => new = Some(reader.unsigned("new_value")?),
            _ => reader.skip()?,
        }
        Ok(())
    })?;
    let tier = |level: Option<u64>, field| {
        let level = level.ok_or(DecodeError::Missing { field })?;
        tier_of_level(level).ok_or(DecodeError::OutOfRange {
            field,
            value: level,
            max: 2,
        })
    };
    let change = EngineChange::Moved {
        name,
        from: tier(old, "old_value")?,
        to: tier(new, "new_value")?,
        group: head.group(),
    };
    Ok(take(head, change, batch))
}

/// One block of a stored event.
#[derive(Default)]
struct StoredBlock {
    name: Option<u64>,
    level: u64,
    tokens: usize,
    lora_id: Option<u64>,
    cache_salt: Option<Span>,
}

/// State of reading a stored event. The event becomes one or more changes in the batch. Consecutive blocks with the
/// same cache level, adapter and salt form one change, and a block that differs begins the next change. A block
/// without a salt has the salt of the block before it.
struct StoredEvent<'a> {
    head: &'a EventHead,
    parent: Option<u64>,
    /// Number of tokens in the first block, which is the block size; `None` before that block is read.
    size: Option<usize>,
    /// The cache level of all blocks of the current change. They also share the adapter and the salt.
    level: u64,
    lora_id: Option<u64>,
    cache_salt: Option<Span>,
    /// Lengths of the batch's lists before the current change.
    mark: Mark,
    blocks: u32,
}

impl<'a> StoredEvent<'a> {
    fn new(head: &'a EventHead, parent: Option<u64>, batch: &EngineBatch) -> Self {
        Self {
            head,
            parent,
            size: None,
            level: 0,
            lora_id: None,
            cache_salt: None,
            mark: batch.mark(),
            blocks: 0,
        }
    }

    fn read(
        mut self,
        reader: &mut Reader<'_>,
        batch: &mut EngineBatch,
        limits: &DecodeLimits,
    ) -> Result<Verdict, DecodeError> {
        let count = array_or_nil(reader, "blocks")?.unwrap_or_default();
        if count == 0 {
            return Ok(Verdict::LeftOut(Reason::Ignored));
        }
        let (mut rest, mut left_out) = (count, None);
        while rest > 0 {
            rest -= 1;
            let before = batch.mark();
            let block = self.read_block(reader, batch, limits)?;
            let size = *self.size.get_or_insert(block.tokens);
            if block.tokens != size || size == 0 {
                batch.rewind(before);
                left_out = Some(match ends_sequence(block.tokens, size, rest == 0) {
                    true => Reason::PartOfBlock,
                    false => Reason::BlockSize,
                });
                break;
            }
            let own_salt = self.cache_salt.map(|salt| batch.text(salt));
            let has_other_salt = block
                .cache_salt
                .is_some_and(|salt| own_salt != Some(batch.text(salt)));
            let is_other = has_other_salt || (block.level, block.lora_id) != (self.level, self.lora_id);
            if self.blocks > 0 && is_other {
                self.begin_next(before, batch)?;
            }
            batch
                .hashes
                .push(block.name.ok_or(DecodeError::Missing { field: "block_hash" })?);
            self.level = block.level;
            self.lora_id = block.lora_id;
            self.cache_salt = block.cache_salt.or(self.cache_salt);
            self.blocks += 1;
        }
        (0..rest).try_for_each(|_| reader.skip())?;
        self.finish(batch.mark(), batch)?;
        if let Some(reason) = left_out {
            batch.note(reason);
        }
        Ok(Verdict::Taken)
    }

    /// Appends to the batch the change with the blocks before `start`. Then begins another change, whose blocks are
    /// at `start` and after it.
    fn begin_next(&mut self, start: Mark, batch: &mut EngineBatch) -> Result<(), DecodeError> {
        self.finish(start, batch)?;
        self.parent = start
            .hashes
            .checked_sub(1)
            .and_then(|last| batch.hashes.get(last).copied());
        self.mark = start;
        self.blocks = 0;
        for object in batch.objects.get_mut(start.objects..).unwrap_or_default() {
            object.block = 0;
        }
        Ok(())
    }

    /// Makes a change of the blocks up to `end`.
    fn finish(&self, end: Mark, batch: &mut EngineBatch) -> Result<(), DecodeError> {
        let Some(size) = self.size.filter(|_| self.blocks > 0) else {
            return Ok(());
        };
        let tier = tier_of_level(self.level).ok_or(DecodeError::OutOfRange {
            field: "cache_level",
            value: self.level,
            max: 2,
        })?;
        let stored = EngineStored {
            names: Span::new(self.mark.hashes, end.hashes),
            parent: self.parent,
            position: None,
            block_size: Some(size as u64),
            content: Content::Tokens {
                tokens: Span::new(self.mark.tokens, end.tokens),
                step: size,
                window: size,
            },
            tier,
            group: self.head.group(),
            lora_name: None,
            lora_id: self.lora_id,
            cache_salt: self.cache_salt,
            objects: Span::new(self.mark.objects, end.objects),
        };
        take(self.head, EngineChange::Stored(stored), batch);
        Ok(())
    }

    fn read_block(
        &self,
        reader: &mut Reader<'_>,
        batch: &mut EngineBatch,
        limits: &DecodeLimits,
    ) -> Result<StoredBlock, DecodeError> {
        let mut block = StoredBlock::default();
        let objects = batch.objects.len();
        let (mut tells_adapter, mut tells_salt) = (false, false);
        reader.map("a block", |reader, key| {
            match key {
                b"block_hash" => block.name = Some(field::name("block_hash", reader.value()?)?),
                b"cache_level" => block.level = reader.optional_unsigned("cache_level")?.unwrap_or_default(),
                b"lora_id" => {
                    tells_adapter = true;
                    block.lora_id = reader.optional_unsigned("lora_id")?;
                }
                b"cache_salt" => {
                    tells_salt = true;
                    let salt = field::optional_text("cache_salt", reader, limits.text_bytes_max)?;
                    block.cache_salt = salt.map(|salt| batch.push_text(salt));
                }
                b"tokens" => {
                    let before = batch.tokens.len();
                    read_tokens(self.blocks, reader, batch, limits)?;
                    block.tokens = batch.tokens.len() - before;
                }
                b"mm_keys" => read_image_keys(self.blocks, reader, batch, limits)?,
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        batch
            .objects
            .get_mut(objects..)
            .unwrap_or_default()
            .sort_unstable();
        batch.untold.adapters |= !tells_adapter;
        batch.untold.salts |= !tells_salt;
        Ok(block)
    }
}

/// Reads tokens with extra ids. Each run of tokens with one extra id other than 0 is an object: the tokens are placeholders,
/// and the id stands for their content. Each text in the place of a token is an object, too.
fn read_tokens(
    block: u32,
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
    limits: &DecodeLimits,
) -> Result<(), DecodeError> {
    let count = array_or_nil(reader, "tokens")?.unwrap_or_default();
    batch.tokens.reserve(count);
    let mut run = 0;
    for _ in 0..count {
        let (mut token, mut extra) = (None::<Token>, 0);
        reader.map("tokens", |reader, key| {
            match key {
                b"token_id" => match reader.clone().value()? {
                    Value::Text([_, ..]) => {
                        let text = reader.text("token_id", limits.text_bytes_max)?;
                        let hash = identifier_hash(text);
                        batch.push_object(block, hash, None);
                        token = Some(TEXT_TOKEN);
                    }
                    _ => token = Some(reader.unsigned_32("token_id")?),
                },
                b"token_extra_id" => extra = reader.optional_unsigned("token_extra_id")?.unwrap_or_default(),
                _ => reader.skip()?,
            }
            Ok(())
        })?;
        batch
            .tokens
            .push(token.ok_or(DecodeError::Missing { field: "token_id" })?);
        if extra != run && extra != 0 {
            batch.push_object(block, extra, None);
        }
        run = extra;
    }
    Ok(())
}
