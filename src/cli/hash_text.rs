//! Hashes as people and JSON write them.
//!
//! A text is hexadecimal, always: 16 digits (32 for a lineage hash), or `0x` and up to as many. A JSON number is decimal.
//! A decimal text is refused, because one hash in two thousand would read as a valid hexadecimal one.

use std::fmt;
use std::str::FromStr;

use kvatlas::hash::{LineageError, PositionalLineageHash};
use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::{Serialize, Serializer};

/// Why a text is not a hash.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum HashTextError {
    /// Not hexadecimal, or not of the right length.
    #[error("{text:?} is not a hash; write {digits} hexadecimal digits, or 0x and at most {digits}")]
    NotHexadecimal {
        /// The text as given, shortened.
        text: String,
        /// The digits of a full hash.
        digits: usize,
    },
    /// Hexadecimal, but no block has this lineage hash.
    #[error("{text:?} is not a lineage hash: {source}")]
    Lineage {
        /// The text as given.
        text: String,
        /// What is wrong with it.
        source: LineageError,
    },
}

/// The longest text that an error repeats, in characters.
const SHOWN_CHARACTERS_MAX: usize = 40;

fn parse_hexadecimal(text: &str, digits: usize) -> Result<u128, HashTextError> {
    let refused = || HashTextError::NotHexadecimal {
        text: text.chars().take(SHOWN_CHARACTERS_MAX).collect(),
        digits,
    };
    let (bare, is_length_allowed) = match text.strip_prefix("0x") {
        Some(bare) => (bare, (1..=digits).contains(&bare.len())),
        None => (text, text.len() == digits),
    };
    // `from_str_radix` would let a sign pass.
    if !is_length_allowed || !bare.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(refused());
    }
    u128::from_str_radix(bare, 16).map_err(|_| refused())
}

/// A block, sequence or engine hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HashText(pub(super) u64);

impl HashText {
    const DIGITS: usize = 16;
}

impl FromStr for HashText {
    type Err = HashTextError;

    fn from_str(text: &str) -> Result<Self, HashTextError> {
        let hash = parse_hexadecimal(text, Self::DIGITS)?;
        // Sixteen digits always fit.
        Ok(Self(u64::try_from(hash).unwrap_or(u64::MAX)))
    }
}

impl fmt::Display for HashText {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:016x}", self.0)
    }
}

impl Serialize for HashText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for HashText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrNumber;

        impl Visitor<'_> for TextOrNumber {
            type Value = HashText;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a hash: a text of 16 hexadecimal digits, or a whole number below 2^64")
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<HashText, E> {
                Ok(HashText(number))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<HashText, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(TextOrNumber)
    }
}

/// A lineage hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LineageText(pub(super) PositionalLineageHash);

impl LineageText {
    const DIGITS: usize = 32;
}

impl FromStr for LineageText {
    type Err = HashTextError;

    fn from_str(text: &str) -> Result<Self, HashTextError> {
        let packed = parse_hexadecimal(text, Self::DIGITS)?;
        let hash = PositionalLineageHash::from_u128(packed).map_err(|source| HashTextError::Lineage {
            text: text.to_owned(),
            source,
        })?;
        Ok(Self(hash))
    }
}

impl Serialize for LineageText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for LineageText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_text_is_hexadecimal_and_a_number_is_decimal() {
        assert_eq!("1234567890123456".parse(), Ok(HashText(0x1234_5678_9012_3456)));
        assert_eq!("0xAB".parse(), Ok(HashText(0xab)));
        let from_json = |json: &str| serde_json::from_str::<HashText>(json);
        assert_eq!(
            from_json("1234567890123456").unwrap(),
            HashText(1_234_567_890_123_456)
        );
        assert_eq!(from_json("18446744073709551615").unwrap(), HashText(u64::MAX));
        assert_eq!(from_json("\"0x1f\"").unwrap(), HashText(31));
        for json in ["-1", "1.5", "18446744073709551616", "\"31\"", "null", "true"] {
            assert!(from_json(json).is_err(), "{json}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        let long = "f".repeat(17);
        for text in [
            "",
            "0x",
            "ab",
            "+123456789012345",
            "0x+1",
            &long,
            "é234567890123456",
            "0x0x1",
        ] {
            assert!(text.parse::<HashText>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_lineage_hash_is_checked() {
        let text = "3fc91a2b3c4d5e6f785cba9876543210";
        let LineageText(hash) = text.parse().unwrap();
        assert_eq!(hash.position(), 255);
        assert_eq!(
            serde_json::to_string(&LineageText(hash)).unwrap(),
            format!("\"{text}\"")
        );
        assert!(matches!(
            "f".repeat(32).parse::<LineageText>(),
            Err(HashTextError::Lineage { .. })
        ));
        assert!("3fc9".parse::<LineageText>().is_err());
    }

    proptest! {
        #[test]
        fn a_hash_is_read_back(hash in any::<u64>()) {
            prop_assert_eq!(HashText(hash).to_string().parse(), Ok(HashText(hash)));
            prop_assert_eq!(format!("{hash:#x}").parse(), Ok(HashText(hash)));
            let json = serde_json::to_string(&HashText(hash)).unwrap();
            prop_assert_eq!(serde_json::from_str::<HashText>(&json).unwrap(), HashText(hash));
        }

        #[test]
        fn any_text_gives_an_answer(text in "\\PC{0,40}") {
            let _ = text.parse::<HashText>();
            let _ = text.parse::<LineageText>();
        }
    }
}
