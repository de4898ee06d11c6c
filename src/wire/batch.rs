//! Event batches: what a publisher sends.

use serde::{Deserialize, Serialize};

use crate::hash::{BlockHash, Position, PositionalLineageHash, SequenceHash, Token};

use super::error::DecodeError;
use super::limits::WireLimits;
use super::name::Rank;
use super::reader::{Reader, check_version, set_once};
use super::writer::{Writer, count};

/// Where in a worker's memory hierarchy a block lies. A holder holds a block as long as any tier has it.
///
/// 0 is the accelerator's memory, 1 the host's, 2 a local disk, 3 remote storage; 4 to 7 are free for the publisher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Tier(u8);

/// There is no such tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there is no tier {0}; tiers are numbered from 0 to {last}", last = Tier::COUNT - 1)]
pub struct UnknownTier(u8);

impl TryFrom<u8> for Tier {
    type Error = UnknownTier;

    fn try_from(number: u8) -> Result<Self, UnknownTier> {
        Self::new(number).ok_or(UnknownTier(number))
    }
}

impl From<Tier> for u8 {
    fn from(tier: Tier) -> Self {
        tier.0
    }
}

impl Tier {
    /// The accelerator's memory.
    pub const DEVICE: Self = Self(0);
    /// How many tiers there are.
    pub const COUNT: u8 = 8;

    /// Tier `number`, below [`Self::COUNT`].
    pub fn new(number: u8) -> Option<Self> {
        (number < Self::COUNT).then_some(Self(number))
    }

    /// The number as it travels.
    pub fn as_u8(self) -> u8 {
        self.0
    }
}

/// What stored blocks are called.
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

/// What stored blocks consist of, for namespaces that recompute the chain.
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

/// Blocks that a holder has stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredBlocks {
    /// What the blocks are called.
    pub names: BlockNames,
    /// What they consist of, where the publisher says so.
    pub content: Option<BlockContent>,
    /// What the engine calls them in later removals, where that is not the sequence hash; one a block.
    pub engine_hashes: Option<Vec<u64>>,
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
    /// All blocks were removed, from every tier. What follows is the holder's full state, so it is exact again.
    Cleared,
    /// The holder shuts down in an orderly way and is forgotten.
    Goodbye,
}

/// One message on an events subject: a gap-free numbered list of changes of one holder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventBatch {
    /// The publisher's incarnation. A higher one replaces all that the holder had.
    pub epoch: u64,
    /// Number of the batch in its epoch: 1, 2, 3, … without a gap. Every batch has one, a heartbeat too.
    pub seq: u64,
    /// Data-parallel rank of the holder.
    pub rank: Rank,
    /// When the publisher made the batch, in microseconds since the Unix epoch.
    pub time_us: Option<u64>,
    /// The tier that the stored and removed blocks lie in; [`Tier::DEVICE`] where it is absent.
    pub tier: Tier,
    /// The changes, applied in this order. None at all makes the batch a heartbeat.
    pub events: Vec<Event>,
}

impl EventBatch {
    /// The payload for an events subject.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = Writer::default();
        let optional = u32::from(self.time_us.is_some()) + u32::from(self.tier != Tier::DEVICE);
        writer.map(5 + optional);
        writer.unsigned_entry("v", super::PROTOCOL_VERSION);
        writer.unsigned_entry("epoch", self.epoch);
        writer.unsigned_entry("seq", self.seq);
        writer.unsigned_entry("rank", u64::from(self.rank));
        if let Some(time_us) = self.time_us {
            writer.unsigned_entry("time_us", time_us);
        }
        if self.tier != Tier::DEVICE {
            writer.unsigned_entry("tier", u64::from(self.tier.as_u8()));
        }
        writer.text("events");
        writer.array(count(self.events.len()));
        for event in &self.events {
            event.encode(&mut writer);
        }
        writer.into_bytes()
    }

    /// Decodes a payload within `limits`.
    pub fn decode(payload: &[u8], limits: &WireLimits) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(payload, limits.message_bytes_max)?;
        let (mut version, mut epoch, mut seq, mut rank) = (None, None, None, None);
        let (mut time_us, mut tier, mut events) = (None, None, None);
        reader.map("the batch", |reader, key| match key {
            b"v" => set_once(&mut version, "v", reader.unsigned("v")?),
            b"epoch" => set_once(&mut epoch, "epoch", reader.unsigned("epoch")?),
            b"seq" => set_once(&mut seq, "seq", reader.unsigned("seq")?),
            b"rank" => set_once(&mut rank, "rank", reader.unsigned_32("rank")?),
            b"time_us" => set_once(&mut time_us, "time_us", reader.optional_unsigned("time_us")?),
            b"tier" => set_once(&mut tier, "tier", decode_tier(reader)?),
            b"events" => set_once(&mut events, "events", decode_events(reader, limits)?),
            _ => reader.skip(),
        })?;
        reader.finish()?;
        check_version(version)?;
        let seq = seq.ok_or(DecodeError::Missing { field: "seq" })?;
        if seq == 0 {
            return Err(DecodeError::Combination(
                "seq is 0; number the batches of an epoch from 1",
            ));
        }
        Ok(Self {
            epoch: epoch.ok_or(DecodeError::Missing { field: "epoch" })?,
            seq,
            rank: rank.unwrap_or_default(),
            time_us: time_us.flatten(),
            tier: tier.unwrap_or_default(),
            events: events.unwrap_or_default(),
        })
    }
}

