//! Events as JSON lines.
//!
//! One line is one event, or a batch of them with an optional tier. The events are those of the wire contract:
//!
//! ```json
//! {"type":"stored","sequence_hashes":["ea06fc71a5ee6e88"],"block_hashes":["ea06fc71a5ee6e88"]}
//! {"tier":1,"events":[{"type":"removed","sequence_hashes":["ea06fc71a5ee6e88"]},{"type":"cleared"}]}
//! {"events":[]}
//! ```

use kvatlas_core::wire::{Event, Tier};
use serde::de::{Error, IgnoredAny};
use serde::{Deserialize, Serialize};

/// Text of the error for a line that is not an object, or has neither the key `type` nor the key `events`.
const NEITHER: &str = "neither an event nor a batch; write an object with \"type\", or one with \"events\"";

/// Events of one line, with their tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LineBatch {
    #[serde(default, skip_serializing_if = "is_device")]
    pub(super) tier: Tier,
    pub(super) events: Vec<Event>,
}

fn is_device(tier: &Tier) -> bool {
    *tier == Tier::DEVICE
}

impl LineBatch {
    /// Parses a line, which must have no spaces around it. Checks the events as a daemon would, except for the limits
    /// in a daemon's configuration.
    pub(super) fn parse(line: &str) -> Result<Self, serde_json::Error> {
        #[derive(Deserialize)]
        struct Shape {
            r#type: Option<IgnoredAny>,
            events: Option<IgnoredAny>,
        }
        // serde would take an array for an object with its keys in order.
        if !line.starts_with('{') {
            return Err(Error::custom(NEITHER));
        }
        // The shape is looked at first, so that errors name the field at fault and its column.
        let shape: Shape = serde_json::from_str(line)?;
        match (shape.r#type, shape.events) {
            (Some(_), _) => Ok(Self {
                tier: Tier::DEVICE,
                events: vec![serde_json::from_str(line)?],
            }),
            (None, Some(_)) => Ok(serde_json::from_str(line)?),
            (None, None) => Err(Error::custom(NEITHER)),
        }
    }

    /// Returns the batch as a line that [`Self::parse`] reads back.
    pub(super) fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string(self)
    }

    /// Returns the number of blocks that the events name.
    pub(super) fn blocks(&self) -> usize {
        let blocks = |event: &Event| match event {
            Event::Stored(stored) => stored.names.len(),
            Event::Removed(removed) => removed.hashes.len() + removed.lineage_hashes.len(),
            Event::Resumable(blocks) => blocks.hashes.len() + blocks.lineage_hashes.len(),
            Event::Cleared | Event::Doubted(_) | Event::Goodbye => 0,
        };
        self.events.iter().map(blocks).sum()
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::hash::SequenceHash;
    use kvatlas_core::wire::{RemovedBlocks, StoredBlocks};

    use super::*;

    fn parse(line: &str) -> Result<LineBatch, String> {
        LineBatch::parse(line).map_err(|error| error.to_string())
    }

    #[test]
    fn an_event_is_a_batch_of_one() {
        let batch = parse(r#"{"type":"stored","sequence_hashes":["00000000000000ab", 172]}"#).unwrap();
        let stored = StoredBlocks::by_sequence(None, None, vec![SequenceHash(0xab), SequenceHash(172)]);
        assert_eq!(batch.events, [Event::Stored(stored)]);
        assert_eq!((batch.tier, batch.blocks()), (Tier::DEVICE, 2));
    }

    #[test]
    fn a_batch_has_events_in_order_and_a_tier() {
        let line = r#"{"tier":1,"events":[{"type":"removed","sequence_hashes":["0x1"]},{"type":"cleared"},{"type":"goodbye"}]}"#;
        let batch = parse(line).unwrap();
        let removed = RemovedBlocks::by_sequence(vec![SequenceHash(1)]);
        assert_eq!(batch.tier.as_u8(), 1);
        assert_eq!(
            batch.events,
            [Event::Removed(removed), Event::Cleared, Event::Goodbye]
        );
        assert_eq!(parse(&batch.to_json().unwrap()), Ok(batch));
        assert_eq!(parse(r#"{"events":[]}"#).unwrap().events, []);
    }

    #[test]
    fn every_fault_is_named() {
        for (line, part) in [
            ("", "neither an event nor a batch"),
            ("[1,2]", "neither an event nor a batch"),
            ("{", "EOF"),
            ("{}", "neither an event nor a batch"),
            (r#"{"type":"evicted"}"#, "unknown variant `evicted`"),
            (r#"{"type":"cleared","tier":1}"#, "unknown field `tier`"),
            (r#"{"events":[],"seq":1}"#, "unknown field `seq`"),
            (r#"{"events":[],"events":[]}"#, "duplicate field"),
            (r#"{"events":[],"tier":8}"#, "there is no tier 8"),
            (r#"{"events":[[1]]}"#, "expected an object"),
            (r#"{"type":"stored"}"#, "sequence_hashes is missing"),
            (
                r#"{"type":"doubted","reasons":["upstream-gap"]}"#,
                "reasons is not one of upstream_gap, upstream_lost",
            ),
            (
                r#"{"type":"doubted","reasons":["gap"]}"#,
                "reasons is not one of upstream_gap",
            ),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
