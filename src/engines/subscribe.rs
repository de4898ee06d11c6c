//! Frames of `SubscribeKvEvents`, a gRPC stream. By this stream, servers of vLLM, SGLang, TokenSpeed and TensorRT-LLM pass on
//! their engines' KV events.
//!
//! The messages are those of the package `smg.grpc.common`. Fields that kvatlas does not need are not declared, and are
//! skipped. A frame is either a live batch, a chunk of a snapshot, or a report of load, which tells nothing of blocks.

use kvatlas_core::wire::{Rank, Tier};
use prost::Message as _;

use crate::batch::{Content, EngineBatch, EngineChange, EngineEvent, EngineRemoved, EngineStored, Group};
use crate::decoder::{ends_sequence, group_of_kind, identifier_hash, is_never_removed, tier_of_medium};
use crate::limits::DecodeLimits;
use crate::reason::Reason;

use kvatlas_core::hash::object_hash;

/// The request for frames. The default asks for all frames that the server has.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SubscribeRequest {
    /// The number of the last frame that was seen; 0 if none was.
    #[prost(uint64, tag = "1")]
    pub start_sequence_number: u64,
}

/// One frame of the stream.
#[derive(Clone, PartialEq, prost::Message)]
pub struct KvEventFrame {
    #[prost(uint64, tag = "1")]
    sequence_number: u64,
    #[prost(double, tag = "2")]
    timestamp: f64,
    #[prost(message, repeated, tag = "3")]
    events: Vec<KvCacheEvent>,
    #[prost(int32, optional, tag = "4")]
    dp_rank: Option<i32>,
    #[prost(message, optional, tag = "7")]
    snapshot: Option<SnapshotChunk>,
    #[prost(message, optional, tag = "8")]
    load: Option<EngineLoad>,
}

/// A frame's place in a snapshot, which comes in chunks.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct SnapshotChunk {
    /// The chunk's number, from 0.
    #[prost(uint32, tag = "1")]
    pub index: u32,
    /// Number of chunks in the snapshot.
    #[prost(uint32, tag = "2")]
    pub count: u32,
    /// Number of blocks in the whole snapshot. Each copy of a block counts.
    #[prost(uint64, tag = "3")]
    pub blocks: u64,
    /// Number of batches that the server itself has missed: their blocks are not in the snapshot.
    #[prost(uint64, tag = "4")]
    pub unknown_before: u64,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
