//! The index: which holder holds which prefix.
//!
//! # Model
//!
//! A block is identified by its whole prefix. The blocks of all holders form a radix tree. A *run* is like an edge of
//! this tree: an array of consecutive blocks (`runs`). A run that branches off a block of another run is a *child* of
//! that run. A block's *place* is its run and its offset in the run. The place determines every block before the
//! block.
//!
//! A holder has some blocks of the tree, each in one or more tiers. A holder's *share* of a run is a short list of
//! intervals (`share`). A hole or a second tier splits an interval.
//!
//! The index knows blocks by sequence and lineage hashes only. Before an event reaches the index, `crate::names`
//! translates the engine's own names into hashes, for each holder separately. It also finds the hashes and places
//! that the event does not give.
//!
//! A block of a holder is either *resumable* or *barred*. A request can continue after a resumable block. It cannot
//! continue after a barred block: the layers with full attention have the block, but other layers lack the state that
//! is needed there. Usually all blocks are resumable. Bars are kept beside the holders' entries (`runs::bars`), and
//! change in the same steps.
//!
//! A block of a holder *counts* if the holder has all blocks before it. So the blocks that count are a hole-free
//! prefix. A search (`search`) follows the query from run to run, beginning at position 0. After each run it keeps
//! only the holders that have all blocks of the run that agree with the query.
//!
//! Two blocks with the same hash under different parents are different blocks. By the hash contract there are no such
//! blocks, because a hash stands for its whole prefix. If a query gives hashes, a search compares only a few of them
//! while two conditions hold:
//!
//! - No two blocks have the same hash, which a table of all hashes shows ([`IndexSizes::chain_conflicts`] is 0).
//! - No holder has hashes outside the contract's chain ([`PositionalIndexer::foreign_holders`] is 0).
//!
//! Otherwise the search compares every hash.
//!
//! # What a query sees during writes
//!
//! A *turn* at the runs is the time in which one thread has the lock that is needed to change them. A *step* is a
//! change of one holder's blocks that is made within a turn; an answer contains it wholly or not at all. If no step
//! changes a run that a search reads during the search, the answer is exact for all holders. The rules, each with the
//! tests that check it:
//!
//! 1. A block keeps its place as long as some holder has the block. Blocks are cut off a run, or the run's number is
//!    reused, only if no holder has any of these blocks. (`tests::differential`)
//! 2. So suppose that a holder has the block at a place during a whole search. Then everything that the search reads
//!    about this place is true at each instant of the search. That holds even if the search reads different places at
//!    different instants. (`tests::interleaved`)
//! 3. A table moves no entry while readers can reach the table. Instead the whole table is replaced by a copy with
//!    all remaining entries (copy on write). So a search finds every run that exists during the whole search. A run
//!    is marked as followed as long as readers can find a child of it. The mark is set before the first child can be
//!    found, and cleared after no child can be found. So a search looks for no child of a run without the mark. A
//!    Bloom filter contains the runs at position 0. The bit of such a run is set before the run can be found, and
//!    cleared after the run can no longer be found. (`tests::concurrency`, `tests/loom`, `runs::store`,
//!    `runs::heads`)
//! 4. Each run has a change counter, a seqlock. A step raises the counters of the runs that it changes, once before
//!    its first change can be seen and once after its last. Only one step is made at a time. So a search can tell
//!    whether the holders' shares of a run have stayed the same since the search first read the run. A run's summary
//!    of all its holders changes in the same steps. (`runs::header`, `runs::roster`, `tests::interleaved`,
//!    `tests/loom`)
//! 5. A step that changes only runs that a search has not read changes nothing that the search's answer rests on. If
//!    the search found the next block of its query, it has read that block's run. If it did not find the next block,
//!    the holder lacked this block at some instant of the look-up; otherwise the search would have found it (2, 3).
//!    So the answer is the holder's state at an instant of the search. (`tests::interleaved`, `tests::concurrency`)
//! 6. If a step changes a run that the search has already read, the search is repeated. After some tries the search
//!    takes a turn at the runs, during which no other thread can make a step. (`tests::concurrency`)
//! 7. Locks are taken in one order: eviction, a holder's state, the runs. A thread that has a turn at the runs never
//!    waits for a holder's lock. (No test checks the order. A wrong order can hang `tests::eviction`, where writers and
//!    eviction run together.)
//! 8. A long event is made in several steps, and each step publishes what is done so far. So nobody waits for the
//!    whole event. (`tests::defects`)
//! 9. A run keeps fingerprints of prompts that have agreed with it. Each fingerprint is bound to the hashes that the
//!    run had then. If the run has other hashes now, the fingerprint matches no prompt. (`tests::known`)
//! 10. While a holder's thread works on only the holder's own state (hashing, names), other writers have turns at the
//!     runs. These writers do not cut off blocks that the holder has added to the runs but not published yet.
//!     (`tests::interleaved`)
//!
//! # Folders and files
//!
//! Each row uses only the rows above it, and `hook`:
//!
//! | folder or file | what |
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
