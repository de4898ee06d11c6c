//! Fields of an event, filled while they are read.

use std::borrow::Cow;

use serde::de::Error;
use serde::{Deserialize, Deserializer};

use crate::hash::{BlockHash, Position, PositionalLineageHash, SequenceHash, Token};
use crate::wire::error::DecodeError;
use crate::wire::limits::WireLimits;
use crate::wire::reader::{Reader, Value, set_once};
use crate::wire::reasons::{DegradedReason, DegradedReasons};
use crate::wire::resumable::{Resumable, ResumableBlocks};

use super::{
    BlockContent, BlockNames, DOUBTS, Event, EventType, RemovedBlocks, StoredBlocks, TYPE_BYTES_MAX,
};

/// All fields that an event of any type may have. Keys may be in any order, so the type may be the last.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct EventFields {
    r#type: Option<EventType>,
    parent: Option<Option<SequenceHash>>,
    position: Option<Option<u64>>,
    sequence_hashes: Option<Vec<SequenceHash>>,
    lineage_hashes: Option<Vec<PositionalLineageHash>>,
    // These hashes are read like other hashes, and then turned into plain numbers in place.
    engine_hashes: Option<Vec<SequenceHash>>,
    block_hashes: Option<Vec<BlockHash>>,
    tokens: Option<Vec<Token>>,
    lora_name: Option<Option<String>>,
    cache_salt: Option<Option<String>>,
    reasons: Option<PublisherDoubts>,
    resumable: Option<RunsOrFlag>,
}

/// Value of the field `resumable`. In an event of stored blocks it is a list of run lengths. In an event of type
/// `resumable` it is one boolean for all blocks.
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
    /// Reads a boolean, run lengths, or nil. Returns `None` for nil.
    fn decode(reader: &mut Reader<'_>, runs_max: usize) -> Result<Option<Self>, DecodeError> {
        match reader.clone().value()? {
            Value::Bool(_) => reader.boolean("resumable").map(|flag| Some(Self::Flag(flag))),
            _ => Ok(reader.optional_list("resumable", runs_max)?.map(Self::Runs)),
        }
    }
}

impl EventFields {
    pub(super) fn read(
        &mut self,
        reader: &mut Reader<'_>,
        key: &[u8],
        limits: &WireLimits,
    ) -> Result<(), DecodeError> {
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
            b"reasons" => set_once(&mut self.reasons, "reasons", PublisherDoubts::decode(reader)?),
            b"resumable" => match RunsOrFlag::decode(reader, blocks.saturating_add(1))? {
                Some(value) => set_once(&mut self.resumable, "resumable", value),
                None => Ok(()),
            },
            _ => reader.skip(),
        }
    }

    pub(super) fn into_event(self) -> Result<Event, DecodeError> {
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

    /// Refuses fields that an event of this type does not have. Called only for JSON, where such a field is a
    /// person's mistake. MessagePack may have such fields, so that the contract can grow.
    pub(super) fn refuse_strays(&self) -> Result<(), DecodeError> {
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
        let PublisherDoubts(reasons) = self.reasons.ok_or(DecodeError::Missing { field: "reasons" })?;
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

    /// Makes removed blocks from the fields. At least one list of hashes must be present.
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

/// The publisher's doubts about its own blocks. A daemon refuses an unknown word, because it must understand every
/// doubt to know when the holder is certain again.
struct PublisherDoubts(DegradedReasons);

impl PublisherDoubts {
    fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let words = reader.array("reasons", DegradedReason::ALL.len())?;
        let mut reasons = DegradedReasons::default();
        for _ in 0..words {
            reasons = reasons.with(Self::of_word(reader.text("reasons", TYPE_BYTES_MAX)?)?);
        }
        Ok(Self(reasons))
    }

    fn of_word(word: &str) -> Result<DegradedReason, DecodeError> {
        let named = DegradedReason::of_word(word).filter(|reason| reason.is_upstream());
        named.ok_or(DecodeError::UnknownWord {
            field: "reasons",
            expected: DOUBTS,
        })
    }
}

impl<'de> Deserialize<'de> for PublisherDoubts {
    /// Reads a list of reasons as words. Unknown words are errors, as in [`Self::decode`]; in replies to queries,
    /// they are [`DegradedReason::Unknown`].
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let words: Vec<Cow<'de, str>> = Deserialize::deserialize(deserializer)?;
        let mut reasons = DegradedReasons::default();
        for word in words {
            reasons = reasons.with(Self::of_word(&word).map_err(D::Error::custom)?);
        }
        Ok(Self(reasons))
    }
}

/// Checks the start of stored blocks: position 0 must have no parent, and every other position must have one. The
/// last block's position must also be in range.
pub(in crate::wire) fn check_start(
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
