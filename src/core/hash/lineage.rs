//! The lineage hash: content, position and parent of a block in 128 bits, the key of the map.

use std::fmt;

use super::positional::{Position, PositionError};
use super::sequence::SequenceHash;

const MODE_SHIFT: u32 = 62;

/// Content, position and parent of a block, packed in 128 bits.
///
/// ```text
/// bit 127                                                    0
///     ┌──────┬──────────┬─────────────────┬──────────────────┐
///     │ mode │ position │ parent fragment │ current fragment │
///     │  2   │ P        │ F               │ F                │
///     └──────┴──────────┴─────────────────┴──────────────────┘
/// ```
///
/// | mode | P | F | last position |
/// |---|---|---|---|
/// | 0 | 8 | 59 | 255 |
/// | 1 | 16 | 55 | 65 535 |
/// | 2 | 24 | 51 | 16 777 215 |
///
/// A fragment is the low F bits of a sequence hash. The mode is the lowest mode whose P bits hold the position. The
/// first block of a sequence has parent fragment 0.
///
/// The parent fragment of a child always equals the current fragment of its parent. A block at position 255 or 65 535
/// has its child in the next mode, where F is smaller. So the current fragment of such a block keeps only as many bits
/// as F of the child's mode. The higher bits of the field are 0.
///
/// Every value is canonical: the encoders produce nothing else and the decoders refuse anything else. So one block
/// has one key, and comparing the integers compares the blocks.
///
/// Ordered by position first, then by parent fragment, so the children of one block sort next to each other.
///
/// The layout is the first one of Dynamo, version [`PositionalLineageHash::LAYOUT_VERSION`] on our wire. Newer
/// releases of Dynamo pack the same facts differently; their integers are not interchangeable with these.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct PositionalLineageHash(u128);

impl PositionalLineageHash {
    /// The version of the bit layout, for messages and files that carry packed hashes. Must be kept stable.
    pub const LAYOUT_VERSION: u8 = 1;

    /// Packs a block at `position`. `current` is the sequence hash of the block, and `parent` that of its parent.
    ///
    /// # Errors
    ///
    /// [`LineageError::PositionOutOfRange`] above [`Position::MAX`]. [`LineageError::ParentMissing`] above position 0
    /// if `parent` is `None`. [`LineageError::ParentAtRoot`] at position 0 if `parent` is given.
    #[inline]
    pub fn new(
        current: SequenceHash,
        parent: Option<SequenceHash>,
        position: u64,
    ) -> Result<Self, LineageError> {
        let position = Position::new(position)?;
        match parent {
            None if position == Position::ZERO => Ok(Self::pack(position, 0, current.as_u64())),
            None => Err(LineageError::ParentMissing { position }),
            Some(_) if position == Position::ZERO => Err(LineageError::ParentAtRoot),
            Some(parent) => Ok(Self::pack(position, parent.as_u64(), current.as_u64())),
        }
    }

    /// Packs a block as [`PositionalLineageHash::new`] does, from a position that is already checked. It cannot fail,
    /// so it is meant for hot loops.
    ///
    /// At position 0, which has no parent, `parent` is ignored.
    #[inline]
    pub const fn at(position: Position, parent: SequenceHash, current: SequenceHash) -> Self {
        let parent = if position.as_u32() == 0 {
            0
        } else {
            parent.as_u64()
        };
        Self::pack(position, parent, current.as_u64())
    }

    /// The hash of the block with sequence hash `current` that follows this block.
    ///
    /// This hash alone is enough, because the child's parent fragment is this block's current fragment. So a chain can
    /// be continued from a stored key.
    ///
    /// # Errors
    ///
    /// [`PositionError`] when this block is at [`Position::MAX`].
    #[inline]
    pub fn child(self, current: SequenceHash) -> Result<Self, PositionError> {
        let position = Position::new(self.position() + 1)?;
        Ok(Self::pack(
            position,
            self.current_hash_fragment(),
            current.as_u64(),
        ))
    }

