//! Hashes that carry a position.

use kvatlas_core::hash::PositionalLineageHash;

/// A hash that carries the position of its block.
pub trait PositionalHash {
    /// The index of the block in its sequence, from 0.
    fn position(&self) -> u64;
}

impl PositionalHash for PositionalLineageHash {
    #[inline]
    fn position(&self) -> u64 {
        Self::position(self)
    }
}
