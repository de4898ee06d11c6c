//! Events: the changes that a batch tells.

use std::borrow::Cow;

use serde::de::Error;
use serde::{Deserialize, Deserializer};

use crate::hash::{
    BlockHash, BlockSize, HashSeed, Position, PositionalLineageHash, SequenceHash, Token, block_hashes,
};

use super::entries::{Entries, Message, serialize_entries};
use super::error::DecodeError;
use super::human::deserialize_fields;
use super::limits::WireLimits;
use super::reader::{Reader, Value, set_once};
use super::reasons::{DegradedReason, DegradedReasons};
use super::resumable::{Resumable, ResumableBlocks};

/// The names of stored blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockNames {
    /// Sequence hashes of consecutive blocks.
    Sequence {
        /// The sequence hash (or engine hash) of the block before the first; absent at position 0.
        parent: Option<SequenceHash>,
        /// The position of the first block. Where it is absent, it follows from the parent, which the holder
        /// must hold then.
        position: Option<Position>,
        /// One hash a block.
        hashes: Vec<SequenceHash>,
    },
    /// Lineage hashes, which name position and parent themselves; in any order.
    Lineage(Vec<PositionalLineageHash>),
}

impl BlockNames {
    /// How many blocks are named.
    pub fn len(&self) -> usize {
        match self {
            Self::Sequence { hashes, .. } => hashes.len(),
            Self::Lineage(hashes) => hashes.len(),
        }
    }

    /// Whether no block is named.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The content of stored blocks, for namespaces that recompute the chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockContent {
    /// One block hash a block.
    BlockHashes(Vec<BlockHash>),
    /// The tokens of all blocks, one after the other.
    Tokens {
        /// Block size × number of blocks tokens.
        tokens: Vec<Token>,
        /// Name of the LoRA adapter, if any.
        lora_name: Option<String>,
        /// Salt that keeps caches apart, if any.
        cache_salt: Option<String>,
    },
}

impl BlockContent {
    /// Whether it is that of so many blocks.
    pub fn is_of(&self, blocks: usize, size: BlockSize) -> bool {
        match self {
            Self::BlockHashes(hashes) => hashes.len() == blocks,
            Self::Tokens { tokens, .. } => tokens.len() == blocks.saturating_mul(size.as_usize()),
        }
    }

    /// The hashes of its blocks from the one of number `from` on.
    pub fn hashes_from(&self, from: usize, size: BlockSize) -> Cow<'_, [BlockHash]> {
        match self {
            Self::BlockHashes(hashes) => Cow::Borrowed(hashes.get(from..).unwrap_or_default()),
            Self::Tokens {
                tokens,
                lora_name,
                cache_salt,
            } => {
                let seed = HashSeed::for_cache(lora_name.as_deref(), cache_salt.as_deref());
                let first = from.saturating_mul(size.as_usize());
                block_hashes(tokens.get(first..).unwrap_or_default(), size, seed).collect()
            }
        }
    }
}

/// Blocks that a holder has stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBlocks {
    /// The names of the blocks.
    pub names: BlockNames,
    /// Their content, where the publisher tells it.
    pub content: Option<BlockContent>,
    /// The engine's names for them in later removals, where those are not the sequence hashes; one a block.
    pub engine_hashes: Option<Vec<u64>>,
    /// Behind which of them a request can resume.
    pub resumable: Resumable,
}

/// Blocks that a holder has removed. Hashes it does not hold are counted and passed over.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RemovedBlocks {
    /// Sequence hashes, or engine hashes where the blocks were stored with them.
    pub hashes: Vec<SequenceHash>,
    /// Lineage hashes.
    pub lineage_hashes: Vec<PositionalLineageHash>,
}

/// One change to what a holder holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Blocks were stored.
    Stored(StoredBlocks),
    /// Blocks were removed.
    Removed(RemovedBlocks),
    /// Blocks have become resumable, or are so no longer.
    Resumable(ResumableBlocks),
    /// All blocks were removed, from every tier. What follows is the holder's full state, so it is exact again.
    Cleared,
    /// The publisher's own doubts about its blocks from now on. It has lost events on the way from the engine, or sight
    /// of the engine. Only reasons for which [`DegradedReason::is_upstream`] holds; none at all ends the doubt, and so do
    /// [`Self::Cleared`] and a new epoch.
    Doubted(DegradedReasons),
    /// The holder shuts down in an orderly way and is forgotten.
    Goodbye,
}
/// The types of events, by their words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum EventType {
    Stored,
    Removed,
    Resumable,
    Cleared,
    Doubted,
    Goodbye,
}

