//! Masks that select the bits of a sequence hash that a lineage hash contains.

use crate::hash::{Position, PositionalLineageHash};

/// Returns the mask of those bits of a sequence hash that the lineage hash of its block, at `position`, contains. The
/// lineage hash of the child block contains the same bits as the parent's fragment.
#[inline]
pub(crate) fn current_mask(position: u32) -> u64 {
    let position = Position::new(u64::from(position)).unwrap_or(Position::MAX);
    u64::MAX >> (64 - PositionalLineageHash::current_fragment_bits(position))
}

/// Whether `hash` can be the sequence hash of the block with the lineage hash `key`. It can if it agrees with `key`
/// in all bits that `key` keeps.
pub(crate) fn is_fragment_of(key: PositionalLineageHash, hash: u64) -> bool {
    (key.current_hash_fragment() ^ hash) & current_mask(Position::from(key).as_u32()) == 0
}

/// Mask of the bits of a sequence hash that every lineage hash keeps, whatever the position. The table that finds
/// blocks by hash uses only these bits as keys.
pub(crate) const COMMON_MASK: u64 =
    u64::MAX >> (64 - PositionalLineageHash::current_fragment_bits(Position::MAX));
