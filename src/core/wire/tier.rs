//! Tiers: the levels of a worker's memory in which blocks are stored.

use serde::{Deserialize, Serialize};

use super::error::DecodeError;
use super::reader::Reader;

/// Level of a worker's memory hierarchy in which a block is stored. A holder has a block as long as the block is in
/// any tier.
///
/// Tier 0 is the accelerator's memory, 1 the host's memory, 2 a local disk, 3 remote storage. A publisher may choose
/// the meaning of 4 to 7.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Tier(u8);

/// The number of a tier that does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there is no tier {0}; tiers are numbered from 0 to {last}", last = Tier::COUNT - 1)]
pub struct UnknownTier(u8);

impl TryFrom<u8> for Tier {
    type Error = UnknownTier;

    fn try_from(number: u8) -> Result<Self, UnknownTier> {
        Self::new(number).ok_or(UnknownTier(number))
    }
}

impl From<Tier> for u8 {
    fn from(tier: Tier) -> Self {
        tier.0
    }
}

impl Tier {
    /// The accelerator's memory.
    pub const DEVICE: Self = Self(0);
    /// The host's memory.
    pub const HOST: Self = Self(1);
    /// A local disk.
    pub const DISK: Self = Self(2);
    /// Remote storage.
    pub const EXTERNAL: Self = Self(3);
    /// Number of tiers.
    pub const COUNT: u8 = 8;

    /// Returns the tier with this number. `None` if `number` is not below [`Self::COUNT`].
    pub fn new(number: u8) -> Option<Self> {
        (number < Self::COUNT).then_some(Self(number))
    }

    /// Number of the tier on the wire.
    pub fn as_u8(self) -> u8 {
        self.0
    }

    pub(super) fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let value = reader.optional_unsigned("tier")?.unwrap_or_default();
        let max = u64::from(Self::COUNT) - 1;
        u8::try_from(value)
            .ok()
            .and_then(Self::new)
            .ok_or(DecodeError::OutOfRange {
                field: "tier",
                value,
                max,
            })
    }
}
