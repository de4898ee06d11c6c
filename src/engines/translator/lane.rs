//! Lanes. A lane is the state of one group of layers: the engine's names of blocks, and the number of copies that each
//! tier has of a block.
//!
//! A copy on the device is *uncertain* if the stored event that added it may only have reported a block that the device
//! had already.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use crate::reason::Reason;

use super::block::{Block, ChainSlot};
use super::chain::Chain;
use super::forms::{SavedError, SavedName};
use super::tiers::{PerTier, TierIndex};

#[derive(Debug, Clone, Copy)]
struct Name {
    slot: ChainSlot,
    copies: PerTier<u16>,
    /// Number of uncertain copies on the device. A copy is uncertain if the stored event that added it may only have
    /// reported a block that was already known.
    reported: u16,
}

impl Name {
    /// Whether the device has copies, and all of them are uncertain.
    fn is_unclear(&self) -> bool {
        let on_device = self.copies[TierIndex::DEVICE];
        on_device > 0 && self.reported >= on_device
    }
}

/// The result of adding a copy of a block.
#[derive(Debug, Clone, Copy)]
pub(super) struct AddedCopy {
    pub(super) slot: ChainSlot,
    /// Whether the group also holds the block under another name.
    pub(super) is_alias: bool,
}

/// The result of removing a copy of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    /// The tier had no copy of the name's block.
    Nothing,
    /// A copy of the block in this slot was removed. Further copies under the same name are left.
    Copy(ChainSlot),
    /// The last copy under the name was removed, so the name was removed, too. The slot is that of its block.
    Name(ChainSlot),
}

/// The names of one block.
#[derive(Debug, Clone, Copy, Default)]
struct BlockNameCounts {
    /// For each tier, the number of the block's names that have a copy there.
    names_in: PerTier<u16>,
    /// The name that was added last. It may be gone, or stand for another block by now.
    last: u64,
}

/// The block names of one group of layers.
#[derive(Debug, Default)]
pub(super) struct GroupLane {
    names: HashMap<u64, Name>,
    /// The names of each block, by the index of its slot.
    held: Vec<BlockNameCounts>,
    /// The mixed blocks: those that have had two names at one time. The engine then tells two blocks apart by something
    /// that its events do not tell. For which of the two a name stands is unknown, even if the other name has gone. The
    /// value tells whether the block has had two names on the device. A block is mixed until it is in no tier.
    mixed: HashMap<ChainSlot, bool>,
    /// For each tier, the number of mixed blocks there. On the device, only those count that have had two names there.
    mixed_in: PerTier<usize>,
    /// For each tier, the number of names that have a copy there.
    names_in: PerTier<usize>,
    /// Number of names whose copies on the device are all uncertain.
    unclear: usize,
}

impl GroupLane {
    /// Returns the names with their copies, in saved form and in no particular order.
    pub(super) fn save(&self) -> Vec<SavedName> {
        let saved = |(name, known): (&u64, &Name)| {
            SavedName(*name, known.slot.number(), known.copies, known.reported)
        };
        self.names.iter().map(saved).collect()
    }

    /// Restores saved names, whose blocks are in `chain`.
    pub(super) fn restore(saved: Vec<SavedName>, chain: &mut Chain) -> Result<Self, SavedError> {
        let mut lane = Self::default();
        for SavedName(name, slot, copies, reported) in saved {
            let slot = chain.slot_in_use(slot)?;
            let known = Name {
                slot,
                copies,
                reported,
            };
            if copies == PerTier::default() || lane.names.insert(name, known).is_some() {
                return Err(SavedError::Contradiction("a name has no copies, or comes twice"));
            }
            chain.add_name(slot);
            lane.unclear += usize::from(known.is_unclear());
            if lane.holds_anywhere(slot) {
                lane.mix(slot);
            }
            for tier in TierIndex::ALL {
                if copies[tier] > 0 {
                    lane.count_held(slot, name, tier);
                }
            }
        }
        Ok(lane)
    }

    /// Returns the mixed blocks, in saved form.
    pub(super) fn save_mixed(&self) -> Vec<(u32, bool)> {
        let saved = |(slot, on_device): (&ChainSlot, &bool)| (slot.number(), *on_device);
        self.mixed.iter().map(saved).collect()
    }

