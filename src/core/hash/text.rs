//! The text and serialized forms of 64-bit hashes; the forms of lineage hashes are in `lineage_text.rs`.
//!
//! | | 64-bit hash | lineage hash |
//! |---|---|---|
//! | text | 16 hexadecimal digits, or `0x` and 1 to 16 | 32 hexadecimal digits, or `0x` and 1 to 32 |
//! | JSON | such a text, or a decimal number, which may be the signed integer with the same bits | such a text |
//! | binary formats | an unsigned integer | 16 bytes, most significant first |
//!
//! A text is never read as a decimal number, because one in two thousand decimal hashes would also be a valid
//! hexadecimal hash.

use std::fmt;

use serde::Serializer;
use serde::de::{Deserialize, Deserializer, Error, Visitor};

/// A text that is not a hash: not hexadecimal, or not of the right length.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a hash; write {digits} hexadecimal digits, or 0x and at most {digits}")]
pub struct HashTextError {
    /// The refused text, shortened.
    pub text: String,
    /// Number of digits with which a hash of this kind is written: 16 or 32.
    pub digits: usize,
}

/// Maximum length of a text that an error repeats, in characters.
const SHOWN_CHARACTERS_MAX: usize = 40;

const HASH_DIGITS: usize = 16;

/// Parses a text of exactly `digits` hexadecimal digits, or of `0x` and at most `digits` digits, and returns its
/// number.
pub(super) fn parse_hexadecimal(text: &str, digits: usize) -> Result<u128, HashTextError> {
    let refused = || HashTextError {
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

/// Reads a 64-bit hash from its text.
pub(super) fn parse_hash(text: &str) -> Result<u64, HashTextError> {
    let hash = parse_hexadecimal(text, HASH_DIGITS)?;
    // Sixteen digits always fit.
    Ok(u64::try_from(hash).unwrap_or(u64::MAX))
}

/// Writes a 64-bit hash: as a text in formats that people read, as an integer in binary formats.
pub(super) fn serialize_hash<S: Serializer>(hash: u64, serializer: S) -> Result<S::Ok, S::Error> {
    if serializer.is_human_readable() {
        serializer.collect_str(&format_args!("{hash:016x}"))
    } else {
        serializer.serialize_u64(hash)
    }
}

/// Reads a 64-bit hash that [`serialize_hash`] wrote. In formats that people read, the hash may also be a number.
pub(super) fn deserialize_hash<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    struct TextOrNumber;

    impl Visitor<'_> for TextOrNumber {
        type Value = u64;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a hash: a 64-bit integer, or a text of 16 hexadecimal digits")
        }

        fn visit_u64<E: Error>(self, number: u64) -> Result<u64, E> {
            Ok(number)
        }

        fn visit_i64<E: Error>(self, number: i64) -> Result<u64, E> {
            Ok(number.cast_unsigned())
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<u64, E> {
            parse_hash(text).map_err(E::custom)
        }
    }

    if deserializer.is_human_readable() {
        deserializer.deserialize_any(TextOrNumber)
    } else {
        u64::deserialize(deserializer)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{BlockHash, SequenceHash};

    #[test]
    fn a_text_is_hexadecimal_and_a_number_is_decimal() {
        assert_eq!("1234567890123456".parse(), Ok(BlockHash(0x1234_5678_9012_3456)));
        assert_eq!("0xAB".parse(), Ok(SequenceHash(0xab)));
        let from_json = |json: &str| serde_json::from_str::<SequenceHash>(json);
        assert_eq!(
            from_json("1234567890123456").unwrap(),
            SequenceHash(1_234_567_890_123_456)
        );
        assert_eq!(from_json("18446744073709551615").unwrap(), SequenceHash(u64::MAX));
        assert_eq!(from_json("\"0x1f\"").unwrap(), SequenceHash(31));
        assert_eq!(from_json("-1").unwrap(), SequenceHash(u64::MAX));
        for json in [
            "-9223372036854775809",
            "1.5",
            "18446744073709551616",
            "\"31\"",
            "null",
            "true",
        ] {
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
            assert!(text.parse::<BlockHash>().is_err(), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn a_hash_is_read_back(hash in any::<u64>()) {
            let hash = SequenceHash(hash);
            prop_assert_eq!(hash.to_string().parse(), Ok(hash));
            prop_assert_eq!(format!("{hash:#x}").parse(), Ok(hash));
            let json = serde_json::to_string(&hash).unwrap();
            prop_assert_eq!(serde_json::from_str::<SequenceHash>(&json).unwrap(), hash);
            let packed = rmp_serde::to_vec(&hash).unwrap();
            prop_assert_eq!(&packed, &rmp_serde::to_vec(&hash.as_u64()).unwrap());
            prop_assert_eq!(rmp_serde::from_slice::<SequenceHash>(&packed).unwrap(), hash);
        }

        #[test]
        fn any_text_gives_an_answer(text in "\\PC{0,40}") {
            let _ = text.parse::<BlockHash>();
        }
    }
}
