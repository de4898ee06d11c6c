//! One tagged event of vLLM, SGLang or Mooncake: its fields, from a map or from an array.

use kvatlas_core::wire::{DecodeError, Reader, Tier, Value};

use crate::batch::{
    Content, EngineBatch, EngineChange, EngineEvent, EngineRemoved, EngineStored, Group, Span,
};
use crate::facts::GroupKind;
use crate::limits::DecodeLimits;
use crate::reason::Reason;

use super::components::{self, Components};
use super::extra_keys::{ExtraKeys, read_extra_keys, read_image_lists, read_object_lists};
use super::media::{is_never_removed, tier_of_medium};
use super::pool::{Object, Pool};
use super::tokens::{TokenList, names_one_page, read_text_tokens, read_tokens, widen};
use super::{Format, Verdict, array_or_nil, field};

/// The kind of a tagged event, which its tag (type name) tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tag {
    Stored,
    Removed,
    Cleared,
    /// An event with the tag `Ignored`, which has no meaning.
    Ignored,
    Unknown,
}

impl Tag {
    /// Returns the kind of event that the tag `name` stands for. Each kind has one tag in events of vLLM and SGLang,
    /// and another in events of Mooncake.
    pub(super) fn of(name: &[u8]) -> Self {
        match name {
            b"BlockStored" | b"stored" => Self::Stored,
            b"BlockRemoved" | b"removed" => Self::Removed,
            b"AllBlocksCleared" | b"cleared" => Self::Cleared,
            b"Ignored" => Self::Ignored,
            _ => Self::Unknown,
        }
    }
}

/// A field that a tagged event may have. Keys of maps and indices of arrays are translated into these fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EventField {
    Type,
    EventType,
    Names,
    SequenceNames,
    Parent,
    ParentHash,
    Position,
    Tokens,
    BlockSize,
    LoraId,
    LoraName,
    CacheSalt,
    Medium,
    Locality,
    Ownership,
    Backend,
    GroupIndex,
    GroupKind,
    GroupWindow,
    ExtraKeys,
    Objects,
    ImageKeys,
    Lookahead,
    CopiesLeft,
    Model,
    Tenant,
    Salt,
    Shard,
    Component,
    Components,
    Other,
}

impl EventField {
    /// Returns the field with the name `name`. An unknown name gives [`Self::Other`], because later versions of engines
    /// may have more fields. A name that is not UTF-8 is an error.
    pub(super) fn of(name: &[u8]) -> Result<Self, DecodeError> {
        Ok(match name {
            b"type" => Self::Type,
            b"event_type" => Self::EventType,
            b"block_hashes" => Self::Names,
            b"seq_hashes" => Self::SequenceNames,
            b"parent_block_hash" => Self::Parent,
            b"parent_hash" => Self::ParentHash,
            b"base_block_idx" => Self::Position,
            b"token_ids" => Self::Tokens,
            b"block_size" => Self::BlockSize,
            b"lora_id" => Self::LoraId,
            b"lora_name" => Self::LoraName,
            b"cache_salt" => Self::CacheSalt,
            b"medium" => Self::Medium,
            b"locality" => Self::Locality,
            b"ownership" => Self::Ownership,
            b"backend_id" => Self::Backend,
            b"group_idx" => Self::GroupIndex,
            b"kv_cache_spec_kind" => Self::GroupKind,
            b"kv_cache_spec_sliding_window" => Self::GroupWindow,
            b"extra_keys" => Self::ExtraKeys,
            b"block_mm_infos" => Self::Objects,
            b"mm_keys" => Self::ImageKeys,
            b"lookahead_token_ids" => Self::Lookahead,
            b"remaining_copy_counts" => Self::CopiesLeft,
            b"model_name" => Self::Model,
            b"tenant_id" => Self::Tenant,
            b"additional_salt" => Self::Salt,
            b"tp_rank" => Self::Shard,
            b"component_type" => Self::Component,
            b"component_types" => Self::Components,
            _ => {
                std::str::from_utf8(name).map_err(|_| DecodeError::NotUtf8 { field: "a key" })?;
                Self::Other
            }
        })
    }
}

/// The kinds of layer groups that are main attention: a request needs all blocks of a prefix in such a group.
const MAIN_KINDS: [&str; 3] = ["full_attention", "mla_attention", "sink_full_attention"];