    /// Restores the mixed blocks, whose names have been restored.
    pub(super) fn restore_mixed(&mut self, saved: Vec<(u32, bool)>, chain: &Chain) -> Result<(), SavedError> {
        for (slot, on_device) in saved {
            let slot = chain.slot_in_use(slot)?;
            if self.holds_anywhere(slot) {
                self.mix(slot);
            }
            if on_device && self.holds(slot, TierIndex::DEVICE) {
                self.mix_on_device(slot);
            }
        }
        Ok(())
    }

    /// The names, each with the block that it stands for.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, ChainSlot)> {
        self.names.iter().map(|(name, known)| (*name, known.slot))
    }

    pub(super) fn len(&self) -> usize {
        self.names.len()
    }

    pub(super) fn clear(&mut self) {
        self.names.clear();
        self.held.clear();
        self.mixed.clear();
        (self.mixed_in, self.names_in) = (PerTier::default(), PerTier::default());
        self.unclear = 0;
    }

    /// Number of block names that have only uncertain copies on the device. The device may no longer have the blocks of
    /// these names.
    pub(super) fn unclear(&self) -> usize {
        self.unclear
    }

    /// Marks a copy of `name` on the device as uncertain: the stored event that has just added it may only have
    /// reported a block that the device had already. If the copy is the only one, it stays certain, because its event
    /// must have added the block.
    pub(super) fn doubt_copy(&mut self, name: u64) {
        if let Some(name) = self.names.get_mut(&name) {
            let was_unclear = name.is_unclear();
            if name.copies[TierIndex::DEVICE] > 1 {
                name.reported = name.reported.saturating_add(1);
            }
            self.unclear += usize::from(name.is_unclear() && !was_unclear);
        }
    }

    /// Number of blocks in the tier that have had two names at one time.
    pub(super) fn mixed_in(&self, tier: TierIndex) -> usize {
        self.mixed_in[tier]
    }

    /// Whether the group of layers has at least one block in the tier.
    pub(super) fn has_in(&self, tier: TierIndex) -> bool {
        self.names_in[tier] > 0
    }

    /// Sets the number of copies of the block `name` in `tier` to `count`. The number stays at least one. Does
    /// nothing if the tier has no copy of the block.
    pub(super) fn set_copies(&mut self, name: u64, tier: TierIndex, count: u16) {
        let Some(name) = self.names.get_mut(&name) else {
            return;
        };
        let was_unclear = name.is_unclear();
        if name.copies[tier] > 0 {
            name.copies[tier] = count.max(1);
            if tier == TierIndex::DEVICE {
                name.reported = 0;
            }
        }
        self.unclear -= usize::from(was_unclear && !name.is_unclear());
    }

    pub(super) fn find(&self, name: u64) -> Option<ChainSlot> {
        self.names.get(&name).map(|name| name.slot)
    }

    pub(super) fn has_copy(&self, name: u64, tier: TierIndex) -> bool {
        self.names.get(&name).is_some_and(|name| name.copies[tier] > 0)
    }

    /// Whether the group has the block in `tier`, under any name.
    pub(super) fn holds(&self, slot: ChainSlot, tier: TierIndex) -> bool {
        let held = self.held.get(slot.place());
        held.is_some_and(|held| held.names_in[tier] > 0)
    }

    /// The name that was added last for the block in `slot`; `None` if that name is gone, or the block has none.
    pub(super) fn name_of(&self, slot: ChainSlot) -> Option<u64> {
        let last = self.held.get(slot.place())?.last;
        (self.find(last)? == slot).then_some(last)
    }

    /// Whether the group has the block in any tier, under any name.
    pub(super) fn holds_anywhere(&self, slot: ChainSlot) -> bool {
        TierIndex::ALL.into_iter().any(|tier| self.holds(slot, tier))
    }

    /// Adds a copy of `block` under the engine's name `name`. If this fails, nothing is changed.
    pub(super) fn add(
        &mut self,
        name: u64,
        block: Block,
        tier: TierIndex,
        chain: &mut Chain,
    ) -> Result<AddedCopy, Reason> {
        match self.names.entry(name) {
            Entry::Occupied(mut entry) => {
                let entry = entry.get_mut();
                if chain.get(entry.slot) != Some(block) {
                    return Err(Reason::NameConflict);
                }
                let was_unclear = entry.is_unclear();
                let copies = &mut entry.copies[tier];
                *copies = copies.checked_add(1).ok_or(Reason::OutOfRange)?;
                let (slot, is_first) = (entry.slot, *copies == 1);
                self.unclear -= usize::from(was_unclear && !entry.is_unclear());
                if is_first {
                    self.count_held(slot, name, tier);
                }
                Ok(AddedCopy {
                    slot,
                    is_alias: false,
                })
            }
            Entry::Vacant(entry) => {
                let slot = chain.slot_of(block)?;
                let mut copies = PerTier::default();
                copies[tier] = 1;
                entry.insert(Name {
                    slot,
                    copies,
                    reported: 0,
                });
                chain.add_name(slot);
                let is_alias = self.holds_anywhere(slot);
                if is_alias {
                    self.mix(slot);
                }
                self.count_held(slot, name, tier);
                Ok(AddedCopy { slot, is_alias })
            }
        }
    }

    fn count_held(&mut self, slot: ChainSlot, name: u64, tier: TierIndex) {
        if let Some(held) = slot.grown(&mut self.held, BlockNameCounts::default()) {
            held.last = name;
            let names = &mut held.names_in[tier];
            *names = names.saturating_add(1);
            match *names {
                1 => self.mixed_in[tier] += usize::from(self.is_mixed_in(slot, tier)),
                2.. if tier == TierIndex::DEVICE => self.mix_on_device(slot),
                _ => {}
            }
        }
        self.names_in[tier] += 1;
    }

    /// Notes that the block has two names.
    fn mix(&mut self, slot: ChainSlot) {
        if let Entry::Vacant(entry) = self.mixed.entry(slot) {
            entry.insert(false);
            for tier in TierIndex::BEYOND {
                self.mixed_in[tier] += usize::from(self.holds(slot, tier));
            }
        }
    }

    /// Notes that the block has two names on the device.
    fn mix_on_device(&mut self, slot: ChainSlot) {
        self.mix(slot);
        if let Some(on_device) = self.mixed.get_mut(&slot)
            && !std::mem::replace(on_device, true)
        {
            self.mixed_in[TierIndex::DEVICE] += 1;
        }
    }

    /// Whether the block counts as mixed in the tier, if it is there.
    fn is_mixed_in(&self, slot: ChainSlot, tier: TierIndex) -> bool {
        let mixed = self.mixed.get(&slot);
        mixed.is_some_and(|on_device| tier != TierIndex::DEVICE || *on_device)
    }

    /// Notes that the block has gone from the tier.
    fn unmix(&mut self, slot: ChainSlot, tier: TierIndex) {
        self.mixed_in[tier] -= usize::from(self.is_mixed_in(slot, tier));
        if !self.holds_anywhere(slot) {
            self.mixed.remove(&slot);
        }
    }

    /// Takes a copy away, if there is one. With the last copy of a name, the name is removed, too.
    pub(super) fn take(&mut self, name: u64, tier: TierIndex, chain: &mut Chain) -> Taken {
        let Entry::Occupied(mut entry) = self.names.entry(name) else {
            return Taken::Nothing;
        };
        let (slot, was_unclear) = (entry.get().slot, entry.get().is_unclear());
        let name = entry.get_mut();
        let copies = &mut name.copies[tier];
        if *copies == 0 {
            return Taken::Nothing;
        }
        *copies -= 1;
        let is_last = *copies == 0;
        if tier == TierIndex::DEVICE {
            name.reported = name.reported.min(*copies);
        }
        self.unclear += usize::from(name.is_unclear());
        self.unclear -= usize::from(was_unclear);
        let is_name_gone = name.copies == PerTier::default();
        if is_name_gone {
            entry.remove();
            chain.drop_name(slot);
        }
        if is_last {
            self.names_in[tier] = self.names_in[tier].saturating_sub(1);
            let names = self
                .held
                .get_mut(slot.place())
                .map(|held| &mut held.names_in[tier]);
            if let Some(names) = names {
                let before = std::mem::replace(names, names.saturating_sub(1));
                if before == 1 {
                    self.unmix(slot, tier);
                }
            }
        }
        match is_name_gone {
            true => Taken::Name(slot),
            false => Taken::Copy(slot),
        }
    }

    /// Removes all names, with their copies.
    pub(super) fn take_all(&mut self, chain: &mut Chain) {
        for (_, name) in self.names.drain() {
            chain.drop_name(name.slot);
        }
        self.clear();
    }
}
