//! Lists of hashes or tokens: as one blob, or as an array.

use crate::hash::{BlockHash, PositionalLineageHash, SequenceHash, Token};

use super::error::DecodeError;
use super::reader::{Reader, Value, set_once, wrong_type};

/// An element of a list that travels as a blob or as an array.
pub(super) trait Element: Sized {
    /// Bytes of one element within a blob.
    const WIDTH: usize;
    /// What the field takes, for error texts.
    const EXPECTED: &'static str;

    fn from_blob(field: &'static str, bytes: &[u8]) -> Result<Self, DecodeError>;

    fn from_reader(field: &'static str, reader: &mut Reader<'_>) -> Result<Self, DecodeError>;
}

impl Element for u64 {
    const WIDTH: usize = 8;
    const EXPECTED: &'static str = "a blob of little-endian u64 or an array of unsigned integers";

    fn from_blob(_field: &'static str, bytes: &[u8]) -> Result<Self, DecodeError> {
        Ok(bytes
            .iter()
            .rev()
            .fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn from_reader(field: &'static str, reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        reader.unsigned(field)
    }
}

macro_rules! hash_element {
    ($hash:ty) => {
        impl Element for $hash {
            const WIDTH: usize = <u64 as Element>::WIDTH;
            const EXPECTED: &'static str = <u64 as Element>::EXPECTED;

            fn from_blob(field: &'static str, bytes: &[u8]) -> Result<Self, DecodeError> {
                u64::from_blob(field, bytes).map(Self::from)
            }

            fn from_reader(field: &'static str, reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
                reader.unsigned(field).map(Self::from)
            }
        }
    };
}

hash_element!(BlockHash);
hash_element!(SequenceHash);

impl Element for Token {
    const WIDTH: usize = 4;
    const EXPECTED: &'static str = "a blob of little-endian u32 or an array of unsigned integers";

    fn from_blob(_field: &'static str, bytes: &[u8]) -> Result<Self, DecodeError> {
        Ok(bytes
            .iter()
            .rev()
            .fold(0, |value, byte| value << 8 | Self::from(*byte)))
    }

    fn from_reader(field: &'static str, reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        reader.unsigned_32(field)
    }
}

impl Element for PositionalLineageHash {
    const WIDTH: usize = 16;
    const EXPECTED: &'static str = "a blob of 16-byte big-endian lineage hashes or an array of such blobs";

    fn from_blob(field: &'static str, bytes: &[u8]) -> Result<Self, DecodeError> {
        let ragged = DecodeError::RaggedBlob {
            field,
            bytes: bytes.len(),
            element: Self::WIDTH,
        };
        let bytes = <[u8; 16]>::try_from(bytes).map_err(|_| ragged)?;
        Self::from_be_bytes(bytes).map_err(|source| DecodeError::Lineage { field, source })
    }

    fn from_reader(field: &'static str, reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        match reader.value()? {
            Value::Blob(bytes) => Self::from_blob(field, bytes),
            other => Err(wrong_type(field, Self::EXPECTED, other)),
        }
    }
}

impl Reader<'_> {
    /// Reads a list of at most `count_max` elements into a field that must not have been sent before.
    pub(super) fn list_once<T: Element>(
        &mut self,
        slot: &mut Option<Vec<T>>,
        field: &'static str,
        count_max: usize,
    ) -> Result<(), DecodeError> {
        let list = self.list(field, count_max)?;
        set_once(slot, field, list)
    }

    /// A list of at most `count_max` elements, as a blob or as an array.
    pub(super) fn list<T: Element>(
        &mut self,
        field: &'static str,
        count_max: usize,
    ) -> Result<Vec<T>, DecodeError> {
        match self.value()? {
            Value::Blob(bytes) => {
                if !bytes.len().is_multiple_of(T::WIDTH) {
                    return Err(DecodeError::RaggedBlob {
                        field,
                        bytes: bytes.len(),
                        element: T::WIDTH,
                    });
                }
                self.checked_count(field, bytes.len() / T::WIDTH, count_max)?;
                bytes
                    .chunks_exact(T::WIDTH)
                    .map(|chunk| T::from_blob(field, chunk))
                    .collect()
            }
            Value::Array(count) => {
                let count = self.checked_count(field, count, count_max)?;
                let mut list = Vec::with_capacity(count);
                for _ in 0..count {
                    list.push(T::from_reader(field, self)?);
                }
                Ok(list)
            }
            other => Err(wrong_type(field, T::EXPECTED, other)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(payload: &[u8]) -> Reader<'_> {
        Reader::new(payload, usize::MAX).unwrap()
    }

    #[test]
    fn a_list_is_a_blob_or_an_array() {
        let blob = [0xc4, 16, 1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0x80];
        assert_eq!(
            reader(&blob).list::<u64>("x", 2),
            Ok(vec![1, 0x8000_0000_0000_0002])
        );
        let array = [0x92, 1, 0xcd, 1, 0];
        assert_eq!(reader(&array).list::<u64>("x", 2), Ok(vec![1, 256]));
        assert_eq!(
            reader(&array).list::<u64>("x", 1),
            Err(DecodeError::TooLong {
                field: "x",
                count: 2,
                max: 1
            })
        );
        let ragged = [0xc4, 3, 1, 2, 3];
        assert_eq!(
            reader(&ragged).list::<u64>("x", 9),
            Err(DecodeError::RaggedBlob {
                field: "x",
                bytes: 3,
                element: 8
            })
        );
    }
}
