//! A query as a chain of lineage hashes, each computed when the search first needs it.

use crate::hash::{
    BlockHash, BlockSize, HashSeed, Position, PositionError, PositionalLineageHash, SequenceHash, block_hash,
    next_sequence_hash,
};
use crate::wire::QueryKey;

use crate::index::runs::prefetch;

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
    pub fn key(&mut self, index: usize) -> PositionalLineageHash {
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

    /// Whether the hashes are whole sequence hashes, and not the fragments of lineage hashes.
    #[inline]
    pub(crate) fn is_whole(&self) -> bool {
        !matches!(self.key, QueryKey::LineageHashes(_))
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

    /// The sequence hashes of `COUNT` blocks from `from` on, where so many are asked for and the query has more of them than fragments.
    #[inline]
    pub(crate) fn whole<const COUNT: usize>(&mut self, from: usize) -> Option<&[SequenceHash; COUNT]> {
        let to = from + COUNT;
        if to > self.len {
            return None;
        }
        let hashes = match self.key {
            QueryKey::LineageHashes(_) => return None,
            QueryKey::SequenceHashes(hashes) => hashes,
            QueryKey::Tokens { .. } | QueryKey::BlockHashes(_) => {
                if self.rolled.len() < to {
                    self.roll(to);
                }
                &self.rolled
            }
        };
        hashes.get(from..)?.first_chunk()
    }

    /// Fills `hashes` with those of the blocks from `from` on, as [`Self::hash`] gives them; says how many there are.
    #[inline]
    pub(crate) fn load<const COUNT: usize>(&mut self, from: usize, hashes: &mut [u64; COUNT]) -> usize {
        let to = (from + COUNT).min(self.len);
        if self.is_rolled() && self.rolled.len() < to {
            self.roll(to);
        }
        let from = from.min(to);
        match self.key {
            QueryKey::LineageHashes(keys) => {
                for (hash, key) in hashes.iter_mut().zip(&keys[from..to]) {
                    *hash = key.current_hash_fragment();
                }
            }
            QueryKey::SequenceHashes(given) => {
                for (hash, given) in hashes.iter_mut().zip(&given[from..to]) {
                    *hash = given.as_u64();
                }
            }
            QueryKey::Tokens { .. } | QueryKey::BlockHashes(_) => {
                for (hash, rolled) in hashes.iter_mut().zip(&self.rolled[from..to]) {
                    *hash = rolled.as_u64();
                }
            }
        }
        to - from
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

    /// Asks for the memory of the hash at `index`, where it has been given.
    #[inline]
    pub(crate) fn prefetch_at(&self, index: usize) {
        match self.key {
            QueryKey::LineageHashes(hashes) => hashes.get(index).into_iter().for_each(prefetch),
            QueryKey::SequenceHashes(hashes) => hashes.get(index).into_iter().for_each(prefetch),
            QueryKey::Tokens { .. } | QueryKey::BlockHashes(_) => {}
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
