//! The text and serialized forms of lineage hashes; `text.rs` has the table of all forms.

use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error, Visitor};
use serde::{Serialize, Serializer};

use super::lineage::{LineageError, PositionalLineageHash};
use super::text::{HashTextError, parse_hexadecimal};

/// Reasons why a text is not a lineage hash.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LineageTextError {
    /// The text is not hexadecimal, or has the wrong length.
    #[error(transparent)]
    NotHexadecimal(#[from] HashTextError),
    /// The text is hexadecimal, but its number cannot be the lineage hash of any block.
    #[error("{text:?} is not a lineage hash: {source}")]
    Lineage {
        /// The text as given.
        text: String,
        /// The rule that the number breaks.
        source: LineageError,
    },
}

const LINEAGE_DIGITS: usize = 32;

impl FromStr for PositionalLineageHash {
    type Err = LineageTextError;

    fn from_str(text: &str) -> Result<Self, LineageTextError> {
        let packed = parse_hexadecimal(text, LINEAGE_DIGITS)?;
        Self::from_u128(packed).map_err(|source| LineageTextError::Lineage {
            text: text.to_owned(),
            source,
        })
    }
}

impl Serialize for PositionalLineageHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if serializer.is_human_readable() {
            serializer.collect_str(self)
        } else {
            serializer.serialize_bytes(&self.to_be_bytes())
        }
    }
}

impl<'de> Deserialize<'de> for PositionalLineageHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrBytes;

        impl Visitor<'_> for TextOrBytes {
            type Value = PositionalLineageHash;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a lineage hash: a text of 32 hexadecimal digits, or 16 bytes")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<PositionalLineageHash, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_bytes<E: Error>(self, bytes: &[u8]) -> Result<PositionalLineageHash, E> {
                let bytes =
                    <[u8; 16]>::try_from(bytes).map_err(|_| E::invalid_length(bytes.len(), &"16 bytes"))?;
                PositionalLineageHash::from_be_bytes(bytes).map_err(E::custom)
            }
        }

        if deserializer.is_human_readable() {
            deserializer.deserialize_str(TextOrBytes)
        } else {
            deserializer.deserialize_bytes(TextOrBytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Position, SequenceHash};
    use super::*;

    #[test]
    fn a_lineage_hash_is_checked() {
        let text = "3fc91a2b3c4d5e6f785cba9876543210";
        let hash: PositionalLineageHash = text.parse().unwrap();
        assert_eq!(hash.position(), 255);
        let json = format!("\"{text}\"");
        assert_eq!(serde_json::to_string(&hash).unwrap(), json);
        assert_eq!(
            serde_json::from_str::<PositionalLineageHash>(&json).unwrap(),
            hash
        );
        assert!(matches!(
            "f".repeat(32).parse::<PositionalLineageHash>(),
            Err(LineageTextError::Lineage { .. })
        ));
        assert!(matches!(
            "3fc9".parse::<PositionalLineageHash>(),
            Err(LineageTextError::NotHexadecimal(_))
        ));
        let not_canonical = rmp_serde::to_vec(&serde_bytes::Bytes::new(&[0xff; 16])).unwrap();
        assert!(rmp_serde::from_slice::<PositionalLineageHash>(&not_canonical).is_err());
    }

    proptest! {
        #[test]
        fn a_lineage_hash_is_read_back(hash in any::<u64>(), position in 0..1_u64 << 24) {
            let hash = SequenceHash(hash);
            let lineage = PositionalLineageHash::at(Position::new(position).unwrap(), hash, hash);
            let packed = rmp_serde::to_vec(&lineage).unwrap();
            prop_assert_eq!(packed.len(), 2 + 16);
            prop_assert_eq!(rmp_serde::from_slice::<PositionalLineageHash>(&packed).unwrap(), lineage);
        }

        #[test]
        fn any_text_gives_an_answer(text in "\\PC{0,40}") {
            let _ = text.parse::<PositionalLineageHash>();
        }
    }
}
