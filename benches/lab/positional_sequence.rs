//! The positional sequence hash: a sequence hash, its position, and a part of the block hash.

use std::fmt;

use kvatlas_core::hash::{BlockHash, SequenceHash};

use crate::positional::PositionalHash;

const MODE_SHIFT: u32 = 62;

/// A sequence hash, the position of its block and the low bits of its block hash, in 128 bits.
///
/// ```text
/// bit 127                                   64 63             0
///     ┌──────┬──────────┬─────────────────────┬────────────────┐
///     │ mode │ position │ low bits of the     │ sequence hash  │
///     │  2   │ P        │ block hash, L       │ 64             │
///     └──────┴──────────┴─────────────────────┴────────────────┘
/// ```
///
/// | mode | P | L | last position |
/// |---|---|---|---|
/// | 0 | 8 | 54 | 255 |
/// | 1 | 16 | 46 | 65 535 |
/// | 2 | 24 | 38 | 16 777 215 |
/// | 3 | 31 | 31 | 2 147 483 647 |
///
/// The mode is the smallest that holds the position, so one hash has one encoding.
///
/// Hashes are sorted by position first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct PositionalSequenceHash(u128);

impl PositionalSequenceHash {
    /// The last position that fits, 2^31 - 1.
    pub const POSITION_MAX: u64 = (1 << 31) - 1;

    /// Packs the parts of a positional sequence hash. Of the block hash, only the low bits are kept, as many as the
    /// mode of the position has room for.
    ///
    /// # Errors
    ///
    /// [`PositionalSequenceHashError::PositionOutOfRange`] when `position` is above [`Self::POSITION_MAX`].
    #[inline]
    pub fn new(
        sequence_hash: SequenceHash,
        position: u64,
        local_block_hash: BlockHash,
    ) -> Result<Self, PositionalSequenceHashError> {
        if position > Self::POSITION_MAX {
            return Err(PositionalSequenceHashError::PositionOutOfRange { position });
        }
        let mode = mode_of(position);
        let block_bits = block_hash_bits(mode);
        let upper = u64::from(mode) << MODE_SHIFT
            | position << block_bits
            | low_bits(local_block_hash.as_u64(), block_bits);
        Ok(Self(u128::from(upper) << 64 | u128::from(sequence_hash.as_u64())))
    }

    /// Reads a packed hash.
    ///
    /// # Errors
    ///
    /// [`PositionalSequenceHashError::WrongMode`] when the position fits in a lower mode. No encoder writes such a
    /// hash, and accepting it would give one hash two keys.
    pub fn from_u128(packed: u128) -> Result<Self, PositionalSequenceHashError> {
        let hash = Self(packed);
        let (mode, position) = (hash.mode(), hash.position());
        if mode != mode_of(position) {
            return Err(PositionalSequenceHashError::WrongMode { mode, position });
        }
        Ok(hash)
    }

    /// The packed hash.
    #[inline]
    pub const fn as_u128(self) -> u128 {
        self.0
    }

    /// The whole sequence hash, all 64 bits.
    #[inline]
    pub const fn sequence_hash(&self) -> SequenceHash {
        SequenceHash(low_half(self.0))
    }

    /// The index of the block in its sequence, from 0.
    #[inline]
    pub const fn position(&self) -> u64 {
        let upper = high_half(self.0);
        low_bits(upper, MODE_SHIFT) >> block_hash_bits(self.mode())
    }

    /// The low bits of the block hash: 54, 46, 38 or 31 bits, depending on the mode. All higher bits are 0.
    #[inline]
    pub const fn local_block_hash(&self) -> BlockHash {
        BlockHash(low_bits(high_half(self.0), block_hash_bits(self.mode())))
    }

    /// The encoding mode, 0 to 3.
    #[inline]
    pub const fn mode(&self) -> u8 {
        let [first, ..] = self.0.to_be_bytes();
        first >> 6
    }
}

impl PositionalHash for PositionalSequenceHash {
    #[inline]
    fn position(&self) -> u64 {
        Self::position(self)
    }
}

impl fmt::Display for PositionalSequenceHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

impl fmt::Debug for PositionalSequenceHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "PositionalSequenceHash({self} at {})", self.position())
    }
}

/// The low `bits` bits of `value`. `bits` is below 64: no field of a packed hash is wider.
#[inline]
const fn low_bits(value: u64, bits: u32) -> u64 {
    value & ((1 << bits) - 1)
}

/// Returns the low 64 bits of a packed hash.
#[inline]
#[expect(
    clippy::cast_possible_truncation,
    reason = "dropping the high half is what this function is for"
)]
const fn low_half(packed: u128) -> u64 {
    packed as u64
}

/// Returns the high 64 bits of a packed hash.
#[inline]
const fn high_half(packed: u128) -> u64 {
    low_half(packed >> 64)
}