    /// Packs a lineage hash; every other encoder calls this function. `parent` and `current` are whole hashes, of which
    /// it keeps as many low bits as the hash has room for at this position.
    #[inline]
    const fn pack(position: Position, parent: u64, current: u64) -> Self {
        let width = Self::fragment_bits(position);
        let parent = low_bits(parent, width);
        let current = low_bits(current, Self::current_fragment_bits(position));
        let mode = mode_of(position.as_u64());
        Self(
            (mode as u128) << 126
                | (position.as_u64() as u128) << (2 * width)
                | (parent as u128) << width
                | current as u128,
        )
    }

    /// Reads a packed hash.
    ///
    /// # Errors
    ///
    /// A [`LineageError`] in each of these cases:
    ///
    /// - The mode does not exist, or is not the smallest that holds the position.
    /// - The hash at position 0 has a parent fragment.
    /// - The current fragment has more bits than a child can hold.
    pub fn from_u128(packed: u128) -> Result<Self, LineageError> {
        let hash = Self(packed);
        let mode = hash.mode();
        if mode > 2 {
            return Err(LineageError::UnknownMode);
        }
        let position = Position::from(hash);
        if mode != mode_of(position.as_u64()) {
            return Err(LineageError::WrongMode { mode, position });
        }
        if position == Position::ZERO && hash.parent_hash_fragment() != 0 {
            return Err(LineageError::ParentAtRoot);
        }
        let bits = Self::current_fragment_bits(position);
        if hash.current_hash_fragment() >> bits != 0 {
            return Err(LineageError::FragmentTooWide { position, bits });
        }
        Ok(hash)
    }

    /// Reads a lineage hash from its wire form: 16 bytes, most significant first.
    ///
    /// # Errors
    ///
    /// The errors of [`PositionalLineageHash::from_u128`].
    pub fn from_be_bytes(bytes: [u8; 16]) -> Result<Self, LineageError> {
        Self::from_u128(u128::from_be_bytes(bytes))
    }

    /// Returns the wire form: 16 bytes, most significant first. Wire forms sorted as bytes have the order that
    /// [`Ord`] gives the hashes.
    #[inline]
    pub const fn to_be_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// The packed hash.
    #[inline]
    pub const fn as_u128(self) -> u128 {
        self.0
    }

    /// The encoding mode: 0, 1 or 2.
    #[inline]
    pub const fn mode(&self) -> u8 {
        let [first, ..] = self.0.to_be_bytes();
        first >> 6
    }

    /// The index of the block in its sequence, from 0. [`Position::from`] gives it as a [`Position`].
    #[inline]
    pub const fn position(&self) -> u64 {
        // The position lies in the upper half in every mode: 64 bits hold mode, position and the top of the
        // parent.
        low_bits(high_half(self.0), MODE_SHIFT) >> (2 * mode_fragment_bits(self.mode()) - 64)
    }

    /// The fragment of the block's own sequence hash.
    #[inline]
    pub const fn current_hash_fragment(&self) -> u64 {
        low_bits(low_half(self.0), mode_fragment_bits(self.mode()))
    }

    /// The fragment of the parent's sequence hash; 0 at position 0.
    #[inline]
    pub const fn parent_hash_fragment(&self) -> u64 {
        let width = mode_fragment_bits(self.mode());
        low_bits(low_half(self.0 >> width), width)
    }

    /// Whether this block follows `parent`: its position is one higher, and its parent fragment equals the current
    /// fragment of `parent`.
    #[inline]
    pub fn is_child_of(&self, parent: &Self) -> bool {
        self.position() == parent.position() + 1
            && self.parent_hash_fragment() == parent.current_hash_fragment()
    }

    /// The width in bits of the two fragment fields at `position`: 59, 55 or 51.
    #[inline]
    pub const fn fragment_bits(position: Position) -> u32 {
        mode_fragment_bits(mode_of(position.as_u64()))
    }

