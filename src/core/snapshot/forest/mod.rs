//! The blocks of a snapshot's regular holders as one forest, each distinct block once.
//!
//! # Order
//!
//! The runs of an index ([`crate::index`]) form a forest: a run branches off a block of another run, or begins at position 0.
//!
//! - Runs are written in depth-first order, parents before children. Of two children, the one that branches off later comes first.
//! - Each run says how many levels to pop after it, as in [`crate::trie`] ([`Outline`](crate::trie::Outline)). Positions, parents and
//!   parents' hashes follow from that, and are not written.
//! - A reader keeps the blocks on the path from the root, and no others.
//!
//! # Holders
//!
//! A holder has the first blocks of a run, or none of them. It has blocks of a run only if it has the block that the run branches off. The
//! holders with that block are the run's *candidates*; all holders of the forest are candidates of a run at position 0.
//!
//! A run lists its changes in the shorter of two forms:
//!
//! - *except*: all candidates have the whole run, except these;
//! - *only*: only these candidates have blocks of the run.
//!
//! A run without a change costs one byte for its holders. A holder with a hole cannot be written.
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
//! The candidates of run A are 0, 1 and 2. Those of run B are 0 and 1, since 2 lacks g. Those of run C are all three, since all have c.
//!
//! A change names its candidate by the number of candidates passed over since the last change. It then counts the blocks that the
//! candidate lacks: from 1 in the form *except*, where a candidate that lacks none is no exception; from 0 in the form *only*. These are
//! the runs, byte by byte. 12 hashes of 8 bytes follow:
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
//! Whatever a file says, a reader takes memory for one frame, [`PARTS_MAX`] parts of holders, and [`PATH_ENTRIES_MAX`] blocks, runs and
//! holders on a path. It looks at [`CANDIDATES_MAX`] candidates for a frame at most. A writer leaves out runs that would need more
//! ([`Pushed::TooWide`]).

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
