//! Hashes in JSON requests: numbers, or hexadecimal text.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, Unexpected, Visitor};

/// A 64-bit hash: an unsigned number, a negative one with the same bits, 16 hexadecimal digits, or `0x` and up to 16.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct HashJson(pub(super) u64);

/// A lineage hash: 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LineageJson(pub(super) u128);

/// Exactly `digits` hexadecimal digits, or `0x` and at most as many.
fn hexadecimal(text: &str, digits: usize) -> Option<u128> {
    let (bare, is_length_allowed) = match text.strip_prefix("0x") {
        Some(bare) => (bare, (1..=digits).contains(&bare.len())),
        None => (text, text.len() == digits),
    };
    // `from_str_radix` would let a sign pass.
    let is_sound = is_length_allowed && bare.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_sound.then(|| u128::from_str_radix(bare, 16).ok()).flatten()
}

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
                let value = hexadecimal(text, 16).and_then(|value| u64::try_from(value).ok());
                value
                    .map(HashJson)
                    .ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
            }
        }

        deserializer.deserialize_any(Hash)
    }
}

impl<'de> Deserialize<'de> for LineageJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        let expected = &"a lineage hash: 32 hexadecimal digits";
        hexadecimal(&text, 32)
            .map(Self)
            .ok_or_else(|| D::Error::invalid_value(Unexpected::Str(&text), expected))
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
        let lineage = "\"3fc91a2b3c4d5e6f785cba9876543210\"";
        let value = 0x3fc9_1a2b_3c4d_5e6f_785c_ba98_7654_3210;
        assert_eq!(
            serde_json::from_str::<LineageJson>(lineage).unwrap(),
            LineageJson(value)
        );
        assert!(serde_json::from_str::<LineageJson>("7").is_err());
    }
}