/// The group of an event, from the group's number, kind and window.
pub(crate) fn group_of_kind(index: Option<u32>, kind: Option<&str>, window: Option<u32>) -> Group {
    let kind_of = |kind: &str| match (kind, window) {
        (kind, _) if MAIN_KINDS.contains(&kind) => GroupKind::Main,
        ("sliding_window" | "sliding_window_mla", Some(tokens)) => GroupKind::Window(tokens),
        ("mamba", _) => GroupKind::State,
        _ => GroupKind::Other,
    };
    Group {
        index,
        kind: kind.map(kind_of),
    }
}

/// All fields that a tagged event may have.
#[derive(Default)]
pub(super) struct Fields<'a> {
    pub(super) tag: Option<Tag>,
    names: Option<Span>,
    /// Mooncake's names, which are the contract's hashes. They take precedence over the engine's names.
    sequence_names: Option<Span>,
    /// The parent's name. The outer option is `None` if the field was absent. The inner option is `None` for nil. Only
    /// nil means that the block has no parent.
    parent: Option<Option<u64>>,
    position: Option<u64>,
    tokens: Option<TokenList<'a>>,
    block_size: Option<u64>,
    lora_id: Option<u64>,
    lora_name: Option<&'a str>,
    cache_salt: Option<&'a str>,
    medium: Option<&'a str>,
    locality: Option<&'a str>,
    ownership: Option<&'a str>,
    backend: Option<Value<'a>>,
    group_index: Option<u32>,
    group_kind: Option<&'a str>,
    group_window: Option<u32>,
    components: Option<Components>,
    /// Extra keys. They can be read only after the names, the adapter and the place in the sequence.
    extra_keys: Option<Reader<'a>>,
    objects: Option<Reader<'a>>,
    image_keys: Option<Reader<'a>>,
    lookahead: Option<Reader<'a>>,
    copies_left: Option<Span>,
    /// The facts about an object of Mooncake Store.
    object: Object<'a>,
    /// Whether the event is a map. In versions that write maps, an image is never a bare text.
    is_map: bool,
    /// Bit set of the fields that have been read so far. A field may come only once.
    seen: u32,
}

impl<'a> Fields<'a> {
    pub(super) fn new(is_map: bool) -> Self {
        Self {
            is_map,
            ..Self::default()
        }
    }

    /// Reads the value of the field `key`. Fails if the event has the field twice.
    pub(super) fn read(
        &mut self,
        key: EventField,
        reader: &mut Reader<'a>,
        batch: &mut EngineBatch,
        limits: &DecodeLimits,
    ) -> Result<(), DecodeError> {
        let text = limits.text_bytes_max;
        if key != EventField::Other {
            let bit = 1 << key as u32;
            if self.seen & bit != 0 {
                return Err(DecodeError::Repeated { field: "a key" });
            }
            self.seen |= bit;
        }
        match key {
            EventField::Type | EventField::EventType => {
                self.tag = Some(Tag::of(reader.text("type", text)?.as_bytes()))
            }
            EventField::Names => self.names = read_names("block_hashes", reader, batch)?,
            EventField::SequenceNames => self.sequence_names = read_names("seq_hashes", reader, batch)?,
            EventField::Parent | EventField::ParentHash => {
                let parent = field::optional_name("parent_block_hash", reader)?;
                self.parent = Some(parent.or(self.parent.flatten()));
            }
            EventField::Position => self.position = reader.optional_unsigned("base_block_idx")?,
            EventField::Tokens => self.tokens = read_tokens(reader, batch)?,
            EventField::BlockSize => self.block_size = reader.optional_unsigned("block_size")?,
            EventField::LoraId => self.lora_id = reader.optional_unsigned("lora_id")?,
            EventField::LoraName => self.lora_name = field::optional_text("lora_name", reader, text)?,
            EventField::CacheSalt => self.cache_salt = field::optional_text("cache_salt", reader, text)?,
            EventField::Medium => self.medium = field::optional_text("medium", reader, text)?,
            EventField::Locality => self.locality = field::optional_text("locality", reader, text)?,
            EventField::Ownership => self.ownership = field::optional_text("ownership", reader, text)?,
            EventField::Backend => self.backend = Some(reader.value()?).filter(|owner| *owner != Value::Nil),
            EventField::GroupIndex => self.group_index = reader.optional_unsigned_32("group_idx")?,
            EventField::GroupKind => {
                self.group_kind = field::optional_text("kv_cache_spec_kind", reader, text)?
            }
            EventField::GroupWindow => {
                self.group_window = reader.optional_unsigned_32("kv_cache_spec_sliding_window")?;
            }
            EventField::ExtraKeys => self.extra_keys = Some(reader.defer()?),
            EventField::Objects => self.objects = Some(reader.defer()?),
            EventField::ImageKeys => self.image_keys = Some(reader.defer()?),
            EventField::Lookahead => self.lookahead = Some(reader.defer()?),
            EventField::CopiesLeft => self.copies_left = read_copies_left(reader, batch)?,
            EventField::Model => self.object.model = field::optional_text("model_name", reader, text)?,
            EventField::Tenant => self.object.tenant = field::optional_text("tenant_id", reader, text)?,
            EventField::Salt => self.object.salt = field::optional_text("additional_salt", reader, text)?,
            EventField::Shard => self.object.shard = reader.optional_unsigned("tp_rank")?,
            EventField::Component => {
                self.components = components::read_one(reader, limits)?.or(self.components)
            }
            EventField::Components => {
                self.components = components::read_all(reader, limits)?.or(self.components)
            }
            EventField::Other => reader.skip()?,
        }
        Ok(())
    }

