//! A bounded cursor over MessagePack, without recursion.
//!
//! `rmp-serde` decodes into owned values before a limit can be checked and recurses over nesting; payloads here come
//! from anyone who can publish, so limits have to be checked in front of every allocation. The cursor reads the
//! markers that the `rmp` crate defines.

use rmp::Marker;

use super::error::DecodeError;

/// One value, or the beginning of an array or map whose elements follow.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value<'a> {
    Nil,
    Bool(bool),
    Unsigned(u64),
    Negative,
    Float,
    Text(&'a [u8]),
    Blob(&'a [u8]),
    Array(usize),
    Map(usize),
    Extension,
}

impl Value<'_> {
    fn name(self) -> &'static str {
        match self {
            Self::Nil => "nil",
            Self::Bool(_) => "a boolean",
            Self::Unsigned(_) => "an unsigned integer",
            Self::Negative => "a negative integer",
            Self::Float => "a float",
            Self::Text(_) => "a text",
            Self::Blob(_) => "a blob",
            Self::Array(_) => "an array",
            Self::Map(_) => "a map",
            Self::Extension => "an extension value",
        }
    }
}

/// The error for a value of another type than its field.
pub(super) fn wrong_type(field: &'static str, expected: &'static str, found: Value<'_>) -> DecodeError {
    DecodeError::WrongType {
        field,
        expected,
        found: found.name(),
    }
}

