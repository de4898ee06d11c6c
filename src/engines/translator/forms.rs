//! The parts of a saved translator, as they are written down.

use std::num::NonZeroU64;

use kvatlas_core::hash::Position;
use serde::{Deserialize, Serialize};

use crate::batch::GroupKind;
use crate::reason::Reason;

use super::block::Block;
use super::tiers::PerTier;

/// Reason why a translator can't be restored from its saved form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SavedError {
    /// The saved form has blocks of another size than the settings.
    #[error("its blocks have {found} tokens, and the engine's have {expected}")]
    BlockSize {
        /// Block size in the saved form, in tokens.
        found: u32,
        /// Block size in the settings, in tokens.
        expected: u32,
    },
    /// The saved form has more block names than may be kept.
    #[error("it has {names} names of blocks; {names_max} are allowed")]
    TooMany {
        /// Number of block names in the saved form.
        names: usize,
        /// Maximum number of names that may be kept.
        names_max: usize,
    },
    /// A part of the saved form contradicts another part, or is impossible.
    #[error("it contradicts itself: {0}")]
    Contradiction(&'static str),
}

impl Block {
    /// Returns the block unchanged. Fails if its position is too large, if a block at position 0 has a parent, or if
    /// a block at another position has no parent.
    pub(super) fn checked(self) -> Result<Self, SavedError> {
        let is_placed = Position::new(u64::from(self.position)).is_ok();
        if !is_placed || self.parent.is_none() != (self.position == 0) {
            return Err(SavedError::Contradiction("a block stands nowhere"));
        }
        Ok(self)
    }
}

/// A block that is kept, and the state in which it was published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedKept {
    pub(super) block: Block,
    pub(super) published: u8,
    pub(super) barred: u8,
    pub(super) inner: u8,
}

/// All blocks of a chain, in their saved form.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedChain {
    /// The kept blocks by slot; `None` for a free slot.
    pub(super) kept: Vec<Option<SavedKept>>,
    pub(super) has_tree: bool,
}

/// A block name of main attention. Fields: the name, the slot of its block, the number of copies in each tier, and
/// the number of uncertain copies on the device. A copy is uncertain if its stored event may only have reported a
/// block that was already known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedName(
    pub(super) u64,
    pub(super) u32,
    pub(super) PerTier<u16>,
    pub(super) u16,
);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedGroups {
    pub(super) lanes: Vec<(Option<u32>, Vec<SavedName>)>,
    pub(super) others: Vec<u32>,
    /// For each of `lanes`, the slots of blocks that have had two names at one time, and whether they had them on the
    /// device. Absent in states of earlier versions.
    #[serde(default)]
    pub(super) mixed: Vec<Vec<(u32, bool)>>,
}

/// A name in a group other than main attention. Its block ends where a block of the contract ends. Fields: the name,
/// the slot of the contract's block, and the number of copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedEnd(pub(super) u64, pub(super) u32, pub(super) u16);

/// The name of a small block, that is, a block smaller than those of main attention. Fields: the name, the block's spot
/// (a hash of its content), the number of copies, and how many small blocks follow in the block of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedSmall(
    pub(super) u64,
    pub(super) Option<NonZeroU64>,
    pub(super) u16,
    pub(super) u8,
);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedSpots {
    pub(super) names: Vec<SavedSmall>,
    /// The spots (content hashes) of the small blocks that a request may need, by the slot of the contract's block in which they
    /// lie. Each slot has the same number of spots.
    pub(super) cells: Vec<Option<NonZeroU64>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedWindow {
    pub(super) index: u32,
    pub(super) kind: GroupKind,
    pub(super) block: u64,
    pub(super) names: Vec<SavedEnd>,
    pub(super) spots: Option<SavedSpots>,
    pub(super) masks: Vec<u64>,
    pub(super) runs: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedWindows {
    pub(super) all: Vec<SavedWindow>,
    pub(super) unlisted: Vec<u32>,
    pub(super) expected: Option<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedBeyond {
    pub(super) doubts: PerTier<Option<Reason>>,
    pub(super) chunks: PerTier<u32>,
    pub(super) past: Vec<(u64, Block)>,
    pub(super) is_used: bool,
    pub(super) has_ends: bool,
    pub(super) has_parts: bool,
    pub(super) has_salts: bool,
    pub(super) has_objects: bool,
    /// The field is missing in saved forms from before the first release.
    #[serde(default)]
    pub(super) has_kinds: bool,
    /// The chunks that have names of their own, one element for each tier. Translators that were saved before the
    /// first release lack this field.
    #[serde(default)]
    pub(super) own_chunks: Vec<SavedOwnChunks>,
}

/// The chunks of a tier that have names of their own. A chunk is several blocks that load only together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedOwnChunks {
    /// The names of the held chunks. Each comes with the name of the chunk before it, or `None` for the first chunk
    /// of a sequence.
    pub(super) parents: Vec<(u64, Option<u64>)>,
    pub(super) is_used: bool,
    pub(super) has_removals: bool,
}
