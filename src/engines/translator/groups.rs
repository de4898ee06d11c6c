//! Groups of layers: the groups that a prefix needs, and the blocks of each group.
//!
//! An engine with several kinds of attention keeps a cache for each group of layers. *Main attention* is all groups of which
//! a request needs every block of a prefix. A prefix is held in a tier if all groups of main attention have it there. From
//! sliding windows and state-space layers, a request needs only the end of the prefix: see [`super::windows`].

use hashbrown::HashSet;

use crate::batch::{Group, GroupKind};
use crate::reason::Reason;

use super::block::{Block, ChainSlot};
use super::chain::Chain;
use super::forms::{SavedError, SavedGroups};
use super::lane::{AddedCopy, GroupLane, Taken};
use super::tiers::TierIndex;

/// Maximum number of groups of layers that are main attention.
const LANES_MAX: usize = 16;
/// Maximum number of groups of unknown kinds that are remembered.
const OTHERS_MAX: usize = 256;

/// Group number of a window that stands in for main attention, in a model without main attention: the window's blocks
/// count as held blocks.
pub(super) const STAND_IN: u32 = u32::MAX;

/// The index of a lane: the names and copies of a group that is main attention, or stands in for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GroupLaneId(usize);

/// All groups of layers of a holder.
#[derive(Debug, Default)]
pub(super) struct HolderGroups {
    /// The groups of main attention: for each, its number and its lane (its block names, with their copies). Events
    /// that give no group number share a lane without a number. The blocks of that lane count as held by all groups.
    lanes: Vec<(Option<u32>, GroupLane)>,
    /// Numbers of groups whose kind kvatlas does not know.
    others: Vec<u32>,
    /// Blocks that all groups of main attention have, but in different tiers: no tier has them in all groups.
    split: HashSet<ChainSlot>,
}

impl HolderGroups {
    /// Returns all groups of layers with their blocks, in saved form.
    pub(super) fn save(&self) -> SavedGroups {
        let lanes = self.lanes.iter().map(|(index, lane)| (*index, lane.save()));
        SavedGroups {
            lanes: lanes.collect(),
            others: self.others.clone(),
            mixed: self.lanes.iter().map(|(_, lane)| lane.save_mixed()).collect(),
        }
    }

    /// Restores the saved groups. `chain` must already have their blocks.
    pub(super) fn restore(saved: SavedGroups, chain: &mut Chain) -> Result<Self, SavedError> {
        let mut groups = Self {
            others: saved.others,
            ..Self::default()
        };
        for (index, names) in saved.lanes {
            if groups.lane_with(index).is_some() {
                return Err(SavedError::Contradiction("a group comes twice"));
            }
            groups.lanes.push((index, GroupLane::restore(names, chain)?));
        }
        for ((_, lane), mixed) in groups.lanes.iter_mut().zip(saved.mixed) {
            lane.restore_mixed(mixed, chain)?;
        }
        groups.find_split();
        match groups.lanes.len() <= LANES_MAX && groups.others.len() <= OTHERS_MAX {
            true => Ok(groups),
            false => Err(SavedError::Contradiction("there are too many groups")),
        }
    }

    /// Number of block names in all groups of layers.
    pub(super) fn names(&self) -> usize {
        self.lanes.iter().map(|(_, lane)| lane.len()).sum()
    }

    /// The lanes (names and copies) of the groups of main attention. The lane of a window that stands in for main
    /// attention is left out.
    fn main_lanes(&self) -> impl Iterator<Item = &GroupLane> {
        let lanes = self.lanes.iter().filter(|(index, _)| *index != Some(STAND_IN));
        lanes.map(|(_, lane)| lane)
    }

    /// The names of main attention with their blocks, in all of its groups.
    pub(super) fn names_of_main(&self) -> impl Iterator<Item = (u64, ChainSlot)> {
        self.main_lanes().flat_map(GroupLane::iter)
    }

    /// The slot of the block that has the name `name` in a group of main attention.
    pub(super) fn find_in_main(&self, name: u64) -> Option<ChainSlot> {
        self.main_lanes().find_map(|lane| lane.find(name))
    }

    /// A name of main attention for the block in `slot`.
    pub(super) fn name_in_main(&self, slot: ChainSlot) -> Option<u64> {
        self.main_lanes().find_map(|lane| lane.name_of(slot))
    }

