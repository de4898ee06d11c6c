//! Groups of layers other than main attention: sliding windows and recurrent states.
//!
//! Such a group keeps few blocks of a prefix: only the last ones, which a request needs to continue after the prefix.
//! For a window of W tokens, a request needs the last ⌈(W − 1) / b⌉ blocks, where b is the size of the group's own
//! blocks. A state is treated as a window of one block.
//!
//! For each group, a block of the contract has a *run*: the number of the group's blocks that are held without a gap up
//! to the end of that block. A request can continue after the block if the run is long enough.
//!
//! The sizes differ: a group's block may span several blocks of the contract (`step` of them). Or a block of the
//! contract has several of the group's blocks (`fan` of them): these are called small blocks.

use hashbrown::hash_map::Entry;
use hashbrown::{HashMap, HashSet};

use kvatlas_core::hash::Token;

use crate::batch::GroupKind;
use crate::reason::Reason;

use super::block::ChainSlot;
use super::chain::Chain;
use super::forms::{SavedEnd, SavedError, SavedWindow, SavedWindows};
use super::shape::{Shape, lcm};
use super::spots::{Reach, Spots, Within};

/// Maximum number of windows and states (groups of layers other than main attention).
const WINDOWS_MAX: usize = 32;
/// Bit in a run (number of blocks held without a gap): the group's block that ends with this block of the contract is
/// held. Only groups whose blocks are not smaller than the contract's use the bit.
const HELD: u32 = 1 << 31;

/// The index of a window or a state (a group of layers other than main attention).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WindowId(usize);

/// The place where a block of a group ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockEnd {
    /// The place where the contract's block in this slot ends.
    End(ChainSlot),
    /// A place inside a block of the contract. All of the contract's blocks that begin with the same tokens have this
    /// place. The slot is that of one such block, if one is known.
    Within(Within, Option<ChainSlot>),
}

#[derive(Debug, Clone, Copy)]
struct EndName {
    slot: ChainSlot,
    copies: u16,
}

/// One group's blocks on the device.
#[derive(Debug)]
struct WindowGroup {
    index: u32,
    kind: GroupKind,
    /// Tokens in a block.
    block: u64,
    shape: Shape,
    /// The names of the group's blocks that end together with a block of the contract.
    names: HashMap<u64, EndName>,
    /// The group's blocks that end inside a block of the contract. `None` if the group's blocks are not smaller than
    /// the contract's.
    spots: Option<Spots>,
    /// One mask for each slot, used only if the group's blocks are smaller than the contract's. A mask tells which of
    /// the group's blocks in that slot's block are held. The lowest bit stands for the last of these blocks.
    masks: Vec<u64>,
    /// Run of each block of the contract, by slot: the number of the group's blocks that are held without a gap up to the block's
    /// end.
    runs: Vec<u32>,
}

/// The result of learning a group from a stored event: the group's id, and whether the group is new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Learned {
    pub(super) id: WindowId,
    pub(super) is_new: bool,
}

/// All groups other than main attention.
#[derive(Debug)]
pub(super) struct Windows {
    /// Tokens in a block of the contract.
    size: u64,
    /// Number of the contract's blocks that are as long as the least common multiple of all block sizes. Cache hits
    /// end only at multiples of this number of blocks.
    stride: u64,
    all: Vec<WindowGroup>,
    /// Blocks of the contract that are on the device although their small blocks (a window's blocks inside them) are
    /// not known.
    unlisted: HashSet<ChainSlot>,
    /// Expected minimum number of windows and states, if the groups are SGLang's components; otherwise `None`. Fewer
    /// may be known, because SGLang's events name a component only once it has a block.
    expected: Option<usize>,
}

impl Windows {
    /// Returns all groups with their blocks, in saved form.
    pub(super) fn save(&self) -> SavedWindows {
        SavedWindows {
            all: self.all.iter().map(WindowGroup::save).collect(),
            unlisted: self.unlisted.iter().map(|slot| slot.number()).collect(),
            expected: self.expected,
        }
    }

    /// Restores the saved state, whose blocks of `size` tokens are in `chain`.
    pub(super) fn restore(size: u32, saved: SavedWindows, chain: &mut Chain) -> Result<Self, SavedError> {
        let mut windows = Self::new(size);
        windows.expected = saved.expected;
        for number in saved.unlisted {
            windows.unlisted.insert(chain.slot_in_use(number)?);
        }
        for window in saved.all {
            let learned = windows.learn(window.index, window.kind, window.block);
            let known = match learned {
                Ok(Learned { id, is_new: true }) => windows.all.get_mut(id.0),
                _ => None,
            };
            known
                .ok_or(SavedError::Contradiction("a group's blocks end nowhere"))?
                .restore(window, chain)?;
        }
        Ok(windows)
    }

