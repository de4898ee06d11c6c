//! Plain indexes with a few holders, for tests that write their blocks by hand.

use crate::hash::SequenceHash;
use crate::wire::{HolderId, WorkerName};

use super::api::{HolderWriter, IndexLimits, NamespaceSettings, PositionalIndexer};

/// Returns an empty index with the default settings.
pub(super) fn index() -> PositionalIndexer {
    PositionalIndexer::new(NamespaceSettings::default(), IndexLimits::default())
}

/// Registers rank 0 of a worker.
pub(super) fn holder(index: &PositionalIndexer, worker: &str) -> HolderWriter {
    let worker = WorkerName::new(worker).unwrap();
    index.register(&HolderId { worker, rank: 0 }).unwrap()
}

pub(super) fn sequence(hashes: &[u64]) -> Vec<SequenceHash> {
    hashes.iter().copied().map(SequenceHash).collect()
}
