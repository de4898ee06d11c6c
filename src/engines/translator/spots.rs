//! Small blocks: blocks of a window that are smaller than those of main attention. A block of main attention is a
//! block of the contract, and consists of several small blocks. The table in this file tells which small blocks are
//! held, and in which blocks of the contract they lie.
//!
//! The engine's name of a small block is a hash of the prefix up to the small block's end. Several blocks of the
//! contract can contain the end of this prefix. Events may tell of these blocks before or after the small block. So
//! the table identifies a small block by its *spot*. A spot is a hash of the last whole block of the contract in the
//! prefix, and of the tokens after that block. Each block of the contract lists the spots that a request may need.
//! Each spot lists the blocks of the contract that have the spot.
//!
//! To continue after a block of the contract, a request needs the last `need` small blocks up to that block's end. A
//! block of the contract consists of `fan` small blocks. So a request may need the last min(`need`, `fan`) small
//! blocks of each block. The very last one needs no spot, because it ends where the block ends. Each other one takes
//! 16 bytes here and about 30 in the table of spots. With the windows of DeepSeek-V4, a block of 256 tokens has 18 of
//! them: about three bytes a token.

use std::num::NonZeroU64;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use kvatlas_core::hash::{HashSeed, SequenceHash, Token, block_hash, next_sequence_hash};

use crate::reason::Reason;

use super::block::ChainSlot;
use super::forms::{SavedError, SavedSmall, SavedSpots};

/// Index that stands for no [`Cell`].
const NONE: u32 = u32::MAX;

/// A hash of the content of a prefix that ends within a block of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct PrefixSpot(NonZeroU64);

impl PrefixSpot {
    fn of(content: SequenceHash) -> Self {
        Self(NonZeroU64::new(content.as_u64()).unwrap_or(NonZeroU64::MIN))
    }
}

/// A prefix that may end inside a block of the contract: some whole blocks of the contract, then `blocks` small
/// blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reach {
    content: SequenceHash,
    blocks: u32,
}

impl Reach {
    /// The prefix that ends with the block `sequence` of the contract.
    pub(super) fn end_of(sequence: SequenceHash) -> Self {
        Self {
            content: sequence,
            blocks: 0,
        }
    }

    /// The empty prefix of sequences with this seed.
    pub(super) fn start_of(seed: HashSeed) -> Self {
        Self::end_of(SequenceHash::from(seed.as_u64()))
    }

    /// Returns the prefix that is one small block longer. The engine's name for that small block covers the tokens
    /// `tokens`.
    pub(super) fn next(self, tokens: &[Token]) -> Self {
        // `content` covers the seed of the sequence already.
        let block = block_hash(tokens, HashSeed::default());
        Self {
            content: next_sequence_hash(Some(self.content), block),
            blocks: self.blocks + 1,
        }
    }
}

/// The place of a small block (a block that is smaller than those of main attention) inside a block of the contract,
/// but not at its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Within {
    /// Hash of the small block's content; `None` if it is not known. A small block that a request may need must have a
    /// known hash: see [`Spots::knows`].
    pub(super) spot: Option<PrefixSpot>,
    /// Number of small blocks from the end of this one to the end of the contract's block; at least one.
    pub(super) before: u8,
}

/// The entry of a small block's name, in 16 bytes.
#[derive(Debug, Clone, Copy)]
struct SmallBlockName {
    spot: Option<PrefixSpot>,
    copies: u16,
    before: u8,
}

impl SmallBlockName {
    fn at(&self) -> Within {
        Within {
            spot: self.spot,
            before: self.before,
        }
    }
}

/// One small block of a block of the contract, as an element of the doubly linked list of all small blocks with the same
/// spot.
#[derive(Debug, Clone, Copy)]
struct Cell {
    spot: Option<PrefixSpot>,
    before: u32,
    next: u32,
}

impl Cell {
    const EMPTY: Self = Self {
        spot: None,
        before: NONE,
        next: NONE,
    };
}

/// The uses of a spot (content hash of a small block): the number of names that stand for it, and the first cell of
/// the list of cells that have it. A spot without names and cells is forgotten.
#[derive(Debug, Clone, Copy)]
struct Users {
    names: u32,
    first: u32,
}

impl Users {
    const NONE: Self = Self {
        names: 0,
        first: NONE,
    };
}

