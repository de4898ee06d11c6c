//! The blocks that a request needs from a window or a state (a group of layers other than main attention).

use crate::batch::GroupKind;

use super::spots::Spots;

/// Maximum number of a group's blocks in a block of the contract: as many as a mask has bits.
const FAN_MAX: u64 = 64;
/// Maximum length of a window, in blocks of the group.
const NEED_MAX: u64 = 1 << 24;

/// The number of blocks that a request needs from a window or a state, and the size of these blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Number of consecutive blocks of the group that a request needs.
    pub(super) need: u32,
    /// Number of the group's blocks in a block of the contract, at least one.
    pub(super) fan: u32,
    /// Number of the contract's blocks that one of the group's blocks spans, at least one.
    pub(super) step: u32,
}

impl Shape {
    /// The shape of a group with blocks of `block` tokens; the contract's blocks have `size` tokens. `None` if neither size is a
    /// multiple of the other, if a number is too large, or if the kind is neither a window nor a state.
    pub(super) fn of(kind: GroupKind, block: u64, size: u64) -> Option<Self> {
        let small = |number: u64| u32::try_from(number).ok();
        if block == 0 || size == 0 {
            return None;
        }
        let (fan, step) = match (size.is_multiple_of(block), block.is_multiple_of(size)) {
            (true, _) => (size / block, 1),
            (_, true) => (1, block / size),
            _ => return None,
        };
        let need = match kind {
            GroupKind::Window(tokens) => u64::from(tokens).saturating_sub(1).div_ceil(block),
            GroupKind::State => 1,
            GroupKind::Main | GroupKind::Other => return None,
        };
        let fits = fan <= FAN_MAX && need <= NEED_MAX && step <= NEED_MAX;
        fits.then_some(Self {
            need: small(need)?,
            fan: small(fan)?,
            step: small(step)?,
        })
    }

    /// Makes an empty table of small blocks, for a group whose blocks of `block` tokens are smaller than the blocks
    /// of the contract. `None` for other groups.
    pub(super) fn spots(self, block: u64) -> Option<Spots> {
        let block = usize::try_from(block).ok().filter(|_| self.fan > 1)?;
        Some(Spots::new(block, self.fan, self.need))
    }
}

/// The least common multiple; `None` beyond 64 bits.
pub(super) fn lcm(one: u64, other: u64) -> Option<u64> {
    let (mut a, mut b) = (one, other);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    one.checked_mul(other / a.max(1))
}
