//! The index: which holder holds which prefix.
//!
//! # Model
//!
//! A block is what its whole prefix makes it: the *runs* are a tree of blocks (`runs`), and a block's place in it says every block
//! before it. A holder has some blocks of the tree, in tiers, under names of its own (`holder`). What it has of a run is a short list of
//! intervals: a hole or a second tier splits an interval, and nothing else changes.
//!
//! A block of a holder is *resumable*, or it is barred: then a request cannot go on behind it, although full attention has it. Mostly all are.
//! What is barred travels beside the entries (`runs::bars`), in the same steps.
//!
//! A block *counts* when the holder has all blocks before it. A search (`search`) goes from position 0 on through the runs along the
//! query, and keeps those holders whose leading blocks of each run reach far enough.
//!
//! Two blocks of the same hash under different parents are different blocks. A holder has at most one block of a name, and the block that
//! gets the name takes it from the other. A search for given hashes relies on the contract, by which a hash stands for its whole
//! prefix. It does so only while that is known to hold of all blocks there are: every block is found by its hash, none has another's
//! ([`IndexSizes::chain_conflicts`]), and no holder's hashes are foreign ([`PositionalIndexer::foreign_holders`]). Otherwise it compares
//! every hash. Where engines use names of their own, blocks need not be found by their hashes, and mostly are not.
//!
//! # What a query sees during writes
//!
//! A holder changes in steps. A search is exact for all holders if no step is made, in its time, about a run that it looks at.
//! The rules, each with the tests that hold it:
//!
//! 1. A block's place never becomes another block's as long as somebody has it: a run is cut, and its number given out again, only
//!    where no holder has anything. (`tests::differential`)
//! 2. So whatever a search reads about places that one holder has all the time is true all the time, however it mixes instants of
//!    others' places. (`tests::interleaved`)
//! 3. Tables move no entry while they can be read, and a table is replaced by one that has all that are still there: a run that is there
//!    all the time is found. A run says that others follow it from before the first can be found until after the last can: where it says
//!    that none does, nothing need be looked up. The bit of a run at position 0 is set before the run can be found, and cleared after.
//!    (`tests::concurrency`, `tests/loom`, `runs::store`, `runs::heads`)
//! 4. The runs that a step changes count it before the first change can be seen, and again after the last. Steps take turns. So a search knows
//!    whether what holders have of a run was the same from its first look at the run to its end.
//!    What a run says of all its holders together changes in the same steps. (`runs::header`, `runs::roster`, `tests::interleaved`, `tests/loom`)
//! 5. A step about other runs than those that a search has looked at changes nothing that the search has read. Where the
//!    search has found a next block, it has looked at its run. Where it has found none, the holder did not have the block at some instant
//!    of that look: what a holder has all the time is found (2, 3). So the answer is the holder's state at an instant of the search.
//!    (`tests::interleaved`, `tests::concurrency`)
//! 6. Where a step is made about such a run during a search, the search is repeated. After some tries the search takes a turn at the runs:
//!    then nobody makes a step. (`tests::concurrency`)
//! 7. Locks are taken in one order: eviction, a holder's state, the runs. Nobody who has the runs waits for a holder.
//!    (No test looks at the order. A wrong one can hang `tests::eviction`, where writers and eviction run at once.)
//! 8. A long event is several steps, with what is done so far published before each ends: so nobody waits for all of it.
//!    (`tests::defects`)
//! 9. What a run keeps of prompts is bound to the hashes that it had: whoever finds other hashes there finds nothing kept.
//!    (`tests::known`)
//! 10. While a holder does what concerns it alone (hashing, its own names), others have turns at the runs. What it has put among the runs
//!     and not published is not cut off meanwhile. (`tests::interleaved`)
//!
//! # Where what is
//!
//! Each uses only those above it, and `hook`:
//!
//! | room or file | what |
//! |---|---|
//! | `settings`, `block`, `usage` | what can be set, what blocks are found by, what is used of a capacity |
//! | `directory/` | who is there: holders by a small number, and sets of them |
//! | `runs/` | what all holders share |
//! | `holder/` | one holder's own state, and what events do to it |
//! | `shared` | one index, and several that are bounded together |
//! | `capacity` | forgetting what is beyond the bounds |
//! | `search/` | queries |
//! | `writer` | applying events to a holder |
//! | `indexer` | the index of a namespace |
//! | `listing/` | walks, and regular holders for snapshots |
//! | `namespace` | all namespaces |
//! | `hook` | points at which tests stop a search or count a writer's turns; empty outside of tests |
//!
//! Two containers that know nothing of an index stand beside it: `crate::split_map`, a hash map that never grows all at once, and `crate::words`,
//! arrays that readers look at without a lock. The index knows no clock, does no I/O and has no async code.

mod block;
mod capacity;
mod directory;
mod holder;
mod hook;
mod indexer;
mod listing;
mod namespace;
mod runs;
mod search;
mod settings;
mod shared;
mod usage;
mod writer;

#[cfg(test)]
mod tests;

pub use directory::{HolderRecord, RegisterError};
pub use holder::{Applied, RejectReason};
pub use indexer::{IndexSizes, PositionalIndexer};
pub use listing::{HolderPart, HolderWalk, RestoredRun, Walk, WalkedHolder, WalkedRun};
pub use namespace::{AnswerTally, Namespace, NamespaceRefused, Namespaces};
pub use runs::give_back_memory;
pub use search::{Match, Matches, NearBlocks, QueryChain, Search, SparseChain, TierDepth};
pub use settings::{Capacity, Hashing, IndexLimits, NamespaceSettings, ParkingLimits};
pub use shared::TotalUsage;
pub use writer::HolderWriter;
