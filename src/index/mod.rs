//! The index: which holder holds which prefix.
//!
//! # Model
//!
//! A holder's blocks form a forest: a block's parent is the block one position before it whose current fragment is its
//! parent fragment. A block *counts* when all its ancestors down to position 0 are resident in the same holder;
//! only blocks that count stand in the shared entry table, one entry per lineage hash with the set of
//! its holders. Blocks behind a hole stay in the holder's own state until the hole is filled. So in the shared table every
//! holder is prefix-closed at every instant: finding it at position p proves the whole prefix up to p, and a search compares
//! *sets of holders*, never counts.
//!
//! A holder has at most one block for a (position, current fragment); a store with another parent fragment moves it.
//!
//! # What a query sees during writes
//!
//! One owner (a [`HolderWriter`]) changes one holder, block by block: stores parents first, removals children first. So the
//! number of leading blocks of any query that a holder holds changes by at most one at a time. A search that sees a holder at
//! position p − 1 at one instant and does not see it at p at another has therefore proved that at some instant in between
//! exactly p blocks matched: every score is exact, per holder, at some point between the query's start and its end.
//! Queries take no lock but those of single table shards, and never wait for a writer's whole event.
//!
//! # When hashes are no chain
//!
//! All this rests on a sequence hash naming its whole prefix. Where somebody stores two blocks of the same position and
//! current fragment with different parents, that is not so. The table notices it, counts it
//! ([`IndexSizes::chain_conflicts`]), and searches of that index walk block by block from then on.
//!
//! The index knows no clock, does no I/O and has no async code.

mod chain;
mod dump;
mod forest;
mod holder_set;
mod indexer;
mod namespace;
mod parking;
mod search;
mod slots;
mod sparse;
mod table;
mod writer;

#[cfg(test)]
mod tests;

pub use chain::QueryChain;
pub use indexer::{IndexLimits, IndexSizes, PositionalIndexer, RegisterError};
pub use namespace::{Hashing, Namespace, NamespaceLimitReached, NamespaceSettings, Namespaces};
pub use parking::ParkingLimits;
pub use search::{Match, Matches, Search};
pub use slots::HolderRecord;
pub use sparse::{BoundedMatches, Bounds, SparseChain};
pub use writer::{Applied, HolderWriter, RejectReason};
