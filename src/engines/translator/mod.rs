//! From an [`EngineBatch`] to events of the contract, for one holder.
//!
//! A translator computes the contract's sequence hash of each block and remembers what the engine calls it. Its events name
//! blocks by the contract's hashes alone, so a daemon needs no table of names for the holder. Its promises:
//!
//! 1. In each tier its events say the same as the engine's events, copies counted. A block is stored with its first copy and
//!    removed with its last. Test: `oracle::events_add_up_to_the_cache`.
//! 2. It never says more. An event that contradicts itself or what came before is left out as a whole, and counted. Test:
//!    `rules::contradictions_are_left_out`.
//! 3. The full state is what its events so far add up to, parents before children. Test: `oracle::events_add_up_to_the_cache`.
//! 4. Its memory is bounded by [`TranslatorSettings::blocks_max`]. Test: `rules::a_full_table_takes_no_more`.

mod chain;
mod content;
mod facts;
mod groups;
mod lane;
mod output;
mod resumable;
mod state;
mod tiers;
mod tree;
mod windows;

use std::cmp::Ordering;
use std::collections::HashMap;

use kvatlas_core::hash::{BlockSize, HashSeed, Position, SequenceHash};
use kvatlas_core::wire::{Event, Tier};

use crate::batch::{
    Content, EngineBatch, EngineChange, EngineEvent, EngineRemoved, EngineStored, Group,
};
use crate::reason::{Reason, ReasonCounts};

use chain::{Block, Chain, Slot};
use content::Contents;
use groups::{Groups, LaneId, STAND_IN};
use resumable::Step;
use tiers::{TierIndex, TierSet};
use windows::Windows;

pub use content::content_hashes;
pub use facts::GroupFacts;
pub use output::{Translation, TranslationPart};

/// Whose hashes a holder's blocks are published by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HashMode {
    /// The contract's hashes are computed from the content of each block.
    #[default]
    Recompute,
    /// The engine's names are the contract's sequence hashes. One block in every `sample` is checked against its content, where the
    /// event has it; 0 checks none.
    Trust {
        /// How many blocks pass for one that is checked.
        sample: u32,
    },
}

/// What a translator has to know of the engine.
#[derive(Debug, Clone)]
pub struct TranslatorSettings {
    /// Tokens in a block.
    pub block_size: BlockSize,
    /// Whose hashes count.
    pub mode: HashMode,
    /// Most names that are kept; a block with several groups of layers has one for each.
    pub blocks_max: usize,
    /// Names of adapters by their number, for engines that tell only the number.
    pub lora_names: HashMap<u64, String>,
    /// What the engine's events don't tell of its groups of layers.
    pub groups: GroupFacts,
}

impl Default for TranslatorSettings {
    fn default() -> Self {
        Self {
            block_size: BlockSize::DEFAULT,
            mode: HashMode::default(),
            blocks_max: 1 << 22,
            lora_names: HashMap::new(),
            groups: GroupFacts::default(),
        }
    }
}

/// Translates the events of one holder: one engine's publisher and rank.
#[derive(Debug)]
pub struct Translator {
    settings: TranslatorSettings,
    chain: Chain,
    groups: Groups,
    windows: Windows,
    step: Step,
    contents: Contents,
    slots: Vec<Slot>,
    doubt: Option<Reason>,
    hides_groups: bool,
    unchecked: u32,
}

/// Where a stored event continues.
struct Start {
    parent: Option<SequenceHash>,
    position: u32,
    seed: HashSeed,
}

impl Translator {
    /// A translator of a holder that has nothing.
    pub fn new(settings: TranslatorSettings) -> Self {
        Self {
            windows: Windows::new(settings.block_size.as_u32()),
            settings,
            chain: Chain::default(),
            groups: Groups::default(),
            step: Step::default(),
            contents: Contents::default(),
            slots: Vec::new(),
            doubt: None,
            hides_groups: false,
            unchecked: 0,
        }
    }

    /// Why what the holder has is not known for certain; none while it is. The first reason stays until the engine clears.
    pub fn doubt(&self) -> Option<Reason> {
        self.doubt
    }

    /// Whether what a request can reuse is not known, though what main attention has is: of groups beside it something is not told.
    pub fn hides_groups(&self) -> bool {
        let has_no_main = !self.windows.is_empty() && !self.groups.has_main();
        self.settings.groups.hide_hits() || self.hides_groups || self.groups.has_others() || has_no_main
    }