    pub(super) fn new(size: u32) -> Self {
        Self {
            size: u64::from(size),
            stride: 1,
            all: Vec::new(),
            unlisted: HashSet::new(),
            expected: None,
        }
    }

    /// Notes that the groups are SGLang's components, and that at least `count` of these are windows or states.
    pub(super) fn expect(&mut self, count: usize) {
        self.expected = Some(count);
    }

    /// Whether the groups are SGLang's components.
    pub(super) fn are_components(&self) -> bool {
        self.expected.is_some()
    }

    /// The numbers of all groups.
    pub(super) fn indexes(&self) -> Vec<u32> {
        self.all.iter().map(|window| window.index).collect()
    }

    /// The kinds of the groups in one word, as a label has them; `None` if there is no group.
    pub(super) fn layers(&self) -> Option<&'static str> {
        let has = |wanted: fn(&GroupKind) -> bool| self.all.iter().any(|window| wanted(&window.kind));
        let windows = has(|kind| matches!(kind, GroupKind::Window(_)));
        match (windows, has(|kind| *kind == GroupKind::State)) {
            (false, false) => None,
            (true, false) => Some("windows"),
            (false, true) => Some("states"),
            (true, true) => Some("windows+states"),
        }
    }

    /// Whether there is no window and no state.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Whether a group has blocks that each span several blocks of the contract.
    pub(super) fn has_wide_blocks(&self) -> bool {
        self.stride > 1
    }

    /// Whether a group has blocks smaller than those of main attention.
    pub(super) fn has_small_blocks(&self) -> bool {
        self.all.iter().any(|window| window.spots.is_some())
    }

    /// Whether it is unknown how much a request can reuse. There are two causes: no event has named an expected group
    /// yet, or the small blocks (blocks of a window) inside a block on the device are not known.
    pub(super) fn has_unlisted(&self) -> bool {
        !self.unlisted.is_empty() || self.expected.is_some_and(|count| self.all.len() < count)
    }

    /// Whether a state has smaller blocks than main attention, as with vLLM's decode context parallelism. A cache hit
    /// can then end inside a block of main attention, where no block of the contract ends.
    pub(super) fn has_inner_states(&self) -> bool {
        let is_inner = |window: &WindowGroup| window.kind == GroupKind::State && window.shape.fan > 1;
        self.all.iter().any(is_inner)
    }

    /// Notes that the block in `slot` is or was on the device. If its small blocks (a window's blocks inside it) are
    /// not known, adds the block to `unlisted`.
    pub(super) fn note_on_device(&mut self, slot: ChainSlot) {
        let mut spots = self.all.iter().filter_map(|window| window.spots.as_ref());
        if spots.any(|spots| !spots.is_listed(slot)) {
            self.unlisted.insert(slot);
        }
    }

    /// Number of block names in all windows and states.
    pub(super) fn names(&self) -> usize {
        self.all.iter().map(WindowGroup::names).sum()
    }

    /// Forgets all blocks. The groups themselves stay known.
    pub(super) fn clear(&mut self) {
        self.unlisted.clear();
        for window in &mut self.all {
            window.names.clear();
            window.spots.iter_mut().for_each(Spots::clear);
            window.masks.clear();
            window.runs.clear();
        }
    }

    /// Whether the group was learned before all other groups and has no small blocks (smaller than the contract's).
    pub(super) fn is_first(&self, index: u32) -> bool {
        let first = self.all.first();
        first.is_some_and(|window| window.index == index && window.spots.is_none())
    }

    pub(super) fn is_first_id(&self, id: WindowId) -> bool {
        id.0 == 0
    }

    pub(super) fn find(&self, index: u32) -> Option<WindowId> {
        self.all
            .iter()
            .position(|window| window.index == index)
            .map(WindowId)
    }

    /// Learns of a group from a stored event.
    pub(super) fn learn(&mut self, index: u32, kind: GroupKind, block: u64) -> Result<Learned, Reason> {
        if let Some(id) = self.find(index) {
            let known = self.all.get(id.0);
            // A block of another size is an incomplete block. Cache hits then end within blocks, and events don't tell
            // where.
            let is_same = known.is_some_and(|known| (known.kind, known.block) == (kind, block));
            return match is_same {
                true => Ok(Learned { id, is_new: false }),
                false => Err(Reason::UnknownGroup),
            };
        }
        if self.all.len() >= WINDOWS_MAX {
            return Err(Reason::OutOfRange);
        }
        let shape = Shape::of(kind, block, self.size).ok_or(Reason::UnknownGroup)?;
        self.all.push(WindowGroup {
            index,
            kind,
            block,
            shape,
            names: HashMap::new(),
            spots: shape.spots(block),
            masks: Vec::new(),
            runs: Vec::new(),
        });
        // A least common multiple above 64 bits is longer than any sequence.
        self.stride = lcm(self.stride, u64::from(shape.step)).unwrap_or(u64::MAX);
        let id = WindowId(self.all.len() - 1);
        Ok(Learned { id, is_new: true })
    }

    /// The kind of the group `id`; `None` if there is no such group.
    pub(super) fn kind(&self, id: WindowId) -> Option<GroupKind> {
        self.all.get(id.0).map(|window| window.kind)
    }

    /// The group's table of small blocks, if it has small blocks.
    pub(super) fn spots(&self, id: WindowId) -> Option<&Spots> {
        self.all.get(id.0)?.spots.as_ref()
    }

    /// The place where the group's block `name` ends, if the group has it.
    pub(super) fn place_of(&self, id: WindowId, name: u64) -> Option<BlockEnd> {
        let window = self.all.get(id.0)?;
        if let Some(name) = window.names.get(&name) {
            return Some(BlockEnd::End(name.slot));
        }
        let spots = window.spots.as_ref()?;
        let at = spots.find(name)?;
        let slot = at.spot.and_then(|spot| spots.slots(spot).next());
        Some(BlockEnd::Within(at, slot))
    }

    /// The slot of the contract's block that ends where a group's block `name` ends. Searches all groups.
    pub(super) fn slot_of(&self, name: u64) -> Option<ChainSlot> {
        let found = |window: &WindowGroup| window.names.get(&name).map(|name| name.slot);
        self.all.iter().find_map(found)
    }

    /// The place where the preceding block of the group ends, for the block that ends at `place`. `None` if the chain
    /// does not keep the contract's block at that place.
    pub(super) fn place_before(&self, id: WindowId, place: BlockEnd, chain: &Chain) -> Option<BlockEnd> {
        let window = self.all.get(id.0)?;
        let (slot, before) = match place {
            BlockEnd::End(slot) => (slot, 1),
            BlockEnd::Within(at, slot) => (slot?, at.before + 1),
        };
        if let Some(spots) = window.spots.as_ref()
            && u32::from(before) < window.shape.fan
        {
            return Some(BlockEnd::Within(spots.at(slot, before), Some(slot)));
        }
        let up = |slot: &ChainSlot| chain.up(*slot);
        let slot = std::iter::successors(Some(slot), up).nth(window.shape.step as usize)?;
        Some(BlockEnd::End(slot))
    }

    /// Whether a block of the group can end at `place`, and the place is known well enough to keep such a block.
    pub(super) fn fits(&self, id: WindowId, place: BlockEnd, chain: &Chain) -> bool {
        let Some(window) = self.all.get(id.0) else {
            return false;
        };
        match place {
            BlockEnd::End(slot) => chain
                .get(slot)
                .is_some_and(|block| (block.position + 1).is_multiple_of(window.shape.step)),
            BlockEnd::Within(at, _) => window.spots.as_ref().is_some_and(|spots| spots.knows(at)),
        }
    }

    /// Lists, for each group, the small blocks inside the block in `slot`. That block has the tokens `tokens` and
    /// comes after the prefix `reach`. Does nothing if the lists of all slots would need more than `cells_max` cells.
    /// A cell is the memory for one listed small block.
    pub(super) fn list(
        &mut self,
        slot: ChainSlot,
        reach: Reach,
        tokens: &[Token],
        cells_max: usize,
        chain: &mut Chain,
    ) {
        self.sweep(chain);
        let kept = |window: &WindowGroup| window.spots.as_ref().map_or(0, Spots::kept) as usize;
        let cells: usize = self.all.iter().map(kept).sum();
        if (slot.place() + 1).saturating_mul(cells) > cells_max {
            return;
        }
        for window in &mut self.all {
            let listed = window
                .spots
                .as_mut()
                .and_then(|spots| spots.list(slot, reach, tokens));
            if let Some(mask) = listed {
                // The bit of the last small block is known already, and is kept.
                let last = window.mask(slot) & 1;
                window.set_mask(slot, mask | last);
                chain.touch(slot);
            }
        }
        self.unlisted.remove(&slot);
    }

    /// Forgets the runs and small blocks of all slots that have become free. A new block in such a slot then starts
    /// without them.
    pub(super) fn sweep(&mut self, chain: &mut Chain) {
        while let Some(slot) = chain.take_freed() {
            if !self.unlisted.is_empty() {
                self.unlisted.remove(&slot);
            }
            for window in &mut self.all {
                if let Some(run) = window.runs.get_mut(slot.place()) {
                    *run = 0;
                }
                if let Some(spots) = &mut window.spots {
                    spots.unlist(slot);
                    window.set_mask(slot, 0);
                }
            }
        }
    }

    /// Adds a copy of the block that ends at `place`, which the engine calls `name`. An error changes nothing, except for
    /// [`Reason::HiddenKey`]: then `name` is added as a second name for the place.
    pub(super) fn add(
        &mut self,
        id: WindowId,
        name: u64,
        place: BlockEnd,
        chain: &mut Chain,
    ) -> Result<(), Reason> {
        self.sweep(chain);
        let window = self.all.get_mut(id.0).ok_or(Reason::UnknownGroup)?;
        match place {
            BlockEnd::End(slot) => window.add_end(name, slot, chain),
            BlockEnd::Within(at, _) => {
                let spots = window.spots.as_mut().ok_or(Reason::UnplacedName)?;
                if let Some(at) = spots.add(name, at)? {
                    window.set_within(at, true, chain);
                }
                Ok(())
            }
        }
    }

    /// Removes a copy of the group's block `name`. The second result tells whether there was a copy. If it was the
    /// last copy, and the block ended together with a block of the contract, the first result is the slot of the
    /// contract's block.
    pub(super) fn take(&mut self, id: WindowId, name: u64, chain: &mut Chain) -> (Option<ChainSlot>, bool) {
        self.sweep(chain);
        let Some(window) = self.all.get_mut(id.0) else {
            return (None, false);
        };
        let Entry::Occupied(mut entry) = window.names.entry(name) else {
            let Some((had_copy, gone)) = window.spots.as_mut().map(|spots| spots.take(name)) else {
                return (None, false);
            };
            if let Some(at) = gone {
                window.set_within(at, false, chain);
            }
            return (None, had_copy);
        };
        let known = entry.get_mut();
        known.copies -= 1;
        if known.copies > 0 {
            return (None, true);
        }
        let slot = entry.remove().slot;
        window.set_end(slot, false);
        chain.touch(slot);
        chain.drop_name(slot);
        (Some(slot), true)
    }

    /// Computes the block's run in each group: the number of the group's blocks that are held without a gap up to the block's
    /// end. Returns whether a run has changed.
    pub(super) fn recompute(&mut self, slot: ChainSlot, position: u32, up: Option<ChainSlot>) -> bool {
        let mut has_changed = false;
        for window in &mut self.all {
            has_changed |= window.recompute(slot, position, up);
        }
        has_changed
    }

    /// Whether every group has the blocks that a request needs to go on after the block at `position`.
    pub(super) fn allow(&self, slot: ChainSlot, position: u32) -> bool {
        let blocks = u64::from(position) + 1;
        blocks.is_multiple_of(self.stride) && self.all.iter().all(|window| window.allows(slot, blocks))
    }
}

