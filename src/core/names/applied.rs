//! The outcome of applying events.

use crate::wire::{DegradedReason, DegradedReasons};
use crate::worded;

worded! {
    /// Reasons why blocks of an event were not taken, or were taken with a note. Label values of a metric.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(usize)]
    pub enum RejectReason {
        /// A removed block was not held. Nothing is lost then.
        UnknownBlock => "unknown_block",
        /// A block lost its place or its name to another block: one name for two blocks, or one hash after two parents.
        /// Nobody can tell whether the engine still has the first block.
        Moved => "moved",
        /// A position beyond what a lineage hash can carry.
        PositionOutOfRange => "position_out_of_range",
        /// The holder is full. Or the blocks follow a block that was left out because the holder or the index was full.
        Capacity => "capacity",
        /// The namespace recomputes the chain, but the event has no block hashes or tokens, or its parent no sequence hash.
        MissingContent => "missing_content",
        /// The tokens do not make whole blocks of the namespace's size.
        ContentMismatch => "content_mismatch",
        /// The engine's hashes are not the contract's chain. The blocks are held, but only under the engine's hashes.
        ForeignChain => "foreign_chain",
        /// Blocks whose parent had not come were dropped to make room.
        ParkingFull => "parking_full",
        /// Blocks were dropped because their parent did not come in time.
        ParkingExpired => "parking_expired",
        /// A block came under a name that orphans had given as the sequence hash of their parent. So the orphans stand
        /// behind the wrong block.
        AmbiguousParent => "ambiguous_parent",
    }
}

impl RejectReason {
    /// Returns the reason for doubt about the holder that follows from such a rejection. `None` if nothing is lost.
    pub fn doubt(self) -> Option<DegradedReason> {
        match self {
            Self::UnknownBlock | Self::ForeignChain => None,
            Self::Moved
            | Self::PositionOutOfRange
            | Self::MissingContent
            | Self::ContentMismatch
            | Self::AmbiguousParent => Some(DegradedReason::Rejected),
            Self::Capacity => Some(DegradedReason::Capacity),
            Self::ParkingFull | Self::ParkingExpired => Some(DegradedReason::UnknownParent),
        }
    }
}

/// The outcome of applying events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Applied {
    /// Number of blocks stored, including blocks that were held already.
    pub stored: u64,
    /// Number of blocks removed, including blocks that another tier still holds.
    pub removed: u64,
    /// Whether everything was cleared.
    pub cleared: bool,
    /// The publisher's doubts from now on, if it told them.
    pub doubted: Option<DegradedReasons>,
    /// Whether the holder said goodbye.
    pub goodbye: bool,
    /// Number of stored events that began to wait for their parent.
    pub parked: u64,
    rejected: [u64; RejectReason::ALL.len()],
}

impl Applied {
    /// Number of blocks that were rejected for this reason.
    pub fn rejected(&self, reason: RejectReason) -> u64 {
        self.rejected[reason as usize]
    }

    /// Whether blocks were left out that the engine still has, or may have.
    pub fn is_short(&self) -> bool {
        let is_short = |reason: &RejectReason| self.rejected(*reason) > 0 && reason.doubt().is_some();
        RejectReason::ALL.iter().any(is_short)
    }

    /// Counts a block that was to be removed: as removed if it `was_held` in the tier, and otherwise as unknown.
    pub(super) fn count_removed(&mut self, was_held: bool) {
        match was_held {
            true => self.removed += 1,
            false => self.reject(RejectReason::UnknownBlock, 1),
        }
    }

    pub(crate) fn reject(&mut self, reason: RejectReason, blocks: usize) {
        self.rejected[reason as usize] += blocks as u64;
    }
}