/// The smallest mode that holds `position`.
const fn mode_of(position: u64) -> u8 {
    match position {
        0..0x100 => 0,
        0x100..0x1_0000 => 1,
        0x1_0000..0x100_0000 => 2,
        _ => 3,
    }
}

/// Number of low bits of the block hash that a hash of this mode keeps.
const fn block_hash_bits(mode: u8) -> u32 {
    match mode {
        0 => 54,
        1 => 46,
        2 => 38,
        _ => 31,
    }
}

/// Reasons why parts, or an integer, do not make a [`PositionalSequenceHash`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PositionalSequenceHashError {
    /// The position does not fit in 31 bits.
    #[error(
        "position {position} is above {max}, the last that a positional sequence hash can carry; \
         use larger blocks or end the sequence earlier",
        max = PositionalSequenceHash::POSITION_MAX
    )]
    PositionOutOfRange {
        /// The refused position.
        position: u64,
    },
    /// The position is encoded in a higher mode than it needs.
    #[error(
        "position {position} is encoded in mode {mode} but belongs to a lower one; \
         encode it in the smallest mode that holds it"
    )]
    WrongMode {
        /// The mode in which the position is encoded.
        mode: u8,
        /// The position that the integer encodes.
        position: u64,
    },
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a generator of positions that need every mode. It often generates positions at the boundaries between
    /// two modes.
    fn positions() -> impl Strategy<Value = u64> {
        prop_oneof![
            prop::sample::select(vec![
                0_u64,
                255,
                256,
                65_535,
                65_536,
                (1 << 24) - 1,
                1 << 24,
                (1 << 31) - 1
            ]),
            0_u64..0x100,
            0x100_u64..0x1_0000,
            0x1_0000_u64..0x100_0000,
            0x100_0000_u64..1 << 31,
        ]
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let pack = |position| {
            let hash = PositionalSequenceHash::new(
                SequenceHash(0x0123_4567_89ab_cdef),
                position,
                BlockHash(u64::MAX),
            );
            hash.unwrap().to_string()
        };
        assert_eq!(pack(0), "003fffffffffffff0123456789abcdef");
        assert_eq!(pack(255), "3fffffffffffffff0123456789abcdef");
        assert_eq!(pack(256), "40403fffffffffff0123456789abcdef");
        assert_eq!(pack(65_536), "8040003fffffffff0123456789abcdef");
        assert_eq!(pack(1 << 24), "c08000007fffffff0123456789abcdef");
        assert_eq!(pack((1 << 31) - 1), "ffffffffffffffff0123456789abcdef");
    }

    #[test]
    fn positions_end_below_two_to_the_31() {
        for position in [1 << 31, 1 << 32, u64::MAX] {
            assert_eq!(
                PositionalSequenceHash::new(SequenceHash(1), position, BlockHash(2)),
                Err(PositionalSequenceHashError::PositionOutOfRange { position })
            );
        }
    }

    #[test]
    fn a_mode_too_high_is_refused() {
        for (mode, block_bits, position) in [(1, 46, 255), (2, 38, 65_535), (3, 31, 0), (3, 31, 16_777_215)] {
            let upper = u64::from(mode) << 62 | position << block_bits;
            assert_eq!(
                PositionalSequenceHash::from_u128(u128::from(upper) << 64),
                Err(PositionalSequenceHashError::WrongMode { mode, position })
            );
        }
    }

    proptest! {
        #[test]
        fn parts_come_back(sequence: u64, position in positions(), block: u64) {
            let hash = PositionalSequenceHash::new(SequenceHash(sequence), position, BlockHash(block)).unwrap();
            let kept = [54, 46, 38, 31][usize::from(hash.mode())];
            prop_assert_eq!(hash.sequence_hash(), SequenceHash(sequence));
            prop_assert_eq!(hash.position(), position);
            prop_assert_eq!(PositionalHash::position(&hash), position);
            prop_assert_eq!(hash.local_block_hash().as_u64(), block % (1 << kept));
            prop_assert_eq!(PositionalSequenceHash::from_u128(hash.as_u128()), Ok(hash));
        }

        #[test]
        fn an_integer_is_refused_or_round_trips(packed: u128) {
            if let Ok(hash) = PositionalSequenceHash::from_u128(packed) {
                let (sequence, block) = (hash.sequence_hash(), hash.local_block_hash());
                let again = PositionalSequenceHash::new(sequence, hash.position(), block);
                prop_assert_eq!(again.unwrap().as_u128(), packed);
            }
        }

        #[test]
        fn order_is_by_position_first(one in positions(), other in positions(), blocks: (u64, u64)) {
            let pack = |position, block| {
                PositionalSequenceHash::new(SequenceHash(9), position, BlockHash(block)).unwrap()
            };
            prop_assume!(one != other);
            prop_assert_eq!(pack(one, blocks.0).cmp(&pack(other, blocks.1)), one.cmp(&other));
        }
    }
}
