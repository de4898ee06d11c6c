//! The index: which holder holds which prefix.
//!
//! # Model
//!
//! A holder's blocks form a forest: a block's parent is the block one position before it whose current fragment is its
//! parent fragment. A block *counts* when all its ancestors down to position 0 are resident in the same holder;
//! only blocks that count are shared with queries. Blocks behind a hole stay in the holder's own state until the hole is filled.
//! So for queries every holder is prefix-closed at every instant: finding it at position p proves the whole prefix up to p, and
//! a search compares *sets of holders*, never counts.
//!
//! A holder has at most one block for a (position, current fragment); a store with another parent fragment moves it.
//!
//! # Where what is
//!
//! | file | what |
//! |---|---|
//! | `runs/` | what all holders share: runs of blocks, who holds how much of each, a table from hash to place |
//! | `plain.rs` | a holder's own state while it is regular: which runs it has how much of |
//! | `forest.rs` | a holder's own state where it is not: holes, tiers, several names of a block |
//! | `resolve.rs`, `writer.rs` | events: what their blocks are, and applying them |
//! | `storage.rs` | which of two storages an index has: runs, or a radix tree |
//! | `radix.rs`, `prefix_tree.rs` | the radix tree, see [`IndexKind::Radix`]; every holder is a forest there |
//! | `capacity.rs`, `runs/eviction.rs` | bounds on size, and forgetting what is beyond them |
//! | `search.rs`, `matches.rs`, `chain.rs` | queries, and what they find |
//! | `walk.rs`, `share.rs` | all blocks in depth-first order, for snapshots and for looking at a part |
//! | `slots.rs`, `worker_slots.rs`, `holder_set.rs` | holders by a small number, and sets of them |
//!
//! # What a query sees during writes
//!
//! One owner (a [`HolderWriter`]) changes one holder, one run at a time: stores parents first, removals children first. A look
//! at a run gives, from one word, the run's length and how much of it each holder has at one instant. How deep a holder has a
//! query's blocks, its *depth*, therefore follows from looks at different instants:
//!
//! - *It has part of a run, and its part ends before the query leaves the run*: that is its depth at that instant.
//! - *It has everything up to position e, where the query leaves the run (because the run ends there, or goes on differently), and
//!   at another instant its depth was at most e*: then its depth was e at an instant in between, or at the look. For at the look
//!   it was e, unless the holder also had a run that begins at e. If its depth was at most e later, it has lost that run first,
//!   and had e then, since children go before parents. If it was at most e earlier, it got that run last, and had e just before.
//!
//! That its depth was at most e is known from not finding the block at e, or from the run itself: where no run follows the block before
//! e, the block at e is in no other run. It may have come into this one since the look, but it is never in two places: so there was an
//! instant, at the look or after it, when nobody had it.
//!
//! Eviction lowers holders' shares as removals do: one run at a time, children first. Its steps fit the same argument.
//!
//! A search settles every holder by one of the two, so every score is exact, per holder, at some point between the query's
//! start and its end. Queries take no lock and never wait for a writer.
//!
//! # When hashes are no chain
//!
//! All this rests on a sequence hash naming its whole prefix. Where somebody stores two blocks of the same position and
//! current fragment with different parents, that is not so. The store notices it, counts it
//! ([`IndexSizes::chain_conflicts`]), and searches of that index walk block by block from then on.
//!
//! The index knows no clock, does no I/O and has no async code.

mod applied;
mod capacity;
mod chain;
mod dump;
mod forest;
mod holder_set;
mod indexer;
mod matches;
mod namespace;
mod parking;
mod place;
mod plain;
pub(crate) mod prefix_tree;
mod radix;
mod resolve;
mod runs;
mod search;
mod share;
mod slots;
mod sparse;
mod storage;
mod walk;
mod worker_slots;
mod writer;

#[cfg(test)]
pub(crate) mod tests;

pub use applied::{Applied, RejectReason};
pub use capacity::{Capacity, TotalUsage};
pub use chain::QueryChain;
pub use indexer::{IndexLimits, IndexSizes, PositionalIndexer, RegisterError};
pub use matches::{Match, Matches};
pub use namespace::{Hashing, IndexKind, Namespace, NamespaceLimitReached, NamespaceSettings, Namespaces};
pub use parking::ParkingLimits;
pub use runs::give_back_memory;
pub use search::Search;
pub use share::{HolderPart, HolderWalk, RestoredRun, WalkedHolder};
pub use slots::HolderRecord;
pub use sparse::{BoundedMatches, Bounds, CompressedChainRefused, SparseChain};
pub use walk::{Walk, WalkedRun};
pub use writer::HolderWriter;
