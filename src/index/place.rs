//! A block's place in its holder: at most one block of a holder is there.

use std::hash::BuildHasher;

use hashbrown::DefaultHashBuilder;

use crate::hash::PositionalLineageHash;

/// A block's place apart from its parent: position and current fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    position: u32,
    fragment: u64,
}

impl Place {
    pub(crate) fn of(key: PositionalLineageHash) -> Self {
        Self {
            position: position(key),
            fragment: key.current_hash_fragment(),
        }
    }

    /// The place of `key`'s parent; none at position 0.
    pub(crate) fn of_parent(key: PositionalLineageHash) -> Option<Self> {
        let position = position(key).checked_sub(1)?;
        Some(Self {
            position,
            fragment: key.parent_hash_fragment(),
        })
    }

    pub(crate) fn hash(self, hasher: &DefaultHashBuilder) -> u64 {
        hasher.hash_one(self)
    }
}

fn position(key: PositionalLineageHash) -> u32 {
    crate::hash::Position::from(key).as_u32()
}