impl WindowGroup {
    fn save(&self) -> SavedWindow {
        let end = |(name, known): (&u64, &EndName)| SavedEnd(*name, known.slot.number(), known.copies);
        SavedWindow {
            index: self.index,
            kind: self.kind,
            block: self.block,
            names: self.names.iter().map(end).collect(),
            spots: self.spots.as_ref().map(Spots::save),
            masks: self.masks.clone(),
            runs: self.runs.clone(),
        }
    }

    /// Restores the saved state. Call it on an empty window.
    fn restore(&mut self, saved: SavedWindow, chain: &mut Chain) -> Result<(), SavedError> {
        for SavedEnd(name, slot, copies) in saved.names {
            let slot = chain.slot_in_use(slot)?;
            if copies == 0 || self.names.insert(name, EndName { slot, copies }).is_some() {
                return Err(SavedError::Contradiction("a name has no copies, or comes twice"));
            }
            chain.add_name(slot);
        }
        let slots = chain.slot_count();
        match (&mut self.spots, saved.spots) {
            (Some(spots), Some(saved)) => spots.restore(saved, slots)?,
            (None, None) => {}
            _ => return Err(SavedError::Contradiction("a group's blocks have another size")),
        }
        if saved.masks.len() > slots || saved.runs.len() > slots {
            return Err(SavedError::Contradiction(
                "a group has more blocks than there are",
            ));
        }
        (self.masks, self.runs) = (saved.masks, saved.runs);
        Ok(())
    }

