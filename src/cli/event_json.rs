//! Events as JSON lines.
//!
//! One line is one event, or a batch of them. The keys are those of the wire contract, unknown ones are errors, and hashes
//! are written as [`HashText`] and [`LineageText`] say:
//!
//! ```json
//! {"type":"stored","sequence_hashes":["ea06fc71a5ee6e88"],"block_hashes":["ea06fc71a5ee6e88"]}
//! {"tier":1,"events":[{"type":"removed","sequence_hashes":["ea06fc71a5ee6e88"]},{"type":"cleared"}]}
//! {"events":[]}
//! ```

use kvatlas::hash::{BlockHash, Position, PositionalLineageHash, SequenceHash, Token};
use kvatlas::wire::{
    BlockContent, BlockNames, DecodeError, Event, EventBatch, RemovedBlocks, StoredBlocks, Tier, WireLimits,
};
use serde::{Deserialize, Serialize};

use super::hash_text::{HashText, LineageText};

/// Why a line is not a batch.
#[derive(Debug, thiserror::Error)]
pub(super) enum EventLineError {
    /// Not JSON, or not of the form of an event or a batch.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// Neither an event nor a batch.
    #[error("neither an event nor a batch; write an object with \"type\", or one with \"events\"")]
    Neither,
    /// The fields contradict each other; the text is the daemon's.
    #[error("{0}")]
    Contract(#[from] DecodeError),
}

/// The events of one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LineBatch {
    pub(super) tier: Tier,
    pub(super) events: Vec<Event>,
}

impl LineBatch {
    /// Reads a line without spaces around it, and checks it as the daemon would, except for limits that a daemon's configuration sets.
    pub(super) fn parse(line: &str) -> Result<Self, EventLineError> {
        #[derive(Deserialize)]
        struct Shape {
            r#type: Option<serde::de::IgnoredAny>,
            events: Option<serde::de::IgnoredAny>,
        }
        // serde would take an array for an object with its keys in order.
        if !line.starts_with('{') {
            return Err(EventLineError::Neither);
        }
        // The shape is looked at first, so that errors name the field at fault and its column.
        let shape: Shape = serde_json::from_str(line)?;
        let batch = if shape.r#type.is_some() {
            BatchLine {
                tier: None,
                events: vec![serde_json::from_str(line)?],
            }
        } else if shape.events.is_some() {
            serde_json::from_str(line)?
        } else {
            return Err(EventLineError::Neither);
        };
        Self::checked(batch)
    }

    /// The batch as a line that [`Self::parse`] reads back.
    pub(super) fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string(&BatchLine {
            tier: (self.tier != Tier::DEVICE).then(|| self.tier.as_u8()),
            events: self.events.iter().map(EventLine::from).collect(),
        })
    }

    /// How many blocks the events name.
    pub(super) fn blocks(&self) -> usize {
        let blocks = |event: &Event| match event {
            Event::Stored(stored) => stored.names.len(),
            Event::Removed(removed) => removed.hashes.len() + removed.lineage_hashes.len(),
            Event::Cleared | Event::Goodbye => 0,
        };
        self.events.iter().map(blocks).sum()
    }

    fn checked(line: BatchLine) -> Result<Self, EventLineError> {
        let number = line.tier.unwrap_or_default();
        let tier = Tier::new(number).ok_or(DecodeError::OutOfRange {
            field: "tier",
            value: number.into(),
            max: u64::from(Tier::COUNT) - 1,
        })?;
        let events = line
            .events
            .into_iter()
            .map(Event::try_from)
            .collect::<Result<Vec<_>, _>>()?;
        // The contract's own rules stand in the decoder alone: what it refuses would be dropped by the daemon.
        let batch = EventBatch {
            epoch: 0,
            seq: 1,
            rank: 0,
            time_us: None,
            tier,
            events,
        };
        let decoded = EventBatch::decode(&batch.encode(), &unlimited())?;
        Ok(Self {
            tier: decoded.tier,
            events: decoded.events,
        })
    }
}

