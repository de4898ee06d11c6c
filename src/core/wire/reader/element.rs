//! Elements of lists: hashes and tokens, each in a blob or in an array.

use crate::hash::{BlockHash, PositionalLineageHash, SequenceHash, Token};

use super::{DecodeError, Reader, Value};

/// Element of a list that is sent as a blob or as an array.
pub(in crate::wire) trait Element: Sized {
    /// Number of bytes of one element in a blob.
    const WIDTH: usize;
    /// Type of the field, for error texts.
    const EXPECTED: &'static str;

    /// Reads the elements of a blob, whose length must be a multiple of an element's width.
    fn list_from_blob(field: &'static str, bytes: &[u8]) -> Result<Vec<Self>, DecodeError>;

    fn from_reader(field: &'static str, reader: &mut Reader<'_>) -> Result<Self, DecodeError>;
}

macro_rules! hash_element {
    ($hash:ty) => {
        impl Element for $hash {
            const WIDTH: usize = 8;
            const EXPECTED: &'static str = "a blob of little-endian u64 or an array of unsigned integers";

            fn list_from_blob(_field: &'static str, bytes: &[u8]) -> Result<Vec<Self>, DecodeError> {
                let (chunks, _) = bytes.as_chunks();
                let hashes = chunks
                    .iter()
                    .map(|chunk| Self::from(u64::from_le_bytes(*chunk)));
                Ok(hashes.collect())
            }

            fn from_reader(field: &'static str, reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
                reader.unsigned(field).map(Self::from)
            }
        }
    };
}

hash_element!(u64);
hash_element!(BlockHash);
hash_element!(SequenceHash);

impl Element for Token {
    const WIDTH: usize = 4;
    const EXPECTED: &'static str = "a blob of little-endian u32 or an array of unsigned integers";

    fn list_from_blob(_field: &'static str, bytes: &[u8]) -> Result<Vec<Self>, DecodeError> {
        let (chunks, _) = bytes.as_chunks();
        Ok(chunks.iter().map(|chunk| Self::from_le_bytes(*chunk)).collect())
    }

    fn from_reader(field: &'static str, reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        reader.unsigned_32(field)
    }
}

/// Reads a lineage hash from a blob.
fn lineage_hash(field: &'static str, bytes: &[u8]) -> Result<PositionalLineageHash, DecodeError> {
    let ragged = || DecodeError::RaggedBlob {
        field,
        bytes: bytes.len(),
        element: PositionalLineageHash::WIDTH,
    };
    let bytes = <[u8; 16]>::try_from(bytes).map_err(|_| ragged())?;
    PositionalLineageHash::from_be_bytes(bytes).map_err(|source| DecodeError::Lineage { field, source })
}

impl Element for PositionalLineageHash {
    const WIDTH: usize = 16;
    const EXPECTED: &'static str = "a blob of 16-byte big-endian lineage hashes or an array of such blobs";

    fn list_from_blob(field: &'static str, bytes: &[u8]) -> Result<Vec<Self>, DecodeError> {
        let mut list = Vec::with_capacity(bytes.len() / Self::WIDTH);
        for chunk in bytes.chunks_exact(Self::WIDTH) {
            list.push(lineage_hash(field, chunk)?);
        }
        Ok(list)
    }

    fn from_reader(field: &'static str, reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        match reader.value()? {
            Value::Blob(bytes) => lineage_hash(field, bytes),
            other => Err(DecodeError::wrong_type(field, Self::EXPECTED, other)),
        }
    }
}
