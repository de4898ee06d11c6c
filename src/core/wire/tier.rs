//! Tiers: where in a worker's memory hierarchy a block lies.

use serde::{Deserialize, Serialize};

use super::error::DecodeError;
use super::reader::Reader;

/// Where in a worker's memory hierarchy a block lies. A holder holds a block as long as any tier has it.
///
/// 0 is the accelerator's memory, 1 the host's, 2 a local disk, 3 remote storage; 4 to 7 are free for the publisher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Tier(u8);

/// There is no such tier.
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
    /// How many tiers there are.
    pub const COUNT: u8 = 8;

    /// Tier `number`, below [`Self::COUNT`].
    pub fn new(number: u8) -> Option<Self> {
        (number < Self::COUNT).then_some(Self(number))
    }

    /// The number as it travels.
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