    /// Notes that events were lost or could not be decoded: the state is in doubt until the engine clears.
    pub fn note_doubt(&mut self, reason: Reason) {
        self.doubt.get_or_insert(reason);
    }

    /// How many blocks are held, in whichever tier.
    pub fn blocks(&self) -> usize {
        self.chain.len()
    }

    /// How many names are kept.
    pub fn names(&self) -> usize {
        self.groups.names() + self.windows.names()
    }

    /// Forgets everything, as if the engine had just started. Emits nothing.
    pub fn reset(&mut self) {
        self.chain = Chain::default();
        self.groups = Groups::default();
        self.windows = Windows::new(self.settings.block_size.as_u32());
        self.step = Step::default();
        (self.doubt, self.hides_groups) = (None, false);
    }

    /// Appends to `output` what all of `batch` changes. For batches about one holder.
    pub fn translate(&mut self, batch: &EngineBatch, output: &mut Translation) {
        self.translate_those(batch, |_| true, output);
    }

    /// Appends to `output` what those events of `batch` change for which `is_ours` holds. They are one step.
    pub fn translate_those(
        &mut self,
        batch: &EngineBatch,
        is_ours: impl Fn(&EngineEvent) -> bool,
        output: &mut Translation,
    ) {
        self.note_reasons(&batch.reasons, output);
        let begun = output.mark();
        for event in batch.events().iter().filter(|event| is_ours(event)) {
            self.translate_event(batch, event, output);
        }
        self.finish_step(batch, begun, output);
    }

    /// Counts what the decoder has left out of a batch for this holder.
    pub fn note_reasons(&mut self, reasons: &ReasonCounts, output: &mut Translation) {
        output.reasons.merge(reasons);
        self.doubt = self.doubt.or(reasons.doubt());
        self.hides_groups |= reasons.iter().any(|(reason, _)| reason.hides_groups());
    }

    /// Appends to `output` what one event of `batch` changes, as far as that doesn't wait for the others.
    fn translate_event(&mut self, batch: &EngineBatch, event: &EngineEvent, output: &mut Translation) {
        match self.defer(&event.change, output) {
            Ok(false) => {}
            Ok(true) => return,
            Err(reason) => return self.count(reason, output),
        }
        let outcome = match &event.change {
            EngineChange::Stored(stored) => self.store(batch, stored, output),
            EngineChange::Removed(removed) => {
                self.remove(batch, removed, output);
                Ok(())
            }
            EngineChange::Moved { name, from, to } => self.relocate(*name, *from, *to, output),
            EngineChange::Cleared => {
                self.clear(output);
                Ok(())
            }
        };
        if let Err(reason) = outcome {
            self.count(reason, output);
        }
    }

    fn count(&mut self, reason: Reason, output: &mut Translation) {
        output.reasons.count(reason);
        if reason.degrades() {
            self.note_doubt(reason);
        }
        self.hides_groups |= reason.hides_groups();
    }

    fn clear(&mut self, output: &mut Translation) {
        self.chain.clear();
        self.groups.clear();
        self.windows.clear();
        self.step.clear();
        (self.doubt, self.hides_groups) = (None, false);
        output.push_for_all_tiers(Event::Cleared);
    }

    fn store(
        &mut self,
        batch: &EngineBatch,
        stored: &EngineStored,
        output: &mut Translation,
    ) -> Result<(), Reason> {
        let tier = TierIndex::of(stored.tier).ok_or(Reason::UnknownMedium)?;
        let lane = self.lane_for(self.stated(stored.group), output)?;
        self.check_block_size(stored)?;
        let names = batch.hashes(stored.names);
        if self.names() + names.len() > self.settings.blocks_max {
            return Err(Reason::TableFull);
        }
        let start = self.start_of(batch, stored, lane)?;
        self.compute_chain(batch, stored, &start)?;
        let is_alias = self.insert(names, &start, lane, tier)?;
        self.publish_stored(tier, output);
        match is_alias {
            true => Err(Reason::HiddenKey),
            false => Ok(()),
        }
    }

