//! Outcome of applying events: the numbers of blocks stored, removed and rejected.

use crate::wire::{DegradedReason, DegradedReasons};
use crate::worded;

worded! {
    /// Reasons why blocks of an event were not stored or removed, or were stored with doubts. They are label values
    /// of a metric.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    #[repr(usize)]
    pub enum RejectReason {
        /// The holder did not have a removed block. In this case nothing is lost.
        UnknownBlock => "unknown_block",
        /// A block lost its place or its name to another block: either both blocks had the same name, or the same hash
        /// followed two parents. It is not known whether the engine still has the first block.
        Moved => "moved",
        /// A block's position is above the maximum that a lineage hash can carry.
        PositionOutOfRange => "position_out_of_range",
        /// The holder is full, or the blocks follow a block that was left out because the holder or the index was
        /// full.
        Capacity => "capacity",
        /// The namespace recomputes the chain, but the event has neither block hashes nor tokens, or its parent has
        /// no sequence hash.
        MissingContent => "missing_content",
        /// The event's tokens do not make whole blocks of the namespace's block size.
        ContentMismatch => "content_mismatch",
        /// The engine's hashes are not the contract's chain. The blocks are stored, but only under the engine's
        /// hashes.
        ForeignChain => "foreign_chain",
        /// Blocks whose parent had not arrived were dropped to make room.
        ParkingFull => "parking_full",
        /// Blocks were dropped because their parent did not arrive in time.
        ParkingExpired => "parking_expired",
        /// A block was stored under a name that orphans (blocks whose parent is unknown) had given as the sequence hash
        /// of their parent. So the orphans may be children of the wrong block.
        AmbiguousParent => "ambiguous_parent",
        /// An event gives a block by a hash that very many blocks have, so that the index may not find this one. Or an
        /// event stores one more block with the same lineage hash behind the same block, and the holder had many such.
        CrowdedHash => "crowded_hash",
    }
}

impl RejectReason {
    /// Returns the reason for doubt about the holder that this rejection causes. `None` if nothing is lost.
    pub fn doubt(self) -> Option<DegradedReason> {
        match self {
            Self::UnknownBlock | Self::ForeignChain => None,
            Self::Moved
            | Self::PositionOutOfRange
            | Self::MissingContent
            | Self::ContentMismatch
            | Self::AmbiguousParent
            | Self::CrowdedHash => Some(DegradedReason::Rejected),
            Self::Capacity => Some(DegradedReason::Capacity),
            Self::ParkingFull | Self::ParkingExpired => Some(DegradedReason::UnknownParent),
        }
    }
}

/// Outcome of applying events: the numbers of blocks stored, removed and rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Applied {
    /// Number of blocks stored, including blocks that the holder already had.
    pub stored: u64,
    /// Number of blocks removed, including blocks that another tier still holds.
    pub removed: u64,
    /// Whether an event cleared all blocks of the holder.
    pub cleared: bool,
    /// Doubts that the publisher now has about its own blocks. `None` if no event told them.
    pub doubted: Option<DegradedReasons>,
    /// Whether the holder's publisher said goodbye.
    pub goodbye: bool,
    /// Number of stored events that began to wait for their parent.
    pub parked: u64,
    rejected: [u64; RejectReason::ALL.len()],
}

impl Applied {
    /// Number of blocks that were rejected for `reason`.
    pub fn rejected(&self, reason: RejectReason) -> u64 {
        self.rejected[reason as usize]
    }

    /// Whether blocks that the engine still has, or may have, were left out.
    pub fn is_short(&self) -> bool {
        let is_short = |reason: &RejectReason| self.rejected(*reason) > 0 && reason.doubt().is_some();
        RejectReason::ALL.iter().any(is_short)
    }

    /// Counts a block of a removed event: as removed if the tier held it (`was_held`), otherwise as unknown.
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
