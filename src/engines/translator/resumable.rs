//! The end of a step: what groups beside main attention have changed, and which blocks a request can resume behind by now.
//!
//! A batch of an engine is one step. The events of windows and states come before that of main attention, which says where their names stand.
//! So they wait for the end of the batch. The names of kept blocks are those of main attention. Where a group's blocks are smaller, some names are
//! its own: those before a name that main attention knows are the blocks just before it, in a row.

use hashbrown::HashMap;

use crate::batch::{Content, EngineBatch, EngineChange, EngineRemoved, EngineStored, Group, GroupKind};
use crate::reason::Reason;

use super::Translator;
use super::chain::{Block, Slot};
use super::groups::{LaneId, STAND_IN};
use super::output::{Mark, Translation};
use super::tiers::{TierIndex, TierSet};
use super::windows::{Place, WindowId};

/// What a step needs until its end.
#[derive(Debug, Default)]
pub(super) struct Step {
    /// The changes of groups beside main attention.
    waiting: Vec<EngineChange>,
    /// What names of main attention stood for that were removed in this step.
    gone: HashMap<u64, Block>,
    /// Whether what a request needs has changed, so that every block has to be looked at.
    has_new_rules: bool,
    /// Where the output stood when the chain began to know what it publishes, if that was in this step.
    grown: Option<Mark>,
    /// Lists for the computation, kept for the next step.
    stack: Vec<Slot>,
    changed: Vec<Slot>,
}

impl Step {
    /// Forgets what came before a clear.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
        self.gone.clear();
    }
}

impl Translator {
    /// A group, with the kind that the settings state where its event says none.
    pub(super) fn stated(&self, group: Group) -> Group {
        let stated = || {
            let index = usize::try_from(group.index?).ok()?;
            self.settings.groups.kinds.get(index).copied()
        };
        Group {
            kind: group.kind.or_else(stated),
            ..group
        }
    }

    /// Keeps a change of a group beside main attention for the end of the step. Returns whether it is one.
    pub(super) fn defer(&mut self, change: &EngineChange, output: &mut Translation) -> Result<bool, Reason> {
        let (EngineChange::Stored(EngineStored { group, .. })
        | EngineChange::Removed(EngineRemoved { group, .. })) = change
        else {
            return Ok(false);
        };
        let Some(index) = group.index else {
            return Ok(false);
        };
        let known = self.windows.find(index).and_then(|id| self.windows.kind(id));
        match (self.stated(*group).kind.or(known), change) {
            (Some(GroupKind::Window(_) | GroupKind::State), EngineChange::Removed(_)) => {}
            (Some(kind @ (GroupKind::Window(_) | GroupKind::State)), EngineChange::Stored(stored)) => {
                self.learn_window(index, kind, stored, output)?;
            }
            _ => return Ok(false),
        }
        self.step.waiting.push(*change);
        Ok(true)
    }

    /// Learns of a group beside main attention. One that is new changes where a request can resume.
    fn learn_window(
        &mut self,
        index: u32,
        kind: GroupKind,
        stored: &EngineStored,
        output: &mut Translation,
    ) -> Result<(), Reason> {
        let learned = self
            .windows
            .learn(index, kind, stored.block_size.ok_or(Reason::UnknownGroup)?)?;
        if !learned.is_new {
            return Ok(());
        }
        if !self.chain.has_tree() {
            self.chain.grow_tree();
            output.seal();
            self.step.grown = Some(output.mark());
        }
        self.step.has_new_rules = true;
        if self.groups.drop_lane(index, &mut self.chain) {
            self.publish_all(output);
        }
        Ok(())
    }

    /// Notes what `name` of main attention stood for, as long as the step lasts, where the lane has it no longer.
    pub(super) fn note_gone(&mut self, lane: LaneId, name: u64, slot: Slot) {
        if self.chain.has_tree()
            && self.groups.find_in(lane, name).is_none()
            && let Some(block) = self.chain.get(slot)
        {
            self.step.gone.insert(name, block);
        }
    }

