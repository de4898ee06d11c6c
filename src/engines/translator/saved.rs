//! A translator in a form that can be written down, so that the next process goes on where this one ends.
//!
//! The form keeps only what cannot be computed again: blocks, names and copies, the blocks of groups of layers, doubts.
//! Everything else (how many names a block has, which block follows which) is computed from that. A form that contradicts
//! itself is refused, so that it can't make a translator count wrong.

use std::num::NonZeroU64;

use kvatlas_core::hash::{HashSeed, Position, SequenceHash};
use serde::{Deserialize, Serialize};

use crate::batch::{GroupKind, Untold};
use crate::reason::Reason;

use super::Translator;
use super::adapters::Adapters;
use super::beyond::Beyond;
use super::chain::{Block, Chain};
use super::groups::Groups;
use super::recalled::Recalled;
use super::settings::TranslatorSettings;
use super::sizes::Sizes;
use super::tiers::TIERS;
use super::windows::Windows;

/// Why a translator can't be restored from a form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SavedError {
    /// The blocks have another size.
    #[error("its blocks have {found} tokens, and the engine's have {expected}")]
    BlockSize {
        /// The size of the form.
        found: u32,
        /// The size of the settings.
        expected: u32,
    },
    /// More names than may be kept.
    #[error("it has {names} names of blocks; {names_max} are allowed")]
    TooMany {
        /// Number of names in the form.
        names: usize,
        /// Largest number of names allowed.
        names_max: usize,
    },
    /// A part contradicts another part, or is impossible.
    #[error("it contradicts itself: {0}")]
    Contradiction(&'static str),
}

/// All that a translator knows between two batches.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedTranslator {
    block_size: u32,
    chain: SavedChain,
    groups: SavedGroups,
    windows: SavedWindows,
    beyond: SavedBeyond,
    recalled: Vec<(u64, SavedBlock)>,
    sizes: Sizes,
    adapters: Adapters,
    untold: Untold,
    lookahead: Option<usize>,
    doubt: Option<Reason>,
    hides_groups: bool,
    unchecked: u32,
}

/// One block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedBlock {
    sequence: u64,
    parent: Option<u64>,
    position: u32,
    seed: HashSeed,
    adapter: HashSeed,
}

impl From<Block> for SavedBlock {
    fn from(block: Block) -> Self {
        Self {
            sequence: block.sequence.as_u64(),
            parent: block.parent.map(SequenceHash::as_u64),
            position: block.position,
            seed: block.seed,
            adapter: block.adapter,
        }
    }
}

impl SavedBlock {
    pub(super) fn block(self) -> Result<Block, SavedError> {
        let is_placed = Position::new(u64::from(self.position)).is_ok();
        if !is_placed || self.parent.is_none() != (self.position == 0) {
            return Err(SavedError::Contradiction("a block stands nowhere"));
        }
        Ok(Block {
            sequence: SequenceHash(self.sequence),
            parent: self.parent.map(SequenceHash),
            position: self.position,
            seed: self.seed,
            adapter: self.adapter,
        })
    }
}

/// A block that is kept, and the state in which it was published.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedKept {
    pub(super) block: SavedBlock,
    pub(super) published: u8,
    pub(super) barred: u8,
    pub(super) inner: u8,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedChain {
    /// By slot.
    pub(super) kept: Vec<Option<SavedKept>>,
    pub(super) has_tree: bool,
}

/// A name of main attention: the slot of its block, its copies in each tier, and how many of its copies on the device may be
/// mere reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedName(
    pub(super) u64,
    pub(super) u32,
    pub(super) [u16; TIERS],
    pub(super) u16,
);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedGroups {
    pub(super) lanes: Vec<(Option<u32>, Vec<SavedName>)>,
    pub(super) others: Vec<u32>,
}

/// A name in another group, whose block ends with a block of the contract: the latter's slot, and the number of copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedEnd(pub(super) u64, pub(super) u32, pub(super) u16);

/// A name of a small block: the block's spot, its copies, and how many small blocks follow it within a block of the contract.
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
    /// The spots of small blocks, by slot, as many for each slot as matter.
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
    pub(super) doubts: [Option<Reason>; TIERS],
    pub(super) chunks: [u32; TIERS],
    pub(super) past: Vec<(u64, SavedBlock)>,
    pub(super) is_used: bool,
    pub(super) has_ends: bool,
    pub(super) has_parts: bool,
    pub(super) has_salts: bool,
    pub(super) has_objects: bool,
}

impl SavedTranslator {
    /// Number of names of blocks in the form.
    pub fn names(&self) -> usize {
        let of_main = self.groups.lanes.iter().map(|(_, names)| names.len());
        let small = |spots: &SavedSpots| spots.names.len();
        let of_windows = self
            .windows
            .all
            .iter()
            .map(|window| window.names.len() + window.spots.as_ref().map_or(0, small));
        of_main.chain(of_windows).sum()
    }
}

impl Translator {
    /// Returns all that the translator knows. Call it between two batches.
    ///
    /// Takes time and memory in proportion to the held blocks.
    pub fn save(&self) -> SavedTranslator {
        SavedTranslator {
            block_size: self.settings.block_size.as_u32(),
            chain: self.chain.save(),
            groups: self.groups.save(),
            windows: self.windows.save(),
            beyond: self.beyond.save(),
            recalled: self.recalled.save(),
            sizes: self.sizes,
            adapters: self.adapters.clone(),
            untold: self.untold,
            lookahead: self.lookahead,
            doubt: self.doubt,
            hides_groups: self.hides_groups,
            unchecked: self.unchecked,
        }
    }

    /// A translator that goes on where `saved` was taken. It does not emit again what the saved translator had emitted.
    ///
    /// # Errors
    ///
    /// [`SavedError`] if the form contradicts itself, or doesn't fit these settings.
    pub fn restore(settings: TranslatorSettings, saved: SavedTranslator) -> Result<Self, SavedError> {
        let (found, expected) = (saved.block_size, settings.block_size.as_u32());
        if found != expected {
            return Err(SavedError::BlockSize { found, expected });
        }
        let (names, names_max) = (saved.names().max(saved.recalled.len()), settings.blocks_max);
        if names > names_max {
            return Err(SavedError::TooMany { names, names_max });
        }
        let has_tree = saved.chain.has_tree;
        let mut chain = Chain::restore(saved.chain)?;
        let groups = Groups::restore(saved.groups, &mut chain)?;
        let windows = Windows::restore(expected, saved.windows, &mut chain)?;
        if has_tree {
            chain.grow_tree();
            // Nothing has changed.
            chain.forget_touched();
        }
        Ok(Self {
            chain,
            groups,
            windows,
            beyond: Beyond::restore(saved.beyond)?,
            recalled: Recalled::restore(saved.recalled)?,
            sizes: saved.sizes,
            adapters: saved.adapters,
            untold: saved.untold,
            lookahead: saved.lookahead,
            doubt: saved.doubt,
            hides_groups: saved.hides_groups,
            unchecked: saved.unchecked,
            ..Self::new(settings)
        })
    }
}