struct EngineLoad {
    #[prost(bool, tag = "9")]
    load_only: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
struct KvCacheEvent {
    #[prost(oneof = "EventData", tags = "2, 3, 4")]
    data: Option<EventData>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum EventData {
    #[prost(message, tag = "2")]
    Stored(KvBlocksStored),
    #[prost(message, tag = "3")]
    Removed(KvBlocksRemoved),
    #[prost(message, tag = "4")]
    Cleared(KvCacheCleared),
}

#[derive(Clone, PartialEq, prost::Message)]
struct KvBlocksStored {
    #[prost(message, repeated, tag = "1")]
    blocks: Vec<KvBlock>,
    #[prost(int64, optional, tag = "2")]
    parent_block_hash: Option<i64>,
    #[prost(int32, optional, tag = "3")]
    tier: Option<i32>,
    #[prost(string, optional, tag = "4")]
    medium: Option<String>,
    #[prost(uint32, optional, tag = "5")]
    group_idx: Option<u32>,
    #[prost(string, optional, tag = "6")]
    kv_cache_spec_kind: Option<String>,
    #[prost(uint32, optional, tag = "7")]
    kv_cache_spec_sliding_window: Option<u32>,
    #[prost(int32, optional, tag = "8")]
    locality: Option<i32>,
    #[prost(string, optional, tag = "9")]
    ownership: Option<String>,
    #[prost(string, optional, tag = "11")]
    lora_name: Option<String>,
    #[prost(string, optional, tag = "12")]
    cache_salt: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct KvBlock {
    #[prost(int64, tag = "1")]
    block_hash: i64,
    #[prost(uint32, repeated, tag = "2")]
    token_ids: Vec<u32>,
    #[prost(int32, tag = "3")]
    block_size: i32,
    #[prost(int64, optional, tag = "4")]
    lora_id: Option<i64>,
    #[prost(message, repeated, tag = "6")]
    extra_keys: Vec<KvBlockExtraKey>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct KvBlockExtraKey {
    #[prost(oneof = "ExtraKey", tags = "1, 2, 3, 4")]
    key: Option<ExtraKey>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum ExtraKey {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(bytes = "vec", tag = "2")]
    Blob(Vec<u8>),
    #[prost(int64, tag = "3")]
    Number(i64),
    #[prost(message, tag = "4")]
    Multimodal(KvMultimodalKey),
}

#[derive(Clone, PartialEq, prost::Message)]
struct KvMultimodalKey {
    #[prost(string, tag = "1")]
    identifier: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct KvBlocksRemoved {
    #[prost(int64, repeated, tag = "1")]
    block_hashes: Vec<i64>,
    #[prost(int32, optional, tag = "3")]
    tier: Option<i32>,
    #[prost(string, optional, tag = "4")]
    medium: Option<String>,
    #[prost(uint32, optional, tag = "5")]
    group_idx: Option<u32>,
    #[prost(int32, optional, tag = "6")]
    locality: Option<i32>,
    #[prost(string, optional, tag = "7")]
    ownership: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct KvCacheCleared {
    #[prost(string, optional, tag = "1")]
    ownership: Option<String>,
}

/// Number of the enum value `KvCacheLocality::REMOTE`. Blocks with this locality are not local to the engine.
const REMOTE: i32 = 2;

impl KvEventFrame {
    /// The number that the engine gave to the batch in the frame. A report of load has no number of its own: it
    /// repeats the number of another frame.
    pub fn number(&self) -> u64 {
        self.sequence_number
    }

    /// The data-parallel rank; `None` if the frame has none, or a negative number.
    pub fn rank(&self) -> Option<Rank> {
        self.dp_rank.and_then(|rank| Rank::try_from(rank).ok())
    }

    /// Whether the frame has only a report of the server's load, and no events. The number in such a frame is the
    /// number of another frame.
    pub fn is_load(&self) -> bool {
        self.load.as_ref().is_some_and(|load| load.load_only)
    }

    /// The frame's place in a snapshot; `None` for a live batch.
    pub fn snapshot(&self) -> Option<SnapshotChunk> {
        self.snapshot
    }

    /// Fills `batch`, which is emptied first, with the frame's events.
    ///
    /// An event that can't be read is counted in [`EngineBatch::reasons`] and left out.
    pub fn read(&self, limits: &DecodeLimits, batch: &mut EngineBatch) {
        batch.begin(|| self.encoded_len());
        batch.rank = self.rank();
        let events_max = match self.events.len() > limits.events_max {
            true => limits.for_payload(self.encoded_len()).events_max,
            false => limits.events_max,
        };
        for (number, event) in self.events.iter().enumerate() {
            let mark = batch.mark();
            let read = match number < events_max {
                true => event.read(limits, batch),
                false => Err(Reason::Malformed),
            };
            match read {
                Ok(change) => batch.push(EngineEvent {
                    owner: None,
                    rank: None,
                    id: None,
                    change,
                }),
                Err(reason) => batch.leave_out(reason, event.stored_tier(), mark),
            }
        }
    }
}

impl KvCacheEvent {
    /// The tier in which the event stores blocks; `None` if it stores none.
    fn stored_tier(&self) -> Option<Tier> {
        match &self.data {
            // A medium without a tier counts as the farthest tier.
            Some(EventData::Stored(stored)) => {
                Some(tier_of(stored.tier, stored.medium.as_deref()).unwrap_or(Tier::EXTERNAL))
            }
            _ => None,
        }
    }

    fn read(&self, limits: &DecodeLimits, batch: &mut EngineBatch) -> Result<EngineChange, Reason> {
        match &self.data {
            None => Err(Reason::UnknownEvent),
            Some(EventData::Stored(stored)) => stored.read(limits, batch).map(EngineChange::Stored),
            Some(EventData::Removed(removed)) => removed.read(batch).map(EngineChange::Removed),
            Some(EventData::Cleared(cleared)) => {
                check_owner(None, cleared.ownership.as_deref())?;
                Ok(EngineChange::Cleared)
            }
        }
    }
}

/// Refuses an event about blocks that are not local to the engine, or that belong to another system.
fn check_owner(locality: Option<i32>, ownership: Option<&str>) -> Result<(), Reason> {
    match ownership {
        _ if locality == Some(REMOTE) => Err(Reason::Remote),
        Some(owner) if !owner.is_empty() => Err(Reason::OtherOwner),
        _ => Ok(()),
    }
}

/// The tier that an event names by number or by medium; the device if the event names none.
fn tier_of(tier: Option<i32>, medium: Option<&str>) -> Result<Tier, Reason> {
    let by_medium = || match medium {
        None | Some("") => Some(Tier::DEVICE),
        Some(medium) => tier_of_medium(medium.as_bytes()),
    };
    let found = match tier {
        None | Some(0) => by_medium(),
        Some(tier @ 1..=4) => u8::try_from(tier - 1).ok().and_then(Tier::new),
        Some(_) => None,
    };
    found.ok_or(Reason::UnknownMedium)
}

impl KvBlocksStored {
    fn read(&self, limits: &DecodeLimits, batch: &mut EngineBatch) -> Result<EngineStored, Reason> {
        check_owner(self.locality, self.ownership.as_deref())?;
        let tier = tier_of(self.tier, self.medium.as_deref())?;
        if self.medium.as_deref().is_some_and(is_never_removed) {
            batch.doubt(Some(tier), Reason::NoRemovals);
        }
        let size = self.blocks.first().map(|block| block.block_size);
        let names = batch.hashes.len();
        let tokens = batch.tokens.len();
        let objects = batch.objects.len();
        let mut is_fit = true;
        let whole = self.whole_blocks();
        if whole.len() < self.blocks.len() {
            batch.note(Reason::PartOfBlock);
        }
        for (number, block) in whole.iter().enumerate() {
            batch.hashes.push(block.block_hash.cast_unsigned());
            batch.tokens.extend(&block.token_ids);
            is_fit &= Some(block.block_size) == size
                && usize::try_from(block.block_size) == Ok(block.token_ids.len());
            self.read_objects(number, block, batch);
        }
        let lora_name = text(self.lora_name.as_deref(), limits, batch)?;
        let cache_salt = text(self.cache_salt.as_deref(), limits, batch)?;
        let block_size = size.map(|size| u64::try_from(size).map_err(|_| Reason::Malformed));
        let block_size = block_size.transpose()?;
        let step = size
            .and_then(|size| usize::try_from(size).ok())
            .unwrap_or_default();
        let lora_id = self.blocks.first().and_then(|block| block.lora_id);
        Ok(EngineStored {
            names: batch.hashes_since(names),
            parent: self.parent_block_hash.map(i64::cast_unsigned),
            position: None,
            block_size,
            content: match is_fit {
                true if step > 0 => Content::Tokens {
                    tokens: batch.tokens_since(tokens),
                    step,
                    window: step,
                },
                // An event about the device may have told, or may still tell, the content of a block of this name.
                true if tier != Tier::DEVICE => Content::Absent,
                _ => Content::Misfit,
            },
            tier,
            group: group_of_kind(
                self.group_idx,
                self.kv_cache_spec_kind.as_deref(),
                self.kv_cache_spec_sliding_window,
            ),
            lora_name,
            lora_id: lora_id.and_then(|id| u64::try_from(id).ok()),
            cache_salt,
            objects: batch.objects_since(objects),
        })
    }

    /// The blocks of the event, without the last one if that is an incomplete block at the end of the sequence.
    fn whole_blocks(&self) -> &[KvBlock] {
        let Some((last, before)) = self.blocks.split_last() else {
            return &[];
        };
        let size_of = |block: &KvBlock| usize::try_from(block.block_size).unwrap_or_default();
        let is_part = before.first().is_some_and(|first| {
            let tokens = last.token_ids.len();
            tokens == size_of(last) && ends_sequence(tokens, size_of(first), true)
        });
        if is_part { before } else { &self.blocks }
    }

    /// Appends the block's multimodal objects. Like adapter and salt, objects tell blocks with the same tokens apart.
    fn read_objects(&self, number: usize, block: &KvBlock, batch: &mut EngineBatch) {
        let block_number = u32::try_from(number).unwrap_or(u32::MAX);
        let start = batch.objects.len();
        for key in block.extra_keys.iter().filter_map(|key| key.key.as_ref()) {
            let (hash, identifier) = match key {
                ExtraKey::Text(text) if self.is_namespace(text) => continue,
                ExtraKey::Text(text) => (identifier_hash(text), Some(text.as_str())),
                ExtraKey::Blob(bytes) => (object_hash(bytes), None),
                ExtraKey::Number(number) => (number.cast_unsigned(), None),
                ExtraKey::Multimodal(key) => {
                    let identifier = key.identifier.as_str();
                    (identifier_hash(identifier), Some(identifier))
                }
            };
            batch.push_object(block_number, hash, identifier);
        }
        batch.objects.get_mut(start..).unwrap_or_default().sort_unstable();
    }

    /// Whether an extra key stands for the adapter or the salt, and not for a multimodal object. Such a key is equal
    /// to the event's field for the adapter's name or for the salt. An empty key counts as such a key, too.
    fn is_namespace(&self, text: &str) -> bool {
        text.is_empty()
            || [&self.lora_name, &self.cache_salt]
                .into_iter()
                .flatten()
                .any(|known| known == text)
    }
}

/// Appends a text to the batch and returns its span; `None` if there is no text, or an empty one.
fn text(
    text: Option<&str>,
    limits: &DecodeLimits,
    batch: &mut EngineBatch,
) -> Result<Option<crate::batch::Span>, Reason> {
    match text {
        None | Some("") => Ok(None),
        Some(text) if text.len() > limits.text_bytes_max => Err(Reason::Malformed),
        Some(text) => Ok(Some(batch.push_text(text))),
    }
}

impl KvBlocksRemoved {
    fn read(&self, batch: &mut EngineBatch) -> Result<EngineRemoved, Reason> {
        check_owner(self.locality, self.ownership.as_deref())?;
        let tier = tier_of(self.tier, self.medium.as_deref())?;
        let names = batch.hashes.len();
        batch
            .hashes
            .extend(self.block_hashes.iter().map(|hash| hash.cast_unsigned()));
        Ok(EngineRemoved {
            names: batch.hashes_since(names),
            tier: Some(tier),
            group: Group {
                index: self.group_idx,
                ..Group::default()
            },
            left: None,
        })
    }
}
