//! One holder's share of one run in one word, so that a reader sees all of it at one instant.

use crate::index::directory::HolderSlot;

/// Entry of one holder in a run's roster, which is the list of the run's holders. For each step of tiers, the entry has
/// the number of leading blocks that the holder has without a hole. It also has the end of the holder's last block. The
/// steps of tiers are: device only, device and host, all tiers.
///
/// ```text
/// bit 63      48 47   36 35   24 23       12 11      0
///     ┌─────────┬───────┬───────┬───────────┬────────┐
///     │  slot   │  end  │  all  │ to host   │ device │
///     └─────────┴───────┴───────┴───────────┴────────┘
/// ```
///
/// The word 0 is the empty entry, which belongs to no holder. A holder with any block of a run has an end above 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RosterEntry(u64);

/// Number of bits of a block count in an entry; no run has 2^12 blocks.
const COUNT_BITS: u32 = 12;
const COUNT_MASK: u64 = (1 << COUNT_BITS) - 1;

impl RosterEntry {
    /// Makes the entry of the holder in `slot`. `reaches` are the holder's numbers of leading blocks on the device,
    /// on device or host, and in any tier. `end` is one more than the offset of the holder's last block.
    pub(crate) fn new(slot: HolderSlot, reaches: [u16; 3], end: u16) -> Self {
        let [device, host, all] = reaches.map(u64::from);
        let slot = (slot.index() as u64) << (4 * COUNT_BITS);
        Self(
            slot | u64::from(end) << (3 * COUNT_BITS) | all << (2 * COUNT_BITS) | host << COUNT_BITS | device,
        )
    }

    pub(super) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(super) fn bits(self) -> u64 {
        self.0
    }

    /// Whether this is the empty entry, which belongs to no holder.
    #[inline]
    pub(crate) fn is_none(self) -> bool {
        self.0 == 0
    }

    #[inline]
    #[allow(
        clippy::cast_possible_truncation,
        reason = "the slot is in the highest 16 bits"
    )]
    pub(crate) fn slot(self) -> HolderSlot {
        HolderSlot::from_bits((self.0 >> (4 * COUNT_BITS)) as u16)
    }

    /// One more than the offset of the holder's last block.
    pub(crate) fn end(self) -> u16 {
        self.count(3)
    }

    /// Number of the holder's leading blocks in the tiers of `step`: 0 for the device, 1 for device and host, 2 for
    /// all tiers.
    #[inline]
    pub(crate) fn reach(self, step: u32) -> u16 {
        self.count(step)
    }

    /// Whether [`Self::reach`] is at least `blocks`.
    #[inline]
    pub(crate) fn reaches(self, step: u32, blocks: usize) -> bool {
        // Both sides are shifted, so that a loop over many entries shifts the bound only once, and no entry.
        let shift = step * COUNT_BITS;
        self.0 & COUNT_MASK << shift >= (blocks as u64) << shift
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation, reason = "masked to 12 bits")]
    fn count(self, number: u32) -> u16 {
        (self.0 >> (number * COUNT_BITS) & COUNT_MASK) as u16
    }
}
