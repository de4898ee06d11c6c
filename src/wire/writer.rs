//! MessagePack into a byte vector.

use rmp::encode;

use crate::hash::{BlockHash, PositionalLineageHash, SequenceHash, Token};

/// An element of a list that travels as one blob.
pub(super) trait BlobElement: Copy {
    fn append(self, blob: &mut Vec<u8>);
}

macro_rules! little_endian_element {
    ($element:ty, $value:expr) => {
        impl BlobElement for $element {
            fn append(self, blob: &mut Vec<u8>) {
                #[allow(
                    clippy::redundant_closure_call,
                    reason = "one macro serves integers and newtypes"
                )]
                blob.extend_from_slice(&($value)(self).to_le_bytes());
            }
        }
    };
}

little_endian_element!(u64, |value| -> u64 { value });
little_endian_element!(Token, |value| -> Token { value });
little_endian_element!(BlockHash, |hash: BlockHash| hash.as_u64());
little_endian_element!(SequenceHash, |hash: SequenceHash| hash.as_u64());

impl BlobElement for PositionalLineageHash {
    fn append(self, blob: &mut Vec<u8>) {
        blob.extend_from_slice(&self.to_be_bytes());
    }
}

/// Writes values one after the other. Writing to memory cannot fail, so the results of `rmp` are dropped.
#[derive(Debug, Default)]
pub(super) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    pub(super) fn map(&mut self, entries: u32) {
        let _ = encode::write_map_len(&mut self.bytes, entries);
    }

    pub(super) fn array(&mut self, elements: u32) {
        let _ = encode::write_array_len(&mut self.bytes, elements);
    }

    pub(super) fn text(&mut self, text: &str) {
        let _ = encode::write_str(&mut self.bytes, text);
    }

    pub(super) fn unsigned_entry(&mut self, key: &str, value: u64) {
        self.text(key);
        let _ = encode::write_uint(&mut self.bytes, value);
    }

    pub(super) fn text_entry(&mut self, key: &str, value: &str) {
        self.text(key);
        self.text(value);
    }

    pub(super) fn boolean_entry(&mut self, key: &str, value: bool) {
        self.text(key);
        let _ = encode::write_bool(&mut self.bytes, value);
    }

    /// A blob.
    pub(super) fn blob(&mut self, bytes: &[u8]) {
        let _ = encode::write_bin(&mut self.bytes, bytes);
    }

    /// A list as one blob.
    pub(super) fn list_entry<T: BlobElement>(&mut self, key: &str, list: &[T]) {
        self.text(key);
        let bytes = u32::try_from(std::mem::size_of_val(list)).unwrap_or(u32::MAX);
        let _ = encode::write_bin_len(&mut self.bytes, bytes);
        self.bytes.reserve(std::mem::size_of_val(list));
        for element in list {
            element.append(&mut self.bytes);
        }
    }
}

/// A count as MessagePack carries it. Lists here come from memory within the limits of the contract, far below 2^32.
pub(super) fn count(length: usize) -> u32 {
    u32::try_from(length).unwrap_or(u32::MAX)
}
