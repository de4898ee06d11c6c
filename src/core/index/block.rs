//! What blocks are found by, and blocks to be stored.

use crate::hash::{Position, PositionalLineageHash, SequenceHash};

/// What a block is found by: position, sequence hash (or the fragment of it that is known), and the parent's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BlockKey {
    pub(crate) position: u32,
    pub(crate) current: u64,
    /// None at position 0, and where any parent will do.
    pub(crate) parent: Option<u64>,
    /// Whether `current` is a whole sequence hash, and not the fragment of a lineage hash.
    pub(crate) is_whole: bool,
}

impl BlockKey {
    /// Whether `current` is this block's hash. `is_whole` says whether it is more than a fragment. All bits that both sides know are
    /// compared.
    #[inline]
    pub(crate) fn is_current(&self, current: u64, is_whole: bool) -> bool {
        (self.current ^ current) & known_mask(self.position, self.is_whole && is_whole) == 0
    }

    /// Whether `parent` is the hash of the block before it, as far as a lineage hash keeps it.
    #[inline]
    pub(crate) fn is_parent(&self, parent: u64) -> bool {
        self.parent
            .is_none_or(|own| (own ^ parent) & current_mask(self.position.wrapping_sub(1)) == 0)
    }
}

impl From<PositionalLineageHash> for BlockKey {
    fn from(key: PositionalLineageHash) -> Self {
        let position = Position::from(key).as_u32();
        Self {
            position,
            current: key.current_hash_fragment(),
            parent: (position > 0).then(|| key.parent_hash_fragment()),
            is_whole: false,
        }
    }
}

impl From<BlockKey> for PositionalLineageHash {
    fn from(key: BlockKey) -> Self {
        // Positions of stored blocks have been checked.
        let position = Position::new(u64::from(key.position)).unwrap_or(Position::MAX);
        let parent = SequenceHash(key.parent.unwrap_or_default());
        Self::at(position, parent, SequenceHash(key.current))
    }
}

/// The bits to compare of the hashes of a block at `position`: all of them where both hashes are whole.
#[inline]
pub(crate) fn known_mask(position: u32, are_whole: bool) -> u64 {
    if are_whole {
        u64::MAX
    } else {
        current_mask(position)
    }
}

/// The bits of a sequence hash that the block at `position` keeps. They are also those that its child keeps of it.
#[inline]
pub(crate) fn current_mask(position: u32) -> u64 {
    let position = Position::new(u64::from(position)).unwrap_or(Position::MAX);
    u64::MAX >> (64 - PositionalLineageHash::current_fragment_bits(position))
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
}