    /// Forgets all blocks. The groups themselves stay known.
    pub(super) fn clear(&mut self) {
        self.lanes.iter_mut().for_each(|(_, lane)| lane.clear());
        self.split.clear();
    }

    /// Number of blocks in the tier that have had two names at one time, in all groups of layers.
    pub(super) fn mixed_in(&self, tier: TierIndex) -> usize {
        self.lanes.iter().map(|(_, lane)| lane.mixed_in(tier)).sum()
    }

    /// Number of block names that have only uncertain copies on the device. The device may no longer have the blocks of
    /// these names.
    pub(super) fn unclear(&self) -> usize {
        self.lanes.iter().map(|(_, lane)| lane.unclear()).sum()
    }

    /// Marks a copy of each of `names` on the device as uncertain: the stored event that has just added it may only
    /// have reported a block that the device had already. A name's only copy stays certain.
    pub(super) fn doubt_copies(&mut self, lane: GroupLaneId, names: &[u64]) {
        if let Some((_, lane)) = self.lanes.get_mut(lane.0) {
            for name in names {
                lane.doubt_copy(*name);
            }
        }
    }

    /// Whether any group of layers has a block in `tier`.
    pub(super) fn has_in(&self, tier: TierIndex) -> bool {
        self.lanes.iter().any(|(_, lane)| lane.has_in(tier))
    }

    /// Whether the group counts as main attention, according to the events so far. Later events may tell otherwise,
    /// see [`Self::learn`].
    pub(super) fn counts(&self, group: Group) -> bool {
        match (group.index, group.kind) {
            (_, Some(kind)) => kind == GroupKind::Main,
            (Some(index), None) if self.others.contains(&index) => false,
            (Some(1..), None) => self.lane_with(group.index).is_some(),
            (_, None) => true,
        }
    }

    /// Whether any group of layers has a block of this name.
    pub(super) fn has_name(&self, name: u64) -> bool {
        self.lanes.iter().any(|(_, lane)| lane.find(name).is_some())
    }

    pub(super) fn lane_with(&self, index: Option<u32>) -> Option<GroupLaneId> {
        self.lanes
            .iter()
            .position(|(lane, _)| *lane == index)
            .map(GroupLaneId)
    }

    /// Learns the kind of a stored event's group. Returns the group's lane (its names and copies), and whether the held blocks
    /// may have changed.
    pub(super) fn learn(&mut self, group: Group, chain: &mut Chain) -> (Result<GroupLaneId, Reason>, bool) {
        match (group.index, group.kind) {
            (Some(index), Some(GroupKind::Main)) => {
                self.others.retain(|other| *other != index);
                self.lane_or_new(Some(index))
            }
            (index, Some(kind)) if kind != GroupKind::Main => {
                let changes = index.is_some_and(|index| {
                    self.set_other(index);
                    self.drop_lane(index, chain)
                });
                (Err(Reason::OtherGroup), changes)
            }
            (Some(index), _) if self.others.contains(&index) => (Err(Reason::OtherGroup), false),
            (Some(index @ 1..), _) => match self.lane_with(Some(index)) {
                Some(lane) => (Ok(lane), false),
                None => (Err(Reason::UnknownGroup), false),
            },
            (index, _) => self.lane_or_new(index),
        }
    }

    fn set_other(&mut self, index: u32) {
        if !self.others.contains(&index) && self.others.len() < OTHERS_MAX {
            self.others.push(index);
        }
    }

    /// Forgets a group of main attention, which has turned out to be another kind. Returns whether there was such a group.
    pub(super) fn drop_lane(&mut self, index: u32, chain: &mut Chain) -> bool {
        let Some(GroupLaneId(place)) = self.lane_with(Some(index)) else {
            return false;
        };
        let (_, mut lane) = self.lanes.remove(place);
        lane.take_all(chain);
        self.find_split();
        true
    }

    fn lane_or_new(&mut self, index: Option<u32>) -> (Result<GroupLaneId, Reason>, bool) {
        if let Some(lane) = self.lane_with(index) {
            return (Ok(lane), false);
        }
        if self.lanes.len() >= LANES_MAX {
            return (Err(Reason::OutOfRange), false);
        }
        let needs_more = index.is_some() && self.lanes.iter().any(|(lane, _)| lane.is_some());
        self.lanes.push((index, GroupLane::default()));
        self.find_split();
        (Ok(GroupLaneId(self.lanes.len() - 1)), needs_more)
    }