    /// Reads the field for the LoRA name. SGLang has no LoRA name in this field, but a map that may hold the salt.
    pub(super) fn read_lora_name_or_metadata(
        &mut self,
        reader: &mut Reader<'a>,
        batch: &mut EngineBatch,
        limits: &DecodeLimits,
    ) -> Result<(), DecodeError> {
        let Value::Map(entries) = reader.clone().value()? else {
            return self.read(EventField::LoraName, reader, batch, limits);
        };
        reader.value()?;
        let mut has_salt = false;
        for _ in 0..entries {
            match reader.value()? {
                Value::Text(b"cache_salt") => {
                    has_salt = true;
                    self.read(EventField::CacheSalt, reader, batch, limits)?;
                }
                _ => reader.skip()?,
            }
        }
        let missing = DecodeError::Missing { field: "cache_salt" };
        if has_salt { Ok(()) } else { Err(missing) }
    }

    /// Builds the event from the fields and appends it to the batch.
    pub(super) fn finish(
        self,
        batch: &mut EngineBatch,
        format: Format,
        limits: &DecodeLimits,
        pool: &mut Pool,
    ) -> Result<Verdict, DecodeError> {
        let Some(tag) = self.tag else {
            return Err(DecodeError::Missing { field: "type" });
        };
        match tag {
            Tag::Unknown => return Ok(Verdict::LeftOut(Reason::UnknownEvent)),
            Tag::Ignored => return Ok(Verdict::LeftOut(Reason::Ignored)),
            Tag::Stored | Tag::Removed | Tag::Cleared => {}
        }
        let told = match self.medium {
            None if format == Format::Mooncake => Some(Tier::HOST),
            None => Some(Tier::DEVICE),
            Some(medium) => tier_of_medium(medium.as_bytes()),
        };
        // A medium without a tier counts as the farthest tier.
        let tier = told.unwrap_or(Tier::EXTERNAL);
        let is_remote = self.locality.is_some_and(|locality| locality != "LOCAL");
        let elsewhere = [
            (self.ownership.is_some(), Reason::OtherOwner),
            (is_remote, Reason::Remote),
            (told.is_none(), Reason::UnknownMedium),
        ];
        if let Some((_, reason)) = elsewhere.into_iter().find(|(is_so, _)| *is_so) {
            return Ok(match tag {
                Tag::Stored => Verdict::LeftOutOf(tier, reason),
                _ => Verdict::LeftOut(reason),
            });
        }
        // Mooncake's master reports removals, but not evictions, so its blocks may stay listed for too long.
        let is_kept = match format {
            Format::Mooncake => true,
            _ => format.has_connector() && self.medium.is_some_and(is_never_removed),
        };
        let owner = push_owner(self.backend, batch)?;
        if format == Format::Mooncake {
            let is_others = !pool.owns(owner.map(|owner| batch.text(owner)), &self.object);
            let is_unclear = tag == Tag::Stored && self.names_span().is_ok_and(Span::is_empty);
            let reason = match is_others {
                true => Some(Reason::OtherOwner),
                // The event names the object by its key only, not by block hashes.
                false if is_unclear => Some(Reason::Unjoined),
                false if tag == Tag::Stored => self.object.trouble(self.lora_name),
                false => None,
            };
            match (reason, tag) {
                (None, _) => {}
                (Some(reason), Tag::Stored) => return Ok(Verdict::LeftOutOf(tier, reason)),
                (Some(reason), _) => return Ok(Verdict::LeftOut(reason)),
            }
        }
        let components = self.components;
        let change = match tag {
            Tag::Stored => match self.stored(tier, batch, format, limits)? {
                Ok(stored) => {
                    if is_kept {
                        batch.doubt(Some(tier), Reason::NoRemovals);
                    }
                    EngineChange::Stored(stored)
                }
                Err(reason) => return Ok(Verdict::LeftOutOf(tier, reason)),
            },
            Tag::Removed => EngineChange::Removed(self.removed(tier)?),
            // Only a part is cleared, and it is unknown which.
            _ if self.is_partial_clear() => return Ok(Verdict::LeftOut(Reason::UnknownEvent)),
            _ if self.medium.is_some() && tier != Tier::DEVICE => {
                return Ok(Verdict::LeftOutOf(tier, Reason::UnclearTier));
            }
            _ => EngineChange::Cleared,
        };
        let event = EngineEvent {
            owner,
            rank: None,
            id: None,
            change,
        };
        components::push(components, event, batch, limits)?;
        Ok(Verdict::Taken)
    }

