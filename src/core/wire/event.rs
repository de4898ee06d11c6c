//! Events: the changes in a batch.

mod fields;
mod sizes;

use std::borrow::Cow;

use serde::{Deserialize, Deserializer};

use crate::hash::{
    BlockHash, BlockSize, HashSeed, Position, PositionalLineageHash, SequenceHash, Token, block_hashes,
};

use super::entries::{Entries, Message, serialize_entries};
use super::error::DecodeError;
use super::human::deserialize_fields;
use super::limits::WireLimits;
use super::reader::Reader;
use super::reasons::{DegradedReason, DegradedReasons};
use super::resumable::{Resumable, ResumableBlocks};

use fields::EventFields;
pub(super) use fields::check_start;
pub use sizes::RUN_BYTES;

/// Names of stored blocks: sequence hashes or lineage hashes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockNames {
    /// Sequence hashes of consecutive blocks.
    Sequence {
        /// The sequence hash (or engine hash) of the block before the first block. Absent at position 0.
        parent: Option<SequenceHash>,
        /// Position of the first block. If absent, the position follows from the parent, which the holder must then
        /// have.
        position: Option<Position>,
        /// Hashes of the blocks, one for each block.
        hashes: Vec<SequenceHash>,
    },
    /// Lineage hashes of blocks, in any order. Each contains its block's position and parent.
    Lineage(Vec<PositionalLineageHash>),
}

impl BlockNames {
    /// Number of blocks that the names stand for.
    pub fn len(&self) -> usize {
        match self {
            Self::Sequence { hashes, .. } => hashes.len(),
            Self::Lineage(hashes) => hashes.len(),
        }
    }

    /// Whether there are no names.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Content of stored blocks, for namespaces that recompute the hash chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockContent {
    /// Block hashes, one for each block.
    BlockHashes(Vec<BlockHash>),
    /// Tokens of all blocks in sequence.
    Tokens {
        /// The tokens. Their number is the block size times the number of blocks.
        tokens: Vec<Token>,
        /// Name of the LoRA adapter, if any.
        lora_name: Option<String>,
        /// Salt that separates caches, if any.
        cache_salt: Option<String>,
    },
}

impl BlockContent {
    /// Whether the content has the right length for `blocks` blocks.
    pub fn is_of(&self, blocks: usize, size: BlockSize) -> bool {
        match self {
            Self::BlockHashes(hashes) => hashes.len() == blocks,
            Self::Tokens { tokens, .. } => tokens.len() == blocks.saturating_mul(size.as_usize()),
        }
    }

    /// Returns the hash of block number `from` (counted from 0) and the hashes of all blocks after it.
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
    /// Content of the blocks, if the publisher sends it.
    pub content: Option<BlockContent>,
    /// Names by which the engine will call the blocks when it removes them, one for each block. Absent if the engine
    /// calls the blocks by their sequence hashes.
    pub engine_hashes: Option<Vec<u64>>,
    /// The blocks after which a request can resume.
    pub resumable: Resumable,
}

/// Blocks that a holder has removed. Hashes of blocks that the holder does not have are counted and otherwise
/// ignored.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RemovedBlocks {
    /// Hashes of the removed blocks: engine hashes if the blocks were stored with engine hashes, otherwise sequence
    /// hashes.
    pub hashes: Vec<SequenceHash>,
    /// Lineage hashes of the removed blocks.
    pub lineage_hashes: Vec<PositionalLineageHash>,
}

/// One change of a holder's blocks or state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Blocks were stored.
    Stored(StoredBlocks),
    /// Blocks were removed.
    Removed(RemovedBlocks),
    /// Blocks became resumable, or stopped being resumable.
    Resumable(ResumableBlocks),
    /// All blocks were removed, from every tier. The events after this one give the holder's full state. So the holder
    /// is exact again.
    Cleared,
    /// The publisher's own doubts about its blocks, from now on. The publisher has lost events of the engine, or has
    /// lost contact with the engine. The set contains only reasons for which [`DegradedReason::is_upstream`] is true.
    /// The doubts end with an empty set, with [`Self::Cleared`] and with a new epoch.
    Doubted(DegradedReasons),
    /// The holder shuts down in an orderly way. The daemon forgets it.
    Goodbye,
}
/// Types of events, each with its word on the wire.
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

/// Words for a publisher's doubts about its own blocks, as a list for error texts.
const DOUBTS: &str = "upstream_gap, upstream_lost, unknown_groups, untold_salts, untold_adapters, looks_ahead, hashes_pairs, \
    host_gap, disk_gap, external_gap";

/// Maximum length of a word that is read as a type, in bytes. The limit is fixed, because the configured limit on
/// texts may be shorter than the word of a type.
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

/// Writes the entries of an event whose blocks are named one by one.
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

impl StoredBlocks {
    /// Returns stored blocks that are named by sequence hashes, without content or engine hashes. All blocks are
    /// resumable.
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

    /// Writes the entries of the event, except for its type.
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
    /// Returns removed blocks that are named by sequence or engine hashes.
    pub fn by_sequence(hashes: Vec<SequenceHash>) -> Self {
        Self {
            hashes,
            lineage_hashes: Vec::new(),
        }
    }
}
