//! Hashes in JSON requests: numbers, or hexadecimal text.

use std::fmt;

use kvatlas_core::hash::SequenceHash;
use serde::de::{Deserialize, Deserializer, Error, Unexpected, Visitor};

/// A 64-bit hash: an unsigned number, a negative one with the same bits, 16 hexadecimal digits, or `0x` and up to 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HashJson(pub(super) u64);

impl<'de> Deserialize<'de> for HashJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Hash;

        impl Visitor<'_> for Hash {
            type Value = HashJson;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a hash: a 64-bit integer, or 16 hexadecimal digits")
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<HashJson, E> {
                Ok(HashJson(value))
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<HashJson, E> {
                Ok(HashJson(value.cast_unsigned()))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<HashJson, E> {
                let hash = text.parse::<SequenceHash>();
                hash.map(|hash| HashJson(hash.as_u64()))
                    .map_err(|_| E::invalid_value(Unexpected::Str(text), &self))
            }
        }

        deserializer.deserialize_any(Hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_of_a_hash_is_read() {
        for (text, value) in [
            ("7", 7),
            ("18446744073709551615", u64::MAX),
            ("-1", u64::MAX),
            ("\"ea06fc71a5ee6e88\"", 0xea06_fc71_a5ee_6e88),
            ("\"0x1f\"", 0x1f),
        ] {
            assert_eq!(
                serde_json::from_str::<HashJson>(text).unwrap(),
                HashJson(value),
                "{text}"
            );
        }
        for text in [
            "1.5",
            "\"12\"",
            "\"0x\"",
            "\"+a06fc71a5ee6e88\"",
            "null",
            "18446744073709551616",
        ] {
            assert!(serde_json::from_str::<HashJson>(text).is_err(), "{text}");
        }
    }
}
