//! The end of a step. A *step* is the translation of one batch. At its end, the translator applies the changes of
//! windows and states (the groups of layers other than main attention). Then it tells after which blocks a request
//! can now resume.
//!
//! To apply a change of a window or state, the translator must know at which place in a sequence each named block
//! ends. An event of main attention tells this place for each of its names. Such an event can come before or after
//! the change of the window, so the change waits for the end of the batch.
//!
//! If the blocks of a group are smaller than those of main attention, main attention does not have all names of the
//! group. The places of these names are found in one of two ways:
//!
//! - The event skips no block. Then its parent and its tokens show the places.
//! - The event skips blocks. Then main attention may show the place of one of its names. The names before this one in
//!   the event stand for the blocks directly before that place.

use std::cell::OnceCell;
use std::cmp::Reverse;

use hashbrown::HashMap;

use kvatlas_core::hash::{HashSeed, Token};
use kvatlas_core::wire::Tier;

use crate::batch::{
    BlockObject, Component, Content, EngineBatch, EngineChange, EngineEvent, EngineRemoved, EngineStored,
    Group,
};
use crate::facts::GroupKind;
use crate::reason::Reason;

use super::block::ChainSlot;
use super::groups::STAND_IN;
use super::output::{Translation, TranslationMark};
use super::spots::Reach;
use super::tiers::{TierIndex, TierSet};
use super::windows::{BlockEnd, WindowId};
use super::{StoredStart, Translator};

/// The state that the translation of one batch (a step) needs until its end.
#[derive(Debug, Default)]
pub(super) struct Step {
    /// The changes of windows and states (groups other than main attention) in this batch, which are applied at its
    /// end.
    waiting: Vec<EngineChange>,
    /// The names of main attention that this batch has removed, in order of removal, each with the slot of its block.
    /// The blocks are kept until the end of the batch, because other events of the batch may still use the names.
    gone: Vec<(u64, ChainSlot)>,
    /// Table that finds the elements of `gone` by name. It is built on first use, because few batches need it.
    gone_by_name: OnceCell<HashMap<u64, ChainSlot>>,
    /// Whether this batch has brought a new group of layers. A request then needs other blocks than before, so all
    /// blocks have to be checked again.
    has_new_rules: bool,
    /// Working lists, which keep their memory for the next batch (this one and the three below).
    touched: Vec<(Reverse<u32>, ChainSlot)>,
    stack: Vec<ChainSlot>,
    changed: Vec<ChainSlot>,
    places: Vec<Option<BlockEnd>>,
}

impl Step {
    /// Forgets the changes and removals of the batch so far. To be called when the batch has a clear.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.gone.clear();
        self.gone_by_name.take();
    }

    /// The slot of the block whose name `name` was removed in this batch. To be called only after the last removal of
    /// the batch.
    fn gone(&self, name: u64) -> Option<ChainSlot> {
        let by_name = || self.gone.iter().copied().collect();
        self.gone_by_name.get_or_init(by_name).get(&name).copied()
    }
}

impl Translator {
    /// Returns the group with its kind. The kind is the one that the event tells, or else the one that the settings
    /// give. It is `None` if neither gives it.
    pub(super) fn stated(&self, group: Group) -> Group {
        let kinds = &self.settings.groups.kinds;
        let stated = || match Component::of(group) {
            Some(_) => kinds
                .iter()
                .find(|kind| matches!(kind, GroupKind::Window(_)))
                .copied(),
            None => kinds.get(usize::try_from(group.index?).ok()?).copied(),
        };
        Group {
            kind: group.kind.or_else(stated),
            ..group
        }
    }

    /// Returns the number and the kind of the changed group, if the group is known to be a window or a state. Returns
    /// `None` for any other group.
    fn beside_main(&self, change: &EngineChange) -> Option<(u32, GroupKind)> {
        let (EngineChange::Stored(EngineStored { group, .. })
        | EngineChange::Removed(EngineRemoved { group, .. })) = change
        else {
            return None;
        };
        let index = group.index?;
        let known = || self.windows.kind(self.windows.find(index)?);
        let kind = self.stated(*group).kind.or_else(known)?;
        matches!(kind, GroupKind::Window(_) | GroupKind::State).then_some((index, kind))
    }

