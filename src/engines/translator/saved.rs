//! A translator in a form that can be written down, so that the next process continues where this one ends.
//!
//! The form has only facts that cannot be computed again: blocks, names, copies, the blocks of groups of layers, and doubts.
//! Other facts are computed from these, for example the number of a block's names and the order of the blocks. A form that
//! contradicts itself is refused, because it would make the translator count wrong.

use serde::{Deserialize, Serialize};

use crate::batch::Untold;
use crate::reason::Reason;

use super::Translator;
use super::adapters::Adapters;
use super::beyond::Beyond;
use super::block::Block;
use super::chain::Chain;
use super::forms::{SavedBeyond, SavedChain, SavedError, SavedGroups, SavedSpots, SavedWindows};
use super::groups::HolderGroups;
use super::recalled::Recalled;
use super::settings::TranslatorSettings;
use super::sizes::Sizes;
use super::windows::Windows;

/// The complete state of a translator between two batches, in a form that can be written down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedTranslator {
    block_size: u32,
    chain: SavedChain,
    groups: SavedGroups,
    windows: SavedWindows,
    beyond: SavedBeyond,
    recalled: Vec<(u64, Block)>,
    sizes: Sizes,
    adapters: Adapters,
    untold: Untold,
    lookahead: Option<usize>,
    doubt: Option<Reason>,
    hides_groups: bool,
    unchecked: u32,
    #[serde(default)]
    hashes_pairs: bool,
}

impl SavedTranslator {
    /// Number of block names in the saved translator, in all groups of layers.
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
    /// Returns the complete state of the translator. May be called only between two batches.
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
            hashes_pairs: self.hashes_pairs,
        }
    }

    /// Makes a translator with the state `saved`. It continues where the saved translator stopped, and emits no event
    /// again that the saved translator has emitted.
    ///
    /// # Errors
    ///
    /// [`SavedError`] if `saved` contradicts itself, or doesn't fit these settings.
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
        let groups = HolderGroups::restore(saved.groups, &mut chain)?;
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
            hashes_pairs: saved.hashes_pairs,
            ..Self::new(settings)
        })
    }
}
