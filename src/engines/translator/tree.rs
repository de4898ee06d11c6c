//! A holder's blocks as a forest, which has the parent and the children of each block. It is kept only for engines with
//! several groups of layers.

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use kvatlas_core::hash::SequenceHash;

use super::block::{Block, ChainSlot};

/// Slot number that stands for no block.
const NONE: u32 = u32::MAX;

/// Links of one block to its parent, its first child and its siblings.
#[derive(Debug, Clone, Copy)]
struct BlockLinks {
    /// The parent's slot; `NONE` at position 0, and if the parent is not kept.
    up: u32,
    /// The slot of the first child.
    first: u32,
    /// Slots of the sibling before this block (`before`) and of the sibling after it (`next`). Blocks that have the
    /// same parent are siblings, even if the parent is not kept.
    before: u32,
    next: u32,
}

impl BlockLinks {
    const ALONE: Self = Self {
        up: NONE,
        first: NONE,
        before: NONE,
        next: NONE,
    };
}

/// Sequence hash and position of a parent that is not kept. A kept block becomes the parent only if both are equal.
/// This makes cycles impossible.
type Missing = (SequenceHash, u32);

/// The blocks as a forest, in doubly linked lists of siblings.
#[derive(Debug, Default)]
pub(super) struct Tree {
    links: Vec<BlockLinks>,
    /// For each parent that is not kept, the slot of its first child.
    orphans: HashMap<Missing, u32>,
    /// Blocks that have got or lost their parent, or whose state in a group of layers has changed.
    touched: Vec<ChainSlot>,
    /// Blocks that have been inserted since the last [`Self::forget_touched`].
    entered: Vec<ChainSlot>,
}

impl Tree {
    pub(super) fn clear(&mut self) {
        self.links.clear();
        self.orphans.clear();
        self.forget_touched();
    }

    fn get(&self, place: u32) -> BlockLinks {
        self.links
            .get(place as usize)
            .copied()
            .unwrap_or(BlockLinks::ALONE)
    }

    fn change(&mut self, place: u32, change: impl FnOnce(&mut BlockLinks)) {
        if let Some(links) = self.links.get_mut(place as usize) {
            change(links);
        }
    }

    /// The parent of the block in `slot`, if the parent is kept.
    pub(super) fn up(&self, slot: ChainSlot) -> Option<ChainSlot> {
        Some(self.get(slot.number()).up)
            .filter(|up| *up != NONE)
            .map(ChainSlot::new)
    }

    /// The children of the block in `slot`.
    pub(super) fn children(&self, slot: ChainSlot) -> impl Iterator<Item = ChainSlot> {
        self.siblings(self.get(slot.number()).first).map(ChainSlot::new)
    }

    fn siblings(&self, first: u32) -> impl Iterator<Item = u32> {
        std::iter::successors(Some(first), |place| Some(self.get(*place).next))
            .take_while(|place| *place != NONE)
    }

    pub(super) fn touch(&mut self, slot: ChainSlot) {
        self.touched.push(slot);
    }

    /// Blocks that have changed since the last [`Self::forget_touched`]: they have got or lost a parent, or their
    /// state in a group of layers is new. A block can be listed several times.
    pub(super) fn touched(&self) -> &[ChainSlot] {
        &self.touched
    }

    /// Adds the newly inserted blocks to those that have changed ([`Self::touched`]).
    pub(super) fn touch_entered(&mut self) {
        self.touched.append(&mut self.entered);
    }

    /// Forgets which blocks have changed, and which are new.
    pub(super) fn forget_touched(&mut self) {
        self.touched.clear();
        self.entered.clear();
    }

    /// Inserts `block`. Its parent is in the slot `up`; `None` if the parent is not kept.
    pub(super) fn enter(&mut self, slot: ChainSlot, block: Block, up: Option<ChainSlot>) {
        let place = slot.number();
        if self.links.len() <= slot.place() {
            self.links.resize(slot.place() + 1, BlockLinks::ALONE);
        }
        let next = match (up, missing_parent(block)) {
            (Some(up), _) => {
                let next = self.get(up.number()).first;
                self.change(up.number(), |up| up.first = place);
                next
            }
            (None, Some(missing)) => self.orphans.insert(missing, place).unwrap_or(NONE),
            (None, None) => NONE,
        };
        self.change(next, |next| next.before = place);
        let first = match self.orphans.is_empty() {
            true => NONE,
            false => self
                .orphans
                .remove(&(block.sequence, block.position))
                .unwrap_or(NONE),
        };
        self.change(place, |links| {
            *links = BlockLinks {
                up: up.map_or(NONE, ChainSlot::number),
                first,
                before: NONE,
                next,
            };
        });
        self.move_children(first, place);
        self.entered.push(slot);
    }

    /// Removes `block`. Its children stay, and count from now on as children of a parent that is not kept.
    pub(super) fn leave(&mut self, slot: ChainSlot, block: Block) {
        let links = self.get(slot.number());
        self.change(links.next, |next| next.before = links.before);
        if links.before != NONE {
            self.change(links.before, |before| before.next = links.next);
        } else if links.up != NONE {
            self.change(links.up, |up| up.first = links.next);
        } else if let Some(missing) = missing_parent(block)
            && let Entry::Occupied(mut first) = self.orphans.entry(missing)
        {
            match links.next {
                NONE => drop(first.remove()),
                next => drop(first.insert(next)),
            }
        }
        if links.first != NONE {
            self.orphans.insert((block.sequence, block.position), links.first);
            self.move_children(links.first, NONE);
        }
        self.change(slot.number(), |links| *links = BlockLinks::ALONE);
    }

    /// Gives `first` and its siblings the parent `up`.
    fn move_children(&mut self, first: u32, up: u32) {
        let mut child = first;
        while child != NONE {
            self.change(child, |links| links.up = up);
            self.touched.push(ChainSlot::new(child));
            child = self.get(child).next;
        }
    }
}

/// Hash and position of the parent of `block`; `None` at position 0.
fn missing_parent(block: Block) -> Option<Missing> {
    Some((block.parent?, block.position.checked_sub(1)?))
}