    /// Ends the step that began at `begun`: appends to `output` where a request can resume by now.
    pub(super) fn finish_step(&mut self, batch: &EngineBatch, begun: Mark, output: &mut Translation) {
        if !self.chain.has_tree() {
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
                EngineChange::Moved { .. } | EngineChange::Cleared => {}
            }
        }
        self.step.waiting = waiting;
        self.step.gone.clear();
        self.recompute();
        let grown = self.step.grown.take();
        self.tell_stored(grown.unwrap_or(begun), output);
        if std::mem::take(&mut self.step.has_new_rules) {
            self.step.changed = self.chain.slots();
            self.tell_changed(None, output);
        } else {
            self.tell_changed(Some(begun), output);
        }
        output.seal();
    }

    /// Of a model without main attention, a window whose events skip no block stands in for it. What a request reuses is not known then: blocks
    /// behind the window may be gone, and it needs none of them.
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
        if TierIndex::of(stored.tier) != Some(TierIndex::DEVICE) {
            // Elsewhere no block is called resumable.
            return output.reasons.count(Reason::OtherGroup);
        }
        if self.names() + names.len() > self.settings.blocks_max {
            return self.count(Reason::TableFull, output);
        }
        let mut behind = None;
        for name in names.iter().rev() {
            behind = self.place(id, *name, behind);
            let added = match behind {
                Some(place) => {
                    let added = self.windows.add(id, *name, place, &mut self.chain);
                    self.chain.free_unnamed(place.slot);
                    added
                }
                None => Err(Reason::UnplacedName),
            };
            if let Err(reason) = added {
                self.count(reason, output);
            }
        }
    }

    /// Where the block `name` of a group ends. `behind` is where the next one of its event does.
    fn place(&mut self, id: WindowId, name: u64, behind: Option<Place>) -> Option<Place> {
        if let Some(place) = self.windows.place_of(id, name) {
            return Some(place);
        }
        let at_end = |slot| Place { slot, before: 0 };
        let known = self.groups.find_any(name).or_else(|| self.windows.slot_of(name));
        let place = match (known, self.step.gone.get(&name)) {
            (Some(slot), _) => at_end(slot),
            (None, Some(block)) => at_end(self.chain.slot_of(*block).ok()?),
            (None, None) => self.windows.place_before(id, behind?, &self.chain)?,
        };
        let position = self.chain.get(place.slot)?.position;
        if !self.windows.fits(id, place, position) {
            self.chain.free_unnamed(place.slot);
            return None;
        }
        Some(place)
    }

    fn remove_window(&mut self, batch: &EngineBatch, removed: &EngineRemoved, output: &mut Translation) {
        let Some(id) = removed.group.index.and_then(|index| self.windows.find(index)) else {
            return self.count(Reason::UnknownGroup, output);
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
            if !had_copy {
                output.reasons.count(Reason::NotHeld);
            }
        }
    }

    /// Computes the runs of all blocks that a change reaches: those that were touched, and what follows them until nothing changes.
    fn recompute(&mut self) {
        let (mut stack, mut changed) = (
            std::mem::take(&mut self.step.stack),
            std::mem::take(&mut self.step.changed),
        );
        self.chain.take_touched(&mut stack);
        changed.extend_from_slice(&stack);
        let position = |slot: &Slot| self.chain.get(*slot).map_or(0, |block| block.position);
        // Parents come first: what follows is computed once.
        stack.sort_by_cached_key(|slot| std::cmp::Reverse(position(slot)));
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

    /// Whether a request can resume behind the block from what `tier` and those nearer have.
    pub(super) fn is_resumable(&self, slot: Slot, tier: TierIndex) -> bool {
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

    /// Says with the blocks that this step has stored whether they are resumable.
    fn tell_stored(&mut self, begun: Mark, output: &mut Translation) {
        let fresh = self.chain.take_fresh();
        let mut slots = fresh.iter().copied();
        output.set_resumable(begun, |tier, sequence| {
            let (Some(slot), Some(tier)) = (slots.next(), TierIndex::of(tier)) else {
                return false;
            };
            // A block that has gone again in the same step, or whose slot has another by now.
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

    /// Says which of the other blocks are resumable by now and were not, or the other way about. What can't be resumed any more is told at
    /// `begun`, before all else, where that is given.
    fn tell_changed(&mut self, begun: Option<Mark>, output: &mut Translation) {
        let mut changed = std::mem::take(&mut self.step.changed);
        for is_resumable in [false, true] {
            for tier in TierIndex::ALL {
                let mut told = Vec::new();
                for slot in &changed {
                    let differs = self.chain.is_published(*slot, tier)
                        && self.is_resumable(*slot, tier) == is_resumable
                        && self.chain.set_resumable(*slot, tier, is_resumable);
                    if let Some(block) = self.chain.get(*slot).filter(|_| differs) {
                        told.push(block.sequence);
                    }
                }
                let at = begun.filter(|_| !is_resumable);
                output.push_resumable(tier.tier(), told, is_resumable, at);
            }
        }
        changed.clear();
        self.step.changed = changed;
    }
}
