//! Removals of blocks from a tier, and moves to another tier.

use kvatlas_core::wire::Tier;

use crate::batch::{EngineBatch, EngineRemoved, Group};
use crate::reason::Reason;

use super::Translator;
use super::groups::GroupLaneId;
use super::lane::Taken;
use super::output::Translation;
use super::tiers::{TierIndex, TierSet};

impl Translator {
    /// Applies a removed event: removes a copy of each block that the event names.
    pub(super) fn remove(&mut self, batch: &EngineBatch, removed: &EngineRemoved, output: &mut Translation) {
        let only = removed.tier.and_then(TierIndex::of);
        let lane = match self.groups.lane_of(removed.group) {
            Ok(lane) => lane,
            Err(reason) => return self.count_in(only, reason, output),
        };
        let tiers = match removed.tier.map(TierIndex::of) {
            Some(Some(tier)) => TierSet::one(tier),
            Some(None) => return self.count(Reason::UnknownMedium, output),
            None => TierSet::ALL,
        };
        self.remove_later(lane, batch.hashes(removed.names), tiers);
        let left = removed.left.map(|left| batch.hashes(left));
        for (place, name) in batch.hashes(removed.names).iter().enumerate() {
            let left = match self.settings.counts_copies {
                true => left.and_then(|left| left.get(place).copied()),
                false => Some(0),
            };
            let was_held = self.remove_one(lane, *name, tiers, left, output);
            self.remove_parts(lane, *name, tiers, output);
            if !was_held {
                // If the block is unknown, no copy of it can be left: an event that tells of one contradicts itself.
                let reason = left
                    .filter(|left| *left > 0)
                    .map_or(Reason::NotHeld, |_| Reason::Malformed);
                self.count_in(only, reason, output);
            }
        }
    }

    /// Removes a copy of the block `name` from each of `tiers` that has one. If `left` is given, removes copies in
    /// each tier until only `left` are there. Returns whether at least one tier had a copy.
    pub(super) fn remove_one(
        &mut self,
        lane: Option<GroupLaneId>,
        name: u64,
        tiers: TierSet,
        left: Option<u64>,
        output: &mut Translation,
    ) -> bool {
        let before = left.map(|left| u16::try_from(left.saturating_add(1)).unwrap_or(u16::MAX));
        let mut has_found = false;
        for lane in self.groups.lanes_with(lane, name) {
            let mut gone = None;
            for tier in tiers.iter() {
                if let Some(before) = before {
                    self.groups.set_copies(lane, name, tier, before);
                }
                let slot = match self.groups.take(lane, name, tier, &mut self.chain) {
                    Taken::Nothing => continue,
                    Taken::Copy(slot) => slot,
                    Taken::Name(slot) => *gone.insert(slot),
                };
                has_found = true;
                if !self.groups.holds(slot, tier) {
                    self.chain.withdraw(slot, tier, output);
                }
            }
            if let Some(slot) = gone {
                self.remember(name, slot);
                self.free_later(name, slot);
            }
        }
        has_found
    }

    /// Moves a copy of a block from one tier to another.
    pub(super) fn relocate(
        &mut self,
        name: u64,
        from: Tier,
        to: Tier,
        group: Group,
        output: &mut Translation,
    ) -> Result<(), Reason> {
        let (Some(from), Some(to)) = (TierIndex::of(from), TierIndex::of(to)) else {
            return Err(Reason::UnknownMedium);
        };
        let told = self.groups.lane_of(group)?;
        let lane = self.groups.lanes_with(told, name).next().ok_or(Reason::NotHeld)?;
        let slot = self.groups.find_in(lane, name).ok_or(Reason::NotHeld)?;
        let block = self.chain.get(slot).ok_or(Reason::NotHeld)?;
        if !self.groups.has_copy(lane, name, from) {
            return Err(Reason::NotHeld);
        }
        // The new copy is added first, so that the block is never without a copy.
        self.groups.add(lane, name, block, to, &mut self.chain)?;
        self.slots.clear();
        self.slots.push(slot);
        self.publish_stored(to, output);
        self.remove_one(Some(lane), name, TierSet::one(from), None, output);
        Ok(())
    }
}
