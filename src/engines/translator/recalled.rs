//! Names from before batches were lost, and the held blocks that they prove.
//!
//! Some engines store a block only while they hold all blocks before it: the request that computes it holds them. Of such an
//! engine, a stored block whose parent is known by name shows that all of the parent's ancestors are on the device at that
//! moment. So a prefix of which no event is left comes back with the first block that is stored behind it. The number of
//! copies stays unknown, and so do other held blocks. So the holder stays in doubt.

use hashbrown::HashMap;

use kvatlas_core::hash::SequenceHash;

use super::Translator;
use super::chain::Block;
use super::groups::LaneId;
use super::output::Translation;
use super::saved::{SavedBlock, SavedError};
use super::tiers::TierIndex;

/// The blocks that names of main attention stood for before batches were lost.
#[derive(Debug, Default)]
pub(super) struct Recalled {
    blocks: HashMap<u64, Block>,
    names: HashMap<SequenceHash, u64>,
}

impl Recalled {
    fn of(names: impl Iterator<Item = (u64, Block)>) -> Self {
        let mut recalled = Self::default();
        for (name, block) in names {
            recalled.blocks.insert(name, block);
            recalled.names.insert(block.sequence, name);
        }
        recalled
    }

    pub(super) fn save(&self) -> Vec<(u64, SavedBlock)> {
        self.blocks
            .iter()
            .map(|(name, block)| (*name, (*block).into()))
            .collect()
    }

    pub(super) fn restore(saved: Vec<(u64, SavedBlock)>) -> Result<Self, SavedError> {
        let blocks = saved.into_iter().map(|(name, block)| Ok((name, block.block()?)));
        let blocks: Vec<(u64, Block)> = blocks.collect::<Result<_, SavedError>>()?;
        Ok(Self::of(blocks.into_iter()))
    }

    /// The sequence hash of the block that `name` stood for.
    pub(super) fn sequence_named(&self, name: u64) -> Option<SequenceHash> {
        self.blocks.get(&name).map(|block| block.sequence)
    }

    /// The block `name` and all blocks before it, each with its name, from the start of the sequence on; `None` if one of
    /// them is not known.
    fn path(&self, name: u64) -> Option<Vec<(u64, Block)>> {
        let last = *self.blocks.get(&name)?;
        let mut path = vec![(name, last)];
        let mut at = last;
        while let Some(parent) = at.parent {
            let name = *self.names.get(&parent)?;
            // Each step has to go towards the start, or the walk might not end.
            let block = self
                .blocks
                .get(&name)
                .filter(|block| block.position < at.position)?;
            path.push((name, *block));
            at = *block;
        }
        path.reverse();
        Some(path)
    }
}

impl Translator {
    /// Forgets the holder's blocks, as [`Self::reset`] does, but remembers the block of each name. For a holder that is in
    /// doubt because batches were lost. If the engine's stored events prove nothing about the blocks before them, the names
    /// are forgotten, too.
    pub fn reset_but_names(&mut self) {
        let earlier = std::mem::take(&mut self.recalled);
        let mut recalled = Recalled::default();
        if self.settings.proves_ancestors {
            let held = self.groups.names_of_main();
            let held = held.filter_map(|(name, slot)| Some((name, self.chain.get(slot)?)));
            recalled = Recalled::of(
                earlier
                    .blocks
                    .into_iter()
                    .chain(held)
                    .take(self.settings.blocks_max),
            );
        }
        self.reset();
        self.recalled = recalled;
    }

    /// Adds `parent` and all blocks before it as held on the device: the `blocks` blocks that were just stored behind it
    /// prove that. Returns whether `parent` is known now.
    pub(super) fn recall(
        &mut self,
        lane: LaneId,
        parent: u64,
        blocks: usize,
        output: &mut Translation,
    ) -> bool {
        if self.doubt.is_none() {
            return false;
        }
        let Some(path) = self.recalled.path(parent) else {
            return false;
        };
        if self.names() + path.len() + blocks > self.settings.blocks_max {
            return false;
        }
        self.slots.clear();
        for (name, block) in path {
            if self.groups.has_copy(lane, name, TierIndex::DEVICE) {
                continue;
            }
            match self
                .groups
                .add(lane, name, block, TierIndex::DEVICE, &mut self.chain)
            {
                Ok(added) => self.slots.push(added.slot),
                Err(_) => break,
            }
        }
        self.publish_stored(TierIndex::DEVICE, output);
        self.known_now(lane, parent).is_some()
    }
}
