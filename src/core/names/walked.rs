//! Regular holders in walks. A holder is regular if it has each block together with all blocks before it, in one
//! tier, under its sequence hash. This file prepares a holder for a walk. It also gives a holder the blocks of runs
//! that an earlier walk has met.

use std::sync::Arc;

use crate::hash::SequenceHash;
use crate::index::indexer::PositionalIndexer;
use crate::index::listing::WalkedHolder;
use crate::wire::Tier;

use super::applied::Applied;
use super::writer::HolderWriter;

/// Consecutive blocks that a holder had, which are to be restored.
#[derive(Debug, Clone, Copy)]
pub struct RestoredRun<'a> {
    /// Position of the first block. The position of the last block must also be in range.
    pub position: u32,
    /// Sequence hash of the block before the first; `None` at position 0.
    pub parent: Option<SequenceHash>,
    /// The blocks' sequence hashes.
    pub hashes: &'a [SequenceHash],
}

impl HolderWriter {
    /// Returns the holder in the form in which a walk over the index can look for it. `None` if the holder has no
    /// blocks, or is not regular. A regular holder is described completely by how many leading blocks of each run it
    /// has.
    pub fn as_walked(&mut self) -> Option<WalkedHolder> {
        self.catch_up();
        let (tier, reshaped) = self.holder.regular(&self.shared.runs)?;
        let shared = Arc::clone(&self.shared);
        let record = Arc::clone(self.record());
        Some(WalkedHolder::new(
            PositionalIndexer { shared },
            record,
            tier,
            reshaped,
        ))
    }

    /// Stores runs of blocks that a walk over an earlier index has met, parents before children. If a run's parent is
    /// absent, because the holder is full or blocks have been evicted, the run is left out and counted.
    pub fn restore_runs<'r>(
        &mut self,
        tier: Tier,
        runs: impl IntoIterator<Item = RestoredRun<'r>>,
    ) -> Applied {
        let mut applied = Applied::default();
        for run in runs {
            self.change(&mut applied, true, |turn| {
                turn.restore(run.parent, run.position, run.hashes, tier);
            });
            self.shared.make_room(applied.stored);
        }
        applied
    }
}
