//! The index: which holder holds which prefix.
//!
//! # Model
//!
//! A block is identified by its whole prefix. The *runs* are a radix tree of blocks (`runs`): a run is like an edge,
//! an array of consecutive blocks. A block's place in the tree determines every block before it. A holder has some
//! blocks of the tree, in tiers (`share`). A holder's share of a run is a short list of intervals. A hole or a second
//! tier splits an interval.
//!
//! The index knows blocks by sequence and lineage hashes only. Before an event reaches the index, `crate::names`
//! translates the engine's own names, for each holder separately. It also fills in anything that the event leaves
//! open.
//!
//! A block of a holder is either *resumable* or *barred*. A request cannot resume after a barred block, although full
//! attention has the block. Usually all blocks are resumable. Bars are kept beside the holders' entries
//! (`runs::bars`), and change in the same steps.
//!
//! A block of a holder *counts* if the holder has all blocks before it: the blocks that count are a hole-free prefix.
//! A search (`search`) goes from position 0 on through the runs along the query. It keeps the holders that have
//! enough leading blocks of each run.
//!
//! Two blocks of the same hash under different parents are different blocks. By the hash contract, a hash stands for
//! its whole prefix. A search for given hashes relies on that only while it is known to be true of all blocks. Two
//! conditions must hold. First, no two blocks have the same hash ([`IndexSizes::chain_conflicts`]), which a table of
//! all hashes shows. Second, no holder has hashes outside the contract's chain
//! ([`PositionalIndexer::foreign_holders`]). Otherwise the search compares every hash.
//!
//! # What a query sees during writes
//!
//! A holder changes in steps. If no step changes a run that a search looks at while it runs, the search is exact for
//! all holders. The rules, each with the tests that check it:
//!
//! 1. A block keeps its place as long as some holder has the block. A run is cut, or its number reused, only where no
//!    holder has a block. (`tests::differential`)
//! 2. So if a holder has a place during a whole search, everything that the search reads about the place is true at
//!    each instant. That holds even if the search reads other places at other instants. (`tests::interleaved`)
//! 3. Tables move no entry while they can be read. A table is replaced as a whole, by a table with all entries that
//!    are still there (copy on write). So a search finds every run that exists during the whole search. A run is
//!    marked as followed as long as readers can find a run after it. The mark is set before the first such run can be
//!    found, and cleared after the last. So after a run without the mark, a search looks nothing up. A Bloom filter
//!    contains the runs at position 0. The bit of such a run is set before the run can be found, and cleared after
//!    the run can no longer be found. (`tests::concurrency`, `tests/loom`, `runs::store`, `runs::heads`)
//! 4. Each run has a change counter, a seqlock. A step raises the counters of the runs that it changes, once before
//!    its first change can be seen and once after its last. Steps take turns. So a search can tell whether the
//!    holders' shares of a run stayed the same since its first look at the run. A run's summary of all its holders
//!    changes in the same steps. (`runs::header`, `runs::roster`, `tests::interleaved`, `tests/loom`)
//! 5. A step about runs that a search has not looked at changes nothing that the search has read. If the search has
//!    found a next block, it has looked at that block's run. If it has found no next block, the holder lacked that
//!    block at some instant of the look. Otherwise the block would have been found (2, 3). So the answer is the
//!    holder's state at an instant of the search. (`tests::interleaved`, `tests::concurrency`)
//! 6. If a step about a run that a search has looked at is made during the search, the search is repeated. After some
//!    tries the search takes a turn at the runs, during which no step can be made. (`tests::concurrency`)
//! 7. Locks are taken in one order: eviction, a holder's state, the runs. A thread that has the runs never waits for
//!    a holder. (No test looks at the order. A wrong one can hang `tests::eviction`, where writers and eviction run
//!    together.)
//! 8. A long event is made in several steps, and each step publishes what is done so far. So nobody waits for the
//!    whole event. (`tests::defects`)
//! 9. Fingerprints of prompts that a run keeps are bound to the hashes that the run had. If the run has different
//!    hashes now, its fingerprints match no prompt. (`tests::known`)
//! 10. While a holder's thread does work on the holder's own state (hashing, names), other writers have turns at the
//!    runs. They do not cut off blocks that the holder has added to the runs but not published yet.
//!    (`tests::interleaved`)
//!
//! # Rooms and files
//!
//! Each row uses only the rows above it, and `hook`:
//!
//! | room or file | what |
//! |---|---|
//! | `settings`, `block`, `usage` | settings, the bits of hashes that blocks keep, the used part of a capacity |
//! | `directory/` | the registered holders: each by a small number, and sets of them |
//! | `runs/` | the blocks that all holders share |
//! | `share/` | one holder's share of the runs |
//! | `shared` | one index, and several that are bounded together |
//! | `capacity` | eviction of blocks beyond the bounds |
//! | `search/` | queries |
//! | `indexer` | the index of a namespace |
//! | `listing/` | walks, and what they meet of regular holders, for snapshots |
//! | `namespace` | all namespaces |
//! | `hook` | points at which tests stop a search or count a writer's turns; does nothing outside of tests |
//!
//! Three containers that know nothing of an index stand beside it: `crate::split_map`, a hash map that never grows
//! all at once; `crate::name_map`, from names to numbers; and `crate::words`, arrays that readers look at without a
//! lock. The index knows no clock, does no I/O and has no async code.

pub(crate) mod block;
mod capacity;
pub(crate) mod directory;
mod hook;
pub(crate) mod indexer;
pub(crate) mod listing;
mod namespace;
pub(crate) mod runs;
mod search;
pub(crate) mod settings;
pub(crate) mod share;
pub(crate) mod shared;
pub(crate) mod usage;

#[cfg(test)]
mod tests;

pub use directory::{HolderRecord, RegisterError};
pub use indexer::{IndexSizes, PositionalIndexer};
pub use listing::{HolderPart, HolderWalk, Walk, WalkedHolder, WalkedRun};
pub use namespace::{AnswerTally, Namespace, NamespaceRefused, Namespaces};
pub use runs::give_back_memory;
pub use search::{Match, Matches, NearBlocks, QueryChain, Search, SparseChain, TierDepth};
pub use settings::{Capacity, Hashing, IndexLimits, NamespaceSettings, ParkingLimits};
pub use shared::TotalUsage;

// Users find the writers of an index here. The index itself does not use them.
pub use crate::names::{Applied, HolderWriter, RejectReason, RestoredRun};