/// The cursor. Methods that take `field` name it in their errors.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    input: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    /// A cursor at the start of `payload`, which must not be longer than `bytes_max`.
    pub(super) fn new(payload: &'a [u8], bytes_max: usize) -> Result<Self, DecodeError> {
        if payload.len() > bytes_max {
            return Err(DecodeError::Oversized {
                bytes: payload.len(),
                max: bytes_max,
            });
        }
        Ok(Self {
            input: payload,
            offset: 0,
        })
    }

    /// Reads a map, calling `entry` with each key; `entry` must consume the value.
    pub(super) fn map(
        &mut self,
        field: &'static str,
        mut entry: impl FnMut(&mut Self, &[u8]) -> Result<(), DecodeError>,
    ) -> Result<(), DecodeError> {
        let count = match self.value()? {
            Value::Map(count) => count,
            other => return Err(wrong_type(field, "a map with text keys", other)),
        };
        for _ in 0..count {
            match self.value()? {
                Value::Text(key) => entry(self, key)?,
                other => return Err(wrong_type(field, "a map with text keys", other)),
            }
        }
        Ok(())
    }

    /// Reads the head of an array of at most `count_max` elements.
    pub(super) fn array(&mut self, field: &'static str, count_max: usize) -> Result<usize, DecodeError> {
        match self.value()? {
            Value::Array(count) => self.checked_count(field, count, count_max),
            other => Err(wrong_type(field, "an array", other)),
        }
    }

    pub(super) fn unsigned(&mut self, field: &'static str) -> Result<u64, DecodeError> {
        match self.value()? {
            Value::Unsigned(value) => Ok(value),
            other => Err(wrong_type(field, "an unsigned integer", other)),
        }
    }

    pub(super) fn unsigned_32(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        let value = self.unsigned(field)?;
        u32::try_from(value).map_err(|_| DecodeError::OutOfRange {
            field,
            value,
            max: u64::from(u32::MAX),
        })
    }

    /// An unsigned integer, or nil for none.
    pub(super) fn optional_unsigned(&mut self, field: &'static str) -> Result<Option<u64>, DecodeError> {
        match self.value()? {
            Value::Nil => Ok(None),
            Value::Unsigned(value) => Ok(Some(value)),
            other => Err(wrong_type(field, "an unsigned integer or nil", other)),
        }
    }

    pub(super) fn boolean(&mut self, field: &'static str) -> Result<bool, DecodeError> {
        match self.value()? {
            Value::Bool(value) => Ok(value),
            other => Err(wrong_type(field, "a boolean", other)),
        }
    }

    /// A blob.
    pub(super) fn blob(&mut self, field: &'static str) -> Result<&'a [u8], DecodeError> {
        match self.value()? {
            Value::Blob(bytes) => Ok(bytes),
            other => Err(wrong_type(field, "a blob", other)),
        }
    }

    /// A text of at most `bytes_max` bytes, or nil for none.
    pub(super) fn optional_text(
        &mut self,
        field: &'static str,
        bytes_max: usize,
    ) -> Result<Option<&'a str>, DecodeError> {
        let bytes = match self.value()? {
            Value::Nil => return Ok(None),
            Value::Text(bytes) => bytes,
            other => return Err(wrong_type(field, "a text", other)),
        };
        if bytes.len() > bytes_max {
            return Err(DecodeError::TextTooLong {
                field,
                bytes: bytes.len(),
                max: bytes_max,
            });
        }
        std::str::from_utf8(bytes)
            .map(Some)
            .map_err(|_| DecodeError::NotUtf8 { field })
    }

    /// A text of at most `bytes_max` bytes.
    pub(super) fn text(&mut self, field: &'static str, bytes_max: usize) -> Result<&'a str, DecodeError> {
        let missing = DecodeError::WrongType {
            field,
            expected: "a text",
            found: "nil",
        };
        self.optional_text(field, bytes_max)?.ok_or(missing)
    }

    /// Passes over one value with all that it contains. Takes no memory and does not recurse: every value left to
    /// pass costs at least a byte of the payload.
    pub(super) fn skip(&mut self) -> Result<(), DecodeError> {
        let mut values_left: u64 = 1;
        while values_left > 0 {
            values_left -= 1;
            match self.value()? {
                Value::Array(count) => values_left += count as u64,
                Value::Map(count) => values_left += 2 * count as u64,
                _ => {}
            }
        }
        Ok(())
    }

    /// Nothing may follow the top-level map.
    pub(super) fn finish(&self) -> Result<(), DecodeError> {
        if self.offset < self.input.len() {
            return Err(DecodeError::TrailingBytes { offset: self.offset });
        }
        Ok(())
    }

    /// An announced count must be within its limit, and within what the bytes that are left can hold.
    pub(super) fn checked_count(
        &self,
        field: &'static str,
        count: usize,
        count_max: usize,
    ) -> Result<usize, DecodeError> {
        if count > count_max {
            return Err(DecodeError::TooLong {
                field,
                count,
                max: count_max,
            });
        }
        Ok(count)
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8], DecodeError> {
        let rest = self.input.get(self.offset..).unwrap_or_default();
        let taken = rest
            .get(..bytes)
            .ok_or(DecodeError::Truncated { offset: self.offset })?;
        self.offset += bytes;
        Ok(taken)
    }

    /// A big-endian unsigned integer of `width` bytes.
    fn big_endian(&mut self, width: usize) -> Result<u64, DecodeError> {
        Ok(self
            .take(width)?
            .iter()
            .fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    fn length(&mut self, width: usize) -> Result<usize, DecodeError> {
        // At most 32 bits, which every supported target can address.
        usize::try_from(self.big_endian(width)?).map_err(|_| DecodeError::Truncated { offset: self.offset })
    }

    /// How many elements an array or map has; more than the bytes left cannot be there.
    fn count(&mut self, width: usize) -> Result<usize, DecodeError> {
        let count = self.length(width)?;
        if count > self.input.len() - self.offset {
            return Err(DecodeError::Truncated { offset: self.offset });
        }
        Ok(count)
    }

    /// A signed integer of `width` bytes; encoders may use one for a value that is not negative.
    fn signed(&mut self, width: usize) -> Result<Value<'a>, DecodeError> {
        let value = self.big_endian(width)?;
        let sign = 1_u64 << (8 * width - 1);
        Ok(if value & sign == 0 {
            Value::Unsigned(value)
        } else {
            Value::Negative
        })
    }

    /// Reads one value, or the head of an array or map.
    pub(super) fn value(&mut self) -> Result<Value<'a>, DecodeError> {
        let start = self.offset;
        let marker = self
            .take(1)?
            .first()
            .copied()
            .map_or(Marker::Reserved, Marker::from_u8);
        Ok(match marker {
            Marker::FixPos(value) => Value::Unsigned(u64::from(value)),
            Marker::FixNeg(_) => Value::Negative,
            Marker::Null => Value::Nil,
            Marker::True => Value::Bool(true),
            Marker::False => Value::Bool(false),
            Marker::U8 => Value::Unsigned(self.big_endian(1)?),
            Marker::U16 => Value::Unsigned(self.big_endian(2)?),
            Marker::U32 => Value::Unsigned(self.big_endian(4)?),
            Marker::U64 => Value::Unsigned(self.big_endian(8)?),
            Marker::I8 => self.signed(1)?,
            Marker::I16 => self.signed(2)?,
            Marker::I32 => self.signed(4)?,
            Marker::I64 => self.signed(8)?,
            Marker::F32 => self.take(4).map(|_| Value::Float)?,
            Marker::F64 => self.take(8).map(|_| Value::Float)?,
            Marker::FixStr(length) => Value::Text(self.take(usize::from(length))?),
            Marker::Str8 => self.sized(1).map(Value::Text)?,
            Marker::Str16 => self.sized(2).map(Value::Text)?,
            Marker::Str32 => self.sized(4).map(Value::Text)?,
            Marker::Bin8 => self.sized(1).map(Value::Blob)?,
            Marker::Bin16 => self.sized(2).map(Value::Blob)?,
            Marker::Bin32 => self.sized(4).map(Value::Blob)?,
            Marker::FixArray(count) => Value::Array(usize::from(count)),
            Marker::Array16 => Value::Array(self.count(2)?),
            Marker::Array32 => Value::Array(self.count(4)?),
            Marker::FixMap(count) => Value::Map(usize::from(count)),
            Marker::Map16 => Value::Map(self.count(2)?),
            Marker::Map32 => Value::Map(self.count(4)?),
            Marker::FixExt1 => self.take(2).map(|_| Value::Extension)?,
            Marker::FixExt2 => self.take(3).map(|_| Value::Extension)?,
            Marker::FixExt4 => self.take(5).map(|_| Value::Extension)?,
            Marker::FixExt8 => self.take(9).map(|_| Value::Extension)?,
            Marker::FixExt16 => self.take(17).map(|_| Value::Extension)?,
            Marker::Ext8 => self.extension(1)?,
            Marker::Ext16 => self.extension(2)?,
            Marker::Ext32 => self.extension(4)?,
            Marker::Reserved => return Err(DecodeError::Reserved { offset: start }),
        })
    }

    fn sized(&mut self, width: usize) -> Result<&'a [u8], DecodeError> {
        let length = self.length(width)?;
        self.take(length)
    }

    fn extension(&mut self, width: usize) -> Result<Value<'a>, DecodeError> {
        let length = self.length(width)?;
        self.take(1)?;
        self.take(length).map(|_| Value::Extension)
    }
}