    /// Whether the event, which is a clear, clears only some groups or blocks.
    fn is_partial_clear(&self) -> bool {
        let has_names = self.names.is_some_and(|names| !names.is_empty());
        self.group_index.is_some() || self.components.is_some() || has_names
    }

    fn group(&self) -> Group {
        match self.components {
            Some(components) => components.first().group(),
            None => group_of_kind(self.group_index, self.group_kind, self.group_window),
        }
    }

    fn names_span(&self) -> Result<Span, DecodeError> {
        self.sequence_names.or(self.names).ok_or(DecodeError::Missing {
            field: "block_hashes",
        })
    }

    fn removed(&self, tier: Tier) -> Result<EngineRemoved, DecodeError> {
        let names = self.names_span()?;
        match self.copies_left {
            Some(left) if left.len() != names.len() => Err(DecodeError::LengthMismatch {
                field: "remaining_copy_counts",
                count: left.len(),
                blocks: names.len(),
            }),
            left => Ok(EngineRemoved {
                names,
                tier: Some(tier),
                group: self.group(),
                left,
            }),
        }
    }

    fn stored(
        self,
        tier: Tier,
        batch: &mut EngineBatch,
        format: Format,
        limits: &DecodeLimits,
    ) -> Result<Result<EngineStored, Reason>, DecodeError> {
        let names = self.names_span()?;
        let group = self.group();
        // An event without blocks still tells that there is a group other than main attention.
        if names.is_empty() && !group.is_beside_main() {
            return Ok(Err(Reason::Ignored));
        }
        let parent = match (self.parent, self.position) {
            // Mooncake writes nil for a root, and for a parent that it does not know.
            (Some(None), None) if format == Format::Mooncake => return Ok(Err(Reason::UnknownParent)),
            (Some(parent), _) => parent,
            (None, Some(_)) => None,
            (None, None) => {
                return Err(DecodeError::Missing {
                    field: "parent_block_hash",
                });
            }
        };
        let content = match self.content(names, tier, format, batch)? {
            Ok(content) => content,
            Err(_) if group.is_beside_main() => Content::Absent,
            Err(reason) => return Ok(Err(reason)),
        };
        if format == Format::Sglang
            && !self.is_map
            && parent.is_none()
            && names_one_page(names, content, batch)
        {
            // SGLang versions that name a page by its own tokens leave out the parent, too.
            batch.note(Reason::UnknownParent);
        }
        let start = batch.objects.len();
        let salt = self.read_objects(names, parent, content, batch, limits)?;
        Ok(Ok(EngineStored {
            names,
            parent,
            position: self.position,
            block_size: self.block_size,
            content,
            tier,
            group,
            lora_name: self.lora_name.map(|name| batch.push_text(name)),
            lora_id: self.lora_id,
            cache_salt: self.cache_salt.or(salt).map(|salt| batch.push_text(salt)),
            objects: Span::new(start, batch.objects.len()),
        }))
    }