    fn names(&self) -> usize {
        self.names.len() + self.spots.as_ref().map_or(0, Spots::names)
    }

    /// Adds a copy of a block that ends with the block of the contract in `slot`.
    fn add_end(&mut self, name: u64, slot: ChainSlot, chain: &mut Chain) -> Result<(), Reason> {
        match self.names.entry(name) {
            Entry::Occupied(mut entry) => {
                let known = entry.get_mut();
                known.copies = known.copies.checked_add(1).ok_or(Reason::OutOfRange)?;
            }
            Entry::Vacant(entry) => {
                entry.insert(EndName { slot, copies: 1 });
                chain.add_name(slot);
                let was_held = self.set_end(slot, true);
                chain.touch(slot);
                // Two names stand for one place: the engine knows of a difference that events don't tell.
                if was_held {
                    return Err(Reason::HiddenKey);
                }
            }
        }
        Ok(())
    }

    /// Sets whether the group holds the block that ends together with the block in `slot`. Returns whether the group
    /// held it before.
    fn set_end(&mut self, slot: ChainSlot, is_held: bool) -> bool {
        if self.spots.is_some() {
            let mask = self.mask(slot);
            self.set_mask(slot, if is_held { mask | 1 } else { mask & !1 });
            return mask & 1 != 0;
        }
        let Some(run) = slot.grown(&mut self.runs, 0) else {
            return false;
        };
        let was_held = *run & HELD != 0;
        *run = if is_held { *run | HELD } else { *run & !HELD };
        was_held
    }

