//! Messages as JSON, for people and for HTTP.
//!
//! The keys are those of MessagePack. Hashes are hexadecimal texts, or decimal numbers where they are read. What is written says
//! defaults too. What is read may leave them out, but may have no key that the contract does not know: a person has misspelt it.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

use super::error::DecodeError;

/// Reads the fields of a map, and makes of them what `finish` makes of them.
///
/// An array is refused: serde would take one for a map with its keys in order.
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
