//! Baselines for tests and benches: the published designs of a prefix index, together with kvatlas's own. The crate
//! also has helpers for tests of several crates: [`random`] numbers, [`pages`] that are made from declarations,
//! tables of [`transitions`], and an [`etcd`].
//!
//! **Nothing here is in the daemon's path.** The daemon serves from [`kvatlas_core::index`]. That index is measured
//! and checked against these designs. Three of them give the same answers by different methods.
//!
//! Designs 1 to 6 are those of the Flash Indexer, from a nested dictionary to a positional index with jump search.
//! Some designs promise exact answers, but give wrong answers in their published form. They are corrected here, and
//! their documentation tells how. Designs that cannot be exact by their nature are left unchanged.
//!
//! | | design | a query of depth D, W holders | answers |
//! |---|---|---|---|
//! | 1 | [`NestedDictionary`] | D × W look-ups | conflates blocks of equal content |
//! | 2 | [`Actor`] around 1 | the same, in one thread | as the index inside |
//! | 3 | [`InvertedIndex`] | D look-ups | conflates blocks of equal content |
//! | 4 | [`RadixTree`] | D pointers | exact |
//! | 5 | [`ConcurrentRadixTree`] in a [`ThreadPool`] | D pointers, inline | exact at rest |
//! | 6 | [`JumpIndex`] in a [`ThreadPool`] | D / jump look-ups, and one rolling hash a matched block | exact at rest |
//! | 7 | [`LineageIndex`]: ours, in a [`ThreadPool`] | a handful of look-ups | exact at every instant |
//!
//! *Exact* means: for every holder, the number of leading blocks of the query that it holds without a hole. *At rest*
//! means: exact for all changes applied before the query began, if no change is applied while it runs.
//!
//! # The contract they share
//!
//! A holder's block is named by its sequence hash, and its content by its block hash. A store names the parent of its
//! first block, or no parent at position 0. A store under a parent that its holder does not hold is refused and
//! counted. Removals name blocks by sequence hash; a block that is not held is skipped. Removing a block in the
//! middle leaves the blocks after it: they match again when the block is stored again. A block that nobody holds has
//! no entry.
//!
//! [`Design`] builds any of the designs as a value of the trait [`PrefixIndex`].
//!
//! # Hash types and tree of the reference document
//!
//! `token-hashing-design.md`, on whose lineage hash kvatlas's is modelled, has more than kvatlas uses:
//! [`PositionalSequenceHash`], the trait [`PositionalHash`], and [`PositionalRadixTree`], which has the blocks of each
//! position in a map of their own.

mod actor;
mod concurrent_radix;
mod design;
mod drain;
pub mod etcd;
mod inverted;
mod jump;
mod jump_search;
mod lineage;
mod nested;
pub mod pages;
mod pool;
mod positional;
mod positional_radix;
mod positional_sequence;
mod prefix_index;
mod prefix_tree;
mod radix;
pub mod random;
mod sequence_entry;
pub mod transitions;

#[cfg(test)]
mod tests;

pub use actor::Actor;
pub use concurrent_radix::ConcurrentRadixTree;
pub use design::Design;
pub use inverted::InvertedIndex;
pub use jump::{DEFAULT_JUMP_SIZE, JumpIndex};
pub use lineage::LineageIndex;
pub use nested::NestedDictionary;
pub use pool::{SharedIndex, ThreadPool};
pub use positional::PositionalHash;
pub use positional_radix::PositionalRadixTree;
pub use positional_sequence::{PositionalSequenceHash, PositionalSequenceHashError};
pub use prefix_index::{Depth, HolderNumber, PrefixBlock, PrefixIndex, PrefixIndexSize, PrefixQuery};
pub use radix::RadixTree;
pub use sequence_entry::SeqEntry;
