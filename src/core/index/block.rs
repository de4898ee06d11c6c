//! The bits of hashes that blocks keep, and blocks to be stored.

use crate::hash::{Position, PositionalLineageHash, SequenceHash};

/// The bits of a sequence hash that the block at `position` keeps. They are also those that its child keeps of it.
#[inline]
pub(crate) fn current_mask(position: u32) -> u64 {
    let position = Position::new(u64::from(position)).unwrap_or(Position::MAX);
    u64::MAX >> (64 - PositionalLineageHash::current_fragment_bits(position))
}

/// Whether this is the sequence hash of a block, as far as its lineage hash tells.
pub(crate) fn is_fragment_of(key: PositionalLineageHash, hash: u64) -> bool {
    (key.current_hash_fragment() ^ hash) & current_mask(Position::from(key).as_u32()) == 0
}

/// The bits of a sequence hash that every block keeps, whatever its position: what the table is keyed by.
pub(crate) const COMMON_MASK: u64 =
    u64::MAX >> (64 - PositionalLineageHash::current_fragment_bits(Position::MAX));

/// A block to be stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewBlock {
    pub(crate) key: PositionalLineageHash,
    pub(crate) sequence_hash: Option<SequenceHash>,
    pub(crate) name: Option<u64>,
    /// Whether it is not resumable where it is stored.
    pub(crate) is_barred: bool,
}
