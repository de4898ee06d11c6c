//! Recalled names: names of blocks that were known before batches of the engine's events were lost. Such names can
//! prove that blocks are still held.
//!
//! Some engines store a block only while they hold all blocks before it, because the request that computes the block
//! holds them. Suppose that such an engine stores a block, and that the name of its parent is known. Then the parent
//! and all blocks before it are on the device at that moment. So after a loss of events, a prefix counts as held
//! again as soon as the engine stores a block after it. The holder stays in doubt, because the number of copies and
//! the other held blocks are still unknown.
//!
//! Some engines name a block by a hash of everything that distinguishes it from other blocks. Two such engines give
//! the same block the same name. So the names of one engine can tell which block a name of another engine stands for.

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

/// Maximum number of names per batch about which the translators of other engines are asked. They are names of
/// parents that this translator does not know.
const STRANGE_MAX: usize = 256;

/// The blocks that names of main attention stood for before batches were lost, by name and by hash.
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
    /// Forgets all that the engine's events have told, as [`Self::reset`] does, except which block each name stood
    /// for. To be called when batches were lost.
    ///
    /// Also forgets the names if the engine's stored events prove nothing about earlier blocks (see
    /// [`crate::TranslatorSettings::proves_ancestors`]).
    pub fn reset_but_names(&mut self) {
        let recalled = self.names_so_far();
        self.reset();
        self.recalled = recalled;
    }

    /// Takes the recalled names and adds the names of the blocks that are held now. The result is empty if the
    /// engine's stored events prove nothing about earlier blocks.
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

    /// Returns the names of parents in the batch's stored events that this translator does not know, because the
    /// batches that told of them were lost. The translator of another engine may know these names. Returns at most
    /// 256 names, and no name twice in a row. If the state is not in doubt, returns none.
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

    /// Adds the block with the name `parent` and all blocks before it as held on the device. To be called for a
    /// stored event with `blocks` blocks and this parent, which proves that the device has them. Returns whether the
    /// parent is held afterwards.
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