    /// The lane (block names and copies) to which a removed event applies. The result is `None` if the event may be
    /// about any group: it gives no group number, or it gives group 0 although no stored event has named that group.
    pub(super) fn lane_of(&self, group: Group) -> Result<Option<GroupLaneId>, Reason> {
        match (group.index, group.kind) {
            (_, Some(kind)) if kind != GroupKind::Main => Err(Reason::OtherGroup),
            (None, _) => Ok(None),
            (Some(index), _) if self.others.contains(&index) => Err(Reason::OtherGroup),
            (Some(index), _) => match self.lane_with(Some(index)) {
                Some(lane) => Ok(Some(lane)),
                None if index == 0 => Ok(None),
                None => Err(Reason::UnknownGroup),
            },
        }
    }

    /// The lanes in which to look up `name`. A lane has the block names of one group of layers.
    ///
    /// - If `lane` is given, it is the only one.
    /// - Otherwise, if the lane without a group number has the name, that lane is the only one.
    /// - Otherwise, these are all lanes that have the name.
    pub(super) fn lanes_with(
        &self,
        lane: Option<GroupLaneId>,
        name: u64,
    ) -> impl Iterator<Item = GroupLaneId> + use<> {
        let has = |lane: &(Option<u32>, GroupLane)| lane.1.find(name).is_some();
        let ungrouped = || self.lanes.iter().position(|lane| lane.0.is_none() && has(lane));
        let mask = match lane.map(|lane| lane.0).or_else(ungrouped) {
            Some(place) => 1_u32 << place,
            None => (0..)
                .zip(&self.lanes)
                .filter(|(_, lane)| has(lane))
                .map(|(place, _)| 1 << place)
                .sum(),
        };
        (0..LANES_MAX)
            .filter(move |place| mask & 1 << place != 0)
            .map(GroupLaneId)
    }

    /// The slot of the block that has the name `name` in `lane` (one group of layers), or else in any other lane.
    pub(super) fn find(&self, lane: GroupLaneId, name: u64) -> Option<ChainSlot> {
        self.find_in(lane, name).or_else(|| self.find_any(name))
    }

    /// The block that `name` stands for in any lane.
    pub(super) fn find_any(&self, name: u64) -> Option<ChainSlot> {
        self.lanes.iter().find_map(|(_, lane)| lane.find(name))
    }

    /// Whether at least one group of main attention has a number that an event has given.
    pub(super) fn has_numbered_main(&self) -> bool {
        let is_main = |index: &Option<u32>| index.is_some_and(|index| index != STAND_IN);
        self.lanes.iter().any(|(index, _)| is_main(index))
    }

    /// Whether events have told of the group, either as a group of main attention or as a group whose kind kvatlas
    /// does not know.
    pub(super) fn knows(&self, index: u32) -> bool {
        self.others.contains(&index) || self.lane_with(Some(index)).is_some()
    }

    /// Whether one group of main attention has blocks on the device, while another has blocks only on host, disk or
    /// remote storage. vLLM's HiSparse works like this: it keeps one group in a pool on the host. A request can then
    /// reuse blocks although no single tier has them in all groups.
    pub(super) fn are_apart(&self) -> bool {
        let numbered = || self.lanes.iter().filter(|(index, _)| index.is_some());
        let on_device = |lane: &GroupLane| lane.has_in(TierIndex::DEVICE);
        let is_beyond = |lane: &GroupLane| TierIndex::BEYOND.into_iter().any(|tier| lane.has_in(tier));
        numbered().any(|(_, lane)| on_device(lane))
            && numbered().any(|(_, lane)| !on_device(lane) && is_beyond(lane))
    }

    /// The names that have copies beyond the device (on host, disk or remote storage), each with its lane: the group that has the
    /// name.
    pub(super) fn names_beyond(&self) -> Vec<(GroupLaneId, u64)> {
        let is_beyond = |lane: &GroupLane, name: u64| {
            TierIndex::BEYOND
                .into_iter()
                .any(|tier| lane.has_copy(name, tier))
        };
        let lanes = self.lanes.iter().enumerate();
        let names = lanes.flat_map(|(place, (_, lane))| {
            let names = lane.iter().filter(move |(name, _)| is_beyond(lane, *name));
            names.map(move |(name, _)| (GroupLaneId(place), name))
        });
        names.collect()
    }

