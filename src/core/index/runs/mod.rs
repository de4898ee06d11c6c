//! State shared by all holders: runs of blocks, the blocks of each run that each holder has, and tables that find
//! runs and blocks.
//!
//! A run is an array of consecutive blocks. It is like an edge of a radix tree, but it is not split where another run
//! branches off. A run that branches off a block *follows* that block, and is a child of that block's run.
//!
//! | file | what |
//! |---|---|
//! | `run.rs`, `slab.rs` | one run as readers see it; runs by number |
//! | `print.rs` | fingerprints: whether a query agrees with 32 blocks of a run, in one comparison |
//! | `header.rs` | a run's position, length and change counter, in one word |
//! | `entry.rs` | how much of a run one holder has, in one word |
//! | `roster.rs` | the entries of all holders of a run |
//! | `bars.rs` | which blocks of a run are not resumable, and for which holders |
//! | `usable.rs` | how many leading blocks of a chain each holder can use |
//! | `heads.rs` | hash table for readers: finds the run that begins after a given block with a given hash |
//! | `places.rs` | table from the hashes of all blocks to their places, for turns |
//! | `waiting.rs` | blocks for which that table has no room |
//! | `store.rs`, `books.rs` | the runs of an index; state that only the writer whose turn it is uses |
//! | `numbers.rs` | which run numbers are in use |
//! | `writer.rs`, `barring.rs`, `trim.rs` | changing runs; changing their bars; cutting off blocks that no holder has |
//! | `recency.rs` | which runs were used longest ago |

mod barring;
mod bars;
mod books;
mod entry;
mod header;
mod heads;
mod numbers;
mod places;
mod print;
mod recency;
mod roster;
mod run;
mod slab;
mod store;
mod trim;
mod usable;
mod waiting;
mod writer;

pub(crate) use bars::{Barred, STEPS};
pub(crate) use entry::RosterEntry;
pub(crate) use header::Version;
pub(crate) use places::Places;
pub(crate) use print::{CHUNK, Prints};
pub(crate) use recency::Victim;
pub(crate) use roster::Roster;
pub(crate) use run::{Column, Run};
pub(crate) use store::{Head, RunStore};
pub(crate) use usable::split_by_usable;
pub(crate) use writer::{RunView, RunWriter};

use crate::index::block::current_mask;
use crate::words::give_back;

/// Maximum number of blocks of one run, an array of consecutive blocks. A longer sequence continues in a child run.
pub(crate) const RUN_BLOCKS_MAX: u16 = 4032;

/// Number of a run, from 1 on. After the run is removed, another run can get its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct RunId(u32);

impl RunId {
    pub(crate) fn new(number: u32) -> Self {
        Self(number)
    }

    /// One more than the largest possible run number.
    pub(crate) const END: u32 = 1 << 26;

    fn index(self) -> usize {
        self.0 as usize
    }
}

/// Place of a block: its run, and its offset in the run. The offset is the number of blocks before it in the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Spot {
    pub(crate) run: RunId,
    pub(crate) offset: u16,
}

/// Number of bits of the offset in the number that stands for a [`Spot`].
const OFFSET_BITS: u32 = 12;

impl Spot {
    /// Returns the place as a number below 2^38, which is never 0. The next block of the run has the next number.
    pub(crate) fn bits(self) -> u64 {
        u64::from(self.run.0) << OFFSET_BITS | u64::from(self.offset)
    }

    #[allow(
        clippy::cast_possible_truncation,
        reason = "both parts are masked to what fits"
    )]
    pub(crate) fn from_bits(bits: u64) -> Self {
        Self {
            run: RunId((bits >> OFFSET_BITS) as u32 & (RunId::END - 1)),
            offset: (bits & ((1 << OFFSET_BITS) - 1)) as u16,
        }
    }
}

/// Whether two sequence hashes, or two fragments of sequence hashes, agree in the bits that a lineage hash keeps at
/// `position`.
#[inline]
pub(crate) fn is_same_at(position: u32, one: u64, other: u64) -> bool {
    (one ^ other) & current_mask(position) == 0
}

/// Hash by which a block is looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) hash: u64,
    /// Whether `hash` is a whole sequence hash. Otherwise it is the fragment that a lineage hash keeps.
    pub(crate) is_whole: bool,
}

impl Wanted {
    pub(crate) fn whole(hash: u64) -> Self {
        Self { hash, is_whole: true }
    }

    pub(crate) fn fragment(hash: u64) -> Self {
        Self {
            hash,
            is_whole: false,
        }
    }
}

/// Number of times that one call of [`give_back_memory`] collects garbage. Each time frees a few hundred allocations.
const COLLECTIONS: usize = 64;

/// Frees memory of all indexes that no query can reach any more. Each change of an index already frees a little of such
/// memory, but after many removals some is left. Call this function regularly, on a thread that neither answers queries
/// nor applies events, to free the rest.
pub fn give_back_memory() {
    for _ in 0..COLLECTIONS {
        crate::epoch::pin().flush();
    }
    give_back(1);
}
