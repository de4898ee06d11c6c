//! Errors in the payload of a forest frame.

use super::{CANDIDATES_MAX, PARTS_MAX, PATH_ENTRIES_MAX};

/// Reason why the payload of a forest frame is not valid. The checksum of the frame was right, so the writer made the
/// fault, not the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ForestError {
    /// The payload ends too early.
    #[error("the forest's frame ends in the middle")]
    Cut,
    /// A number needs more than 64 bits.
    #[error("a number is too large")]
    NumberTooLarge,
    /// An integer is larger than its field allows.
    #[error("{what} is {number}, and at most {most} is possible")]
    OutOfRange {
        /// Name of the field.
        what: &'static str,
        /// The integer in the payload.
        number: u64,
        /// Maximum integer that the field allows.
        most: usize,
    },
    /// The flags are unknown, or wrong at this place: the flag that begins a forest is on its first frame, and on no
    /// other frame.
    #[error("the flags {flags:#x} cannot come here: a forest begins once, goes on, and ends once")]
    Flags {
        /// The frame's first byte, which has the flags.
        flags: u8,
    },
    /// The forest ends, but after its last run the path from the root has not been popped completely.
    #[error("{open} levels are open after the last run; the data has been cut")]
    Unfinished {
        /// Number of levels of the path that have not been popped.
        open: usize,
    },
    /// No holder has the whole run. A writer cuts each run after the last block that a holder has.
    #[error("nobody has the last block of a run")]
    Unheld,
    /// A run extends beyond the last position.
    #[error("a run goes on beyond the last position")]
    Position,
    /// A run and its ancestors have more blocks, runs and holders than a reader allows.
    #[error("a path has more than {PATH_ENTRIES_MAX} blocks, runs and holders")]
    TooWide,
    /// A frame has more parts, or more candidates to check, than a reader accepts in one frame. A part is one holder's
    /// blocks of one run; the candidates are the holders of the block before a run.
    #[error("a frame has more than {PARTS_MAX} parts of holders, or {CANDIDATES_MAX} candidates for them")]
    TooManyParts,
    /// The frame has more or fewer hashes than its runs have blocks.
    #[error("the runs have {blocks} blocks, and {bytes} bytes of hashes follow; 8 are needed for each")]
    Hashes {
        /// Number of blocks of all runs of the frame.
        blocks: usize,
        /// Number of bytes that follow the runs; they should be the hashes of the blocks.
        bytes: usize,
    },
}