/// The words of a publisher's own doubts.
const DOUBTS: &str = "upstream_gap, upstream_lost, unknown_groups, untold_salts, untold_adapters, looks_ahead, host_gap, disk_gap, \
    external_gap";

/// The longest word that is compared with the types, in bytes. Fixed, because the configured limit on texts may be shorter than a type.
const TYPE_BYTES_MAX: usize = 64;

impl EventType {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let mut ahead = reader.clone();
        if let Some(known) = ahead.short_text().and_then(Self::of_word) {
            *reader = ahead;
            return Ok(known);
        }
        let word = reader.text("type", TYPE_BYTES_MAX)?;
        Self::of_word(word.as_bytes()).ok_or(DecodeError::UnknownWord {
            field: "type",
            expected: "stored, removed, resumable, cleared, doubted, goodbye",
        })
    }

    fn of_word(word: &[u8]) -> Option<Self> {
        match word {
            b"stored" => Some(Self::Stored),
            b"removed" => Some(Self::Removed),
            b"resumable" => Some(Self::Resumable),
            b"cleared" => Some(Self::Cleared),
            b"doubted" => Some(Self::Doubted),
            b"goodbye" => Some(Self::Goodbye),
            _ => None,
        }
    }
}

impl Event {
    pub(super) fn decode(reader: &mut Reader<'_>, limits: &WireLimits) -> Result<Self, DecodeError> {
        let mut fields = EventFields::default();
        reader.map("an event", |reader, key| fields.read(reader, key, limits))?;
        fields.into_event()
    }
}

impl Message for Event {
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        match self {
            Self::Stored(stored) => {
                entries.text("type", "stored")?;
                stored.write(entries)
            }
            Self::Removed(removed) => {
                entries.text("type", "removed")?;
                write_named(&removed.hashes, &removed.lineage_hashes, entries)
            }
            Self::Resumable(blocks) => {
                entries.text("type", "resumable")?;
                write_named(&blocks.hashes, &blocks.lineage_hashes, entries)?;
                entries.flag("resumable", blocks.resumable)
            }
            Self::Cleared => entries.text("type", "cleared"),
            Self::Doubted(reasons) => {
                entries.text("type", "doubted")?;
                let upstream = DegradedReason::ALL
                    .into_iter()
                    .filter(|reason| reason.is_upstream());
                let doubts = upstream.filter(|reason| reasons.contains(*reason));
                entries.texts("reasons", doubts.map(DegradedReason::as_str))
            }
            Self::Goodbye => entries.text("type", "goodbye"),
        }
    }
}

/// The entries of blocks that are named one by one.
fn write_named<E: Entries>(
    hashes: &[SequenceHash],
    lineage_hashes: &[PositionalLineageHash],
    entries: &mut E,
) -> Result<(), E::Error> {
    entries.list("sequence_hashes", hashes)?;
    match lineage_hashes {
        [] => Ok(()),
        hashes => entries.list("lineage_hashes", hashes),
    }
}

serialize_entries!(Event);
impl<'de> Deserialize<'de> for Event {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_fields(deserializer, |fields: EventFields| {
            fields.refuse_strays()?;
            fields.into_event()
        })
    }
}

/// All fields that an event of any type may have; keys come in any order, so the type may come last.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct EventFields {
    r#type: Option<EventType>,
    parent: Option<Option<SequenceHash>>,
    position: Option<Option<u64>>,
    sequence_hashes: Option<Vec<SequenceHash>>,
    lineage_hashes: Option<Vec<PositionalLineageHash>>,
    // Written as other hashes are; turned into plain numbers in place.
    engine_hashes: Option<Vec<SequenceHash>>,
    block_hashes: Option<Vec<BlockHash>>,
    tokens: Option<Vec<Token>>,
    lora_name: Option<Option<String>>,
    cache_salt: Option<Option<String>>,
    reasons: Option<Doubts>,
    resumable: Option<RunsOrFlag>,
}

