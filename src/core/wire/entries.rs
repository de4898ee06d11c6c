//! The entries of a message's map. A message lists its entries once, for all output forms.
//!
//! A message writes its entries to an [`Entries`]. Two types implement that trait: the MessagePack writer, and a writer
//! for serde (JSON, for people and for HTTP).

use std::collections::BTreeMap;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::hash::{BlockHash, Position, PositionalLineageHash, SequenceHash, Token};

/// A message, or a part of a message, that is sent as a map with text keys.
pub(super) trait Message {
    /// Writes the entries in their order.
    fn write<E: Entries>(&self, entries: &mut E) -> Result<(), E::Error>;
}

/// Receives the entries of a map one by one, and writes them.
pub(super) trait Entries {
    /// Error of an entry that could not be written.
    type Error;

    /// Whether entries are written even if their value is the default. Binary formats leave out such entries, to save
    /// bytes.
    fn wants_defaults(&self) -> bool;

    /// Writes an entry with a number.
    fn number(&mut self, key: &'static str, value: u64) -> Result<(), Self::Error>;

    /// Writes an entry with a boolean.
    fn flag(&mut self, key: &'static str, value: bool) -> Result<(), Self::Error>;

    /// Writes an entry with a text.
    fn text(&mut self, key: &'static str, value: &str) -> Result<(), Self::Error>;

    /// Writes an entry with one hash.
    fn hash(&mut self, key: &'static str, value: SequenceHash) -> Result<(), Self::Error>;

    /// Writes an entry with one lineage hash.
    fn lineage(&mut self, key: &'static str, value: PositionalLineageHash) -> Result<(), Self::Error>;

    /// Writes an entry with a list of hashes, tokens or positions. In MessagePack the list is one blob.
    fn list<T: ListElement>(&mut self, key: &'static str, list: &[T]) -> Result<(), Self::Error>;

    /// Writes an entry with a list of numbers. The list is an array in every form.
    fn numbers(&mut self, key: &'static str, numbers: &[u32]) -> Result<(), Self::Error>;

    /// Writes an entry with a list of texts.
    fn texts<'a>(
        &mut self,
        key: &'static str,
        texts: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), Self::Error>;

    /// Writes an entry with a map of texts.
    fn text_map<'a>(
        &mut self,
        key: &'static str,
        map: impl ExactSizeIterator<Item = (&'a str, &'a str)>,
    ) -> Result<(), Self::Error>;

    /// Writes an entry with a list of blobs.
    fn blobs(&mut self, key: &'static str, blobs: &[Vec<u8>]) -> Result<(), Self::Error>;

    /// Writes an entry with a map.
    fn map<M: Message>(&mut self, key: &'static str, message: &M) -> Result<(), Self::Error>;

    /// Writes an entry with a list of maps.
    fn maps<M: Message>(&mut self, key: &'static str, messages: &[M]) -> Result<(), Self::Error>;

    /// Writes an entry with a text, if there is one.
    fn optional_text(&mut self, key: &'static str, value: Option<&String>) -> Result<(), Self::Error> {
        value.map_or(Ok(()), |value| self.text(key, value))
    }

    /// Writes an entry with a number, if there is one.
    fn optional_number(&mut self, key: &'static str, value: Option<u64>) -> Result<(), Self::Error> {
        value.map_or(Ok(()), |value| self.number(key, value))
    }
}

/// An element of a list that MessagePack writes as one blob.
pub(super) trait ListElement: Copy {
    /// Type of the element in the form that serde writes.
    type Text: Serialize;

    /// Returns the element in the form that serde writes.
    fn text(self) -> Self::Text;

    /// Appends the element to a blob.
    fn append(self, blob: &mut Vec<u8>);
}

macro_rules! list_element {
    ($element:ty as $text:ty, $to_text:expr, $to_bytes:expr) => {
        impl ListElement for $element {
            type Text = $text;

            fn text(self) -> Self::Text {
                let to_text: fn($element) -> $text = $to_text;
                to_text(self)
            }

            fn append(self, blob: &mut Vec<u8>) {
                let to_bytes: fn($element) -> [u8; size_of::<$element>()] = $to_bytes;
                blob.extend_from_slice(&to_bytes(self));
            }
        }
    };
}

// An engine's hash, a plain u64, is written for people in the same way as every other hash.
list_element!(u64 as SequenceHash, SequenceHash, u64::to_le_bytes);
list_element!(Token as Token, |token| token, Token::to_le_bytes);
list_element!(Position as u32, Position::as_u32, |position| position
    .as_u32()
    .to_le_bytes());
list_element!(BlockHash as Self, |hash| hash, |hash| hash.as_u64().to_le_bytes());
list_element!(SequenceHash as Self, |hash| hash, |hash| hash
    .as_u64()
    .to_le_bytes());
list_element!(
    PositionalLineageHash as Self,
    |hash| hash,
    PositionalLineageHash::to_be_bytes
);

/// Writes a message as a map, through serde.
pub(super) fn serialize<S: Serializer>(message: &impl Message, serializer: S) -> Result<S::Ok, S::Error> {
    let wants_defaults = serializer.is_human_readable();
    let map = serializer.serialize_map(None)?;
    let mut entries = SerdeEntries { map, wants_defaults };
    message.write(&mut entries)?;
    entries.map.end()
}

struct SerdeEntries<M> {
    map: M,
    wants_defaults: bool,
}

impl<S: SerializeMap> Entries for SerdeEntries<S> {
    type Error = S::Error;

    fn wants_defaults(&self) -> bool {
        self.wants_defaults
    }

    fn number(&mut self, key: &'static str, value: u64) -> Result<(), S::Error> {
        self.map.serialize_entry(key, &value)
    }

    fn flag(&mut self, key: &'static str, value: bool) -> Result<(), S::Error> {
        self.map.serialize_entry(key, &value)
    }

    fn text(&mut self, key: &'static str, value: &str) -> Result<(), S::Error> {
        self.map.serialize_entry(key, value)
    }

    fn hash(&mut self, key: &'static str, value: SequenceHash) -> Result<(), S::Error> {
        self.map.serialize_entry(key, &value)
    }

    fn lineage(&mut self, key: &'static str, value: PositionalLineageHash) -> Result<(), S::Error> {
        self.map.serialize_entry(key, &value)
    }

    fn list<T: ListElement>(&mut self, key: &'static str, list: &[T]) -> Result<(), S::Error> {
        let texts = list.iter().map(|element| element.text());
        self.map.serialize_entry(key, &SerializedList(texts))
    }

    fn numbers(&mut self, key: &'static str, numbers: &[u32]) -> Result<(), S::Error> {
        self.map.serialize_entry(key, numbers)
    }

    fn texts<'a>(
        &mut self,
        key: &'static str,
        texts: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), S::Error> {
        self.map.serialize_entry(key, &SerializedList(texts))
    }

    fn text_map<'a>(
        &mut self,
        key: &'static str,
        map: impl ExactSizeIterator<Item = (&'a str, &'a str)>,
    ) -> Result<(), S::Error> {
        let map: BTreeMap<&str, &str> = map.collect();
        self.map.serialize_entry(key, &map)
    }

    fn blobs(&mut self, key: &'static str, blobs: &[Vec<u8>]) -> Result<(), S::Error> {
        let blobs = blobs.iter().map(|blob| serde_bytes::Bytes::new(blob));
        self.map.serialize_entry(key, &SerializedList(blobs))
    }

    fn map<M: Message>(&mut self, key: &'static str, message: &M) -> Result<(), S::Error> {
        self.map.serialize_entry(key, &Nested(message))
    }

    fn maps<M: Message>(&mut self, key: &'static str, messages: &[M]) -> Result<(), S::Error> {
        self.map
            .serialize_entry(key, &SerializedList(messages.iter().map(Nested)))
    }
}

/// The items of an iterator, which serde writes as a list.
struct SerializedList<I>(I);

impl<T: Serialize, I: Iterator<Item = T> + Clone> Serialize for SerializedList<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.clone())
    }
}

/// A message that is a part of another message.
#[derive(Clone, Copy)]
struct Nested<'a, M>(&'a M);

impl<M: Message> Serialize for Nested<'_, M> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serialize(self.0, serializer)
    }
}

/// Implements `Serialize` for messages: serde writes their entries as a map.
macro_rules! serialize_entries {
    ($($message:ty),+ $(,)?) => {
        $(impl serde::Serialize for $message {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                $crate::wire::entries::serialize(self, serializer)
            }
        })+
    };
}

/// Implements `encode` and `decode` for messages that serde writes and reads. Unknown keys are skipped, as in every
/// payload.
macro_rules! coded {
    ($($message:ty),+ $(,)?) => {
        $(impl $message {
            /// Encodes the message as a MessagePack map.
            pub fn encode(&self) -> Vec<u8> {
                // Writing to memory cannot fail.
                rmp_serde::to_vec_named(self).unwrap_or_default()
            }

            /// Decodes a payload that [`Self::encode`] wrote.
            ///
            /// # Errors
            ///
            /// The error of `rmp_serde` if the payload is not a message of this type.
            pub fn decode(payload: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
                rmp_serde::from_slice(payload)
            }
        })+
    };
}

pub(super) use {coded, serialize_entries};
