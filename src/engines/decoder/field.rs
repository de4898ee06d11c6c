//! Single values as engines write them.

use kvatlas_core::wire::{DecodeError, Rank, Reader, Value};

/// The name of a block, as a 64-bit number. A value can be:
///
/// - an unsigned integer, or a signed integer with the same 64 bits
/// - a byte string: its last eight bytes, big-endian
/// - a text: a byte string in hexadecimal digits
pub(super) fn name(field: &'static str, value: Value<'_>) -> Result<u64, DecodeError> {
    match value {
        Value::Unsigned(name) => Ok(name),
        Value::Negative(name) => Ok(name.cast_unsigned()),
        Value::Blob(bytes) => bytes
            .last_chunk::<8>()
            .map(|last| u64::from_be_bytes(*last))
            .ok_or(DecodeError::RaggedBlob {
                field,
                bytes: bytes.len(),
                element: size_of::<u64>(),
            }),
        Value::Text(digits) => text_name(digits).ok_or(DecodeError::Combination(
            "a name as text that is not at least 16 hexadecimal digits, two for each byte",
        )),
        other => Err(DecodeError::wrong_type(
            field,
            "an integer or at least eight bytes",
            other,
        )),
    }
}

/// Reads a byte string that `digits` give in hexadecimal. Returns the number in its last eight bytes; `None` if
/// `digits` give no byte string of at least eight bytes.
fn text_name(digits: &[u8]) -> Option<u64> {
    let last = digits.last_chunk::<{ 2 * size_of::<u64>() }>()?;
    let is_bytes = digits.len().is_multiple_of(2) && digits.iter().all(u8::is_ascii_hexdigit);
    let last = std::str::from_utf8(last).ok().filter(|_| is_bytes)?;
    u64::from_str_radix(last, 16).ok()
}

/// Reads the name of a block; `None` for nil.
pub(super) fn optional_name(
    field: &'static str,
    reader: &mut Reader<'_>,
) -> Result<Option<u64>, DecodeError> {
    match reader.value()? {
        Value::Nil => Ok(None),
        value => name(field, value).map(Some),
    }
}

/// Reads a list of block names, and appends the names.
pub(super) fn names(
    field: &'static str,
    reader: &mut Reader<'_>,
    names: &mut Vec<u64>,
) -> Result<(), DecodeError> {
    let count = reader.array(field, usize::MAX)?;
    names.reserve(count);
    for _ in 0..count {
        names.push(name(field, reader.value()?)?);
    }
    Ok(())
}

/// Reads a data-parallel rank; `None` for nil.
pub(super) fn rank(reader: &mut Reader<'_>) -> Result<Option<Rank>, DecodeError> {
    reader.optional_unsigned_32("rank")
}

/// Reads a text of at most `bytes_max` bytes; `None` for nil and for the empty text, which mean the same to engines.
pub(super) fn optional_text<'a>(
    field: &'static str,
    reader: &mut Reader<'a>,
    bytes_max: usize,
) -> Result<Option<&'a str>, DecodeError> {
    let text = reader.optional_text(field, bytes_max)?;
    Ok(text.filter(|text| !text.is_empty()))
}