    /// Sets whether a small block (a window's block within a block of the contract) is held, in all blocks of the contract that
    /// have it.
    fn set_within(&mut self, at: Within, is_held: bool, chain: &mut Chain) {
        let (Some(spots), Some(spot)) = (&self.spots, at.spot) else {
            return;
        };
        let bit = 1_u64 << (at.before & 63);
        for slot in spots.slots(spot) {
            // Blocks that list their small blocks have a mask.
            if let Some(mask) = self.masks.get_mut(slot.place()) {
                *mask = if is_held { *mask | bit } else { *mask & !bit };
            }
            chain.touch(slot);
        }
    }

    fn mask(&self, slot: ChainSlot) -> u64 {
        self.masks.get(slot.place()).copied().unwrap_or_default()
    }

    fn set_mask(&mut self, slot: ChainSlot, mask: u64) {
        if let Some(place) = slot.grown(&mut self.masks, 0) {
            *place = mask;
        }
    }

    fn run(&self, slot: ChainSlot) -> u32 {
        self.runs.get(slot.place()).map_or(0, |run| run & !HELD)
    }

    /// Number of the group's blocks in the block in `slot` that are held without a gap, counted back from the end of
    /// that block.
    fn own(&self, slot: ChainSlot) -> u32 {
        if self.shape.fan == 1 {
            let run = self.runs.get(slot.place()).copied().unwrap_or_default();
            return u32::from(run & HELD != 0);
        }
        self.mask(slot).trailing_ones().min(self.shape.fan)
    }

    fn recompute(&mut self, slot: ChainSlot, position: u32, up: Option<ChainSlot>) -> bool {
        let Shape { need, fan, step } = self.shape;
        let above = up.map_or(0, |up| self.run(up));
        let run = match self.own(slot) {
            // The block ends within a block of the group: the run of the group's last whole block applies.
            _ if !(position + 1).is_multiple_of(step) => above,
            own if own == fan => above.saturating_add(own).min(need),
            own => own.min(need),
        };
        let before = self.run(slot);
        if run == before {
            return false;
        }
        if let Some(place) = slot.grown(&mut self.runs, 0) {
            *place = *place & HELD | run;
        }
        true
    }

    /// Whether the block's run (the group's held blocks up to its end, without a gap) is long enough for a request. Near the
    /// start of a sequence, where fewer blocks exist than a request needs, all of them are enough.
    fn allows(&self, slot: ChainSlot, blocks: u64) -> bool {
        let all = blocks * u64::from(self.shape.fan) / u64::from(self.shape.step);
        u64::from(self.run(slot)) >= u64::from(self.shape.need).min(all)
    }
}
