//! Questions that a mirror asks a translator. A mirror keeps the tokens of the blocks that the translator holds on the
//! device.

use kvatlas_core::hash::SequenceHash;

use crate::batch::Group;
use crate::reason::Reason;

use super::Translator;
use super::tiers::TierIndex;

impl Translator {
    /// Returns the reason why the holder's blocks are in doubt until the next clear; `None` if they are not.
    pub fn lasting_doubt(&self) -> Option<Reason> {
        self.doubt
    }

    /// Whether the group of layers belongs to main attention (a request needs all of its blocks), as far as is known.
    pub(crate) fn counts(&self, group: Group) -> bool {
        self.groups.counts(self.stated(group))
    }

    /// The sequence hash of the block that has the engine's name `name`. If the name is not in use now, returns the
    /// hash of the block that had it before batches were lost.
    pub(crate) fn sequence_named(&self, name: u64) -> Option<SequenceHash> {
        let held = self.groups.find_any(name).and_then(|slot| self.chain.get(slot));
        held.map(|block| block.sequence)
            .or_else(|| self.recalled.sequence_named(name))
    }

    /// Tells whether `name` stands for the block, and all groups of main attention hold it on the device.
    pub(crate) fn holds_on_device(&self, name: u64, sequence: SequenceHash) -> bool {
        let slot = self.groups.find_any(name);
        slot.is_some_and(|slot| {
            let block = self.chain.get(slot);
            block.is_some_and(|block| block.sequence == sequence)
                && self.groups.holds(slot, TierIndex::DEVICE)
        })
    }
}
