//! The errors of a forest.

use crate::trie::OutlineError;

use super::{CANDIDATES_MAX, PARTS_MAX, PATH_ENTRIES_MAX};

/// Why the payload of a forest frame is not valid. Its checksum was right, so the fault is the writer's and not the
/// disk's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ForestError {
    /// The payload ends in the middle.
    #[error("the forest's frame ends in the middle")]
    Cut,
    /// A number needs more than 64 bits.
    #[error("a number is too large")]
    NumberTooLarge,
    /// A number is larger than is possible there.
    #[error("{what} is {number}, and at most {most} is possible")]
    OutOfRange {
        /// The things that the number counts.
        what: &'static str,
        /// The number in the payload.
        number: u64,
        /// The largest that would be possible.
        most: usize,
    },
    /// The flags do not fit the frame's place: a forest begins once, continues, and ends once.
    #[error("the flags {flags:#x} cannot come here: a forest begins once, goes on, and ends once")]
    Flags {
        /// The frame's first byte.
        flags: u8,
    },
    /// The numbers of levels to pop make no forest.
    #[error(transparent)]
    Outline(#[from] OutlineError),
    /// No holder has the last block of a run.
    #[error("nobody has the last block of a run")]
    Unheld,
    /// A run goes on beyond the last position.
    #[error("a run goes on beyond the last position")]
    Position,
    /// A path needs more memory than a reader grants.
    #[error("a path has more than {PATH_ENTRIES_MAX} blocks, runs and holders")]
    TooWide,
    /// A frame has more parts of holders, or more candidates, than a reader takes at once.
    #[error("a frame has more than {PARTS_MAX} parts of holders, or {CANDIDATES_MAX} candidates for them")]
    TooManyParts,
    /// The frame has more or fewer hashes than its runs have blocks.
    #[error("the runs have {blocks} blocks, and {bytes} bytes of hashes follow; 8 are needed for each")]
    Hashes {
        /// Blocks of all runs of the frame.
        blocks: usize,
        /// Bytes of hashes that follow the runs.
        bytes: usize,
    },
}
