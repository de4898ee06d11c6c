//! Whether the engine's blocks have the size that it was registered with.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use crate::reason::Reason;

/// The facts that the block sizes in an engine's events have shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Sizes {
    /// Whether an event has shown a block of the size that the engine was registered with.
    is_proven: bool,
    /// Whether a smaller block has followed a block that is not held. That block may be a smaller one, too. The
    /// engine's blocks may then be smaller than registered.
    is_doubted: bool,
    /// Size of the last block of another size than the registered one; `None` if no such block has come since the last
    /// block of the registered size.
    #[serde(skip)]
    other: Option<u64>,
}

impl Sizes {
    /// Whether the engine may have blocks of another size. A block of the registered size ends this doubt.
    pub(super) fn is_doubted(&self) -> bool {
        self.is_doubted
    }

    /// Returns the size of the last whole block that had another size than the registered one; `None` if it is not
    /// known.
    pub(super) fn other(&self) -> Option<u64> {
        self.other
    }

    /// Notes that the engine has cleared. A block size that events have proven stays proven.
    pub(super) fn clear(&mut self) {
        self.is_doubted = false;
    }

    /// Judges the block size of a stored event. The event has `blocks` blocks of `told` tokens each, and the engine
    /// was registered with blocks of `size` tokens. `follows_unknown` tells that no group holds the parent of the
    /// blocks.
    ///
    /// A single block with fewer than `size` tokens is an incomplete block at the end of a sequence, which no block
    /// follows. But if its parent is unknown, the single block can mean one of two things:
    ///
    /// - The parent is a smaller block, too, and the engine's blocks are smaller than registered.
    /// - The block belongs to another cache than the blocks of the registered size.
    pub(super) fn judge(
        &mut self,
        told: u64,
        size: u64,
        blocks: usize,
        follows_unknown: bool,
    ) -> Result<(), Reason> {
        match told.cmp(&size) {
            Ordering::Equal => {
                *self = Self {
                    is_proven: true,
                    ..Self::default()
                };
                Ok(())
            }
            Ordering::Less if blocks == 1 => {
                self.is_doubted |= follows_unknown && !self.is_proven;
                Err(Reason::PartOfBlock)
            }
            _ => {
                self.other = Some(told);
                Err(Reason::BlockSize)
            }
        }
    }
}
