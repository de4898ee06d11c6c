//! Messages as JSON, for people and for HTTP.
//!
//! The keys are the same as in MessagePack. Hashes are written as hexadecimal texts; a decimal number is also accepted
//! when a message is read. Written messages also contain default values. A message that is read may leave out default
//! values, but must not have a key that the contract does not know: a person has probably misspelt it.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

use super::error::DecodeError;

/// Reads the fields of a map, and returns the value that `finish` makes from them.
///
/// Refuses an array, because serde would read it as a map whose keys are in the order of declaration.
pub(super) fn deserialize_fields<'de, D, Fields, T>(
    deserializer: D,
    finish: impl FnOnce(Fields) -> Result<T, DecodeError>,
) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    Fields: Deserialize<'de>,
{
    struct MapOnly<Fields>(PhantomData<Fields>);

    impl<'de, Fields: Deserialize<'de>> Visitor<'de> for MapOnly<Fields> {
        type Value = Fields;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("an object")
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Fields, A::Error> {
            Fields::deserialize(MapAccessDeserializer::new(map))
        }
    }

    let fields = deserializer.deserialize_map(MapOnly(PhantomData))?;
    finish(fields).map_err(D::Error::custom)
}
