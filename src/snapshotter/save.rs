//! Writing a snapshot while serving.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use tokio::runtime::Handle;

use crate::ingest::{LanePool, PoolError};
use crate::snapshot::SnapshotTotals;

use super::directory::{DirectoryError, SnapshotDirectory};

/// Why there is no new snapshot. The older ones are as they were.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// A file could not be written.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// A lane has stopped.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Writing failed in the middle.
    #[error("cannot write the snapshot: {0}")]
    Write(#[from] std::io::Error),
}

/// A snapshot that has been written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    /// The file.
    pub path: PathBuf,
    /// Its length in bytes.
    pub bytes: u64,
    /// What it holds.
    pub totals: SnapshotTotals,
    /// How long it took.
    pub elapsed: Duration,
}

/// Dumps all holders, one after the other, into a new snapshot. Blocks: to be called where blocking is allowed.
///
/// Every holder is caught between two of its batches, with the cursor that belongs to its blocks, so the batches after the
/// cursor can be applied on top. A lane pauses for one holder's dump at a time; queries do not notice.
pub fn save(pool: &LanePool, directory: &SnapshotDirectory, runtime: &Handle) -> Result<Saved, SaveError> {
    let started = Instant::now();
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let created_us = u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX);
    let written = directory.write::<SaveError>(created_us, |writer| {
        for lane in 0..pool.lane_count() {
            let mut position = None;
            while let Some((next, dump)) = runtime.block_on(pool.dump_next(lane, position.take()))? {
                writer.write_holder(&dump.frame)?;
                for batch in &dump.batches {
                    writer.write_batch(batch)?;
                }
                position = Some(next);
            }
        }
        Ok(())
    })?;
    directory.prune()?;
    Ok(Saved {
        path: written.path,
        bytes: written.bytes,
        totals: written.totals,
        elapsed: started.elapsed(),
    })
}