/// The value of `resumable`: run lengths of stored blocks, or what is said of all blocks of an event.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "resumable is neither a boolean nor an array of run lengths"
)]
enum RunsOrFlag {
    Flag(bool),
    Runs(Vec<u32>),
}

impl RunsOrFlag {
    fn decode(reader: &mut Reader<'_>, runs_max: usize) -> Result<Self, DecodeError> {
        match reader.clone().value()? {
            Value::Bool(_) => reader.boolean("resumable").map(Self::Flag),
            _ => reader.list("resumable", runs_max).map(Self::Runs),
        }
    }
}

impl EventFields {
    fn read(&mut self, reader: &mut Reader<'_>, key: &[u8], limits: &WireLimits) -> Result<(), DecodeError> {
        let blocks = limits.blocks_per_event_max;
        let tokens = blocks.saturating_mul(limits.tokens_per_block_max);
        match key {
            b"type" => set_once(&mut self.r#type, "type", EventType::decode(reader)?),
            b"parent" => {
                let parent = reader.optional_unsigned("parent")?.map(SequenceHash);
                set_once(&mut self.parent, "parent", parent)
            }
            b"position" => set_once(
                &mut self.position,
                "position",
                reader.optional_unsigned("position")?,
            ),
            b"sequence_hashes" => reader.list_once(&mut self.sequence_hashes, "sequence_hashes", blocks),
            b"lineage_hashes" => reader.list_once(&mut self.lineage_hashes, "lineage_hashes", blocks),
            b"engine_hashes" => reader.list_once(&mut self.engine_hashes, "engine_hashes", blocks),
            b"block_hashes" => reader.list_once(&mut self.block_hashes, "block_hashes", blocks),
            b"tokens" => reader.list_once(&mut self.tokens, "tokens", tokens),
            b"lora_name" => reader.text_once(&mut self.lora_name, "lora_name", limits.text_bytes_max),
            b"cache_salt" => reader.text_once(&mut self.cache_salt, "cache_salt", limits.text_bytes_max),
            b"reasons" => set_once(&mut self.reasons, "reasons", Doubts::decode(reader)?),
            b"resumable" => {
                let value = RunsOrFlag::decode(reader, blocks.saturating_add(1))?;
                set_once(&mut self.resumable, "resumable", value)
            }
            _ => reader.skip(),
        }
    }

    fn into_event(self) -> Result<Event, DecodeError> {
        match self.r#type {
            None => Err(DecodeError::Missing { field: "type" }),
            Some(EventType::Stored) => self.into_stored().map(Event::Stored),
            Some(EventType::Removed) => self.into_removed().map(Event::Removed),
            Some(EventType::Resumable) => self.into_resumable().map(Event::Resumable),
            Some(EventType::Cleared) => Ok(Event::Cleared),
            Some(EventType::Doubted) => self.into_doubted().map(Event::Doubted),
            Some(EventType::Goodbye) => Ok(Event::Goodbye),
        }
    }

