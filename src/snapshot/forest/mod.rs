//! The walked holders of a snapshot: their blocks as one forest, each distinct block once.
//!
//! # Order
//!
//! The runs of an index ([`crate::index`]) form a forest: a run branches off a block of another one, or begins at position 0. They are
//! written in depth-first order, parents before children; of two children the one that branches off later comes first. It is the layout of
//! [`crate::trie`] as a stream: each run says how many levels to pop after it ([`Outline`](crate::trie::Outline)), so positions, parents and
//! parents' hashes follow from the walk, and are not written. A reader keeps the blocks on the path from the root, and nothing else.
//!
//! # Holders
//!
//! A holder has a run's first blocks or nothing of it, and only what branches off blocks that it has. So the *candidates* of a run
//! are known: those that have the block that it branches off; of a run at position 0 all holders of the forest. A run says how they
//! change, in the shorter of two forms: all candidates have all of it, *except* these; or *only* these have any. What is the same all
//! along a path costs one byte a run, and nothing can be written that has a hole.
//!
//! # Example
//!
//! Three holders: number 0 has the blocks `abcdefg`, 1 has these and `hi` behind them, 2 has `abc` and then `xyz`.
//!
//! ```text
//!   a b c d e f g          run A   0 and 1 have all 7 blocks, 2 has 3
//!       │       └── h i    run B   branches off g; 1 has it
//!       └── x y z          run C   branches off c; 2 has it
//!
//!                     run A       run B       run C
//! behind the branch   -           0           4          blocks of the parent: g is its last, c has 4 behind it
//! length - 1          6           1           2
//! changes             1, except   1, except   1, only
//!                     2 lacks 4   0 lacks 2   2 lacks 0
//! pops                0           1           2          after B its sibling comes; after C nothing is left open
//! hashes              a … g       h i         x y z
//! ```
//!
//! The candidates of run A are 0, 1 and 2; those of run B 0 and 1, since 2 lacks g; those of run C all three, since all have c. A change
//! names its candidate by how many are passed over since the last change. Lacking blocks count from 1 in the form *except* (who lacks
//! none is no exception), and from 0 in the form *only*. So these are the runs, byte by byte, and 12 hashes of 8 bytes follow:
//!
//! ```text
//! A: 06 | 02 02 03 | 00        B: 00 01 | 02 00 01 | 01        C: 04 02 | 03 02 00 | 02
//! ```
//!
//! # Layout of a frame
//!
//! ```text
//! bytes
//!     1  flags: 1 the frame begins a forest, 2 it ends it
//!        if it begins one: the number of its holders, then each holder's number (walked holders of the file count from 0), as the
//!        distance from the number that could have been next
//!        the number of runs, then for each, in order:
//!            where it branches off: how many blocks of the parent lie behind that block (not at position 0). A later sibling counts
//!                as if the parent ended there.
//!            its length, less 1
//!            2 × changes + form: 0 except, 1 only
//!            for each change: candidates passed over since the last one; blocks that the candidate lacks, less 1 in the form "except"
//!            levels to pop after it: 0 if a child follows
//!   8×n  the hashes of all blocks of these runs
//! ```
//!
//! Numbers are LEB128: 7 bits a byte, the lowest first, the top bit says that more follow. A forest's frames follow each other.
//!
//! # Limits
//!
//! Whatever a file says, a reader takes memory for one frame, for [`PARTS_MAX`] parts of holders, and for [`PATH_ENTRIES_MAX`] blocks, runs
//! and holders on a path; and it looks at no more than [`CANDIDATES_MAX`] candidates for a frame. A writer leaves out what would need more, and says so ([`Pushed::TooWide`]).

mod bytes;
mod encoder;
mod error;
mod reader;

#[cfg(test)]
mod tests;

pub use encoder::{ForestEncoder, ForestFrame, Pushed};
pub use error::ForestError;
pub use reader::ForestChunk;
pub(super) use reader::ForestReader;

/// Most parts that one frame gives to holders; a part is what one holder has of one run.
pub const PARTS_MAX: usize = 1 << 20;
/// Most candidates that the runs of one frame have together.
pub const CANDIDATES_MAX: usize = 1 << 25;
/// Most blocks on a path, plus its runs, plus their holders.
pub const PATH_ENTRIES_MAX: usize = 1 << 23;
/// Most blocks of a run.
const RUN_BLOCKS_MAX: usize = u16::MAX as usize;
/// A frame is closed when it has this many bytes.
const FRAME_BYTES: usize = 1 << 20;

/// A frame's first byte: it begins a forest.
const BEGINS: u8 = 1;
/// A frame's first byte: it ends a forest.
const ENDS: u8 = 2;
/// Changes: all candidates have all, except these.
const EXCEPT: u64 = 0;
/// Changes: only these candidates have any.
const ONLY: u64 = 1;
