//! Recalled names: names that were known before batches of the engine's events were lost. They help to find blocks that are
//! still held.
//!
//! Some engines store a block only while they hold all blocks before it, because the request that computes the block holds
//! them. Suppose that such an engine stores a block whose parent's name is known. Then the parent and all blocks before it
//! are on the device at that moment. So a prefix whose events were lost counts as held again as soon as a block is stored
//! after it. The number of copies stays unknown, and so do the other held blocks. So the holder stays in doubt.
//!
//! Some engines name a block by a hash of everything that distinguishes it from other blocks. Such engines use the same name
//! for the same block. So one engine's names can tell which block another engine's name stands for.

use hashbrown::HashMap;

use kvatlas_core::hash::SequenceHash;
use kvatlas_core::wire::Tier;

use crate::batch::{EngineBatch, EngineChange};

use super::Translator;
use super::block::Block;
use super::forms::SavedError;
use super::groups::GroupLaneId;
use super::output::Translation;
use super::tiers::TierIndex;

/// Maximum number of unknown parents of one batch that other engines are asked for.
const STRANGE_MAX: usize = 256;

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

    pub(super) fn save(&self) -> Vec<(u64, Block)> {
        self.blocks.iter().map(|(name, block)| (*name, *block)).collect()
    }

    pub(super) fn restore(saved: Vec<(u64, Block)>) -> Result<Self, SavedError> {
        saved
            .iter()
            .try_for_each(|(_, block)| block.checked().map(drop))?;
        Ok(Self::of(saved.into_iter()))
    }

    /// The sequence hash of the block that `name` stood for.
    pub(super) fn sequence_named(&self, name: u64) -> Option<SequenceHash> {
        self.blocks.get(&name).map(|block| block.sequence)
    }

    /// Adds blocks with their names. Does nothing if more than `blocks_max` blocks would be remembered.
    fn learn(&mut self, named: Vec<(u64, Block)>, blocks_max: usize) {
        if self.blocks.len() + named.len() > blocks_max {
            return;
        }
        for (name, block) in named {
            self.blocks.insert(name, block);
            self.names.insert(block.sequence, name);
        }
    }
}

/// The blocks of a whole prefix, with an engine's names for them. The translator of another engine can learn these
/// names, if both engines give equal blocks equal names.
#[derive(Debug)]
pub struct NamedBlocks(Vec<(u64, Block)>);

impl Translator {
    /// Forgets that the holder has any blocks, as [`Self::reset`] does, but remembers the block of each name. Call it for a
    /// holder that is in doubt because batches were lost. If the engine's stored events prove nothing about earlier blocks,
    /// forgets the names, too (see [`crate::TranslatorSettings::proves_ancestors`]).
    pub fn reset_but_names(&mut self) {
        let recalled = self.names_so_far();
        self.reset();
        self.recalled = recalled;
    }

    /// Takes the remembered names, and adds those of the held blocks. Empty if the engine's stored events prove nothing about
    /// earlier blocks.
    pub(super) fn names_so_far(&mut self) -> Recalled {
        let earlier = std::mem::take(&mut self.recalled);
        if !self.settings.proves_ancestors {
            return Recalled::default();
        }
        let held = self.groups.names_of_main();
        let held = held.filter_map(|(name, slot)| Some((name, self.chain.get(slot)?)));
        let all = earlier.blocks.into_iter().chain(held);
        Recalled::of(all.take(self.settings.blocks_max))
    }

    /// Returns the names of unknown parents in the batch's stored events. The batches that told of these parents were
    /// lost, but the translator of another engine may know the names. Returns at most 256 names, none twice in a row.
    /// Empty unless the state is in doubt.
    pub fn strange_parents(&self, batch: &EngineBatch) -> Vec<u64> {
        let mut strange = Vec::new();
        if self.doubt.is_none() || !self.settings.proves_ancestors {
            return strange;
        }
        let mut before: &[u64] = &[];
        for event in batch.events() {
            let EngineChange::Stored(stored) = &event.change else {
                continue;
            };
            let parent = stored
                .parent
                .filter(|_| stored.tier == Tier::DEVICE && self.counts(stored.group));
            if let Some(parent) = parent
                && strange.len() < STRANGE_MAX
                && strange.last() != Some(&parent)
                && !before.contains(&parent)
                && self.named(parent).is_none()
            {
                strange.push(parent);
            }
            before = batch.hashes(stored.names);
        }
        strange
    }

    /// The block that `name` stands for and all blocks before it, with their names; `None` if one of them is not known.
    pub fn named_prefix(&self, name: u64) -> Option<NamedBlocks> {
        self.prefix(name).map(NamedBlocks)
    }

    /// Remembers blocks by another engine's names. Both engines must give equal blocks equal names. The blocks count as
    /// held only when the engine's own events prove that.
    pub fn learn_names(&mut self, NamedBlocks(named): NamedBlocks) {
        if self.settings.proves_ancestors {
            self.recalled.learn(named, self.settings.blocks_max);
        }
    }

    /// The block of main attention that `name` stands for, or stood for before batches were lost.
    fn named(&self, name: u64) -> Option<Block> {
        let held = self
            .groups
            .find_in_main(name)
            .and_then(|slot| self.chain.get(slot));
        held.or_else(|| self.recalled.blocks.get(&name).copied())
    }

    fn name_of(&self, sequence: SequenceHash) -> Option<u64> {
        let held = self.chain.slot_with(sequence);
        let held = held.and_then(|slot| self.groups.name_in_main(slot));
        held.or_else(|| self.recalled.names.get(&sequence).copied())
    }

    /// The block `name` and all blocks before it, each with its name, from the start of the sequence on; `None` if one of
    /// them is not known.
    fn prefix(&self, name: u64) -> Option<Vec<(u64, Block)>> {
        let last = self.named(name)?;
        let mut prefix = vec![(name, last)];
        let mut at = last;
        while let Some(parent) = at.parent {
            let name = self.name_of(parent)?;
            // Each step has to go towards the start, or the walk might not end.
            let is_before = |block: &Block| block.sequence == parent && block.position < at.position;
            at = self.named(name).filter(is_before)?;
            prefix.push((name, at));
        }
        prefix.reverse();
        Some(prefix)
    }

    /// Adds the block named `parent` and all blocks before it as held on the device. The proof is a stored event of `blocks`
    /// blocks whose parent has this name. Returns whether `parent` is known now.
    pub(super) fn recall(
        &mut self,
        lane: GroupLaneId,
        parent: u64,
        blocks: usize,
        output: &mut Translation,
    ) -> bool {
        if self.doubt.is_none() {
            return false;
        }
        let Some(path) = self.prefix(parent) else {
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