/// The small blocks of one group of layers, that is, blocks smaller than those of main attention.
#[derive(Debug)]
pub(super) struct Spots {
    /// Number of tokens in a small block, that is, one smaller than those of main attention.
    block: usize,
    /// Number of small blocks in a block of the contract.
    fan: u32,
    /// Number of spots that are listed for each block of the contract, each in a [`Cell`]. They stand for the small
    /// blocks that a request may need. The last small block in the contract's block needs no spot and does not count.
    kept: u32,
    names: HashMap<u64, SmallBlockName>,
    users: HashMap<PrefixSpot, Users>,
    /// Cells of all slots, `kept` cells for each slot, in the order of the slots. The first cell of a slot is for the
    /// listed small block that is nearest to the end of the slot's block.
    cells: Vec<Cell>,
}

impl Spots {
    /// Returns the saved form: the names of small blocks, in no particular order, and the spots (content hashes) that
    /// are listed for each block of the contract.
    pub(super) fn save(&self) -> SavedSpots {
        let saved = |(name, known): (&u64, &SmallBlockName)| {
            let spot = known.spot.map(|spot| spot.0);
            SavedSmall(*name, spot, known.copies, known.before)
        };
        SavedSpots {
            names: self.names.iter().map(saved).collect(),
            cells: self.cells.iter().map(|cell| Some(cell.spot?.0)).collect(),
        }
    }

    /// Restores the saved state, for a chain with `slots` slots. Call it on an empty table.
    pub(super) fn restore(&mut self, saved: SavedSpots, slots: usize) -> Result<(), SavedError> {
        let cells_max = slots.saturating_mul(self.kept as usize).min(NONE as usize);
        if saved.cells.len() > cells_max {
            return Err(SavedError::Contradiction("small blocks lie in no block"));
        }
        for SavedSmall(name, spot, copies, before) in saved.names {
            let known = SmallBlockName {
                spot: spot.map(PrefixSpot),
                copies,
                before,
            };
            if copies == 0 || self.names.insert(name, known).is_some() {
                return Err(SavedError::Contradiction(
                    "a small block has no copies, or comes twice",
                ));
            }
            if let Some(spot) = self.mattering(known.at()) {
                self.users.entry(spot).or_insert(Users::NONE).names += 1;
            }
        }
        self.cells.resize(saved.cells.len(), Cell::EMPTY);
        for (cell, spot) in saved.cells.into_iter().enumerate() {
            if let Some(spot) = spot {
                self.link(cell, PrefixSpot(spot));
            }
        }
        Ok(())
    }

    pub(super) fn new(block: usize, fan: u32, need: u32) -> Self {
        Self {
            block,
            fan,
            kept: need.min(fan).saturating_sub(1),
            names: HashMap::new(),
            users: HashMap::new(),
            cells: Vec::new(),
        }
    }

    pub(super) fn clear(&mut self) {
        self.names.clear();
        self.users.clear();
        self.cells.clear();
    }

    /// Number of names of small blocks that end inside a block of the contract, not at its end.
    pub(super) fn names(&self) -> usize {
        self.names.len()
    }

    /// Number of [`Cell`]s that the table keeps for each block of the contract.
    pub(super) fn kept(&self) -> u32 {
        self.kept
    }

    /// Whether the spots (content hashes of the small blocks) of the block in `slot` are listed. Also true if no spot
    /// has to be listed for any block.
    pub(super) fn is_listed(&self, slot: ChainSlot) -> bool {
        self.kept == 0 || self.at(slot, 1).spot.is_some()
    }

    /// Whether enough is known of the small block at this place to keep it: its spot (content hash) is known, or no
    /// request can need the block.
    pub(super) fn knows(&self, at: Within) -> bool {
        u32::from(at.before) < self.fan && (at.spot.is_some() || u32::from(at.before) > self.kept)
    }

    /// The place of the last small block of the prefix `reach`; `None` if the prefix does not end inside a block of
    /// the contract.
    pub(super) fn within(&self, reach: Reach) -> Option<Within> {
        let before = self.fan.checked_sub(reach.blocks).filter(|before| *before > 0)?;
        Some(Within {
            spot: Some(PrefixSpot::of(reach.content)),
            before: u8::try_from(before).ok()?,
        })
    }

    /// The prefix up to the end of the small block `name`; `None` if the name is not known, or the spot (content
    /// hash) of its block is not known.
    pub(super) fn reach(&self, name: u64) -> Option<Reach> {
        let Within { spot, before } = self.find(name)?;
        Some(Reach {
            content: SequenceHash::from(spot?.0.get()),
            blocks: self.fan.checked_sub(u32::from(before))?,
        })
    }

    /// The place of the small block `name` in the block of the contract that contains it.
    pub(super) fn find(&self, name: u64) -> Option<Within> {
        self.names.get(&name).map(SmallBlockName::at)
    }

