//! A block of the contract, and the slot in which a holder's chain keeps it.

use kvatlas_core::hash::{HashSeed, SequenceHash};
use serde::{Deserialize, Serialize};

/// Index of a block in a chain, the array of a holder's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct ChainSlot(u32);

impl ChainSlot {
    pub(super) fn new(number: u32) -> Self {
        Self(number)
    }

    pub(super) fn number(self) -> u32 {
        self.0
    }

    pub(super) fn place(self) -> usize {
        self.0 as usize
    }

    /// The element of `list` that belongs to the slot. If the list is too short, first appends copies of `empty`.
    pub(super) fn grown<T: Clone>(self, list: &mut Vec<T>, empty: T) -> Option<&mut T> {
        if list.len() <= self.place() {
            list.resize(self.place() + 1, empty);
        }
        list.get_mut(self.place())
    }
}

/// One block of the contract. Saved translators contain blocks in this form, so the order of the fields must not
/// change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Block {
    pub(super) sequence: SequenceHash,
    /// Sequence hash of the block before; `None` at position 0.
    pub(super) parent: Option<SequenceHash>,
    pub(super) position: u32,
    /// Hash seed of the sequence, which stands for adapter and salt; children inherit it.
    pub(super) seed: HashSeed,
    /// Hash seed of a sequence with the same adapter and without a salt.
    pub(super) adapter: HashSeed,
}
