//! The trait that all designs implement, and the types of its methods.

use std::sync::Arc;

use kvatlas_core::hash::{BlockHash, SequenceHash, sequence_hashes};
use kvatlas_core::wire::QueryKey;

/// A holder, by number: the baselines know no names.
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

/// A prompt, in the forms that the designs look it up by. Cheap to clone.
#[derive(Debug, Clone)]
pub struct PrefixQuery {
    blocks: Arc<[BlockHash]>,
    chain: Arc<QueryKey>,
}

impl PrefixQuery {
    /// Creates the query for a prompt with these blocks.
    pub fn new(blocks: &[BlockHash]) -> Self {
        let chain = sequence_hashes(blocks.iter().copied()).collect();
        Self {
            blocks: blocks.into(),
            chain: Arc::new(QueryKey::SequenceHashes(chain)),
        }
    }

    /// Block hashes, by position. Designs 1 to 6 look these up.
    pub fn blocks(&self) -> &[BlockHash] {
        &self.blocks
    }

    /// Sequence hashes, by position. Design 7 looks these up.
    pub fn chain(&self) -> &QueryKey {
        &self.chain
    }
}

/// How many leading blocks of a query one holder holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Depth {
    /// Holder that has the blocks.
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

/// The size of an index. All numbers are 0 when nobody holds anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PrefixIndexSize {
    /// Entries that queries look up: nodes, keys, or hashes in the dictionaries of all holders.
    pub entries: usize,
    /// Names that removals look up, summed over all holders.
    pub names: usize,
    /// Holders that have any state.
    pub holders: usize,
}

/// An index of the prefixes that holders hold. The crate's documentation has the contract.
pub trait PrefixIndex {
    /// Notes that `holder` holds `blocks`, which follow one another after the block named `parent`, or start at position 0.
    fn store(&mut self, holder: HolderNumber, parent: Option<SequenceHash>, blocks: &[PrefixBlock]);

    /// Notes that `holder` no longer holds the blocks with these names.
    fn remove(&mut self, holder: HolderNumber, names: &[SequenceHash]);

    /// Notes that `holder` holds nothing any more.
    fn clear(&mut self, holder: HolderNumber);

    /// Returns the holders of leading blocks of `query`, each with the number of leading blocks that it holds, in no particular
    /// order. Holders without the first block are left out.
    fn find_matches(&self, query: &PrefixQuery) -> Vec<Depth>;

    /// Waits until all changes that were handed over before are applied.
    fn flush(&self) {}

    /// Number of stores that were refused because the holder did not hold the parent.
    fn refused_stores(&self) -> u64;

    /// The size of the index. May walk over the whole index.
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
