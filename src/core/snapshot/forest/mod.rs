//! The blocks of a snapshot's regular holders (no hole, one tier, the contract's names) as one forest, which has each
//! distinct block once.
//!
//! # Order
//!
//! The runs of an index ([`crate::index`]) form a forest. A run is a sequence of blocks; it branches off a block of
//! another run, or begins at position 0.
//!
//! - Runs are written in depth-first order, parents before children. Of two children, the child that branches off at
//!   a later block comes first.
//! - Each run tells how many levels to pop after it. That is 0 if its child comes next, 1 if its sibling comes next, and
//!   2 or more if the next run is a sibling of its parent or of a run further up. Positions, parents and parents'
//!   hashes follow from the pops, and are not written.
//! - A reader keeps only the blocks on the path from the root.
//!
//! # Holders
//!
//! A holder has the first blocks of a run, or none of its blocks. It has blocks of a run only if it has the block that
//! the run branches off. All holders with that block are the run's *candidates*. For a run at position 0, all holders
//! of the forest are candidates.
//!
//! A run lists some of its candidates, in one of two forms, whichever is shorter. Each entry of the list, called a
//! *change*, tells how many blocks of the run the candidate lacks:
//!
//! - *except*: all candidates have the whole run, except the listed ones;
//! - *only*: only the listed candidates have blocks of the run.
//!
//! A run without changes takes one byte for its holders. A holder with a hole cannot be written.
//!
//! # Example
//!
//! Three holders: number 0 has the blocks `abcdefg`, number 1 has the same and then `hi`, number 2 has `abc` and then
//! `xyz`.
//!
//! ```text
//!   a b c d e f g          run A   0 and 1 have all 7 blocks, 2 has 3
//!       │       └── h i    run B   branches off g; 1 has it
//!       └── x y z          run C   branches off c; 2 has it
//!
//!                     run A       run B       run C
//! after the branch    -           0           4          blocks of the parent after the branch: none after g, 4 after c
//! length - 1          6           1           2
//! changes             1, except   1, except   1, only
//!                     2 lacks 4   0 lacks 2   2 lacks 0
//! pops                0           1           2          after B its sibling comes; after C nothing is left open
//! hashes              a … g       h i         x y z
//! ```
//!
//! Run A has the candidates 0, 1 and 2. Run B has 0 and 1, since 2 lacks g. Run C has all three, since all have c.
//!
//! A change first gives the number of candidates skipped since the last change, and then the number of blocks that the
//! candidate lacks. In the form *except*, this number is stored less 1, as a candidate that lacks no block is no
//! exception. In the form *only*, it is stored as it is. These are the runs, byte by byte; 12 hashes of 8 bytes follow:
//!
//! ```text
//! A: 06 | 02 02 03 | 00        B: 00 01 | 02 00 01 | 01        C: 04 02 | 03 02 00 | 02
//! ```
//!
//! # Layout of a frame
//!
//! ```text
//! bytes
//!     1  flags: 1 the frame begins a forest, 2 the frame ends a forest
//!        if the frame begins a forest: the number of the forest's holders, then the number of each holder, in ascending
//!            order, less the smallest number that is still possible: 0, then the last number plus 1. (The numbers
//!            count the file's holders that are in a forest, from 0.)
//!        the number of runs, then for each run, in order:
//!            where it branches off: the number of the parent's blocks after that block (absent at position 0).
//!                For a later sibling the parent counts as if it ended where the sibling before branches off.
//!            its length, less 1
//!            2 × changes + form: 0 except, 1 only
//!            for each change: candidates passed over since the last change; blocks that the candidate lacks,
//!                less 1 in the form "except"
//!            levels to pop after the run: 0 if a child follows
//!   8×n  the hashes of all blocks of these runs
//! ```
//!
//! Numbers are LEB128: 7 bits per byte, the lowest bits first. A set top bit means that more bytes follow. The frames
//! of a forest are consecutive.
//!
//! # Limits
//!
//! Whatever a file contains, a reader takes memory for one frame, [`PARTS_MAX`] parts of holders, and
//! [`PATH_ENTRIES_MAX`] blocks, runs and holders on a path. It checks at most [`CANDIDATES_MAX`] candidates for each
//! frame. A writer leaves out runs that would need more ([`Pushed::TooWide`]).

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

/// Maximum number of parts in one frame. A part is the blocks that one holder has of one run.
pub const PARTS_MAX: usize = 1 << 20;
/// Maximum number of candidates (holders of the block before a run) of all runs of one frame together.
pub const CANDIDATES_MAX: usize = 1 << 25;
/// Maximum number of blocks, runs and holders on a path together. A path is a run and its ancestors. A holder counts
/// once for each of these runs of which it has blocks.
pub const PATH_ENTRIES_MAX: usize = 1 << 23;
/// Maximum number of blocks of a run.
const RUN_BLOCKS_MAX: usize = u16::MAX as usize;
/// Number of bytes at which a frame is complete and the next frame begins.
const FRAME_BYTES: usize = 1 << 20;

/// Flag in a frame's first byte: the frame begins a forest.
const BEGINS: u8 = 1;
/// Flag in a frame's first byte: the frame ends a forest.
const ENDS: u8 = 2;
/// Number that stands for the form *except* of a run's list: all candidates (holders of the block before the run) have
/// the whole run, except the listed ones.
const EXCEPT: u64 = 0;
/// Number that stands for the form *only* of a run's list: only the listed candidates (holders of the block before the
/// run) have blocks of the run.
const ONLY: u64 = 1;
