//! A query as a chain of lineage hashes, each computed when the search first needs it.

use crate::hash::{
    BlockHash, BlockSize, HashSeed, Position, PositionError, PositionalLineageHash, SequenceHash, block_hash,
    next_sequence_hash,
};
use crate::wire::QueryKey;

use super::runs::{BlockKey, prefetch};

/// The lineage hashes of a query, by position.
///
/// Lineage and sequence hashes need no hashing at all. Block hashes and tokens are hashed only as far as the search looks.
#[derive(Debug)]
pub struct QueryChain<'a> {
    key: &'a QueryKey,
    block_size: BlockSize,
    seed: HashSeed,
    len: usize,
    /// The rolling chain as far as it has been computed.
    rolled: Vec<SequenceHash>,
}

/// How many hashes from the first are asked for at once, at most.
const PREFETCHED: usize = 128;
/// Bytes that come into the processor's cache together.
const CACHE_LINE: usize = 64;

#[inline]
fn prefetch_ends<T>(hashes: &[T]) {
    let step = CACHE_LINE / size_of::<T>();
    hashes
        .iter()
        .take(PREFETCHED)
        .skip(step)
        .step_by(step)
        .for_each(prefetch);
    hashes.last().into_iter().for_each(prefetch);
}

impl<'a> QueryChain<'a> {
    /// The chain of `key`; `block_size` cuts tokens into blocks. Fails where it is deeper than a position can say.
    pub fn new(key: &'a QueryKey, block_size: BlockSize) -> Result<Self, PositionError> {
        let mut seed = HashSeed::default();
        let len = match key {
            QueryKey::Tokens {
                tokens,
                lora_name,
                cache_salt,
            } => {
                seed = HashSeed::for_cache(lora_name.as_deref(), cache_salt.as_deref());
                tokens.len() / block_size.as_usize()
            }
            QueryKey::BlockHashes(hashes) => hashes.len(),
            QueryKey::SequenceHashes(hashes) => hashes.len(),
            QueryKey::LineageHashes(hashes) => hashes.len(),
        };
        Position::new((len as u64).saturating_sub(1))?;
        Ok(Self {
            key,
            block_size,
            seed,
            len,
            rolled: Vec::new(),
        })
    }

    /// How many blocks are asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no whole block is asked for.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The lineage hash at `index`, which must be below [`Self::len`].
    pub(crate) fn key(&mut self, index: usize) -> PositionalLineageHash {
        if let QueryKey::LineageHashes(hashes) = self.key {
            return hashes[index];
        }
        let current = self.sequence_hash(index);
        // The first block has no parent; `at` does not look at the value there.
        let parent = index
            .checked_sub(1)
            .map_or(SequenceHash(0), |before| self.sequence_hash(before));
        // `new` has checked the largest.
        let position = Position::new(index as u64).unwrap_or(Position::MAX);
        PositionalLineageHash::at(position, parent, current)
    }

    /// Whether hashes have to be computed, one after the other.
    pub(crate) fn is_rolled(&self) -> bool {
        matches!(self.key, QueryKey::BlockHashes(_) | QueryKey::Tokens { .. })
    }

    /// The sequence hash of the block at `index`, which must be below [`Self::len`], or the fragment of it that is known.
    #[inline]
    pub(crate) fn hash(&mut self, index: usize) -> u64 {
        match self.key {
            QueryKey::LineageHashes(hashes) => hashes[index].current_hash_fragment(),
            _ => self.sequence_hash(index).as_u64(),
        }
    }

    /// As [`Self::hash`], of a block whose hash has been given or computed; 0 of any other.
    #[inline]
    pub(crate) fn known_hash(&self, index: usize) -> u64 {
        let hashes = match self.key {
            QueryKey::LineageHashes(hashes) => {
                return hashes.get(index).map_or(0, |hash| hash.current_hash_fragment());
            }
            QueryKey::SequenceHashes(hashes) => hashes,
            QueryKey::Tokens { .. } | QueryKey::BlockHashes(_) => &self.rolled,
        };
        hashes.get(index).map_or(0, |hash| hash.as_u64())
    }

    /// Asks for the memory of what a search compares first, where hashes have been given: common prompts end early, and the last hash
    /// tells whether all is there.
    #[inline]
    pub(crate) fn prefetch(&self) {
        match self.key {
            QueryKey::LineageHashes(hashes) => prefetch_ends(hashes),
            QueryKey::SequenceHashes(hashes) => prefetch_ends(hashes),
            QueryKey::Tokens { .. } | QueryKey::BlockHashes(_) => {}
        }
    }

    /// What the block at `index`, which must be below [`Self::len`], is found by.
    #[inline]
    pub(crate) fn block_key(&mut self, index: usize) -> BlockKey {
        if let QueryKey::LineageHashes(hashes) = self.key {
            return hashes[index].into();
        }
        BlockKey {
            // `new` has checked the largest.
            position: u32::try_from(index).unwrap_or(u32::MAX),
            current: self.sequence_hash(index).as_u64(),
            parent: index
                .checked_sub(1)
                .map(|before| self.sequence_hash(before).as_u64()),
        }
    }

    #[inline]
    fn sequence_hash(&mut self, index: usize) -> SequenceHash {
        if let QueryKey::SequenceHashes(hashes) = self.key {
            return hashes[index];
        }
        if self.rolled.len() <= index {
            self.roll(index + 1);
        }
        self.rolled[index]
    }

    /// Computes the chain up to `len` blocks.
    pub(crate) fn roll(&mut self, len: usize) {
        let from = self.rolled.len();
        let blocks = from..len.min(self.len);
        if self.rolled.capacity() < blocks.end {
            // The first block alone decides most misses; a second one means all, or many.
            let wanted = if blocks.end == 1 { 1 } else { self.len };
            self.rolled.reserve_exact(wanted.saturating_sub(from));
        }
        let mut last = self.rolled.last().copied();
        let mut next = |block: BlockHash| {
            let hash = next_sequence_hash(last, block);
            last = Some(hash);
            hash
        };
        match self.key {
            QueryKey::BlockHashes(hashes) => {
                let blocks = hashes.get(blocks).unwrap_or_default();
                self.rolled.extend(blocks.iter().map(|block| next(*block)));
            }
            QueryKey::Tokens { tokens, .. } => {
                let size = self.block_size.as_usize();
                let tokens = tokens.get(blocks.start * size..blocks.end * size);
                let blocks = tokens.unwrap_or_default().chunks_exact(size);
                // In one loop: while a step of the chain is waited for, the next blocks are hashed.
                self.rolled
                    .extend(blocks.map(|block| next(block_hash(block, self.seed))));
            }
            // Neither needs rolling.
            QueryKey::SequenceHashes(_) | QueryKey::LineageHashes(_) => {}
        }
    }
}
