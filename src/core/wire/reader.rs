//! A bounded cursor over MessagePack, without recursion.
//!
//! `rmp-serde` decodes into owned values before a limit can be checked and recurses over nesting; payloads here come
//! from anyone who can publish, so limits have to be checked in front of every allocation. The cursor reads the
//! markers that the `rmp` crate defines.

use rmp::Marker;

use super::error::DecodeError;

/// Bytes of each value that begins with the index, marker included; 0 where that depends on more than the marker.
const WIDTHS: [u8; 256] = {
    let mut widths = [0; 256];
    let mut marker = 0;
    while marker < 256 {
        widths[marker] = match marker {
            0x00..=0x7f | 0xc0 | 0xc2 | 0xc3 | 0xe0..=0xff => 1,
            // The length of a short text is in its marker.
            0xa0..=0xbf => {
                let mut length = 1;
                let mut text = 0xa0;
                while text < marker {
                    text += 1;
                    length += 1;
                }
                length
            }
            0xcc | 0xd0 => 2,
            0xcd | 0xd1 | 0xd4 => 3,
            0xd5 => 4,
            0xca | 0xce | 0xd2 => 5,
            0xd6 => 6,
            0xcb | 0xcf | 0xd3 => 9,
            0xd7 => 10,
            0xd8 => 18,
            _ => 0,
        };
        marker += 1;
    }
    widths
};

/// Bytes of each unsigned integer of at most 32 bits, by its marker; 0 for all other markers.
const NUMBER_WIDTHS: [u8; 256] = {
    let mut widths = [0; 256];
    let mut marker = 0;
    while marker < 256 {
        widths[marker] = match marker {
            0x00..=0x7f => 1,
            0xcc => 2,
            0xcd => 3,
            0xce => 5,
            _ => 0,
        };
        marker += 1;
    }
    widths
};

/// How far such an integer has to be shifted down in the four bytes behind its marker.
const NUMBER_SHIFTS: [u8; 256] = {
    let mut shifts = [0; 256];
    shifts[0xcc] = 24;
    shifts[0xcd] = 16;
    shifts
};