    /// The place of a small block inside the block in `slot`. From its end to the end of that block, there are
    /// `before` small blocks.
    pub(super) fn at(&self, slot: ChainSlot, before: u8) -> Within {
        let cell = self.cell(slot, before).and_then(|cell| self.cells.get(cell));
        Within {
            spot: cell.and_then(|cell| cell.spot),
            before,
        }
    }

    fn cell(&self, slot: ChainSlot, before: u8) -> Option<usize> {
        let (kept, before) = (self.kept as usize, usize::from(before));
        (1..=kept)
            .contains(&before)
            .then(|| slot.place() * kept + before - 1)
    }

    /// The slots of the blocks of the contract that contain the small block with the content hash `spot`.
    pub(super) fn slots(&self, spot: PrefixSpot) -> impl Iterator<Item = ChainSlot> {
        let first = self.users.get(&spot).map(|users| users.first);
        let next = |cell: &u32| self.cells.get(*cell as usize).map(|cell| cell.next);
        std::iter::successors(first, next)
            .take_while(|cell| *cell != NONE)
            .map(|cell| ChainSlot::new(cell / self.kept.max(1)))
    }

    /// Lists the spots (content hashes) of the small blocks in the block in `slot`. That block has the tokens
    /// `tokens` and comes after the prefix `reach`. With engines that look ahead, `tokens` also has the tokens after the
    /// block that its name covers. Returns a mask of those small blocks that are held. Returns `None` if the spots are
    /// listed already, or if there would be more cells than 32 bits can number.
    pub(super) fn list(&mut self, slot: ChainSlot, mut reach: Reach, tokens: &[Token]) -> Option<u64> {
        let end = (slot.place() + 1) * self.kept as usize;
        if self.is_listed(slot) || u32::try_from(end).is_err() {
            return None;
        }
        if self.cells.len() < end {
            self.cells.resize(end, Cell::EMPTY);
        }
        let mut mask = 0;
        let ahead = tokens.len().saturating_sub(self.block * self.fan as usize);
        for tokens in tokens.windows(self.block + ahead).step_by(self.block) {
            reach = reach.next(tokens);
            if let Some(Within {
                spot: Some(spot),
                before,
            }) = self.within(reach)
                && let Some(cell) = self.cell(slot, before)
            {
                mask |= u64::from(self.link(cell, spot)) << (before & 63);
            }
        }
        Some(mask)
    }

    /// Removes the small blocks of the block in `slot` from the lists of their spots.
    pub(super) fn unlist(&mut self, slot: ChainSlot) {
        let cells = slot.place() * self.kept as usize;
        (cells..cells + self.kept as usize).for_each(|cell| self.unlink(cell));
    }

    /// Puts a cell at the front of the list of cells that have the spot `spot`. A cell stands for one small block in
    /// one block of the contract. Returns whether the spot is held, that is, whether a name stands for it.
    fn link(&mut self, cell: usize, spot: PrefixSpot) -> bool {
        let number = u32::try_from(cell).unwrap_or(NONE);
        let users = self.users.entry(spot).or_insert(Users::NONE);
        let next = std::mem::replace(&mut users.first, number);
        let is_held = users.names > 0;
        if let Some(next) = self.cells.get_mut(next as usize) {
            next.before = number;
        }
        if let Some(cell) = self.cells.get_mut(cell) {
            *cell = Cell {
                spot: Some(spot),
                before: NONE,
                next,
            };
        }
        is_held
    }

    /// Removes a cell from the list of cells that have the same spot. Does nothing if the cell is in no list.
    fn unlink(&mut self, cell: usize) {
        let Some(place) = self.cells.get_mut(cell) else {
            return;
        };
        let Cell { spot, before, next } = std::mem::replace(place, Cell::EMPTY);
        let Some(spot) = spot else {
            return;
        };
        if let Some(next) = self.cells.get_mut(next as usize) {
            next.before = before;
        }
        if let Some(before) = self.cells.get_mut(before as usize) {
            before.next = next;
        } else if let Entry::Occupied(mut users) = self.users.entry(spot) {
            users.get_mut().first = next;
            Self::forget_unused(users);
        }
    }

    fn forget_unused(users: hashbrown::hash_map::OccupiedEntry<'_, PrefixSpot, Users>) {
        if (users.get().names, users.get().first) == (0, NONE) {
            users.remove();
        }
    }

