//! Blocks that one worker has according to its reports, tier by tier.

use std::collections::HashMap;

/// Size of one slot of the map, in bytes: an entry, and one byte of the map's own bookkeeping.
const PLACE_BYTES: usize = size_of::<(i64, WorkerBlock)>() + 1;
/// Bit that stands for all cache components from bit 7 on. The rules in `reuse.rs` use none of these components.
const UNKNOWN: u8 = 1 << 7;
/// Minimum capacity that a map keeps when it shrinks, in blocks.
const KEPT_ROOM: usize = 1024;

/// A tier: 0 on the device, 1 in the host's memory, 2 on a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TierPlace(u8);

impl TierPlace {
    pub(super) const ALL: [Self; 3] = [Self(0), Self(1), Self(2)];

    /// Returns the tier that has this number on the wire (1 to 3). `None` for any other number.
    pub(super) fn of_wire(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|tier| tier.to_wire() == number)
    }

    pub(super) fn to_wire(self) -> i32 {
        i32::from(self.0) + 1
    }

    fn bit(self) -> u8 {
        1 << self.0
    }
}

/// State of one block in a worker's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct WorkerBlock {
    /// Number of tokens in the block. 0 if no report has told the number.
    pub(super) tokens: u32,
    /// Tiers that have the block, as bits (bit 0 is the device).
    tiers: u8,
    /// Components of the block in each tier, as bits. All bits of a tier are 0 if the tier does not have the block, or
    /// if no report has named the components.
    components: [u8; 3],
}

impl WorkerBlock {
    /// Returns the components of the block in a tier, as bits. `None` if the tier does not have the block.
    pub(super) fn at(&self, tier: TierPlace) -> Option<u8> {
        let components = self.components.get(usize::from(tier.0))?;
        (self.tiers & tier.bit() != 0).then_some(*components)
    }

    /// Marks the block as held in `tier`, and replaces the block's components in that tier. Also replaces the block's
    /// number of tokens, unless `tokens` is 0.
    fn store(&mut self, tier: TierPlace, components: u32, tokens: u32) {
        if let Some(known) = self.components.get_mut(usize::from(tier.0)) {
            // Bit 7 stands for all components from bit 7 on. No rule is about any of them.
            let others = if components >= UNKNOWN.into() { UNKNOWN } else { 0 };
            *known = components.to_le_bytes()[0] | others;
            self.tiers |= tier.bit();
        }
        if tokens > 0 {
            self.tokens = tokens;
        }
    }

    fn remove(&mut self, tier: TierPlace) {
        self.tiers &= !tier.bit();
        if let Some(known) = self.components.get_mut(usize::from(tier.0)) {
            *known = 0;
        }
    }

    fn has_components(&self) -> bool {
        self.components != [0; 3]
    }
}

/// All blocks of one worker, as reported.
#[derive(Debug, Default)]
pub(super) struct WorkerBlocks {
    held: HashMap<i64, WorkerBlock>,
    /// Number of blocks for which a report has named components of the cache, for example full attention or a window.
    in_parts: usize,
    /// Number of walks over all blocks.
    #[cfg(test)]
    pub(super) walks: usize,
}

/// Returns the number of slots of a map for `blocks` blocks: a power of two, at least four, or 0 for no blocks. At most
/// seven eighths of the slots are used.
fn places(blocks: usize) -> usize {
    match blocks {
        0 => 0,
        _ => blocks.saturating_mul(8).div_ceil(7).next_power_of_two().max(4),
    }
}

impl WorkerBlocks {
    pub(super) fn get(&self, hash: i64) -> Option<&WorkerBlock> {
        self.held.get(&hash)
    }

    /// Whether a report has named components of the cache for at least one block.
    pub(super) fn are_in_parts(&self) -> bool {
        self.in_parts > 0
    }

    /// Returns the memory of the map of blocks, in bytes.
    pub(super) fn bytes(&self) -> usize {
        places(self.held.capacity()) * PLACE_BYTES
    }

    /// Returns an upper bound of the map's memory, in bytes, for the case that `further` blocks are added.
    pub(super) fn bytes_with(&self, further: usize) -> usize {
        let blocks = self.held.len().saturating_add(further);
        match blocks <= self.held.capacity() {
            true => self.bytes(),
            false => places(blocks).saturating_mul(PLACE_BYTES).max(self.bytes()),
        }
    }

    /// Stores a block as held in `tier`.
    pub(super) fn store(&mut self, hash: i64, tier: TierPlace, components: u32, tokens: u32) {
        let held = self.held.entry(hash).or_default();
        let was_in_parts = held.has_components();
        held.store(tier, components, tokens);
        self.in_parts += usize::from(held.has_components());
        self.in_parts -= usize::from(was_in_parts);
    }

    /// Removes a block from `tier`. A block that no tier has is forgotten.
    pub(super) fn remove(&mut self, hash: i64, tier: TierPlace) {
        let Some(held) = self.held.get_mut(&hash) else {
            return;
        };
        let was_in_parts = held.has_components();
        held.remove(tier);
        self.in_parts += usize::from(held.has_components());
        self.in_parts -= usize::from(was_in_parts);
        if held.tiers == 0 {
            self.held.remove(&hash);
        }
    }

    /// Removes all blocks from `tier`. Walks over all blocks once.
    pub(super) fn clear(&mut self, tier: TierPlace) {
        #[cfg(test)]
        {
            self.walks += 1;
        }
        let mut in_parts = 0;
        self.held.retain(|_, held| {
            held.remove(tier);
            in_parts += usize::from(held.has_components());
            held.tiers != 0
        });
        self.in_parts = in_parts;
    }

    /// Shrinks the map if its capacity is more than eight times the number of its blocks. A number below `KEPT_ROOM`
    /// counts as `KEPT_ROOM`.
    pub(super) fn rest(&mut self) {
        let needed = self.held.len().max(KEPT_ROOM);
        if self.held.capacity() / 8 > needed {
            self.held.shrink_to(needed * 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_map_is_known_before_it_grows() {
        let mut blocks = WorkerBlocks::default();
        assert_eq!(blocks.bytes(), 0);
        for hash in 0..20_000 {
            let expected = blocks.bytes_with(1);
            blocks.store(hash, TierPlace(0), 0, 0);
            assert!(blocks.bytes() <= expected, "block {hash}");
        }
        assert!(blocks.bytes() >= 20_000 * PLACE_BYTES && blocks.bytes() <= 20_000 * 3 * PLACE_BYTES);
        blocks.clear(TierPlace(0));
        blocks.rest();
        assert!(blocks.bytes() <= places(KEPT_ROOM * 2) * PLACE_BYTES);
    }

    #[test]
    fn unknown_components_are_none_of_the_known_ones() {
        let mut blocks = WorkerBlocks::default();
        blocks.store(1, TierPlace(0), 0x1_0000, 0);
        assert_eq!(
            blocks.get(1).and_then(|held| held.at(TierPlace(0))),
            Some(UNKNOWN)
        );
        assert!(blocks.are_in_parts());
        blocks.remove(1, TierPlace(0));
        assert!(!blocks.are_in_parts() && blocks.get(1).is_none());
    }

    #[test]
    fn tiers_are_those_of_the_wire() {
        assert_eq!(TierPlace::of_wire(1), Some(TierPlace(0)));
        assert_eq!(TierPlace::of_wire(3).map(TierPlace::to_wire), Some(3));
        assert_eq!([0, 4, -1].map(TierPlace::of_wire), [None; 3]);
    }
}
