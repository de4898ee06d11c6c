//! Whether the engine's blocks have the size that it was registered with.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use crate::reason::Reason;

/// The facts that the sizes of an engine's blocks have shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Sizes {
    /// Whether a block of the registered size has come.
    is_proven: bool,
    /// Whether pieces follow each other that may be the engine's blocks.
    is_doubted: bool,
}

impl Sizes {
    /// Whether the engine may have blocks of another size. A block of the registered size ends this doubt.
    pub(super) fn is_doubted(&self) -> bool {
        self.is_doubted
    }

    /// The engine has cleared. Its size stays proven.
    pub(super) fn clear(&mut self) {
        self.is_doubted = false;
    }

    /// Judges blocks of `told` tokens in a cache of blocks of `size`. `follows_unknown` says that they have a parent which is not held.
    ///
    /// A single smaller block is a part, at the end of a sequence. Nothing follows a part: a piece behind something that is not held either
    /// follows another piece, so that the engine's blocks are smaller, or is of a cache beside that of whole blocks.
    pub(super) fn judge(
        &mut self,
        told: u64,
        size: u64,
        blocks: usize,
        follows_unknown: bool,
    ) -> Result<(), Reason> {
        match told.cmp(&size) {
            Ordering::Equal => {
                (self.is_proven, self.is_doubted) = (true, false);
                Ok(())
            }
            Ordering::Less if blocks == 1 => {
                self.is_doubted |= follows_unknown && !self.is_proven;
                Err(Reason::PartOfBlock)
            }
            _ => Err(Reason::BlockSize),
        }
    }
}