/// No limits: they are the daemon's to set.
fn unlimited() -> WireLimits {
    WireLimits {
        message_bytes_max: usize::MAX,
        events_max: usize::MAX,
        blocks_per_event_max: usize::MAX,
        tokens_per_block_max: usize::MAX,
        text_bytes_max: usize::MAX,
        ..WireLimits::default()
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct BatchLine {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tier: Option<u8>,
    events: Vec<EventLine>,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum EventLine {
    Stored(StoredLine),
    Removed(RemovedLine),
    // With braces, or further keys would pass unseen.
    Cleared {},
    Goodbye {},
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct StoredLine {
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<HashText>,
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sequence_hashes: Option<Vec<HashText>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lineage_hashes: Option<Vec<LineageText>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    engine_hashes: Option<Vec<HashText>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    block_hashes: Option<Vec<HashText>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<Vec<Token>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lora_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_salt: Option<String>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RemovedLine {
    #[serde(skip_serializing_if = "Option::is_none")]
    sequence_hashes: Option<Vec<HashText>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lineage_hashes: Option<Vec<LineageText>>,
}

fn from_texts<T: From<u64>>(texts: Vec<HashText>) -> Vec<T> {
    texts.into_iter().map(|text| T::from(text.0)).collect()
}

fn to_texts<T: Copy + Into<u64>>(hashes: &[T]) -> Vec<HashText> {
    hashes.iter().map(|hash| HashText((*hash).into())).collect()
}

impl TryFrom<EventLine> for Event {
    type Error = DecodeError;

    fn try_from(line: EventLine) -> Result<Self, DecodeError> {
        Ok(match line {
            EventLine::Stored(line) => Self::Stored(line.try_into()?),
            EventLine::Removed(line) => {
                if line.sequence_hashes.is_none() && line.lineage_hashes.is_none() {
                    return Err(DecodeError::Missing {
                        field: "sequence_hashes",
                    });
                }
                Self::Removed(RemovedBlocks {
                    hashes: from_texts(line.sequence_hashes.unwrap_or_default()),
                    lineage_hashes: from_lineage(line.lineage_hashes.unwrap_or_default()),
                })
            }
            EventLine::Cleared {} => Self::Cleared,
            EventLine::Goodbye {} => Self::Goodbye,
        })
    }
}

fn from_lineage(texts: Vec<LineageText>) -> Vec<PositionalLineageHash> {
    texts.into_iter().map(|text| text.0).collect()
}

impl TryFrom<StoredLine> for StoredBlocks {
    type Error = DecodeError;

    fn try_from(line: StoredLine) -> Result<Self, DecodeError> {
        let names = match (line.sequence_hashes, line.lineage_hashes) {
            (Some(hashes), None) => BlockNames::Sequence {
                parent: line.parent.map(|parent| SequenceHash(parent.0)),
                position: line.position.map(Position::new).transpose()?,
                hashes: from_texts(hashes),
            },
            (None, Some(_)) if line.parent.is_some() || line.position.is_some() => {
                return Err(DecodeError::Combination(
                    "lineage_hashes name parent and position themselves; leave out parent and position",
                ));
            }
            (None, Some(hashes)) => BlockNames::Lineage(from_lineage(hashes)),
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
        if line.tokens.is_none() && (line.lora_name.is_some() || line.cache_salt.is_some()) {
            return Err(DecodeError::Combination(
                "lora_name and cache_salt belong to tokens; leave them out",
            ));
        }
        let content = match (line.block_hashes, line.tokens) {
            (Some(_), Some(_)) => {
                return Err(DecodeError::Combination("send block_hashes or tokens, not both"));
            }
            (Some(hashes), None) => Some(BlockContent::BlockHashes(from_texts(hashes))),
            (None, Some(tokens)) => Some(BlockContent::Tokens {
                tokens,
                lora_name: line.lora_name,
                cache_salt: line.cache_salt,
            }),
            (None, None) => None,
        };
        Ok(Self {
            names,
            content,
            engine_hashes: line.engine_hashes.map(from_texts),
        })
    }
}

impl From<&Event> for EventLine {
    fn from(event: &Event) -> Self {
        match event {
            Event::Stored(stored) => Self::Stored(stored.into()),
            Event::Removed(removed) => Self::Removed(RemovedLine {
                sequence_hashes: Some(to_texts(&removed.hashes)),
                lineage_hashes: (!removed.lineage_hashes.is_empty())
                    .then(|| removed.lineage_hashes.iter().copied().map(LineageText).collect()),
            }),
            Event::Cleared => Self::Cleared {},
            Event::Goodbye => Self::Goodbye {},
        }
    }
}

impl From<&StoredBlocks> for StoredLine {
    fn from(stored: &StoredBlocks) -> Self {
        let mut line = Self {
            engine_hashes: stored.engine_hashes.as_deref().map(to_texts),
            ..Self::default()
        };
        match &stored.names {
            BlockNames::Sequence {
                parent,
                position,
                hashes,
            } => {
                line.parent = parent.map(|parent| HashText(parent.as_u64()));
                line.position = position.map(Position::as_u64);
                line.sequence_hashes = Some(to_texts(hashes));
            }
            BlockNames::Lineage(hashes) => {
                line.lineage_hashes = Some(hashes.iter().copied().map(LineageText).collect());
            }
        }
        match &stored.content {
            Some(BlockContent::BlockHashes(hashes)) => {
                line.block_hashes = Some(to_texts::<BlockHash>(hashes))
            }
            Some(BlockContent::Tokens {
                tokens,
                lora_name,
                cache_salt,
            }) => {
                line.tokens = Some(tokens.clone());
                line.lora_name.clone_from(lora_name);
                line.cache_salt.clone_from(cache_salt);
            }
            None => {}
        }
        line
    }
}

#[cfg(test)]
#[path = "event_json_tests.rs"]
mod tests;