    /// Refuses fields that an event of this type does not have. Machines may send them, so that the contract can grow; a person has
    /// made a mistake.
    fn refuse_strays(&self) -> Result<(), DecodeError> {
        let has_content_name = self.lora_name.is_some() || self.cache_salt.is_some();
        let has_stored_fields = self.parent.is_some()
            || self.position.is_some()
            || self.engine_hashes.is_some()
            || self.block_hashes.is_some()
            || self.tokens.is_some()
            || has_content_name;
        let has_hashes = self.sequence_hashes.is_some() || self.lineage_hashes.is_some();
        let has_reasons = self.reasons.is_some();
        let has_resumable = self.resumable.is_some();
        let fault = match self.r#type {
            Some(EventType::Doubted) if has_stored_fields || has_hashes || has_resumable => {
                "doubted has reasons only; leave the others out"
            }
            Some(EventType::Doubted) => return Ok(()),
            _ if has_reasons => "reasons belong to doubted; leave them out",
            Some(EventType::Stored) if has_content_name && self.tokens.is_none() => {
                "lora_name and cache_salt belong to tokens; leave them out"
            }
            Some(EventType::Removed) if has_stored_fields || has_resumable => {
                "removed has sequence_hashes and lineage_hashes only; leave the others out"
            }
            Some(EventType::Resumable) if has_stored_fields => {
                "resumable has sequence_hashes, lineage_hashes and resumable only; leave the others out"
            }
            Some(EventType::Cleared | EventType::Goodbye)
                if has_stored_fields || has_hashes || has_resumable =>
            {
                "cleared and goodbye have a type only; leave the others out"
            }
            _ => return Ok(()),
        };
        Err(DecodeError::Combination(fault))
    }

    fn into_doubted(self) -> Result<DegradedReasons, DecodeError> {
        let Doubts(reasons) = self.reasons.ok_or(DecodeError::Missing { field: "reasons" })?;
        Ok(reasons)
    }

    fn into_stored(self) -> Result<StoredBlocks, DecodeError> {
        let parent = self.parent.flatten();
        let position = self.position.flatten().map(Position::new).transpose()?;
        let names = match (self.sequence_hashes, self.lineage_hashes) {
            (Some(hashes), None) => {
                check_start(parent, position, hashes.len())?;
                BlockNames::Sequence {
                    parent,
                    position,
                    hashes,
                }
            }
            (None, Some(_)) if parent.is_some() || position.is_some() => {
                return Err(DecodeError::Combination(
                    "lineage_hashes name parent and position themselves; leave out parent and position",
                ));
            }
            (None, Some(hashes)) => BlockNames::Lineage(hashes),
            (None, None) => {
                return Err(DecodeError::Missing {
                    field: "sequence_hashes",
                });
            }
            (Some(_), Some(_)) => {
                return Err(DecodeError::Combination(
                    "send sequence_hashes or lineage_hashes, not both",
                ));
            }
        };
        let blocks = names.len();
        let content = match (self.block_hashes, self.tokens) {
            (None, None) => None,
            (Some(hashes), None) => {
                check_length("block_hashes", hashes.len(), blocks)?;
                Some(BlockContent::BlockHashes(hashes))
            }
            (None, Some(tokens)) if tokens.len() % blocks.max(1) != 0 => {
                return Err(DecodeError::LengthMismatch {
                    field: "tokens",
                    count: tokens.len(),
                    blocks,
                });
            }
            (None, Some(tokens)) => Some(BlockContent::Tokens {
                tokens,
                lora_name: self.lora_name.flatten(),
                cache_salt: self.cache_salt.flatten(),
            }),
            (Some(_), Some(_)) => {
                return Err(DecodeError::Combination("send block_hashes or tokens, not both"));
            }
        };
        if let Some(hashes) = &self.engine_hashes {
            check_length("engine_hashes", hashes.len(), blocks)?;
        }
        let resumable = match self.resumable {
            None => Resumable::ALL,
            Some(RunsOrFlag::Runs(runs)) => Resumable::from_runs(runs, blocks)?,
            Some(RunsOrFlag::Flag(_)) => {
                return Err(DecodeError::Combination(
                    "resumable of stored blocks is an array of run lengths",
                ));
            }
        };
        Ok(StoredBlocks {
            names,
            content,
            engine_hashes: self
                .engine_hashes
                .map(|hashes| hashes.into_iter().map(u64::from).collect()),
            resumable,
        })
    }

    fn into_resumable(self) -> Result<ResumableBlocks, DecodeError> {
        let resumable = match self.resumable {
            Some(RunsOrFlag::Flag(resumable)) => resumable,
            Some(RunsOrFlag::Runs(_)) => {
                return Err(DecodeError::Combination(
                    "resumable of an event of that type is a boolean",
                ));
            }
            None => return Err(DecodeError::Missing { field: "resumable" }),
        };
        let RemovedBlocks {
            hashes,
            lineage_hashes,
        } = self.into_removed()?;
        Ok(ResumableBlocks {
            hashes,
            lineage_hashes,
            resumable,
        })
    }

    /// Blocks that are named one by one.
    fn into_removed(self) -> Result<RemovedBlocks, DecodeError> {
        if self.sequence_hashes.is_none() && self.lineage_hashes.is_none() {
            return Err(DecodeError::Missing {
                field: "sequence_hashes",
            });
        }
        Ok(RemovedBlocks {
            hashes: self.sequence_hashes.unwrap_or_default(),
            lineage_hashes: self.lineage_hashes.unwrap_or_default(),
        })
    }
}