/// One value, or the beginning of an array or map whose elements follow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// Nothing.
    Nil,
    /// A boolean.
    Bool(bool),
    /// An integer that is not negative, however it was encoded.
    Unsigned(u64),
    /// A negative integer.
    Negative(i64),
    /// A float of either width.
    Float(f64),
    /// A text, which need not be UTF-8.
    Text(&'a [u8]),
    /// A blob.
    Blob(&'a [u8]),
    /// The head of an array: so many values follow.
    Array(usize),
    /// The head of a map: so many pairs of values follow.
    Map(usize),
    /// An extension value, which has been passed over.
    Extension,
}

impl Value<'_> {
    fn name(self) -> &'static str {
        match self {
            Self::Nil => "nil",
            Self::Bool(_) => "a boolean",
            Self::Unsigned(_) => "an unsigned integer",
            Self::Negative(_) => "a negative integer",
            Self::Float(_) => "a float",
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
    DecodeError::wrong_type(field, expected, found)
}

impl DecodeError {
    /// The error for a value of another type than its field.
    pub fn wrong_type(field: &'static str, expected: &'static str, found: Value<'_>) -> Self {
        Self::WrongType {
            field,
            expected,
            found: found.name(),
        }
    }
}

/// A cursor over one MessagePack payload. Methods that take `field` name it in their errors.
///
/// It takes no memory and does not recurse. A clone is a bookmark: reading goes on from there.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    input: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    /// A cursor at the start of `payload`, which must not be longer than `bytes_max`.
    ///
    /// # Errors
    ///
    /// [`DecodeError::Oversized`] for a longer one.
    pub fn new(payload: &'a [u8], bytes_max: usize) -> Result<Self, DecodeError> {
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
    ///
    /// # Errors
    ///
    /// The [`DecodeError`] of the first entry that fails, or of what is no map with text keys.
    pub fn map(
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
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if it is none, or has more.
    pub fn array(&mut self, field: &'static str, count_max: usize) -> Result<usize, DecodeError> {
        match self.value()? {
            Value::Array(count) => self.checked_count(field, count, count_max),
            other => Err(wrong_type(field, "an array", other)),
        }
    }

    /// An unsigned integer.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if it is none.
    pub fn unsigned(&mut self, field: &'static str) -> Result<u64, DecodeError> {
        match self.value()? {
            Value::Unsigned(value) => Ok(value),
            other => Err(wrong_type(field, "an unsigned integer", other)),
        }
    }

    /// An unsigned integer of 32 bits.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if it is none, or larger.
    pub fn unsigned_32(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        let value = self.unsigned(field)?;
        u32::try_from(value).map_err(|_| DecodeError::OutOfRange {
            field,
            value,
            max: u64::from(u32::MAX),
        })
    }

    /// An unsigned integer, or nil for none.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if it is neither.
    pub fn optional_unsigned(&mut self, field: &'static str) -> Result<Option<u64>, DecodeError> {
        match self.value()? {
            Value::Nil => Ok(None),
            Value::Unsigned(value) => Ok(Some(value)),
            other => Err(wrong_type(field, "an unsigned integer or nil", other)),
        }
    }

    /// A boolean.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if it is none.
    pub fn boolean(&mut self, field: &'static str) -> Result<bool, DecodeError> {
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

    /// Appends `count` unsigned integers of 32 bits to `list`: the elements of an array whose head was read.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] at the first that is none. What was read before stays in the list.
    pub fn unsigned_32_list(
        &mut self,
        field: &'static str,
        count: usize,
        list: &mut Vec<u32>,
    ) -> Result<(), DecodeError> {
        // Each takes a byte at least.
        self.checked_by_bytes(count)?;
        let start = list.len();
        list.resize(start + count, 0);
        for (done, place) in list.iter_mut().skip(start).enumerate() {
            match self.small_number() {
                Some(value) => *place = value,
                None => match self.unsigned_32(field) {
                    Ok(value) => *place = value,
                    Err(error) => {
                        list.truncate(start + done);
                        return Err(error);
                    }
                },
            }
        }
        Ok(())
    }

    /// The next value if it is an unsigned integer of at most 32 bits, far enough from the end. There is no branch on how it is encoded, as
    /// no processor could guess that of tokens.
    #[inline]
    fn small_number(&mut self) -> Option<u32> {
        let bytes = self.input.get(self.offset..)?.first_chunk::<5>()?;
        let [marker, a, b, c, d] = *bytes;
        let width = NUMBER_WIDTHS[usize::from(marker)];
        if width == 0 {
            return None;
        }
        self.offset += usize::from(width);
        // One byte is the value itself. Otherwise it follows, and what follows it is shifted out.
        let following = u32::from_be_bytes([a, b, c, d]) >> NUMBER_SHIFTS[usize::from(marker)];
        Some(if width == 1 { u32::from(marker) } else { following })
    }

    /// A text of at most `bytes_max` bytes, or nil for none.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if it is neither, longer, or not UTF-8.
    pub fn optional_text(
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

    /// Reads a text of at most `bytes_max` bytes, or nil, into a field that must not have been sent before.
    pub(super) fn text_once(
        &mut self,
        slot: &mut Option<Option<String>>,
        field: &'static str,
        bytes_max: usize,
    ) -> Result<(), DecodeError> {
        let text = self.optional_text(field, bytes_max)?;
        set_once(slot, field, text.map(str::to_owned))
    }

    /// A text of at most `bytes_max` bytes.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if it is none, longer, or not UTF-8.
    pub fn text(&mut self, field: &'static str, bytes_max: usize) -> Result<&'a str, DecodeError> {
        let missing = DecodeError::WrongType {
            field,
            expected: "a text",
            found: "nil",
        };
        self.optional_text(field, bytes_max)?.ok_or(missing)
    }

    /// Passes over one value with all that it contains. Takes no memory and does not recurse: every value left to
    /// pass costs at least a byte of the payload.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the payload ends before the value does.
    pub fn skip(&mut self) -> Result<(), DecodeError> {
        let mut values_left: u64 = 1;
        while values_left > 0 {
            values_left -= 1;
            let marker = self
                .input
                .get(self.offset)
                .copied()
                .unwrap_or(Marker::Reserved.to_u8());
            let width = WIDTHS[usize::from(marker)];
            if width > 0 && usize::from(width) <= self.input.len() - self.offset {
                self.offset += usize::from(width);
                continue;
            }
            match self.value()? {
                Value::Array(count) => values_left += count as u64,
                Value::Map(count) => values_left += 2 * count as u64,
                _ => {}
            }
        }
        Ok(())
    }

    /// How many bytes have been read.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Nothing may follow the top-level value.
    ///
    /// # Errors
    ///
    /// [`DecodeError::TrailingBytes`] if bytes follow.
    pub fn finish(&self) -> Result<(), DecodeError> {
        if self.offset < self.input.len() {
            return Err(DecodeError::TrailingBytes { offset: self.offset });
        }
        Ok(())
    }

    /// An announced count must be within its limit, and within what the bytes that are left can hold.
    ///
    /// # Errors
    ///
    /// [`DecodeError::TooLong`] above the limit.
    pub fn checked_count(
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

    /// The next bytes, a number of them that is known when this is compiled.
    #[inline]
    fn bytes<const WIDTH: usize>(&mut self) -> Result<[u8; WIDTH], DecodeError> {
        let rest = self.input.get(self.offset..).unwrap_or_default();
        let bytes = rest
            .first_chunk::<WIDTH>()
            .ok_or(DecodeError::Truncated { offset: self.offset })?;
        self.offset += WIDTH;
        Ok(*bytes)
    }

    #[inline]
    fn unsigned_8(&mut self) -> Result<u8, DecodeError> {
        self.bytes().map(u8::from_be_bytes)
    }

    #[inline]
    fn unsigned_16(&mut self) -> Result<u16, DecodeError> {
        self.bytes().map(u16::from_be_bytes)
    }

    /// A length or count. At most 32 bits, which every supported target can address.
    #[inline]
    fn length_32(&mut self) -> Result<usize, DecodeError> {
        let length = u32::from_be_bytes(self.bytes()?);
        usize::try_from(length).map_err(|_| DecodeError::Truncated { offset: self.offset })
    }

    /// How many elements an array or map has; more than the bytes left cannot be there.
    #[inline]
    fn checked_by_bytes(&self, count: usize) -> Result<usize, DecodeError> {
        if count > self.input.len() - self.offset {
            return Err(DecodeError::Truncated { offset: self.offset });
        }
        Ok(count)
    }

    /// Reads one value, or the head of an array or map.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the payload ends inside it, or it is not MessagePack.
    pub fn value(&mut self) -> Result<Value<'a>, DecodeError> {
        let start = self.offset;
        let marker = Marker::from_u8(self.unsigned_8()?);
        Ok(match marker {
            Marker::FixPos(value) => Value::Unsigned(u64::from(value)),
            Marker::FixNeg(value) => Value::Negative(i64::from(value)),
            Marker::Null => Value::Nil,
            Marker::True => Value::Bool(true),
            Marker::False => Value::Bool(false),
            Marker::U8 => Value::Unsigned(u64::from(u8::from_be_bytes(self.bytes()?))),
            Marker::U16 => Value::Unsigned(u64::from(u16::from_be_bytes(self.bytes()?))),
            Marker::U32 => Value::Unsigned(u64::from(u32::from_be_bytes(self.bytes()?))),
            Marker::U64 => Value::Unsigned(u64::from_be_bytes(self.bytes()?)),
            Marker::I8 => signed(i64::from(i8::from_be_bytes(self.bytes()?))),
            Marker::I16 => signed(i64::from(i16::from_be_bytes(self.bytes()?))),
            Marker::I32 => signed(i64::from(i32::from_be_bytes(self.bytes()?))),
            Marker::I64 => signed(i64::from_be_bytes(self.bytes()?)),
            Marker::F32 => Value::Float(f64::from(f32::from_be_bytes(self.bytes()?))),
            Marker::F64 => Value::Float(f64::from_be_bytes(self.bytes()?)),
            Marker::FixStr(length) => Value::Text(self.take(usize::from(length))?),
            Marker::Str8 => {
                let length = usize::from(self.unsigned_8()?);
                Value::Text(self.take(length)?)
            }
            Marker::Str16 => {
                let length = usize::from(self.unsigned_16()?);
                Value::Text(self.take(length)?)
            }
            Marker::Str32 => {
                let length = self.length_32()?;
                Value::Text(self.take(length)?)
            }
            Marker::Bin8 => {
                let length = usize::from(self.unsigned_8()?);
                Value::Blob(self.take(length)?)
            }
            Marker::Bin16 => {
                let length = usize::from(self.unsigned_16()?);
                Value::Blob(self.take(length)?)
            }
            Marker::Bin32 => {
                let length = self.length_32()?;
                Value::Blob(self.take(length)?)
            }
            Marker::FixArray(count) => Value::Array(usize::from(count)),
            Marker::Array16 => {
                let count = usize::from(self.unsigned_16()?);
                Value::Array(self.checked_by_bytes(count)?)
            }
            Marker::Array32 => {
                let count = self.length_32()?;
                Value::Array(self.checked_by_bytes(count)?)
            }
            Marker::FixMap(count) => Value::Map(usize::from(count)),
            Marker::Map16 => {
                let count = usize::from(self.unsigned_16()?);
                Value::Map(self.checked_by_bytes(count)?)
            }
            Marker::Map32 => {
                let count = self.length_32()?;
                Value::Map(self.checked_by_bytes(count)?)
            }
            Marker::FixExt1 => self.take(2).map(|_| Value::Extension)?,
            Marker::FixExt2 => self.take(3).map(|_| Value::Extension)?,
            Marker::FixExt4 => self.take(5).map(|_| Value::Extension)?,
            Marker::FixExt8 => self.take(9).map(|_| Value::Extension)?,
            Marker::FixExt16 => self.take(17).map(|_| Value::Extension)?,
            Marker::Ext8 => {
                let length = usize::from(self.unsigned_8()?);
                self.extension(length)?
            }
            Marker::Ext16 => {
                let length = usize::from(self.unsigned_16()?);
                self.extension(length)?
            }
            Marker::Ext32 => {
                let length = self.length_32()?;
                self.extension(length)?
            }
            Marker::Reserved => return Err(DecodeError::Reserved { offset: start }),
        })
    }

    /// The type and the bytes of an extension value.
    fn extension(&mut self, length: usize) -> Result<Value<'a>, DecodeError> {
        self.take(1)?;
        self.take(length).map(|_| Value::Extension)
    }
}

/// Encoders may use a signed integer for a value that is not negative.
#[inline]
fn signed(value: i64) -> Value<'static> {
    match u64::try_from(value) {
        Ok(value) => Value::Unsigned(value),
        Err(_) => Value::Negative(value),
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
mod tests;
