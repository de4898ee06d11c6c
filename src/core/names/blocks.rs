//! Blocks to be stored: single blocks, or sequences of consecutive blocks.

use crate::hash::{PositionalLineageHash, SequenceHash, lineage_hashes_from};
use crate::index::runs::Spot;

use super::marks::Marks;

/// Block to be stored.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewBlock {
    pub(super) key: PositionalLineageHash,
    pub(super) sequence_hash: Option<SequenceHash>,
    pub(super) name: Option<u64>,
    /// Whether the block is not resumable in the tier in which it is stored.
    pub(super) is_barred: bool,
}

/// Returns blocks one by one. The first is at `position`, after `parent`. Leaves out blocks whose position is out of
/// range.
pub(super) fn new_blocks(
    position: u64,
    parent: Option<SequenceHash>,
    hashes: &[SequenceHash],
    names: &[u64],
    marks: Marks<'_>,
) -> Vec<NewBlock> {
    let keys = lineage_hashes_from(position, parent, hashes);
    let block = |(((key, hash), name), is_barred): (((Result<_, _>, &SequenceHash), &u64), bool)| {
        Some(NewBlock {
            key: key.ok()?,
            sequence_hash: Some(*hash),
            name: Some(*name),
            is_barred,
        })
    };
    let named = keys.zip(hashes).zip(names);
    named.zip(marks.flags()).filter_map(block).collect()
}

/// Consecutive blocks to be stored. The first follows `parent`, a block that the holder has or had, or is at position
/// 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sequence<'a> {
    pub(super) parent: Option<Spot>,
    pub(super) position: u32,
    pub(super) hashes: &'a [SequenceHash],
    /// Engine's names for the blocks.
    pub(super) names: &'a [u64],
    /// Which of the blocks are to be held; `None` for all. The other blocks only get their places.
    pub(super) kept: Option<&'a [bool]>,
    /// Which of the blocks are resumable.
    pub(super) marks: Marks<'a>,
}

impl<'a> Sequence<'a> {
    /// Leaves out the first `blocks` blocks. The last block left out is at `parent`.
    pub(super) fn skip(&mut self, blocks: usize, parent: Option<Spot>) {
        self.parent = parent;
        self.position = self
            .position
            .saturating_add(u32::try_from(blocks).unwrap_or(u32::MAX));
        self.hashes = self.hashes.get(blocks..).unwrap_or_default();
        self.names = self.names.get(blocks..).unwrap_or_default();
        self.kept = self.kept.map(|kept| kept.get(blocks..).unwrap_or_default());
        self.marks.skip(blocks);
    }
}