    /// Number of low bits of the block's own sequence hash that its lineage hash keeps at `position`. The number equals
    /// the width of the parent field of a child of the block.
    #[inline]
    pub const fn current_fragment_bits(position: Position) -> u32 {
        mode_fragment_bits(mode_of(position.as_u64() + 1))
    }
}

impl From<PositionalLineageHash> for Position {
    #[inline]
    fn from(hash: PositionalLineageHash) -> Self {
        Self::from_masked(hash.position())
    }
}

impl TryFrom<u128> for PositionalLineageHash {
    type Error = LineageError;

    fn try_from(packed: u128) -> Result<Self, Self::Error> {
        Self::from_u128(packed)
    }
}

impl fmt::Display for PositionalLineageHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

impl fmt::Debug for PositionalLineageHash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "PositionalLineageHash({self} at {})", self.position())
    }
}

/// The smallest mode that holds `position`.
#[inline]
const fn mode_of(position: u64) -> u8 {
    match position {
        0..0x100 => 0,
        0x100..0x1_0000 => 1,
        _ => 2,
    }
}

/// The width in bits of a fragment in `mode`.
#[inline]
const fn mode_fragment_bits(mode: u8) -> u32 {
    match mode {
        0 => 59,
        1 => 55,
        _ => 51,
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

/// Lineage hashes of the blocks of a sequence, from the first block on.
///
/// Every position above [`Position::MAX`] gives an error. Collecting into a `Result` stops at the first error.
pub fn lineage_hashes(
    sequence: &[SequenceHash],
) -> impl Iterator<Item = Result<PositionalLineageHash, LineageError>> {
    lineage_hashes_from(0, None, sequence)
}

/// Lineage hashes of consecutive blocks, computed from their sequence hashes `sequence`. The first block is at position
/// `first`, and its parent has the sequence hash `parent`.
///
/// Each item is the result of [`PositionalLineageHash::new`]. So the first item is an error if `parent` is given at
/// position 0, or missing at a later position.
pub fn lineage_hashes_from(
    first: u64,
    parent: Option<SequenceHash>,
    sequence: &[SequenceHash],
) -> impl Iterator<Item = Result<PositionalLineageHash, LineageError>> {
    let parents = std::iter::once(parent).chain(sequence.iter().copied().map(Some));
    let positions = (0..).map(move |offset| first.saturating_add(offset));
    sequence
        .iter()
        .zip(parents)
        .zip(positions)
        .map(|((&current, parent), position)| PositionalLineageHash::new(current, parent, position))
}

/// Reasons why parts, or an integer, do not make a [`PositionalLineageHash`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineageError {
    /// The position does not fit in 24 bits.
    #[error(transparent)]
    PositionOutOfRange(#[from] PositionError),
    /// A block at a position above 0 was given without a parent.
    #[error("the block at position {position} has no parent; give the sequence hash of the block before it")]
    ParentMissing {
        /// The position of the block.
        position: Position,
    },
    /// A block at position 0 was given with a parent.
    #[error("the block at position 0 has a parent; leave the parent out or correct the position")]
    ParentAtRoot,
    /// The mode bits are `11`.
    #[error(
        "mode 3 does not exist in a lineage hash; check that the sender packs layout version {version}",
        version = PositionalLineageHash::LAYOUT_VERSION
    )]
    UnknownMode,
    /// The position is encoded in a higher mode than it needs.
    #[error(
        "position {position} is encoded in mode {mode} but belongs to a lower one; \
         encode it in the smallest mode that holds it"
    )]
    WrongMode {
        /// Mode in which the position is encoded.
        mode: u8,
        /// The position that the integer encodes.
        position: Position,
    },
    /// The block is at the last position of its mode, and its current fragment has more bits than a child's parent
    /// field can hold.
    #[error(
        "the current fragment at position {position} has more than {bits} bits; \
         cut it to what the parent field of the next position holds"
    )]
    FragmentTooWide {
        /// The position that the integer encodes.
        position: Position,
        /// Number of bits that the current fragment may have.
        bits: u32,
    },
}

#[cfg(test)]
#[path = "lineage_tests.rs"]
mod tests;
