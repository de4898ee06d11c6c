//! Writer of MessagePack into a byte vector.

use std::convert::Infallible;

use rmp::{Marker, encode};

use crate::hash::{PositionalLineageHash, SequenceHash};

use super::entries::{Entries, ListElement, Message};

/// Minimum length, in bytes, of a text whose marker byte has no room for the length.
const SHORT_TEXT: u8 = 32;
/// Minimum number of entries of a map whose marker byte has no room for that number.
const SHORT_MAP: u8 = 16;

/// Encodes a message as MessagePack.
pub(super) fn encode(message: &impl Message) -> Vec<u8> {
    encode_into(Vec::new(), message)
}

/// Encodes a message as [`encode`] does, but appends it to `bytes`. A caller that knows the length passes a vector
/// with that capacity.
pub(super) fn encode_into(bytes: Vec<u8>, message: &impl Message) -> Vec<u8> {
    let mut writer = Writer { bytes, entries: 0 };
    writer.message(message);
    writer.bytes
}

/// Writes values one after the other to memory. Writing to memory cannot fail, so the code ignores the results of
/// `rmp`.
struct Writer {
    bytes: Vec<u8>,
    /// Number of entries so far of the map that is being written.
    entries: u32,
}

impl Writer {
    fn array(&mut self, elements: usize) {
        // Lists here come from memory within the limits of the contract, far below 2^32.
        let elements = u32::try_from(elements).unwrap_or(u32::MAX);
        let _ = encode::write_array_len(&mut self.bytes, elements);
    }

    /// Writes a key or a name as a text. The text is usually so short that its first byte (the marker) also gives its
    /// length.
    #[inline]
    fn word(&mut self, text: &str) {
        match u8::try_from(text.len()) {
            Ok(length @ ..SHORT_TEXT) => {
                self.bytes.reserve(1 + text.len());
                self.bytes.push(Marker::FixStr(length).to_u8());
                self.bytes.extend_from_slice(text.as_bytes());
            }
            _ => {
                let _ = encode::write_str(&mut self.bytes, text);
            }
        }
    }

    fn blob(&mut self, bytes: &[u8]) {
        let _ = encode::write_bin(&mut self.bytes, bytes);
    }

    /// Begins an entry of the map that is being written.
    fn key(&mut self, key: &'static str) {
        self.entries += 1;
        self.word(key);
    }

    /// Writes a map. The map begins with the number of its entries, which is known only when the last entry has been
    /// written.
    fn message(&mut self, message: &impl Message) {
        let start = self.bytes.len();
        self.bytes.push(Marker::FixMap(0).to_u8());
        let around = std::mem::take(&mut self.entries);
        let Ok(()) = message.write(self);
        let entries = std::mem::replace(&mut self.entries, around);
        match u8::try_from(entries) {
            Ok(entries @ ..SHORT_MAP) => self.bytes[start] = Marker::FixMap(entries).to_u8(),
            _ => {
                let mut head = Vec::new();
                let _ = encode::write_map_len(&mut head, entries);
                self.bytes.splice(start..=start, head);
            }
        }
    }
}

impl Entries for Writer {
    type Error = Infallible;

    fn wants_defaults(&self) -> bool {
        false
    }

    fn number(&mut self, key: &'static str, value: u64) -> Result<(), Infallible> {
        self.key(key);
        match u8::try_from(value) {
            // A number below 0x80 is its own marker.
            Ok(value @ ..0x80) => self.bytes.push(value),
            _ => {
                let _ = encode::write_uint(&mut self.bytes, value);
            }
        }
        Ok(())
    }

    fn flag(&mut self, key: &'static str, value: bool) -> Result<(), Infallible> {
        self.key(key);
        let _ = encode::write_bool(&mut self.bytes, value);
        Ok(())
    }

    fn text(&mut self, key: &'static str, value: &str) -> Result<(), Infallible> {
        self.key(key);
        self.word(value);
        Ok(())
    }

    fn hash(&mut self, key: &'static str, value: SequenceHash) -> Result<(), Infallible> {
        self.number(key, value.as_u64())
    }

    fn lineage(&mut self, key: &'static str, value: PositionalLineageHash) -> Result<(), Infallible> {
        self.key(key);
        self.blob(&value.to_be_bytes());
        Ok(())
    }

    fn list<T: ListElement>(&mut self, key: &'static str, list: &[T]) -> Result<(), Infallible> {
        self.key(key);
        let bytes = u32::try_from(std::mem::size_of_val(list)).unwrap_or(u32::MAX);
        let _ = encode::write_bin_len(&mut self.bytes, bytes);
        self.bytes.reserve(std::mem::size_of_val(list));
        for element in list {
            element.append(&mut self.bytes);
        }
        Ok(())
    }

    fn numbers(&mut self, key: &'static str, numbers: &[u32]) -> Result<(), Infallible> {
        self.key(key);
        self.array(numbers.len());
        for number in numbers {
            let _ = encode::write_uint(&mut self.bytes, u64::from(*number));
        }
        Ok(())
    }

    fn texts<'a>(
        &mut self,
        key: &'static str,
        texts: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), Infallible> {
        self.key(key);
        self.array(texts.clone().count());
        texts.for_each(|text| self.word(text));
        Ok(())
    }

    fn text_map<'a>(
        &mut self,
        key: &'static str,
        map: impl ExactSizeIterator<Item = (&'a str, &'a str)>,
    ) -> Result<(), Infallible> {
        self.key(key);
        let _ = encode::write_map_len(&mut self.bytes, u32::try_from(map.len()).unwrap_or(u32::MAX));
        map.for_each(|(key, value)| {
            self.word(key);
            self.word(value);
        });
        Ok(())
    }

    fn blobs(&mut self, key: &'static str, blobs: &[Vec<u8>]) -> Result<(), Infallible> {
        self.key(key);
        self.array(blobs.len());
        blobs.iter().for_each(|blob| self.blob(blob));
        Ok(())
    }

    fn map<M: Message>(&mut self, key: &'static str, message: &M) -> Result<(), Infallible> {
        self.key(key);
        self.message(message);
        Ok(())
    }

    fn maps<M: Message>(&mut self, key: &'static str, messages: &[M]) -> Result<(), Infallible> {
        self.key(key);
        self.array(messages.len());
        messages.iter().for_each(|message| self.message(message));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A map of flags. The outer map's first entry is an inner map with the same number of flags.
    struct Flags {
        flags: u32,
        is_inner: bool,
    }

    impl Message for Flags {
        fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error> {
            if !self.is_inner {
                let flags = self.flags;
                entries.map(
                    "inner",
                    &Self {
                        flags,
                        is_inner: true,
                    },
                )?;
            }
            (0..self.flags).try_for_each(|_| entries.flag("flag", true))
        }
    }

    #[test]
    fn a_map_of_any_size_has_its_number_of_entries_in_front() {
        for flags in [0, 1, 14, 15, 16, 70_000] {
            let mut expected = Vec::new();
            let all = b"\xa4flag\xc3".repeat(flags as usize);
            encode::write_map_len(&mut expected, flags + 1).unwrap();
            expected.extend(b"\xa5inner");
            encode::write_map_len(&mut expected, flags).unwrap();
            expected.extend([all.as_slice(), all.as_slice()].concat());
            let written = encode(&Flags {
                flags,
                is_inner: false,
            });
            assert_eq!(written, expected, "{flags} flags");
        }
    }
}