    fn check_block_size(&self, stored: &EngineStored) -> Result<(), Reason> {
        let size = match (stored.block_size, stored.content) {
            (Some(size), _) => size,
            (None, Content::Tokens { step, .. }) => step as u64,
            (None, _) => return Ok(()),
        };
        match size.cmp(&u64::from(self.settings.block_size.as_u32())) {
            Ordering::Equal => Ok(()),
            // Nothing follows a part: where all blocks are smaller, the next one's parent is unknown.
            Ordering::Less if stored.names.len() == 1 => Err(Reason::PartOfBlock),
            _ => Err(Reason::BlockSize),
        }
    }

    /// The lane of a stored event's group. A group that turns out to be needed, or not to be, changes what counts as held.
    fn lane_for(&mut self, group: Group, output: &mut Translation) -> Result<LaneId, Reason> {
        let stood_in = group.index != Some(STAND_IN) && self.groups.drop_lane(STAND_IN, &mut self.chain);
        let (lane, changes_all) = self.groups.learn(group, &mut self.chain);
        if changes_all || stood_in {
            self.publish_all(output);
        }
        lane
    }

    /// Where the event's first block stands.
    fn start_of(&self, batch: &EngineBatch, stored: &EngineStored, lane: LaneId) -> Result<Start, Reason> {
        let lora_name = self.lora_name(batch, stored)?;
        let salt = stored.cache_salt.map(|salt| batch.text(salt));
        let own_seed = HashSeed::for_cache(lora_name, salt);
        let Some(parent) = stored.parent else {
            return match stored.position {
                None | Some(0) => Ok(Start {
                    parent: None,
                    position: 0,
                    seed: own_seed,
                }),
                Some(_) => Err(Reason::UnknownParent),
            };
        };
        let names = batch.hashes(stored.names);
        if names.contains(&parent) {
            return Err(Reason::SelfParent);
        }
        let known = self
            .groups
            .find(lane, parent)
            .and_then(|slot| self.chain.get(slot));
        let start = match (known, self.settings.mode, stored.position) {
            (Some(block), _, _) => Start {
                parent: Some(block.sequence),
                position: block.position + 1,
                seed: block.seed,
            },
            // The contract's hash names the prefix, whether or not the holder has it.
            (None, HashMode::Trust { .. }, Some(position @ 1..)) => Start {
                parent: Some(SequenceHash::from(parent)),
                position: u32::try_from(position).map_err(|_| Reason::OutOfRange)?,
                seed: own_seed,
            },
            (None, _, _) => return Err(Reason::UnknownParent),
        };
        if salt.is_some() && start.seed != own_seed {
            return Err(Reason::SaltConflict);
        }
        if stored
            .position
            .is_some_and(|position| position != u64::from(start.position))
        {
            return Err(Reason::Malformed);
        }
        Ok(start)
    }

