//! Positions of blocks in a sequence.

use serde::{Deserialize, Serialize};

/// A position that a lineage hash can carry: 0 to 2^24 - 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(transparent)]
#[serde(try_from = "u64", into = "u32")]
pub struct Position(u32);

impl Position {
    /// The first block of a sequence.
    pub const ZERO: Self = Self(0);

    /// The last position that a lineage hash can carry, 2^24 - 1.
    pub const MAX: Self = Self((1 << 24) - 1);

    /// Checks `position` and returns it as a [`Position`].
    ///
    /// # Errors
    ///
    /// [`PositionError`] when `position` is above [`Position::MAX`].
    #[inline]
    pub fn new(position: u64) -> Result<Self, PositionError> {
        match u32::try_from(position) {
            Ok(narrow) if narrow <= Self::MAX.0 => Ok(Self(narrow)),
            _ => Err(PositionError { position }),
        }
    }

    /// Returns the position in a field of at most 24 bits, which the caller has read from a packed hash. Higher bits
    /// are dropped.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the value is masked to 24 bits first"
    )]
    pub(super) const fn from_masked(position: u64) -> Self {
        Self((position & Self::MAX.0 as u64) as u32)
    }

    /// The position as a plain integer.
    #[inline]
    pub const fn as_u32(self) -> u32 {
        self.0
    }

    /// The position as a wide integer.
    #[inline]
    pub const fn as_u64(self) -> u64 {
        self.0 as u64
    }

    /// The position as an index.
    #[inline]
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }
}

impl TryFrom<u64> for Position {
    type Error = PositionError;

    fn try_from(position: u64) -> Result<Self, Self::Error> {
        Self::new(position)
    }
}

impl From<Position> for u32 {
    fn from(position: Position) -> Self {
        position.0
    }
}

impl std::fmt::Display for Position {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

/// A position above [`Position::MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "position {position} is above {max}, the last that a lineage hash can carry; \
     use larger blocks or end the sequence earlier",
    max = Position::MAX
)]
pub struct PositionError {
    /// The refused position.
    pub position: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_end_below_two_to_the_24() {
        assert_eq!(Position::new(0), Ok(Position::ZERO));
        assert_eq!(Position::new((1 << 24) - 1), Ok(Position::MAX));
        for position in [1 << 24, 1 << 32, (1 << 32) + 5, u64::MAX] {
            assert_eq!(Position::new(position), Err(PositionError { position }));
        }
    }

    #[test]
    fn positions_convert() {
        let position = Position::try_from(65_536).unwrap();
        assert_eq!(
            (position.as_u32(), position.as_u64(), position.as_usize()),
            (65_536, 65_536, 65_536)
        );
    }
}