    /// Whether there is a group of main attention.
    pub(super) fn has_main(&self) -> bool {
        self.lanes.iter().any(|(index, _)| *index != Some(STAND_IN))
    }

    /// Whether there is a group of an unknown kind.
    pub(super) fn has_others(&self) -> bool {
        !self.others.is_empty()
    }

    pub(super) fn find_in(&self, lane: GroupLaneId, name: u64) -> Option<ChainSlot> {
        self.lanes.get(lane.0).and_then(|(_, lane)| lane.find(name))
    }

    pub(super) fn has_copy(&self, lane: GroupLaneId, name: u64, tier: TierIndex) -> bool {
        self.lanes
            .get(lane.0)
            .is_some_and(|(_, lane)| lane.has_copy(name, tier))
    }

    /// Sets the number of copies of the block `name` in `tier` to `count`. The number stays at least one. Does
    /// nothing if the tier has no copy of the block.
    pub(super) fn set_copies(&mut self, lane: GroupLaneId, name: u64, tier: TierIndex, count: u16) {
        if let Some((_, lane)) = self.lanes.get_mut(lane.0) {
            lane.set_copies(name, tier, count);
        }
    }

    pub(super) fn add(
        &mut self,
        lane: GroupLaneId,
        name: u64,
        block: Block,
        tier: TierIndex,
        chain: &mut Chain,
    ) -> Result<AddedCopy, Reason> {
        let (_, lane) = self.lanes.get_mut(lane.0).ok_or(Reason::UnknownGroup)?;
        let added = lane.add(name, block, tier, chain)?;
        self.note_split(added.slot);
        Ok(added)
    }

    pub(super) fn take(&mut self, lane: GroupLaneId, name: u64, tier: TierIndex, chain: &mut Chain) -> Taken {
        let lane = self.lanes.get_mut(lane.0);
        let taken = lane.map_or(Taken::Nothing, |(_, lane)| lane.take(name, tier, chain));
        if let Taken::Copy(slot) | Taken::Name(slot) = taken {
            self.note_split(slot);
        }
        taken
    }

    /// Whether there is a block that all groups of main attention hold, but in no common tier. A request can reuse
    /// such a block, although no tier has it in all groups.
    pub(super) fn has_split(&self) -> bool {
        !self.split.is_empty()
    }

    /// Updates whether the groups hold the block only in different tiers. To be called after a group has got or lost
    /// a copy of the block.
    fn note_split(&mut self, slot: ChainSlot) {
        // Most engines have one group, and need no look into the set.
        if self.lanes.len() < 2 {
            return;
        }
        match self.is_split(slot) {
            true => self.split.insert(slot),
            false => self.split.remove(&slot),
        };
    }

    fn is_split(&self, slot: ChainSlot) -> bool {
        let numbered = || self.lanes.iter().filter(|(index, _)| index.is_some());
        let all_have = |tier: TierIndex| numbered().all(|(_, lane)| lane.holds(slot, tier));
        numbered().all(|(_, lane)| lane.holds_anywhere(slot)) && !TierIndex::ALL.into_iter().any(all_have)
    }

    /// Finds the blocks that groups have in different tiers.
    fn find_split(&mut self) {
        let slots: HashSet<ChainSlot> = self.names_of_main().map(|(_, slot)| slot).collect();
        self.split = slots.into_iter().filter(|slot| self.is_split(*slot)).collect();
    }

    /// Whether the block counts as held in `tier`. There are two cases: all groups with a number hold it in this
    /// tier, or events without a group number have stored it there.
    pub(super) fn holds(&self, slot: ChainSlot, tier: TierIndex) -> bool {
        if let [(_, only)] = self.lanes.as_slice() {
            return only.holds(slot, tier);
        }
        let mut numbered = self.lanes.iter().filter(|(index, _)| index.is_some()).peekable();
        let all_have = numbered.peek().is_some() && numbered.all(|(_, lane)| lane.holds(slot, tier));
        let mut ungrouped = self.lanes.iter().filter(|(index, _)| index.is_none());
        all_have || ungrouped.any(|(_, lane)| lane.holds(slot, tier))
    }
}