    fn lora_name<'a>(
        &'a self,
        batch: &'a EngineBatch,
        stored: &EngineStored,
    ) -> Result<Option<&'a str>, Reason> {
        match (stored.lora_name, stored.lora_id) {
            (Some(name), _) => Ok(Some(batch.text(name))),
            (None, None) => Ok(None),
            (None, Some(number)) => match (self.settings.lora_names.get(&number), number) {
                (Some(name), _) => Ok(Some(name)),
                // As elsewhere, no adapter.
                (None, 0) => Ok(None),
                (None, _) => Err(Reason::UnnamedAdapter),
            },
        }
    }

    /// Computes, or takes from the names, the sequence hashes of the event's blocks.
    fn compute_chain(
        &mut self,
        batch: &EngineBatch,
        stored: &EngineStored,
        start: &Start,
    ) -> Result<(), Reason> {
        let names = batch.hashes(stored.names);
        let last = u64::from(start.position) + (names.len() as u64).saturating_sub(1);
        Position::new(last).map_err(|_| Reason::OutOfRange)?;
        match self.settings.mode {
            HashMode::Recompute => self.contents.compute(batch, stored, start.parent, start.seed),
            HashMode::Trust { sample } => {
                let seed = start.seed;
                self.contents.take_names(names);
                let contents = &self.contents;
                contents.check(batch, stored, start.parent, seed, sample, &mut self.unchecked)
            }
        }
    }

    /// Adds a copy of each block, or of none. Returns whether a block is held under another name already.
    fn insert(
        &mut self,
        names: &[u64],
        start: &Start,
        lane: LaneId,
        tier: TierIndex,
    ) -> Result<bool, Reason> {
        self.slots.clear();
        let mut before = start.parent;
        let mut is_alias = false;
        for (position, (name, sequence)) in (start.position..).zip(names.iter().zip(self.contents.chain())) {
            let block = Block {
                sequence: *sequence,
                parent: before.replace(*sequence),
                position,
                seed: start.seed,
            };
            match self.groups.add(lane, *name, block, tier, &mut self.chain) {
                Ok(added) => {
                    is_alias |= added.is_alias;
                    self.slots.push(added.slot);
                }
                Err(reason) => {
                    let reason = self.explain(reason, *name, start, lane);
                    for name in names.iter().take(self.slots.len()).rev() {
                        self.groups.take(lane, *name, tier, &mut self.chain);
                    }
                    self.slots
                        .drain(..)
                        .rev()
                        .for_each(|slot| self.chain.free_unnamed(slot));
                    return Err(reason);
                }
            }
        }
        Ok(is_alias)
    }

    /// A name that stands for another block already: a cycle where that block is an ancestor.
    fn explain(&self, reason: Reason, name: u64, start: &Start, lane: LaneId) -> Reason {
        let known = self.groups.find(lane, name).and_then(|slot| self.chain.get(slot));
        match (reason, known, start.parent) {
            (Reason::NameConflict, Some(known), Some(parent)) if self.chain.has_ancestor(parent, known) => {
                Reason::Cycle
            }
            _ => reason,
        }
    }

    /// Emits what the blocks in `slots` are held in by now, and were not before.
    fn publish_stored(&mut self, tier: TierIndex, output: &mut Translation) {
        for slot in self.slots.drain(..) {
            if self.groups.holds(slot, tier) {
                self.chain.publish(slot, tier, output);
            }
        }
    }

    /// Emits every difference between what is held and what was published.
    fn publish_all(&mut self, output: &mut Translation) {
        for slot in self.chain.slots() {
            for tier in TierIndex::ALL {
                match self.groups.holds(slot, tier) {
                    true => self.chain.publish(slot, tier, output),
                    false => self.chain.withdraw(slot, tier, output),
                }
            }
            self.chain.free_unnamed(slot);
        }
    }

    fn remove(&mut self, batch: &EngineBatch, removed: &EngineRemoved, output: &mut Translation) {
        let lane = match self.groups.lane_of(removed.group) {
            Ok(lane) => lane,
            Err(reason) => return self.count(reason, output),
        };
        let tiers = match removed.tier.map(TierIndex::of) {
            Some(Some(tier)) => TierSet::one(tier),
            Some(None) => return self.count(Reason::UnknownMedium, output),
            None => TierSet::ALL,
        };
        for name in batch.hashes(removed.names) {
            if !self.remove_one(lane, *name, tiers, output) {
                output.reasons.count(Reason::NotHeld);
            }
        }
    }

    /// Takes a copy of a block from each of `tiers` that has one. Returns whether any had.
    fn remove_one(
        &mut self,
        lane: Option<LaneId>,
        name: u64,
        tiers: TierSet,
        output: &mut Translation,
    ) -> bool {
        let mut has_found = false;
        for lane in self.groups.lanes_with(lane, name) {
            let Some(slot) = self.groups.find_in(lane, name) else {
                continue;
            };
            for tier in tiers.iter() {
                has_found |= self.groups.take(lane, name, tier, &mut self.chain);
                if !self.groups.holds(slot, tier) {
                    self.chain.withdraw(slot, tier, output);
                }
            }
            self.note_gone(lane, name, slot);
            self.chain.free_unnamed(slot);
        }
        has_found
    }

    fn relocate(&mut self, name: u64, from: Tier, to: Tier, output: &mut Translation) -> Result<(), Reason> {
        let (Some(from), Some(to)) = (TierIndex::of(from), TierIndex::of(to)) else {
            return Err(Reason::UnknownMedium);
        };
        let lane = self.groups.lanes_with(None, name).next().ok_or(Reason::NotHeld)?;
        let slot = self.groups.find_in(lane, name).ok_or(Reason::NotHeld)?;
        let block = self.chain.get(slot).ok_or(Reason::NotHeld)?;
        if !self.groups.has_copy(lane, name, from) {
            return Err(Reason::NotHeld);
        }
        // Stored first: at no time is it nowhere.
        self.groups.add(lane, name, block, to, &mut self.chain)?;
        self.slots.clear();
        self.slots.push(slot);
        self.publish_stored(to, output);
        self.remove_one(Some(lane), name, TierSet::one(from), output);
        Ok(())
    }
}