    /// Learns which windows and states (groups other than main attention) the batch's stored events name. To be
    /// called before the events are translated, because a new group changes where a request can resume.
    pub(super) fn learn_windows<'a>(
        &mut self,
        events: impl Iterator<Item = &'a EngineEvent>,
        output: &mut Translation,
    ) {
        for event in events {
            if let EngineChange::Stored(stored) = &event.change
                && Component::of(stored.group).is_some()
            {
                self.windows.expect(self.settings.groups.components());
            }
            if let EngineChange::Stored(stored) = &event.change
                && let Some((index, kind)) = self.beside_main(&event.change)
                && self.windows.find(index).is_none()
                && let Some(block) = stored.block_size
                && self.windows.learn(index, kind, block).is_ok()
            {
                if !self.chain.has_tree() {
                    self.chain.grow_tree();
                    output.seal();
                }
                self.step.has_new_rules = true;
                if self.groups.drop_lane(index, &mut self.chain) {
                    self.publish_all(output);
                }
            }
        }
    }

    /// Postpones a change of a window or a state to the end of the batch. Returns true if the caller is done with
    /// this change. Returns false if the caller still has to apply the change to main attention.
    pub(super) fn defer(&mut self, change: &EngineChange) -> Result<bool, Reason> {
        let Some((index, kind)) = self.beside_main(change) else {
            return Ok(self.defer_of_all(change));
        };
        if let EngineChange::Stored(stored) = change {
            let block = stored.block_size.ok_or(Reason::UnknownGroup)?;
            // vLLM's connectors tell the names of what lies beyond the device, and 0 tokens.
            if block == 0 && stored.tier != Tier::DEVICE {
                self.windows.find(index).ok_or(Reason::UnknownGroup)?;
            } else {
                self.windows.learn(index, kind, block)?;
                self.check_lookahead(stored, block)?;
            }
        }
        self.step.waiting.push(*change);
        Ok(true)
    }

    /// Handles a change whose group is not a known window or state. Only removals from engines with SGLang's
    /// components (groups of layers) need handling:
    ///
    /// - A removal that names no component is about all components. It is postponed for the windows and states. The
    ///   result is false: the caller also has to apply it to main attention.
    /// - A removal from a window without known blocks changes nothing. The result is true: the caller is done with
    ///   it.
    ///
    /// The result is false for every other change.
    fn defer_of_all(&mut self, change: &EngineChange) -> bool {
        let EngineChange::Removed(removed) = change else {
            return false;
        };
        match Component::of(removed.group) {
            // The removal is from all components.
            None if removed.group == Group::default() && self.windows.are_components() => {
                self.step.waiting.push(*change);
                false
            }
            // No stored event has named this component, so it has no known blocks.
            Some(Component::Window) => true,
            _ => false,
        }
    }

    /// Frees the block in `slot` if it has no other name than `name`, a removed name of main attention. If there are
    /// windows or states, the block is kept until the end of the batch, because their events may name it.
    pub(super) fn free_later(&mut self, name: u64, slot: ChainSlot) {
        match self.chain.has_tree() {
            true => {
                self.chain.add_name(slot);
                self.step.gone.push((name, slot));
            }
            false => self.chain.free_unnamed(slot),
        }
    }

    /// Records which small blocks each of the event's blocks consists of, if the event gives the tokens. Small blocks
    /// are blocks of a window that are smaller than those of main attention. Blocks with images are left out, because
    /// events don't tell at which token an image begins.
    pub(super) fn list_small_blocks(
        &mut self,
        batch: &EngineBatch,
        stored: &EngineStored,
        start: &StoredStart,
    ) {
        let size = self.settings.block_size.as_usize();
        let Content::Tokens { tokens, step, window } = stored.content else {
            return;
        };
        if !self.windows.has_small_blocks() || (step != size && step != window) {
            return;
        }
        let objects = batch.objects(stored.objects);
        let mut reach = start.parent.map_or(Reach::start_of(start.seed), Reach::end_of);
        let tokens = blocks_of(batch.tokens(tokens), step, window);
        let contents = self.contents.chain().iter().zip(tokens);
        for (number, (slot, (sequence, tokens))) in (0..).zip(self.slots.iter().zip(contents)) {
            if !has_object(objects, number) {
                let cells_max = self.settings.blocks_max;
                self.windows
                    .list(*slot, reach, tokens, cells_max, &mut self.chain);
            }
            reach = Reach::end_of(*sequence);
        }
    }

    /// Ends the translation of a batch: applies the postponed changes, and appends to `output` which blocks have
    /// become resumable or no longer are. `begun` is the point at which the batch's events begin in `output`.
    pub(super) fn finish_step(
        &mut self,
        batch: &EngineBatch,
        begun: TranslationMark,
        output: &mut Translation,
    ) {
        if !self.chain.has_tree() {
            // No window or state is known, so these changes are removals of blocks that none has.
            self.step.waiting.clear();
            return;
        }
        let mut waiting = std::mem::take(&mut self.step.waiting);
        for change in waiting.drain(..) {
            match &change {
                EngineChange::Stored(stored) => {
                    self.stand_in(batch, stored, output);
                    self.store_window(batch, stored, output);
                }
                EngineChange::Removed(removed) => self.remove_window(batch, removed, output),
                EngineChange::Created(_) | EngineChange::Moved { .. } | EngineChange::Cleared => {}
            }
        }
        self.step.waiting = waiting;
        self.step.gone_by_name.take();
        for (_, slot) in self.step.gone.drain(..) {
            self.chain.drop_name(slot);
            self.chain.free_unnamed(slot);
        }
        self.windows.sweep(&mut self.chain);
        self.note_unlisted();
        self.recompute();
        self.tell_stored(begun, output);
        if std::mem::take(&mut self.step.has_new_rules) {
            self.step.changed = self.chain.slots();
            self.tell_changed(None, output);
        } else {
            self.tell_changed(Some(begun), output);
        }
        output.seal();
    }

    /// Notes each block on the device whose small blocks (a window's blocks that are smaller) are not known. Looks at
    /// the blocks that this batch has published, or at all blocks if the batch has brought a new group.
    fn note_unlisted(&mut self) {
        if !self.windows.has_small_blocks() {
            return;
        }
        let all = self.step.has_new_rules.then(|| self.chain.slots());
        for slot in all.as_deref().unwrap_or(self.chain.fresh()) {
            if self.chain.is_published(*slot, TierIndex::DEVICE) {
                self.windows.note_on_device(*slot);
            }
        }
    }

    /// In a model without main attention, also stores the blocks of a window as if they were blocks of main
    /// attention. This works only for an event that skips no block. It is then unknown how much a request can reuse:
    /// the engine may have dropped earlier blocks of the window, because no request needs them.
    fn stand_in(&mut self, batch: &EngineBatch, stored: &EngineStored, output: &mut Translation) {
        let is_first = stored
            .group
            .index
            .is_some_and(|index| self.windows.is_first(index));
        if self.groups.has_main() || !is_first || !matches!(stored.content, Content::Tokens { .. }) {
            return;
        }
        let group = Group {
            index: Some(STAND_IN),
            kind: Some(GroupKind::Main),
        };
        if self
            .store(batch, &EngineStored { group, ..*stored }, output)
            .is_err()
        {
            self.count(Reason::UnplacedName, output);
        }
    }

    fn store_window(&mut self, batch: &EngineBatch, stored: &EngineStored, output: &mut Translation) {
        let names = batch.hashes(stored.names);
        let Some(id) = stored.group.index.and_then(|index| self.windows.find(index)) else {
            return;
        };
        let is_component = Component::of(stored.group).is_some();
        let tier = TierIndex::of(stored.tier);
        if tier != Some(TierIndex::DEVICE) {
            // A request can load such a block from its tier. So it is unknown how much a request can reuse: of SGLang's tree
            // at all, of vLLM's blocks with that tier.
            return match is_component {
                true => self.count(Reason::OtherGroup, output),
                false if self.settings.groups.has_divergent_hits => output.reasons.count(Reason::OtherGroup),
                false => self.count_in(tier, Reason::OtherGroup, output),
            };
        }
        if self.names() + names.len() > self.settings.blocks_max {
            return self.count(Reason::TableFull, output);
        }
        let mut places = std::mem::take(&mut self.step.places);
        self.walk(id, batch, stored, &mut places);
        let mut behind = None;
        for (name, walked) in names.iter().zip(&places).rev() {
            let place = self.place(id, *name, *walked, behind);
            behind = place.filter(|place| self.windows.fits(id, *place, &self.chain));
            let added = match behind {
                // SGLang's tree has each block once, and may tell of it again.
                Some(_) if is_component && self.windows.place_of(id, *name).is_some() => Ok(()),
                Some(place) => self.windows.add(id, *name, place, &mut self.chain),
                None => Err(Reason::UnplacedName),
            };
            if let Err(reason) = added {
                self.count(reason, output);
            }
        }
        self.step.places = places;
    }

    /// The slot of the contract's block that ends at the same place as the engine's block `name`. Searches the names
    /// of main attention, the names of windows and states, and the names that this batch has removed.
    fn end_named(&self, name: u64) -> Option<ChainSlot> {
        self.groups
            .find_any(name)
            .or_else(|| self.windows.slot_of(name))
            .or_else(|| self.step.gone(name))
    }

    /// Finds the place where a group's block `name` ends; `None` if it cannot be found. `walked` is the place that
    /// the event's tokens show, if they show it. `behind` is the place of the next block in the event, if it is
    /// known.
    fn place(
        &self,
        id: WindowId,
        name: u64,
        walked: Option<BlockEnd>,
        behind: Option<BlockEnd>,
    ) -> Option<BlockEnd> {
        self.windows
            .place_of(id, name)
            .or(walked)
            .or_else(|| self.end_named(name).map(BlockEnd::End))
            .or_else(|| self.windows.place_before(id, behind?, &self.chain))
    }

    /// Follows the tokens of an event that skips no block, to find where its small blocks end. Writes one place to
    /// `places` for each small block, or `None` if the place is not known. This also works where main attention does
    /// not have the contract's blocks.
    fn walk(
        &self,
        id: WindowId,
        batch: &EngineBatch,
        stored: &EngineStored,
        places: &mut Vec<Option<BlockEnd>>,
    ) {
        places.clear();
        places.resize(stored.names.len(), None);
        let (Some(spots), Content::Tokens { tokens, step, window }) =
            (self.windows.spots(id), stored.content)
        else {
            return;
        };
        let end_of = |slot| self.chain.get(slot).map(|block| Reach::end_of(block.sequence));
        let objects = batch.objects(stored.objects);
        let mut reach = match stored.parent {
            Some(parent) => spots
                .reach(parent)
                .or_else(|| self.end_named(parent).and_then(end_of)),
            None if stored.position.is_none_or(|position| position == 0) => {
                self.seed_of(batch, stored).map(Reach::start_of)
            }
            None => None,
        };
        let tokens = blocks_of(batch.tokens(tokens), step, window);
        let blocks = batch.hashes(stored.names).iter().zip(tokens);
        for (number, (place, (name, tokens))) in (0..).zip(places.iter_mut().zip(blocks)) {
            reach = reach
                .filter(|_| !has_object(objects, number))
                .map(|reach| reach.next(tokens));
            match reach.and_then(|reach| spots.within(reach)) {
                Some(within) => *place = Some(BlockEnd::Within(within, None)),
                None => {
                    let end = self.end_named(*name);
                    *place = end.map(BlockEnd::End);
                    reach = end.and_then(end_of);
                }
            }
        }
    }

    /// Hash seed of the event's sequence, from the adapter and the salt in the event. To be used if the event's
    /// blocks begin the sequence.
    fn seed_of(&self, batch: &EngineBatch, stored: &EngineStored) -> Option<HashSeed> {
        let lora_name = self.lora_name(batch, stored).ok()?;
        let salt = stored.cache_salt.map(|salt| batch.text(salt));
        Some(HashSeed::for_cache(lora_name, salt))
    }

    fn remove_window(&mut self, batch: &EngineBatch, removed: &EngineRemoved, output: &mut Translation) {
        let Some(index) = removed.group.index else {
            for index in self.windows.indexes() {
                let group = Group {
                    index: Some(index),
                    kind: None,
                };
                self.remove_window(batch, &EngineRemoved { group, ..*removed }, output);
            }
            return;
        };
        let is_component = Component::of(removed.group).is_some();
        let id = match self.windows.find(index) {
            Some(id) => id,
            None if is_component => return,
            None => return self.count(Reason::UnknownGroup, output),
        };
        if removed
            .tier
            .is_some_and(|tier| TierIndex::of(tier) != Some(TierIndex::DEVICE))
        {
            return;
        }
        let standing_in = self
            .groups
            .lane_with(Some(STAND_IN))
            .filter(|_| self.windows.is_first_id(id));
        for name in batch.hashes(removed.names) {
            if let Some(lane) = standing_in {
                self.remove_one(Some(lane), *name, TierSet::one(TierIndex::DEVICE), None, output);
            }
            let (slot, had_copy) = self.windows.take(id, *name, &mut self.chain);
            if let Some(slot) = slot {
                self.chain.free_unnamed(slot);
            }
            // Events of SGLang's components remove all blocks that a component lacks, even blocks that it never had.
            if !had_copy && !is_component {
                output.reasons.count(Reason::NotHeld);
            }
        }
    }

    /// Recomputes the runs of all blocks that a change affects. A run is the number of a group's blocks that are held
    /// without a gap ([`super::windows`]). Starts at the changed blocks and goes on to their children, as long as the
    /// runs differ from before.
    fn recompute(&mut self) {
        let (mut stack, mut changed) = (
            std::mem::take(&mut self.step.stack),
            std::mem::take(&mut self.step.changed),
        );
        // A new block is checked only if it is touched. If a group has wider blocks, all new blocks are checked,
        // because a wider block may span several of these.
        if self.windows.has_wide_blocks() {
            self.chain.touch_entered();
        }
        // Parents come first, so that their children are computed once. A block with many small blocks is touched once for
        // each of them.
        let position = |slot: &ChainSlot| self.chain.get(*slot).map_or(0, |block| block.position);
        let touched = &mut self.step.touched;
        touched.extend(
            self.chain
                .touched()
                .iter()
                .map(|slot| (Reverse(position(slot)), *slot)),
        );
        touched.sort_unstable();
        touched.dedup();
        stack.extend(touched.drain(..).map(|(_, slot)| slot));
        self.chain.forget_touched();
        changed.extend_from_slice(&stack);
        while let Some(slot) = stack.pop() {
            let Some(block) = self.chain.get(slot) else {
                continue;
            };
            if self.windows.recompute(slot, block.position, self.chain.up(slot)) {
                changed.push(slot);
                stack.extend(self.chain.children(slot));
            }
        }
        (self.step.stack, self.step.changed) = (stack, changed);
    }

    /// Whether a request that uses only blocks of `tier` and of nearer tiers can resume after the block.
    pub(super) fn is_resumable(&self, slot: ChainSlot, tier: TierIndex) -> bool {
        if self.chain.is_within_chunk(slot, tier) {
            return false;
        }
        if self.windows.is_empty() {
            return true;
        }
        if tier != TierIndex::DEVICE {
            return self.settings.groups.has_divergent_hits;
        }
        let block = self.chain.get(slot);
        block.is_some_and(|block| self.windows.allow(slot, block.position))
    }

    /// Marks the blocks in this batch's stored events that are resumable: a request can go on after a resumable block.
    fn tell_stored(&mut self, begun: TranslationMark, output: &mut Translation) {
        let fresh = self.chain.take_fresh();
        let mut slots = fresh.iter().copied();
        output.set_resumable(begun, |tier, sequence| {
            let (Some(slot), Some(tier)) = (slots.next(), TierIndex::of(tier)) else {
                return false;
            };
            // The block may have gone again in the same step, and its slot may have another block by now.
            let is_there = self
                .chain
                .get(slot)
                .is_some_and(|block| block.sequence == sequence);
            if !is_there || !self.chain.is_published(slot, tier) {
                return false;
            }
            let is_resumable = self.is_resumable(slot, tier);
            self.chain.set_resumable(slot, tier, is_resumable);
            is_resumable
        });
        self.chain.keep_fresh(fresh);
    }

    /// Emits the changes of blocks that were held before this batch: which have become resumable, and which no longer
    /// are. If `begun` is given, emits the blocks that are no longer resumable at that point, before the batch's
    /// other events.
    fn tell_changed(&mut self, begun: Option<TranslationMark>, output: &mut Translation) {
        let mut changed = std::mem::take(&mut self.step.changed);
        for tier in self.chain.published_of(&changed).iter() {
            let (mut resumable, mut barred) = (Vec::new(), Vec::new());
            for slot in &changed {
                if !self.chain.is_published(*slot, tier) {
                    continue;
                }
                let is_resumable = self.is_resumable(*slot, tier);
                if let Some(sequence) = self.chain.set_resumable(*slot, tier, is_resumable) {
                    let told = if is_resumable { &mut resumable } else { &mut barred };
                    told.push(sequence);
                }
            }
            output.push_resumable(tier.tier(), barred, false, begun);
            output.push_resumable(tier.tier(), resumable, true, None);
        }
        changed.clear();
        self.step.changed = changed;
    }
}

/// Returns the tokens that the name of each block covers: `window` tokens, from each multiple of `step` on.
fn blocks_of(tokens: &[Token], step: usize, window: usize) -> impl Iterator<Item = &[Token]> {
    let starts = (0..tokens.len()).step_by(step.max(1));
    starts.map_while(move |start| tokens.get(start..)?.get(..window))
}

/// Whether block `number` of an event has one of `objects`. The objects must be sorted by block number.
fn has_object(objects: &[BlockObject], number: u32) -> bool {
    objects
        .binary_search_by_key(&number, |object| object.block)
        .is_ok()
}