fn decode_tier(reader: &mut Reader<'_>) -> Result<Tier, DecodeError> {
    let value = reader.optional_unsigned("tier")?.unwrap_or_default();
    let max = u64::from(Tier::COUNT) - 1;
    u8::try_from(value)
        .ok()
        .and_then(Tier::new)
        .ok_or(DecodeError::OutOfRange {
            field: "tier",
            value,
            max,
        })
}

fn decode_events(reader: &mut Reader<'_>, limits: &WireLimits) -> Result<Vec<Event>, DecodeError> {
    let events = reader.array("events", limits.events_max)?;
    (0..events).map(|_| Event::decode(reader, limits)).collect()
}

const EVENT_TYPES: &str = "stored, removed, cleared, goodbye";
/// Longer than any type; what is longer still is not worth looking at. No limit that can be configured: that one on names
/// could be set so low that no event has a type.
const TYPE_BYTES_MAX: usize = 64;

impl Event {
    fn encode(&self, writer: &mut Writer) {
        match self {
            Self::Stored(stored) => stored.encode(writer),
            Self::Removed(removed) => removed.encode(writer),
            Self::Cleared => {
                writer.map(1);
                writer.text_entry("type", "cleared");
            }
            Self::Goodbye => {
                writer.map(1);
                writer.text_entry("type", "goodbye");
            }
        }
    }

    fn decode(reader: &mut Reader<'_>, limits: &WireLimits) -> Result<Self, DecodeError> {
        let mut fields = EventFields::default();
        reader.map("an event", |reader, key| fields.read(reader, key, limits))?;
        match fields.kind.take() {
            None => Err(DecodeError::Missing { field: "type" }),
            Some("stored") => fields.into_stored().map(Self::Stored),
            Some("removed") => fields.into_removed().map(Self::Removed),
            Some("cleared") => Ok(Self::Cleared),
            Some("goodbye") => Ok(Self::Goodbye),
            Some(_) => Err(DecodeError::UnknownWord {
                field: "type",
                expected: EVENT_TYPES,
            }),
        }
    }
}

/// All fields that an event of any type may have; keys come in any order, so the type may come last.
#[derive(Default)]
struct EventFields<'a> {
    kind: Option<&'a str>,
    parent: Option<Option<u64>>,
    position: Option<Option<u64>>,
    sequence_hashes: Option<Vec<SequenceHash>>,
    lineage_hashes: Option<Vec<PositionalLineageHash>>,
    engine_hashes: Option<Vec<u64>>,
    block_hashes: Option<Vec<BlockHash>>,
    tokens: Option<Vec<Token>>,
    lora_name: Option<Option<&'a str>>,
    cache_salt: Option<Option<&'a str>>,
}

