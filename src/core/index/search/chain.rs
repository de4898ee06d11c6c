//! A query as a chain of lineage hashes, each computed when the search first needs it.

use crate::hash::{BlockSize, HashSeed, Position, PositionError, PositionalLineageHash, SequenceHash};
use crate::wire::QueryKey;

use crate::ahead::prefetch;
use crate::index::runs::Prints;

use super::rolled::{QueryContent, Rolled};

/// The hashes of a query, by position.
///
/// If the query gives lineage or sequence hashes, nothing is hashed. If it gives tokens or block hashes, they are
/// hashed only as far as the search needs them.
#[derive(Debug)]
pub struct QueryChain<'a> {
    hashes: Hashes<'a>,
    len: usize,
}

#[derive(Debug)]
enum Hashes<'a> {
    Sequence(&'a [SequenceHash]),
    Lineage(&'a [PositionalLineageHash]),
    /// Hashes computed from tokens or block hashes. Each hash is computed from the previous hash.
    Rolled(Rolled<'a>),
}

/// Maximum number of leading hashes that are prefetched at the same time.
const PREFETCHED: usize = 128;
/// Number of bytes of a cache line of the processor.
const CACHE_LINE: usize = 64;

#[inline]
fn prefetch_ends<T>(hashes: &[T]) {
    let step = CACHE_LINE / size_of::<T>();
    let first = hashes.iter().take(PREFETCHED).skip(step).step_by(step);
    first.chain(hashes.last()).for_each(prefetch);
}

impl<'a> QueryChain<'a> {
    /// Makes the chain of the query `key`. `block_size` is the number of tokens in a block. Fails if the last block's
    /// position is above [`Position::MAX`].
    pub fn new(key: &'a QueryKey, block_size: BlockSize) -> Result<Self, PositionError> {
        Self::with_ahead(key, block_size, 0)
    }

    /// Makes the chain as [`Self::new`] does, but for engines that hash each block together with the token after it.
    /// A chain that is given as hashes stays as it is.
    pub fn looking_ahead(key: &'a QueryKey, block_size: BlockSize) -> Result<Self, PositionError> {
        Self::with_ahead(key, block_size, 1)
    }

    fn with_ahead(key: &'a QueryKey, block_size: BlockSize, ahead: usize) -> Result<Self, PositionError> {
        let rolled = |content: QueryContent<'a>| (content.len(), Hashes::Rolled(Rolled::new(content)));
        let (len, hashes) = match key {
            QueryKey::Tokens {
                tokens,
                lora_name,
                cache_salt,
            } => rolled(QueryContent::Tokens {
                tokens,
                size: block_size,
                ahead,
                seed: HashSeed::for_cache(lora_name.as_deref(), cache_salt.as_deref()),
            }),
            QueryKey::BlockHashes(hashes) => rolled(QueryContent::Blocks(hashes)),
            QueryKey::SequenceHashes(hashes) => (hashes.len(), Hashes::Sequence(hashes)),
            QueryKey::LineageHashes(hashes) => (hashes.len(), Hashes::Lineage(hashes)),
        };
        Position::new((len as u64).saturating_sub(1))?;
        Ok(Self { hashes, len })
    }

    /// Number of blocks that the query asks for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the query asks for no whole block.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the lineage hash at `index`, which must be below [`Self::len`].
    pub fn key(&mut self, index: usize) -> PositionalLineageHash {
        if let Hashes::Lineage(hashes) = self.hashes {
            return hashes[index];
        }
        // At position 0, `PositionalLineageHash::at` ignores the parent.
        let parent = index
            .checked_sub(1)
            .map_or(SequenceHash(0), |before| SequenceHash(self.hash(before)));
        let current = SequenceHash(self.hash(index));
        // `new` has checked that the last position of the query is in range.
        let position = Position::new(index as u64).unwrap_or(Position::MAX);
        PositionalLineageHash::at(position, parent, current)
    }

    /// Whether the hashes are whole sequence hashes, and not the fragments of lineage hashes.
    #[inline]
    pub(crate) fn is_whole(&self) -> bool {
        !matches!(self.hashes, Hashes::Lineage(_))
    }

    /// Returns the sequence hash of the block at `index`, or its fragment if the query gives only fragments. `index`
    /// must be below [`Self::len`].
    #[inline]
    pub(crate) fn hash(&mut self, index: usize) -> u64 {
        match &mut self.hashes {
            Hashes::Sequence(hashes) => hashes[index].as_u64(),
            Hashes::Lineage(hashes) => hashes[index].current_hash_fragment(),
            Hashes::Rolled(rolled) => rolled.hash(index).as_u64(),
        }
    }

    /// Returns the fingerprint of the 32 blocks from `from` on. `None` if the query has fewer than 32 blocks there,
    /// or does not give their whole hashes.
    #[inline]
    pub(crate) fn print(&self, from: usize, prints: &Prints) -> Option<u64> {
        let Hashes::Sequence(hashes) = self.hashes else {
            return None;
        };
        Some(prints.of(hashes.get(from..)?.first_chunk()?))
    }

    /// Returns the state that computes hashes from tokens or block hashes. `None` if the query gives its hashes.
    #[inline]
    pub(super) fn rolled(&mut self) -> Option<&mut Rolled<'a>> {
        match &mut self.hashes {
            Hashes::Rolled(rolled) => Some(rolled),
            Hashes::Sequence(_) | Hashes::Lineage(_) => None,
        }
    }

    /// Prefetches the hashes of the query that a search compares first, if the query gives hashes. These are the first
    /// ones and the last one. Many prompts agree with a run only at their beginning. If the last hash agrees, the whole
    /// query agrees.
    #[inline]
    pub(crate) fn prefetch(&self) {
        match self.hashes {
            Hashes::Lineage(hashes) => prefetch_ends(hashes),
            Hashes::Sequence(hashes) => prefetch_ends(hashes),
            Hashes::Rolled(_) => {}
        }
    }
}
