//! Kinds of values in a query's fields: how each kind is read from a message, and its limits.

use crate::hash::{BlockHash, Position, PositionalLineageHash, SequenceHash, Token};

use super::error::{DecodeError, PositionsError};
use super::limits::WireLimits;
use super::reader::{Element, Reader, check_count, check_text};
use super::subject::WorkerName;

/// Kind of the value of a query field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FieldKind {
    /// A list of tokens.
    Tokens,
    /// A list of 64-bit hashes.
    Hashes,
    /// A list of lineage hashes.
    LineageHashes,
    /// A list of positions, or no value.
    Positions,
    /// A list of names.
    Names,
    /// A text, or no value.
    Text,
    /// A number, or no value.
    Number,
    /// A number of 32 bits.
    Number32,
    /// A boolean.
    Flag,
}

/// Type of the values that a query field may have.
pub(super) trait FieldValue: Sized {
    const KIND: FieldKind;

    /// Reads a value, which must be within `limits`. `key` is the field's key, for errors.
    fn read(reader: &mut Reader<'_>, key: &'static str, limits: &WireLimits) -> Result<Self, DecodeError>;

    /// Checks the value against `limits` as [`Self::read`] does, and returns the number of bytes that it takes in a
    /// message.
    fn checked_bytes(&self, key: &'static str, limits: &WireLimits) -> Result<usize, DecodeError>;

    /// Whether the value means the same as an absent field: a nil, an empty text, `false` or 0.
    fn is_void(&self) -> bool {
        false
    }
}

macro_rules! list_field {
    ($type:ty, $kind:ident, |$limits:ident| $count_max:expr) => {
        impl FieldValue for Vec<$type> {
            const KIND: FieldKind = FieldKind::$kind;

            fn read(
                reader: &mut Reader<'_>,
                key: &'static str,
                $limits: &WireLimits,
            ) -> Result<Self, DecodeError> {
                reader.list(key, $count_max)
            }

            fn checked_bytes(&self, key: &'static str, $limits: &WireLimits) -> Result<usize, DecodeError> {
                check_count(key, self.len(), $count_max)?;
                Ok(self.len() * <$type>::WIDTH)
            }
        }
    };
}

list_field!(Token, Tokens, |limits| limits
    .query_depth_max
    .saturating_mul(limits.tokens_per_block_max));
list_field!(BlockHash, Hashes, |limits| limits.query_depth_max);
list_field!(SequenceHash, Hashes, |limits| limits.query_depth_max);
list_field!(PositionalLineageHash, LineageHashes, |limits| limits
    .query_depth_max);

impl FieldValue for Option<Vec<Position>> {
    const KIND: FieldKind = FieldKind::Positions;

    fn read(reader: &mut Reader<'_>, key: &'static str, limits: &WireLimits) -> Result<Self, DecodeError> {
        let Some(positions) = reader.optional_list::<u32>(key, limits.query_depth_max)? else {
            return Ok(None);
        };
        let position = |position: u32| Position::new(u64::from(position)).map_err(PositionsError::from);
        Ok(Some(
            positions.into_iter().map(position).collect::<Result<_, _>>()?,
        ))
    }

    fn checked_bytes(&self, key: &'static str, limits: &WireLimits) -> Result<usize, DecodeError> {
        let count = self.as_ref().map_or(0, Vec::len);
        check_count(key, count, limits.query_depth_max)?;
        Ok(count * u32::WIDTH)
    }

    fn is_void(&self) -> bool {
        self.is_none()
    }
}

impl FieldValue for Vec<WorkerName> {
    const KIND: FieldKind = FieldKind::Names;

    fn read(reader: &mut Reader<'_>, key: &'static str, limits: &WireLimits) -> Result<Self, DecodeError> {
        let names = reader.array(key, limits.filter_workers_max)?;
        let decode_one = |_| {
            let text = reader.text(key, limits.name_bytes_max)?;
            WorkerName::bounded(text, limits.name_bytes_max)
                .map_err(|source| DecodeError::Name { field: key, source })
        };
        (0..names).map(decode_one).collect()
    }

    fn checked_bytes(&self, key: &'static str, limits: &WireLimits) -> Result<usize, DecodeError> {
        check_count(key, self.len(), limits.filter_workers_max)?;
        self.iter().try_fold(0, |bytes, name| {
            check_text(key, name.as_str().len(), limits.name_bytes_max)?;
            Ok(bytes + name.as_str().len())
        })
    }
}

impl FieldValue for Option<String> {
    const KIND: FieldKind = FieldKind::Text;

    fn read(reader: &mut Reader<'_>, key: &'static str, limits: &WireLimits) -> Result<Self, DecodeError> {
        let text = reader.optional_text(key, limits.text_bytes_max)?;
        Ok(text.map(str::to_owned))
    }

    fn checked_bytes(&self, key: &'static str, limits: &WireLimits) -> Result<usize, DecodeError> {
        let bytes = self.as_ref().map_or(0, String::len);
        check_text(key, bytes, limits.text_bytes_max)?;
        Ok(bytes)
    }

    fn is_void(&self) -> bool {
        self.as_deref().is_none_or(str::is_empty)
    }
}

macro_rules! small_field {
    ($type:ty, $kind:ident, $read:ident, $is_void:expr) => {
        impl FieldValue for $type {
            const KIND: FieldKind = FieldKind::$kind;

            fn read(
                reader: &mut Reader<'_>,
                key: &'static str,
                _limits: &WireLimits,
            ) -> Result<Self, DecodeError> {
                reader.$read(key)
            }

            fn checked_bytes(&self, _key: &'static str, _limits: &WireLimits) -> Result<usize, DecodeError> {
                Ok(size_of::<$type>())
            }

            fn is_void(&self) -> bool {
                $is_void(self)
            }
        }
    };
}

small_field!(Option<u64>, Number, optional_unsigned, Option::is_none);
small_field!(u32, Number32, unsigned_32, |number: &u32| *number == 0);
small_field!(bool, Flag, boolean, |flag: &bool| !*flag);