    /// Adds a copy of the small block `name`, which ends at `at`. Returns `at` if no name stood for its spot (content
    /// hash) before. Returns `None` if the spot was held already, or no request can need it. An error changes
    /// nothing, except for [`Reason::HiddenKey`]: then `name` is added as a second name of the spot.
    pub(super) fn add(&mut self, name: u64, at: Within) -> Result<Option<Within>, Reason> {
        match self.names.entry(name) {
            Entry::Occupied(mut entry) => {
                let known = entry.get_mut();
                known.copies = known.copies.checked_add(1).ok_or(Reason::OutOfRange)?;
                known.spot = known.spot.or(at.spot);
                Ok(None)
            }
            Entry::Vacant(entry) => {
                entry.insert(SmallBlockName {
                    spot: at.spot,
                    copies: 1,
                    before: at.before,
                });
                let Some(spot) = self.mattering(at) else {
                    return Ok(None);
                };
                let users = self.users.entry(spot).or_insert(Users::NONE);
                users.names += 1;
                // Two names stand for one place: the engine knows of a difference that events don't tell.
                match users.names {
                    1 => Ok(Some(at)),
                    _ => Err(Reason::HiddenKey),
                }
            }
        }
    }

    /// Removes a copy of the small block `name`. The first result tells whether there was a copy. The second result
    /// is the block's place if its spot (content hash) is no longer held.
    pub(super) fn take(&mut self, name: u64) -> (bool, Option<Within>) {
        let Entry::Occupied(mut entry) = self.names.entry(name) else {
            return (false, None);
        };
        let known = entry.get_mut();
        known.copies -= 1;
        if known.copies > 0 {
            return (true, None);
        }
        let at = entry.remove().at();
        let Some(Entry::Occupied(mut users)) = self.mattering(at).map(|spot| self.users.entry(spot)) else {
            return (true, None);
        };
        users.get_mut().names -= 1;
        let is_gone = users.get().names == 0;
        Self::forget_unused(users);
        (true, is_gone.then_some(at))
    }

    /// The spot (content hash) of the small block at `at`; `None` if the spot is unknown or no request can need the
    /// block.
    fn mattering(&self, at: Within) -> Option<PrefixSpot> {
        at.spot.filter(|_| u32::from(at.before) <= self.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_gone_leaves_nothing_behind() {
        let mut spots = Spots::new(2, 4, 9);
        let start = Reach::start_of(HashSeed::default());
        let (one, other) = (ChainSlot::new(3), ChainSlot::new(0));
        assert_eq!(spots.list(one, start, &[0, 1, 2, 3, 4, 5, 6, 7]), Some(0));
        let at = spots.within(start.next(&[0, 1])).unwrap();
        assert_eq!(spots.add(17, at), Ok(Some(at)));
        assert_eq!(spots.add(17, at), Ok(None));
        // Three small blocks follow, and one is held.
        assert_eq!(spots.list(other, start, &[0, 1, 9, 9, 9, 9, 9, 9]), Some(0b1000));
        assert_eq!(spots.list(other, start, &[0, 1, 9, 9, 9, 9, 9, 9]), None);
        let slots = |spots: &Spots| spots.slots(at.spot.unwrap()).collect::<Vec<_>>();
        assert_eq!(slots(&spots), [other, one]);
        assert!(spots.is_listed(one) && spots.is_listed(other) && !spots.is_listed(ChainSlot::new(1)));
        spots.unlist(one);
        spots.unlist(one);
        assert_eq!(slots(&spots), [other]);
        assert_eq!((spots.take(17), spots.take(17)), ((true, None), (true, Some(at))));
        assert_eq!(spots.take(17), (false, None));
        assert_eq!(slots(&spots), [other]);
        spots.unlist(other);
        assert!(!spots.is_listed(other) && spots.users.is_empty() && spots.names.is_empty());
    }

    #[test]
    fn only_what_a_request_needs_is_listed() {
        let mut spots = Spots::new(1, 4, 2);
        let start = Reach::end_of(SequenceHash::from(5));
        assert_eq!(
            (spots.kept(), spots.list(ChainSlot::new(1), start, &[1, 2, 3, 4])),
            (1, Some(0))
        );
        assert_eq!(spots.users.len(), 1);
        let (first, third) = (start.next(&[1]), start.next(&[1]).next(&[2]).next(&[3]));
        let at = |spots: &Spots, reach| spots.within(reach).unwrap();
        assert_eq!(at(&spots, third), spots.at(ChainSlot::new(1), 1));
        // A request needs only the last two small blocks. The first has no cell: its number in the block is enough.
        let first = at(&spots, first);
        assert_eq!(spots.add(7, first), Ok(None));
        assert!(
            spots.knows(first)
                && spots.knows(spots.at(ChainSlot::new(1), 3))
                && !spots.knows(spots.at(ChainSlot::new(2), 1))
        );
        assert_eq!((spots.users.len(), spots.reach(7).is_some()), (1, true));
    }
}