/// The publisher's own doubts. A word that is not known is an error: nobody could say of the holder that it is exact.
struct Doubts(DegradedReasons);

impl Doubts {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let words = reader.array("reasons", DegradedReason::ALL.len())?;
        let mut reasons = DegradedReasons::default();
        for _ in 0..words {
            reasons = reasons.with(Self::of_word(reader.text("reasons", TYPE_BYTES_MAX)?)?);
        }
        Ok(Self(reasons))
    }

    fn of_word(word: &str) -> Result<DegradedReason, DecodeError> {
        let upstream = DegradedReason::ALL
            .into_iter()
            .filter(|reason| reason.is_upstream());
        let mut named = upstream.filter(|reason| reason.as_str() == word);
        named.next().ok_or(DecodeError::UnknownWord {
            field: "reasons",
            expected: DOUBTS,
        })
    }
}

impl<'de> Deserialize<'de> for Doubts {
    /// As strict as [`Self::decode`]; replies read the same words leniently.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let words: Vec<Cow<'de, str>> = Deserialize::deserialize(deserializer)?;
        let mut reasons = DegradedReasons::default();
        for word in words {
            reasons = reasons.with(Self::of_word(&word).map_err(D::Error::custom)?);
        }
        Ok(Self(reasons))
    }
}

/// A start that can be placed: position 0 has no parent, every other has one, and the last block has a position too.
pub(super) fn check_start(
    parent: Option<SequenceHash>,
    position: Option<Position>,
    blocks: usize,
) -> Result<(), DecodeError> {
    match (parent, position.map(Position::as_u64)) {
        (None, Some(1..)) => Err(DecodeError::Combination(
            "a position above 0 needs a parent; send its sequence hash",
        )),
        (Some(_), Some(0)) => Err(DecodeError::Combination("position 0 has no parent; leave it out")),
        (_, first) => {
            let last = first.unwrap_or_default() + (blocks as u64).saturating_sub(1);
            Position::new(last)?;
            Ok(())
        }
    }
}

fn check_length(field: &'static str, count: usize, blocks: usize) -> Result<(), DecodeError> {
    if count != blocks {
        return Err(DecodeError::LengthMismatch { field, count, blocks });
    }
    Ok(())
}

impl StoredBlocks {
    /// Blocks called by sequence hashes, with nothing beside them.
    pub fn by_sequence(
        parent: Option<SequenceHash>,
        position: Option<Position>,
        hashes: Vec<SequenceHash>,
    ) -> Self {
        Self {
            names: BlockNames::Sequence {
                parent,
                position,
                hashes,
            },
            content: None,
            engine_hashes: None,
            resumable: Resumable::ALL,
        }
    }

    /// The entries behind the type.
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
        match &self.names {
            BlockNames::Sequence {
                parent,
                position,
                hashes,
            } => {
                if let Some(parent) = parent {
                    entries.hash("parent", *parent)?;
                }
                entries.optional_number("position", position.map(Position::as_u64))?;
                entries.list("sequence_hashes", hashes)?;
            }
            BlockNames::Lineage(hashes) => entries.list("lineage_hashes", hashes)?,
        }
        match &self.content {
            None => {}
            Some(BlockContent::BlockHashes(hashes)) => entries.list("block_hashes", hashes)?,
            Some(BlockContent::Tokens {
                tokens,
                lora_name,
                cache_salt,
            }) => {
                entries.list("tokens", tokens)?;
                entries.optional_text("lora_name", lora_name.as_ref())?;
                entries.optional_text("cache_salt", cache_salt.as_ref())?;
            }
        }
        if let Some(hashes) = &self.engine_hashes {
            entries.list("engine_hashes", hashes)?;
        }
        match self.resumable.runs() {
            Some(runs) => entries.numbers("resumable", runs),
            None => Ok(()),
        }
    }
}

impl RemovedBlocks {
    /// Blocks called by sequence or engine hashes.
    pub fn by_sequence(hashes: Vec<SequenceHash>) -> Self {
        Self {
            hashes,
            lineage_hashes: Vec::new(),
        }
    }
}
