//! The storage of an index: runs of blocks, who holds how much of each, and a table that leads from a hash to its place.
//!
//! # Runs
//!
//! A *run* is an array of the sequence hashes of consecutive blocks, each the child of the one before. It has the position of
//! its first block and the fragment of that block's parent, which lies in another run (or nowhere, at position 0). Where
//! prompts part, the branch is a run of its own; the trunk is never split, because a branch may begin at any of its blocks.
//!
//! ```text
//! run 2, from position 0   a b c d e f g      holders: w1 has 7 blocks of it, w2 has 7, w3 has 3
//! run 3, from position 3         x y z        holders: w3 has 3       (child of c)
//! run 4, from position 7                 h i  holders: w2 has 2       (child of g)
//! ```
//!
//! A holder has a prefix of a run or nothing of it, and it has something of a run only if it has the run's parent: the store
//! keeps only prefix-closed holders ([`super::forest`] keeps what lies behind a hole). So a run needs, per holder, one number:
//! how many of its blocks it has, the *cutoff*. Those of up to three holders fit into a word. A run is as long as its largest
//! cutoff, and is gone when nobody has any of it.
//!
//! # Finding a place
//!
//! A [`table`](Table) of 8-byte words leads from a hash to (run, offset); the hash is verified in the run's array. So every
//! position is one probe away, and how far a query agrees with a run is a comparison of two arrays: since a hash names its
//! whole prefix, the last equal pair is found by bisection, after a look at where holders have parted from the run before.
//!
//! # Readers and writers
//!
//! Writers take turns: [`RunStore::write`] locks the index for one event (tens of nanoseconds a block). Readers take no lock
//! and write to no memory that they share:
//!
//! - What a run's pointer leads to is immutable, but for the word that says who holds how much ([`Coverage`]), which is
//!   replaced as a whole, for the number that says where other runs may follow, and for the array beyond the run's length, which
//!   nobody reads before it is published.
//!   A run that needs a larger array, or another hash where one was already written, gets a new allocation.
//! - A reader that meets a replaced run, segment or coverage sees what was true when it was replaced. That was after the reader
//!   had loaded the pointer: so it is still a state within the reader's query.
//! - Memory is given back when no reader can see it any more (epoch-based reclamation: Fraser, *Practical lock-freedom*,
//!   2004; the crossbeam-epoch crate).
//!
//! That answers are exact follows from the steps that a writer makes; see the index's own documentation.

mod cover_word;
mod coverage;
mod eviction;
mod few;
mod run;
mod slab;
mod store;
mod table;
mod walk;
mod writer;

pub(crate) use coverage::View;
pub(crate) use run::{BlockKey, Run, is_same_at};
pub(crate) use slab::RunId;
pub(crate) use store::{Found, Root, RunStore};
pub(crate) use walk::{Life, Listing};
pub(crate) use writer::RunWriter;

/// How many steps [`give_back_memory`] makes at once; one gives back a few hundred allocations.
const COLLECTIONS: usize = 64;

/// Gives back memory of all indexes that no query sees any more. Changes do so by themselves, a little at a time; who calls this
/// regularly, outside of lanes and queries, has what the last of many removals left behind given back, too.
pub fn give_back_memory() {
    for _ in 0..COLLECTIONS {
        crossbeam_epoch::pin().flush();
    }
}

/// The place of a block: a run and how many blocks of it come before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Spot {
    pub(crate) run: RunId,
    pub(crate) offset: u16,
}

/// Asks the processor to load the cache line of `place`, which a later step will need.
#[inline]
pub(crate) fn prefetch<T: ?Sized>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    #[allow(
        unsafe_code,
        reason = "a hint without an effect on memory; probing without it costs a cache miss per block stored"
    )]
    // SAFETY: a prefetch does not access memory as far as the program can see; any address is allowed.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