/// Puts `value` into a field that must not have been sent before.
pub(super) fn set_once<T>(slot: &mut Option<T>, field: &'static str, value: T) -> Result<(), DecodeError> {
    match slot {
        Some(_) => Err(DecodeError::Repeated { field }),
        None => {
            *slot = Some(value);
            Ok(())
        }
    }
}

/// The version of the contract: 1 where it is left out.
pub(super) fn check_version(version: Option<u64>) -> Result<(), DecodeError> {
    match version {
        None | Some(super::PROTOCOL_VERSION) => Ok(()),
        Some(version) => Err(DecodeError::UnsupportedVersion { version }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reader(bytes: &[u8]) -> Reader<'_> {
        Reader::new(bytes, 1 << 20).unwrap()
    }

    #[test]
    fn an_announced_length_that_lies_takes_no_memory() {
        // An array of 4 billion elements in five bytes, within a limit that would allow it.
        let lie = [0xdd, 0xff, 0xff, 0xff, 0xff];
        assert!(matches!(
            reader(&lie).list::<u64>("x", usize::MAX),
            Err(DecodeError::Truncated { .. })
        ));
        let lie = [0xc6, 0xff, 0xff, 0xff, 0xff, 1];
        assert!(matches!(
            reader(&lie).list::<u64>("x", usize::MAX),
            Err(DecodeError::Truncated { .. })
        ));
    }

    #[test]
    fn deep_nesting_is_passed_over_without_recursion() {
        let mut nested = vec![0x91; 1 << 20];
        nested[(1 << 20) - 1] = 0xc0;
        let mut reader = reader(&nested);
        assert_eq!(reader.skip(), Ok(()));
        assert_eq!(reader.finish(), Ok(()));
    }

    #[test]
    fn signed_encodings_of_positive_numbers_are_taken() {
        assert_eq!(reader(&[0xd0, 5]).unsigned("x"), Ok(5));
        assert_eq!(reader(&[0xd3, 0, 0, 0, 0, 0, 0, 1, 0]).unsigned("x"), Ok(256));
        assert!(matches!(
            reader(&[0xd0, 0xff]).unsigned("x"),
            Err(DecodeError::WrongType { .. })
        ));
        assert!(matches!(
            reader(&[0xff]).unsigned("x"),
            Err(DecodeError::WrongType { .. })
        ));
        assert_eq!(
            reader(&[0xc1]).unsigned("x"),
            Err(DecodeError::Reserved { offset: 0 })
        );
    }

    #[test]
    fn an_oversized_payload_is_not_read() {
        assert_eq!(
            Reader::new(&[0; 11], 10).unwrap_err(),
            DecodeError::Oversized { bytes: 11, max: 10 }
        );
    }
}
