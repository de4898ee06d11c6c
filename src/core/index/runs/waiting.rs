//! Waiting blocks: blocks that the table from hashes to places does not have, because too many other blocks have the same
//! hash. A waiting block enters the table when one of these others leaves it.

use std::collections::BTreeSet;

/// Approximate number of bytes that a waiting block takes.
const WAITING_BYTES: u64 = 26;

/// Number of bits of a place.
const PLACE_BITS: u32 = 38;

/// Bits of a place.
const PLACE_MASK: u64 = (1 << PLACE_BITS) - 1;

/// Waiting block, ordered by its hash: the hash's common bits stand above the block's place. Both together have fewer
/// than 96 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct WaitingBlock([u32; 3]);

impl WaitingBlock {
    #[allow(clippy::cast_possible_truncation, reason = "each word keeps its own bits")]
    fn new(key: u64, place: u64) -> Self {
        let bits = u128::from(key) << PLACE_BITS | u128::from(place);
        Self([(bits >> 64) as u32, (bits >> 32) as u32, bits as u32])
    }

    fn place(self) -> u64 {
        let [_, upper, lower] = self.0;
        (u64::from(upper) << 32 | u64::from(lower)) & PLACE_MASK
    }
}

/// All waiting blocks, each with the common bits of its hash (`key`) and its place.
#[derive(Debug, Default)]
pub(super) struct WaitingBlocks(BTreeSet<WaitingBlock>);

impl WaitingBlocks {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Approximate number of bytes that the blocks take.
    pub(super) fn bytes(&self) -> u64 {
        self.0.len() as u64 * WAITING_BYTES
    }

    pub(super) fn insert(&mut self, key: u64, place: u64) {
        self.0.insert(WaitingBlock::new(key, place));
    }

    /// Removes a block. Returns whether it was there.
    pub(super) fn remove(&mut self, key: u64, place: u64) -> bool {
        self.0.remove(&WaitingBlock::new(key, place))
    }

    pub(super) fn contains(&self, key: u64, place: u64) -> bool {
        self.0.contains(&WaitingBlock::new(key, place))
    }

    /// Returns the place of the first block with this hash.
    pub(super) fn next(&self, key: u64) -> Option<u64> {
        let all = WaitingBlock::new(key, 0)..=WaitingBlock::new(key, PLACE_MASK);
        self.0.range(all).next().map(|block| block.place())
    }
}
