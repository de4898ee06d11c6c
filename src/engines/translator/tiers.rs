//! Tiers that engines use, each with its index in arrays that have one element for each tier.

use std::ops::{Index, IndexMut};

use kvatlas_core::wire::Tier;
use serde::{Deserialize, Serialize};

/// How many tiers engines use: device, host, disk, remote storage.
const TIERS: usize = 4;

/// One of the tiers that engines use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TierIndex(u8);

impl TierIndex {
    pub(super) const DEVICE: Self = Self(0);
    pub(super) const ALL: [Self; TIERS] = [Self(0), Self(1), Self(2), Self(3)];
    /// All tiers except for the device.
    pub(super) const BEYOND: [Self; TIERS - 1] = [Self(1), Self(2), Self(3)];

    /// The index of a tier; `None` for a tier that no engine uses.
    pub(super) fn of(tier: Tier) -> Option<Self> {
        Self::ALL.get(usize::from(tier.as_u8())).copied()
    }

    pub(super) fn tier(self) -> Tier {
        Tier::new(self.0).unwrap_or(Tier::DEVICE)
    }

    pub(super) fn is_beyond_device(self) -> bool {
        self.0 > 0
    }

    /// The tier's bit in a set.
    pub(super) fn bit(self) -> u8 {
        1 << self.0
    }
}

/// One value for each tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct PerTier<T>([T; TIERS]);

impl<T> PerTier<T> {
    pub(super) fn of(value: impl FnMut(TierIndex) -> T) -> Self {
        Self(TierIndex::ALL.map(value))
    }
}

impl<T> Index<TierIndex> for PerTier<T> {
    type Output = T;

    fn index(&self, tier: TierIndex) -> &T {
        // A tier's number is below `TIERS` already.
        &self.0[usize::from(tier.0) % TIERS]
    }
}

impl<T> IndexMut<TierIndex> for PerTier<T> {
    fn index_mut(&mut self, tier: TierIndex) -> &mut T {
        &mut self.0[usize::from(tier.0) % TIERS]
    }
}

/// A set of tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TierSet(u8);

impl TierSet {
    pub(super) const ALL: Self = Self(0b1111);
    /// All tiers except for the device.
    pub(super) const BEYOND: Self = Self(0b1110);

    pub(super) fn one(tier: TierIndex) -> Self {
        Self(tier.bit())
    }

    /// The tiers whose bits are set in `bits`.
    pub(super) fn of_bits(bits: u8) -> Self {
        Self(bits & Self::ALL.0)
    }

    pub(super) fn iter(self) -> impl Iterator<Item = TierIndex> {
        TierIndex::ALL
            .into_iter()
            .filter(move |tier| self.0 & tier.bit() != 0)
    }
}
