//! The blocks that were reported of one worker, by tier.

use std::collections::HashMap;

/// Bytes that a map has for each of its places: a block, and a byte of the map.
const PLACE_BYTES: usize = size_of::<(i64, Held)>() + 1;
/// A component that has no rule here.
const UNKNOWN: u8 = 1 << 7;
/// Blocks for which a map keeps its room.
const KEPT_ROOM: usize = 1024;

/// A tier: 0 on the device, 1 in the host's memory, 2 on a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TierPlace(u8);

impl TierPlace {
    pub(super) const ALL: [Self; 3] = [Self(0), Self(1), Self(2)];

    /// The tier that has this number on the wire.
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

/// A block that a worker has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Held {
    /// Its tokens; 0 where nobody has said.
    pub(super) tokens: u32,
    /// The tiers that have it, as bits.
    tiers: u8,
    /// The components that each tier has; 0 where nobody has said.
    components: [u8; 3],
}

impl Held {
    /// The components that a tier has. None where the tier has not the block.
    pub(super) fn at(&self, tier: TierPlace) -> Option<u8> {
        let components = self.components.get(usize::from(tier.0))?;
        (self.tiers & tier.bit() != 0).then_some(*components)
    }

    /// A tier has the block now, with these components in place of those before.
    fn store(&mut self, tier: TierPlace, components: u32, tokens: u32) {
        if let Some(known) = self.components.get_mut(usize::from(tier.0)) {
            // All components that nobody knows are one.
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

/// The blocks of a worker.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    held: HashMap<i64, Held>,
    /// Blocks whose components are told.
    in_parts: usize,
}

/// Places of a map for so many blocks: a power of two, four at least, of which seven eighths are used.
fn places(blocks: usize) -> usize {
    match blocks {
        0 => 0,
        _ => blocks.saturating_mul(8).div_ceil(7).next_power_of_two().max(4),
    }
}

impl Blocks {
    pub(super) fn get(&self, hash: i64) -> Option<&Held> {
        self.held.get(&hash)
    }

    /// Whether the components of some block are told.
    pub(super) fn are_in_parts(&self) -> bool {
        self.in_parts > 0
    }

    /// Memory of the map, in bytes.
    pub(super) fn bytes(&self) -> usize {
        places(self.held.capacity()) * PLACE_BYTES
    }

    /// Memory of the map after so many further blocks, in bytes, at most.
    pub(super) fn bytes_with(&self, further: usize) -> usize {
        let blocks = self.held.len().saturating_add(further);
        match blocks <= self.held.capacity() {
            true => self.bytes(),
            false => places(blocks).saturating_mul(PLACE_BYTES).max(self.bytes()),
        }
    }

    /// A tier has a block now.
    pub(super) fn store(&mut self, hash: i64, tier: TierPlace, components: u32, tokens: u32) {
        let held = self.held.entry(hash).or_default();
        let was_in_parts = held.has_components();
        held.store(tier, components, tokens);
        self.in_parts += usize::from(held.has_components());
        self.in_parts -= usize::from(was_in_parts);
    }

    /// A tier does not have a block any more.
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

    /// A tier has nothing any more.
    pub(super) fn clear(&mut self, tier: TierPlace) {
        self.held.retain(|_, held| {
            held.remove(tier);
            held.tiers != 0
        });
        self.in_parts = self.held.values().filter(|held| held.has_components()).count();
    }

    /// Gives room back that is not needed.
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
        let mut blocks = Blocks::default();
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
        let mut blocks = Blocks::default();
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
