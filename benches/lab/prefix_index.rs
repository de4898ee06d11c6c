//! Trait that all designs implement, and the types that its methods use.

use std::sync::Arc;

use kvatlas_core::hash::{BlockHash, SequenceHash, sequence_hashes};
use kvatlas_core::wire::QueryKey;

/// Number of a holder. The designs identify holders only by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HolderNumber(pub u32);

/// One block of a stored event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrefixBlock {
    /// Content of the block: the hash of its tokens.
    pub content: BlockHash,
    /// Name of the block: the hash of the whole prefix up to and including the block.
    pub name: SequenceHash,
}

/// A prompt as a query, with the hashes by which the designs look it up. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PrefixQuery {
    blocks: Arc<[BlockHash]>,
    chain: Arc<QueryKey>,
}

impl PrefixQuery {
    /// Makes the query for a prompt with these blocks.
    pub fn new(blocks: &[BlockHash]) -> Self {
        let chain = sequence_hashes(blocks.iter().copied()).collect();
        Self {
            blocks: blocks.into(),
            chain: Arc::new(QueryKey::SequenceHashes(chain)),
        }
    }

    /// Returns the block hashes, by position. Designs 1 to 6 use these.
    pub fn blocks(&self) -> &[BlockHash] {
        &self.blocks
    }

    /// Returns the sequence hashes, by position. Only some of the designs look blocks up by these.
    pub fn chain(&self) -> &QueryKey {
        &self.chain
    }
}

/// Depth of one holder: the number of leading blocks of a query that it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Depth {
    /// Holder of the blocks.
    pub holder: HolderNumber,
    /// Number of leading blocks that the holder has without a hole; at least 1.
    pub matched_blocks: u32,
}

impl Depth {
    /// Makes a depth. `matched_blocks` is at most the length of a query, which fits 32 bits.
    pub(super) fn new(holder: HolderNumber, matched_blocks: usize) -> Self {
        Self {
            holder,
            matched_blocks: u32::try_from(matched_blocks).unwrap_or(u32::MAX),
        }
    }
}

/// Size of an index. All numbers are 0 when no holder holds a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixIndexSize {
    /// Number of entries that queries look up: nodes, keys, or hashes in the dictionaries of all holders.
    pub entries: usize,
    /// Number of names that removals look up, summed over all holders.
    pub names: usize,
    /// Number of holders that have any state.
    pub holders: usize,
}

/// Index of the prefixes that holders hold. The documentation of the crate has the contract.
pub trait PrefixIndex {
    /// Records that `holder` holds `blocks`. The blocks are consecutive; the first follows the block named `parent`, or
    /// is at position 0.
    fn store(&mut self, holder: HolderNumber, parent: Option<SequenceHash>, blocks: &[PrefixBlock]);

    /// Records that `holder` no longer holds the blocks with these names.
    fn remove(&mut self, holder: HolderNumber, names: &[SequenceHash]);

    /// Records that `holder` holds no blocks any more.
    fn clear(&mut self, holder: HolderNumber);

    /// Returns the holders of leading blocks of `query`, each with the number of leading blocks that it holds, in no particular
    /// order. Holders without the first block are left out.
    fn find_matches(&self, query: &PrefixQuery) -> Vec<Depth>;

    /// Waits until all changes passed to the index before this call have been applied.
    fn flush(&self) {}

    /// Number of stores that were refused because the holder did not hold the parent.
    fn refused_stores(&self) -> u64;

    /// Returns the size of the index. May walk over the whole index.
    fn sizes(&self) -> PrefixIndexSize;
}

impl<I: PrefixIndex + ?Sized> PrefixIndex for Box<I> {
    fn store(&mut self, holder: HolderNumber, parent: Option<SequenceHash>, blocks: &[PrefixBlock]) {
        (**self).store(holder, parent, blocks);
    }

    fn remove(&mut self, holder: HolderNumber, names: &[SequenceHash]) {
        (**self).remove(holder, names);
    }

    fn clear(&mut self, holder: HolderNumber) {
        (**self).clear(holder);
    }

    fn find_matches(&self, query: &PrefixQuery) -> Vec<Depth> {
        (**self).find_matches(query)
    }

    fn flush(&self) {
        (**self).flush();
    }

    fn refused_stores(&self) -> u64 {
        (**self).refused_stores()
    }

    fn sizes(&self) -> PrefixIndexSize {
        (**self).sizes()
    }
}
