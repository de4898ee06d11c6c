//! Reader of MessagePack: a bounded cursor, without recursion.
//!
//! Payloads come from anyone who can publish, so limits are checked before every allocation. `rmp-serde` is not used,
//! because it decodes into owned values first, and recurses over nesting. The cursor reads the markers that the `rmp`
//! crate defines.
//!
//! A list of hashes or tokens is either one blob or an array.

mod element;
mod fast;

use rmp::Marker;

use super::error::DecodeError;

pub(super) use element::Element;

/// One value, or the head of an array or map. The elements of an array or map follow its head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// The MessagePack value nil.
    Nil,
    /// A boolean.
    Bool(bool),
    /// An integer that is not negative, in any of its encodings.
    Unsigned(u64),
    /// A negative integer.
    Negative(i64),
    /// A float of either width.
    Float(f64),
    /// A text, which need not be UTF-8.
    Text(&'a [u8]),
    /// A blob.
    Blob(&'a [u8]),
    /// Head of an array, with the number of values that follow.
    Array(usize),
    /// Head of a map, with the number of pairs of values that follow.
    Map(usize),
    /// An extension value. The reader has already skipped its bytes.
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

impl DecodeError {
    /// Returns the error for a value whose type is not the type of its field.
    pub fn wrong_type(field: &'static str, expected: &'static str, found: Value<'_>) -> Self {
        Self::WrongType {
            field,
            expected,
            found: found.name(),
        }
    }
}

/// Cursor over one MessagePack payload. Methods with a parameter `field` name that field in their errors.
///
/// The cursor allocates no memory and does not recurse. A clone keeps the cursor's place, so that reading can be
/// repeated from there.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    input: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    /// Makes a cursor at the start of `payload`, which must not be longer than `bytes_max` bytes.
    ///
    /// # Errors
    ///
    /// [`DecodeError::Oversized`] if the payload is longer.
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

    /// Reads a map, and calls `entry` with each key; `entry` must read the value.
    ///
    /// # Errors
    ///
    /// The [`DecodeError`] of the first entry that fails. A [`DecodeError`] if the value is not a map with text keys.
    pub fn map(
        &mut self,
        field: &'static str,
        mut entry: impl FnMut(&mut Self, &[u8]) -> Result<(), DecodeError>,
    ) -> Result<(), DecodeError> {
        let count = match self.value()? {
            Value::Map(count) => count,
            other => return Err(DecodeError::wrong_type(field, "a map with text keys", other)),
        };
        for _ in 0..count {
            let key = match self.short_text() {
                Some(key) => key,
                None => match self.value()? {
                    Value::Text(key) => key,
                    other => return Err(DecodeError::wrong_type(field, "a map with text keys", other)),
                },
            };
            entry(self, key)?;
        }
        Ok(())
    }

    /// Reads the head of an array of at most `count_max` elements, and returns their number.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the value is not an array, or has more than `count_max` elements.
    pub fn array(&mut self, field: &'static str, count_max: usize) -> Result<usize, DecodeError> {
        match self.value()? {
            Value::Array(count) => self.checked_count(field, count, count_max),
            other => Err(DecodeError::wrong_type(field, "an array", other)),
        }
    }

    /// Reads an unsigned integer.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the value has another type.
    pub fn unsigned(&mut self, field: &'static str) -> Result<u64, DecodeError> {
        if let Some(value) = self.plain_number() {
            return Ok(value);
        }
        match self.value()? {
            Value::Unsigned(value) => Ok(value),
            other => Err(DecodeError::wrong_type(field, "an unsigned integer", other)),
        }
    }

    /// Reads an unsigned integer of at most 32 bits.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the value is not an unsigned integer, or needs more than 32 bits.
    pub fn unsigned_32(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        let value = self.unsigned(field)?;
        narrow(field, value)
    }

    /// Reads an unsigned integer, or nil. Returns `None` for nil.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the value is neither.
    pub fn optional_unsigned(&mut self, field: &'static str) -> Result<Option<u64>, DecodeError> {
        if let Some(value) = self.plain_number() {
            return Ok(Some(value));
        }
        match self.value()? {
            Value::Nil => Ok(None),
            Value::Unsigned(value) => Ok(Some(value)),
            other => Err(DecodeError::wrong_type(
                field,
                "an unsigned integer or nil",
                other,
            )),
        }
    }

    /// Reads an unsigned integer of at most 32 bits, or nil. Returns `None` for nil.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the value is neither, or needs more than 32 bits.
    pub fn optional_unsigned_32(&mut self, field: &'static str) -> Result<Option<u32>, DecodeError> {
        let value = self.optional_unsigned(field)?;
        value.map(|value| narrow(field, value)).transpose()
    }

    /// Reads a boolean.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the value has another type.
    pub fn boolean(&mut self, field: &'static str) -> Result<bool, DecodeError> {
        match self.value()? {
            Value::Bool(value) => Ok(value),
            other => Err(DecodeError::wrong_type(field, "a boolean", other)),
        }
    }

    /// Reads a blob.
    pub(super) fn blob(&mut self, field: &'static str) -> Result<&'a [u8], DecodeError> {
        match self.value()? {
            Value::Blob(bytes) => Ok(bytes),
            other => Err(DecodeError::wrong_type(field, "a blob", other)),
        }
    }

    /// Skips a value, and returns a reader that can read the skipped value later.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the payload ends before the value does.
    pub fn defer(&mut self) -> Result<Self, DecodeError> {
        let here = self.clone();
        self.skip()?;
        Ok(here)
    }

    /// Reads a text of at most `bytes_max` bytes, or nil. Returns `None` for nil.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the value is neither a text nor nil, if the text has more than `bytes_max` bytes, or if it is
    /// not UTF-8.
    pub fn optional_text(
        &mut self,
        field: &'static str,
        bytes_max: usize,
    ) -> Result<Option<&'a str>, DecodeError> {
        let bytes = match self.value()? {
            Value::Nil => return Ok(None),
            Value::Text(bytes) => bytes,
            other => return Err(DecodeError::wrong_type(field, "a text", other)),
        };
        check_text(field, bytes.len(), bytes_max)?;
        std::str::from_utf8(bytes)
            .map(Some)
            .map_err(|_| DecodeError::NotUtf8 { field })
    }

    /// Reads a text of at most `bytes_max` bytes, or nil, and stores it in `slot`. A field that the message has already
    /// sent is an error.
    pub(super) fn text_once(
        &mut self,
        slot: &mut Option<Option<String>>,
        field: &'static str,
        bytes_max: usize,
    ) -> Result<(), DecodeError> {
        let text = self.optional_text(field, bytes_max)?;
        set_once(slot, field, text.map(str::to_owned))
    }

    /// Reads a text of at most `bytes_max` bytes.
    ///
    /// # Errors
    ///
    /// [`DecodeError`] if the value is not a text, if the text has more than `bytes_max` bytes, or if it is not UTF-8.
    pub fn text(&mut self, field: &'static str, bytes_max: usize) -> Result<&'a str, DecodeError> {
        let missing = DecodeError::WrongType {
            field,
            expected: "a text",
            found: "nil",
        };
        self.optional_text(field, bytes_max)?.ok_or(missing)
    }

    /// Reads a list of at most `count_max` elements, and stores it in `slot`. Nil leaves the slot empty. A field that
    /// the message has already sent is an error.
    pub(super) fn list_once<T: Element>(
        &mut self,
        slot: &mut Option<Vec<T>>,
        field: &'static str,
        count_max: usize,
    ) -> Result<(), DecodeError> {
        match self.optional_list(field, count_max)? {
            Some(list) => set_once(slot, field, list),
            None => Ok(()),
        }
    }

    /// Reads a list of at most `count_max` elements, or nil. Returns `None` for nil.
    pub(super) fn optional_list<T: Element>(
        &mut self,
        field: &'static str,
        count_max: usize,
    ) -> Result<Option<Vec<T>>, DecodeError> {
        match self.value()? {
            Value::Nil => Ok(None),
            head => self.list_behind(head, field, count_max).map(Some),
        }
    }

    /// Reads a list of at most `count_max` elements, as a blob or as an array.
    pub(super) fn list<T: Element>(
        &mut self,
        field: &'static str,
        count_max: usize,
    ) -> Result<Vec<T>, DecodeError> {
        let head = self.value()?;
        self.list_behind(head, field, count_max)
    }

    /// Reads the list of at most `count_max` elements whose blob, or whose array's head, is `head`.
    fn list_behind<T: Element>(
        &mut self,
        head: Value<'a>,
        field: &'static str,
        count_max: usize,
    ) -> Result<Vec<T>, DecodeError> {
        match head {
            Value::Blob(bytes) => {
                if !bytes.len().is_multiple_of(T::WIDTH) {
                    return Err(DecodeError::RaggedBlob {
                        field,
                        bytes: bytes.len(),
                        element: T::WIDTH,
                    });
                }
                self.checked_count(field, bytes.len() / T::WIDTH, count_max)?;
                T::list_from_blob(field, bytes)
            }
            Value::Array(count) => {
                let count = self.checked_count(field, count, count_max)?;
                let mut list = Vec::with_capacity(count);
                for _ in 0..count {
                    list.push(T::from_reader(field, self)?);
                }
                Ok(list)
            }
            other => Err(DecodeError::wrong_type(field, T::EXPECTED, other)),
        }
    }

    /// Number of bytes that have been read.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Checks that no bytes follow the top-level value.
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

    /// Returns `count`, the number of elements that the payload gives for a list, if it is at most `count_max`. The
    /// payload may be too short for up to 15 elements; [`Self::value`] has checked every larger count.
    ///
    /// # Errors
    ///
    /// [`DecodeError::TooLong`] if the count is above the limit.
    pub fn checked_count(
        &self,
        field: &'static str,
        count: usize,
        count_max: usize,
    ) -> Result<usize, DecodeError> {
        check_count(field, count, count_max)?;
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

    /// Reads the next `WIDTH` bytes.
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

    /// Reads a length or count of 32 bits. It always fits in a `usize` on the targets that kvatlas supports.
    #[inline]
    fn length_32(&mut self) -> Result<usize, DecodeError> {
        let length = u32::from_be_bytes(self.bytes()?);
        usize::try_from(length).map_err(|_| DecodeError::Truncated { offset: self.offset })
    }

    /// Returns the number of elements of an array or map if the payload still has at least as many bytes. Otherwise the
    /// payload is truncated.
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
    /// [`DecodeError`] if the payload ends inside the value, or is not MessagePack.
    #[inline]
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

    /// Skips an extension value, that is, its type and its bytes.
    fn extension(&mut self, length: usize) -> Result<Value<'a>, DecodeError> {
        self.take(1)?;
        self.take(length).map(|_| Value::Extension)
    }
}

/// Returns the value of an integer in a signed encoding. The integer need not be negative: encoders may use signed
/// encodings for any integer.
#[inline]
fn signed(value: i64) -> Value<'static> {
    match u64::try_from(value) {
        Ok(value) => Value::Unsigned(value),
        Err(_) => Value::Negative(value),
    }
}

/// Refuses a list of more than `max` elements.
pub(super) fn check_count(field: &'static str, count: usize, max: usize) -> Result<(), DecodeError> {
    match count > max {
        true => Err(DecodeError::TooLong { field, count, max }),
        false => Ok(()),
    }
}

/// Refuses a text of more than `max` bytes.
pub(super) fn check_text(field: &'static str, bytes: usize, max: usize) -> Result<(), DecodeError> {
    match bytes > max {
        true => Err(DecodeError::TextTooLong { field, bytes, max }),
        false => Ok(()),
    }
}

/// Stores `value` in `slot`. A field that the message has already sent is an error.
pub(super) fn set_once<T>(slot: &mut Option<T>, field: &'static str, value: T) -> Result<(), DecodeError> {
    match slot {
        Some(_) => Err(DecodeError::Repeated { field }),
        None => {
            *slot = Some(value);
            Ok(())
        }
    }
}

/// Returns the value of `field` as an integer of 32 bits.
fn narrow(field: &'static str, value: u64) -> Result<u32, DecodeError> {
    u32::try_from(value).map_err(|_| DecodeError::OutOfRange {
        field,
        value,
        max: u64::from(u32::MAX),
    })
}

/// Checks that the contract's version is known. An absent version means 1.
pub(super) fn check_version(version: Option<u64>) -> Result<(), DecodeError> {
    match version {
        None | Some(super::PROTOCOL_VERSION) => Ok(()),
        Some(version) => Err(DecodeError::UnsupportedVersion { version }),
    }
}

#[cfg(test)]
mod tests;
