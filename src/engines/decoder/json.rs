//! Turns JSON into MessagePack, so that one reader serves both.

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};

use kvatlas_core::wire::DecodeError;

use super::BatchError;

/// Whether a payload begins as a JSON list or object. A MessagePack payload never does, since these bytes are small integers there.
pub(super) fn is_json(payload: &[u8]) -> bool {
    let first = payload.iter().find(|byte| !byte.is_ascii_whitespace());
    matches!(first, Some(b'[' | b'{'))
}

/// Writes the JSON `text` as MessagePack to `output`, which is emptied first.
///
/// The output takes at most four bytes for each byte of text, because short values grow: `[]` becomes five bytes, and `1e1` nine.
/// Nesting is refused beyond 128 levels.
pub(super) fn transcode(text: &[u8], bytes_max: usize, output: &mut Vec<u8>) -> Result<(), BatchError> {
    output.clear();
    if text.len() > bytes_max {
        return Err(DecodeError::Oversized {
            bytes: text.len(),
            max: bytes_max,
        }
        .into());
    }
    let mut parser = serde_json::Deserializer::from_slice(text);
    let written = Transcode(output).deserialize(&mut parser);
    written
        .and_then(|()| parser.end())
        .map_err(|error| BatchError::Json {
            line: error.line(),
            column: error.column(),
        })
}

/// Serde visitor that appends each JSON value to the list, as MessagePack.
struct Transcode<'a>(&'a mut Vec<u8>);

const ARRAY_32: u8 = 0xdd;
const MAP_32: u8 = 0xdf;

/// Writes the head of a list or a map before the number of its elements is known. Returns the index in `output` at
/// which the caller has to write that number.
fn open(output: &mut Vec<u8>, marker: u8) -> usize {
    output.push(marker);
    output.extend_from_slice(&[0; 4]);
    output.len() - 4
}

fn close(output: &mut [u8], place: usize, count: u32) {
    if let Some(cells) = output.get_mut(place..place + 4) {
        cells.copy_from_slice(&count.to_be_bytes());
    }
}

impl<'de> DeserializeSeed<'de> for Transcode<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

// Writing to memory cannot fail, so the results of `rmp` are dropped.
impl<'de> Visitor<'de> for Transcode<'_> {
    type Value = ();

    fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<(), E> {
        let _ = rmp::encode::write_bool(self.0, value);
        Ok(())
    }

    fn visit_i64<E>(self, value: i64) -> Result<(), E> {
        let _ = rmp::encode::write_sint(self.0, value);
        Ok(())
    }

    fn visit_u64<E>(self, value: u64) -> Result<(), E> {
        let _ = rmp::encode::write_uint(self.0, value);
        Ok(())
    }

    fn visit_f64<E>(self, value: f64) -> Result<(), E> {
        let _ = rmp::encode::write_f64(self.0, value);
        Ok(())
    }

    fn visit_str<E>(self, value: &str) -> Result<(), E> {
        let _ = rmp::encode::write_str(self.0, value);
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        let _ = rmp::encode::write_nil(self.0);
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let place = open(self.0, ARRAY_32);
        let mut count = 0;
        while list.next_element_seed(Transcode(self.0))?.is_some() {
            count += 1;
        }
        close(self.0, place, count);
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let place = open(self.0, MAP_32);
        let mut count = 0;
        while map.next_key_seed(Transcode(self.0))?.is_some() {
            map.next_value_seed(Transcode(self.0))?;
            count += 1;
        }
        close(self.0, place, count);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::{Reader, Value};

    use super::*;

    fn transcoded(text: &str) -> Result<Vec<u8>, BatchError> {
        let mut output = Vec::new();
        transcode(text.as_bytes(), 1 << 20, &mut output)?;
        Ok(output)
    }

    #[test]
    fn values_come_through() {
        let bytes =
            transcoded(r#" {"a": [1, -2, 18446744073709551615, null, true, "\u00e4"], "b": {}} "#).unwrap();
        let mut reader = Reader::new(&bytes, 1 << 20).unwrap();
        assert_eq!(reader.value(), Ok(Value::Map(2)));
        assert_eq!(reader.value(), Ok(Value::Text(b"a")));
        assert_eq!(reader.value(), Ok(Value::Array(6)));
        assert_eq!(reader.value(), Ok(Value::Unsigned(1)));
        assert_eq!(reader.value(), Ok(Value::Negative(-2)));
        assert_eq!(reader.value(), Ok(Value::Unsigned(u64::MAX)));
        assert_eq!(reader.value(), Ok(Value::Nil));
        assert_eq!(reader.value(), Ok(Value::Bool(true)));
        assert_eq!(reader.value(), Ok(Value::Text("ä".as_bytes())));
        assert_eq!(reader.value(), Ok(Value::Text(b"b")));
        assert_eq!(reader.value(), Ok(Value::Map(0)));
        assert_eq!(reader.finish(), Ok(()));
    }

    #[test]
    fn what_is_no_json_is_an_error() {
        for text in ["[1", "[1] 2", "{\"a\" 1}", "[nan]", "{1: 2}"] {
            assert!(
                matches!(transcoded(text), Err(BatchError::Json { line: 1, .. })),
                "{text}"
            );
        }
        assert!(matches!(
            transcoded(&"[".repeat(1_000_000)),
            Err(BatchError::Json { .. })
        ));
        let mut output = Vec::new();
        assert!(matches!(
            transcode(b"[1]", 2, &mut output),
            Err(BatchError::Payload(_))
        ));
    }

    #[test]
    fn json_is_told_from_messagepack() {
        assert!(is_json(b" \n[1]"));
        assert!(is_json(b"{}"));
        assert!(!is_json(&[0x91, 1]));
        assert!(!is_json(&[0x81]));
        assert!(!is_json(b""));
    }
}
