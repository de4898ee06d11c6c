//! Blocks to store: single blocks, or sequences of consecutive blocks.

use crate::hash::{PositionalLineageHash, SequenceHash, lineage_hashes_from};
use crate::index::runs::Spot;

use super::marks::Marks;

/// One block to store.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewBlock {
    pub(super) key: PositionalLineageHash,
    pub(super) sequence_hash: Option<SequenceHash>,
    pub(super) name: Option<u64>,
    /// Whether the block is not resumable in the tier in which it will be stored.
    pub(super) is_barred: bool,
}

/// Returns consecutive blocks one by one. The first block is at `position` and follows `parent`. Blocks whose
/// position is out of range are left out.
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

/// Consecutive blocks to store. The first block follows `parent`, a block that the holder has or had. Without a
/// parent, the first block is at position 0.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sequence<'a> {
    pub(super) parent: Option<Spot>,
    pub(super) position: u32,
    pub(super) hashes: &'a [SequenceHash],
    /// Engine's names for the blocks.
    pub(super) names: &'a [u64],
    /// For each block, whether the holder keeps it. `None` if the holder keeps all blocks. A block that the holder does
    /// not keep gets a place in the runs, but does not become a block of the holder.
    pub(super) kept: Option<&'a [bool]>,
    /// Marks that tell which of the blocks are resumable.
    pub(super) marks: Marks<'a>,
}

impl<'a> Sequence<'a> {
    /// Skips the first `blocks` blocks. `parent` is the place of the last skipped block.
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