impl<'a> EventFields<'a> {
    fn read(&mut self, reader: &mut Reader<'a>, key: &[u8], limits: &WireLimits) -> Result<(), DecodeError> {
        let blocks = limits.blocks_per_event_max;
        let tokens = blocks.saturating_mul(limits.tokens_per_block_max);
        match key {
            b"type" => set_once(&mut self.kind, "type", reader.text("type", TYPE_BYTES_MAX)?),
            b"parent" => set_once(&mut self.parent, "parent", reader.optional_unsigned("parent")?),
            b"position" => set_once(
                &mut self.position,
                "position",
                reader.optional_unsigned("position")?,
            ),
            b"sequence_hashes" => set_once(
                &mut self.sequence_hashes,
                "sequence_hashes",
                reader.list("sequence_hashes", blocks)?,
            ),
            b"lineage_hashes" => set_once(
                &mut self.lineage_hashes,
                "lineage_hashes",
                reader.list("lineage_hashes", blocks)?,
            ),
            b"engine_hashes" => set_once(
                &mut self.engine_hashes,
                "engine_hashes",
                reader.list("engine_hashes", blocks)?,
            ),
            b"block_hashes" => set_once(
                &mut self.block_hashes,
                "block_hashes",
                reader.list("block_hashes", blocks)?,
            ),
            b"tokens" => set_once(&mut self.tokens, "tokens", reader.list("tokens", tokens)?),
            b"lora_name" => set_once(
                &mut self.lora_name,
                "lora_name",
                reader.optional_text("lora_name", limits.text_bytes_max)?,
            ),
            b"cache_salt" => set_once(
                &mut self.cache_salt,
                "cache_salt",
                reader.optional_text("cache_salt", limits.text_bytes_max)?,
            ),
            _ => reader.skip(),
        }
    }

    fn into_stored(self) -> Result<StoredBlocks, DecodeError> {
        let parent = self.parent.flatten().map(SequenceHash::from);
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
                lora_name: self.lora_name.flatten().map(str::to_owned),
                cache_salt: self.cache_salt.flatten().map(str::to_owned),
            }),
            (Some(_), Some(_)) => {
                return Err(DecodeError::Combination("send block_hashes or tokens, not both"));
            }
        };
        if let Some(hashes) = &self.engine_hashes {
            check_length("engine_hashes", hashes.len(), blocks)?;
        }
        Ok(StoredBlocks {
            names,
            content,
            engine_hashes: self.engine_hashes,
        })
    }

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

/// A start that can be placed: position 0 has no parent, every other has one, and the last block has a position too.
fn check_start(
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
        }
    }

    fn encode(&self, writer: &mut Writer) {
        writer.map(1 + self.entries());
        writer.text_entry("type", "stored");
        match &self.names {
            BlockNames::Sequence {
                parent,
                position,
                hashes,
            } => {
                if let Some(parent) = parent {
                    writer.unsigned_entry("parent", parent.as_u64());
                }
                if let Some(position) = position {
                    writer.unsigned_entry("position", position.as_u64());
                }
                writer.list_entry("sequence_hashes", hashes);
            }
            BlockNames::Lineage(hashes) => writer.list_entry("lineage_hashes", hashes),
        }
        match &self.content {
            None => {}
            Some(BlockContent::BlockHashes(hashes)) => writer.list_entry("block_hashes", hashes),
            Some(BlockContent::Tokens {
                tokens,
                lora_name,
                cache_salt,
            }) => {
                writer.list_entry("tokens", tokens);
                if let Some(name) = lora_name {
                    writer.text_entry("lora_name", name);
                }
                if let Some(salt) = cache_salt {
                    writer.text_entry("cache_salt", salt);
                }
            }
        }
        if let Some(hashes) = &self.engine_hashes {
            writer.list_entry("engine_hashes", hashes);
        }
    }

    /// How many map entries beside `type` the encoding has.
    fn entries(&self) -> u32 {
        let names = match &self.names {
            BlockNames::Sequence { parent, position, .. } => {
                1 + u32::from(parent.is_some()) + u32::from(position.is_some())
            }
            BlockNames::Lineage(_) => 1,
        };
        let content = match &self.content {
            None => 0,
            Some(BlockContent::BlockHashes(_)) => 1,
            Some(BlockContent::Tokens {
                lora_name,
                cache_salt,
                ..
            }) => 1 + u32::from(lora_name.is_some()) + u32::from(cache_salt.is_some()),
        };
        names + content + u32::from(self.engine_hashes.is_some())
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

    fn encode(&self, writer: &mut Writer) {
        let has_lineage = !self.lineage_hashes.is_empty();
        writer.map(2 + u32::from(has_lineage));
        writer.text_entry("type", "removed");
        writer.list_entry("sequence_hashes", &self.hashes);
        if has_lineage {
            writer.list_entry("lineage_hashes", &self.lineage_hashes);
        }
    }
}
