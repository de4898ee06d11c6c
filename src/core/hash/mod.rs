//! The hash contract: how tokens become the keys of the map.
//!
//! The hashes form a chain, each step a small value type that is copied, compared and sent without a pointer:
//!
//! | type | bits | says |
//! |---|---|---|
//! | [`BlockHash`] | 64 | which tokens one block holds |
//! | [`SequenceHash`] | 64 | which tokens the whole prefix up to and including a block holds |
//! | [`PositionalLineageHash`] | 128 | the prefix, its position and which block comes before it |
//!
//! Block and sequence hashes are XXH3-64 over little-endian bytes, with Dynamo's seeds. So kvatlas and Dynamo give a
//! block the same hash. Test vectors in the submodules check this. A change of a test vector is a change of the wire
//! contract.
//!
//! A namespace may use the rolling hash of another system instead: a [`Scheme`].
//!
//! Hashes are identities, not proofs: XXH3 is fast and not cryptographic. Two different prefixes share a 64-bit
//! sequence hash by accident about once in 2^32 blocks. A lineage hash keeps at least 51 bits of the sequence hash,
//! together with the position and the same number of bits of the parent's sequence hash.
//!
//! # From tokens to lineage hashes
//!
//! ```
//! use kvatlas_core::hash::{
//!     BlockSize, HashSeed, PositionalLineageHash, Token, block_hashes, lineage_hashes, sequence_hashes,
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let tokens: Vec<Token> = (1..=40).collect();
//! let block_size = BlockSize::new(16)?;
//! let seed = HashSeed::for_cache(None, None);
//!
//! // Two full blocks; the eight tokens left over have no hash yet.
//! let sequence: Vec<_> = sequence_hashes(block_hashes(&tokens, block_size, seed)).collect();
//! assert_eq!(sequence.len(), 2);
//! assert_eq!(sequence[1].to_string(), "ad01835a37dd294c");
//!
//! let lineage: Vec<PositionalLineageHash> = lineage_hashes(&sequence).collect::<Result<_, _>>()?;
//! assert!(lineage[1].is_child_of(&lineage[0]));
//! assert_eq!(lineage[1].position(), 1);
//! # Ok(())
//! # }
//! ```

mod block;
mod lineage;
mod lineage_text;
mod newtype;
mod positional;
mod schemes;
mod sequence;
mod text;

pub use block::{
    BlockHash, BlockSize, BlockSizeError, HashSeed, Token, block_hash, block_hash_with, block_hashes,
    object_hash,
};
pub use lineage::{LineageError, PositionalLineageHash, lineage_hashes, lineage_hashes_from};
pub use lineage_text::LineageTextError;
pub use positional::{Position, PositionError};
pub use schemes::{Scheme, SchemeAlgorithm, SchemeChains, SchemeSteps, UnknownScheme};
pub use sequence::{SequenceHash, next_sequence_hash, sequence_hashes, sequence_hashes_after};
pub use text::HashTextError;