    /// Appends the event's multimodal objects to the batch. Two blocks with the same tokens and different objects are
    /// different blocks. Returns the salt if the extra keys hold it.
    fn read_objects(
        &self,
        names: Span,
        parent: Option<u64>,
        content: Content,
        batch: &mut EngineBatch,
        limits: &DecodeLimits,
    ) -> Result<Option<&'a str>, DecodeError> {
        let start = batch.objects.len();
        let mut salt = None;
        if let Some(reader) = &self.extra_keys {
            let keys = ExtraKeys {
                blocks: names.len(),
                lora_name: self.lora_name,
                starts_sequence: parent.is_none(),
                images_are_pairs: self.is_map,
                text_bytes_max: limits.text_bytes_max,
            };
            salt = read_extra_keys(&keys, &mut reader.clone(), batch)?;
        }
        if let Some(reader) = &self.objects {
            // These lists hold the same objects as the extra keys, in another form, so the extra keys' objects are
            // dropped.
            batch.truncate_objects(start);
            read_object_lists(names.len(), &mut reader.clone(), batch)?;
        }
        if let Some(reader) = &self.image_keys {
            read_image_lists(names.len(), &mut reader.clone(), batch, limits)?;
        }
        let texts = self.tokens.as_ref().and_then(|list| list.with_texts.as_ref());
        if let (Some((count, reader)), Content::Tokens { step, .. }) = (texts, content) {
            let size = self.block_size.and_then(|size| usize::try_from(size).ok());
            read_text_tokens(size.unwrap_or(step), *count, &mut reader.clone(), batch)?;
        }
        batch.sort_objects(start);
        Ok(salt)
    }

    /// Returns the blocks' content: their tokens, and the lookahead tokens. A lookahead token stands after a block, and
    /// the block's hash covers it.
    fn content(
        &self,
        names: Span,
        tier: Tier,
        format: Format,
        batch: &mut EngineBatch,
    ) -> Result<Result<Content, Reason>, DecodeError> {
        // An engine's events about the device may tell the content of a block that lies beyond the device. Not so for
        // Mooncake: its names are not an engine's names.
        let is_beyond = tier != Tier::DEVICE && format != Format::Mooncake;
        let list = match &self.tokens {
            Some(list) if !list.tokens.is_empty() => list,
            _ if self.sequence_names.is_some() => return Ok(Ok(Content::Absent)),
            // Events about the device may tell the content.
            _ if is_beyond => return Ok(Ok(Content::Absent)),
            _ => return Ok(Err(Reason::Placeholder)),
        };
        let blocks = names.len();
        let count = list.tokens.len() - usize::from(list.is_bigram);
        let size = match self.block_size {
            Some(size) => usize::try_from(size).unwrap_or(usize::MAX),
            None if self.sequence_names.is_some() => count / blocks.max(1),
            None => return Err(DecodeError::Missing { field: "block_size" }),
        };
        if size == 0 || size.checked_mul(blocks) != Some(count) {
            return Ok(Ok(Content::Misfit));
        }
        let plain = Content::Tokens {
            tokens: list.tokens,
            step: size,
            window: size + usize::from(list.is_bigram),
        };
        match &self.lookahead {
            Some(reader) if !list.is_bigram => {
                let widened = widen(list.tokens, size, blocks, &mut reader.clone(), batch)?;
                Ok(Ok(widened.unwrap_or(plain)))
            }
            _ => Ok(Ok(plain)),
        }
    }
}

/// Appends the owner of an event's blocks as text.
pub(super) fn push_owner(
    owner: Option<Value<'_>>,
    batch: &mut EngineBatch,
) -> Result<Option<Span>, DecodeError> {
    match owner {
        None => Ok(None),
        Some(Value::Text(bytes)) => match std::str::from_utf8(bytes) {
            Ok(text) => Ok(Some(batch.push_text(text))),
            Err(_) => Err(DecodeError::NotUtf8 { field: "backend_id" }),
        },
        Some(Value::Unsigned(number)) => Ok(Some(batch.push_number(number))),
        Some(other) => Err(DecodeError::wrong_type("backend_id", "a text or a number", other)),
    }
}

fn read_names(
    field: &'static str,
    reader: &mut Reader<'_>,
    batch: &mut EngineBatch,
) -> Result<Option<Span>, DecodeError> {
    let start = batch.hashes.len();
    field::names(field, reader, &mut batch.hashes)?;
    Ok(Some(batch.hashes_since(start)))
}

/// Reads the list `remaining_copy_counts`: for each removed block, the number of copies that are left after the removal. `None`
/// for nil.
fn read_copies_left(reader: &mut Reader<'_>, batch: &mut EngineBatch) -> Result<Option<Span>, DecodeError> {
    let field = "remaining_copy_counts";
    let Some(count) = array_or_nil(reader, field)? else {
        return Ok(None);
    };
    let start = batch.hashes.len();
    for _ in 0..count {
        batch.hashes.push(reader.unsigned(field)?);
    }
    Ok(Some(batch.hashes_since(start)))
}
