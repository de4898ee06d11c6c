//! Writing of a snapshot while the daemon serves.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::lanes::{LanePool, PoolError, StreamPosition};
use kvatlas_core::snapshot::{SnapshotTotals, StreamCursor};
use kvatlas_core::stream::StreamTrust;
use kvatlas_telemetry::labels::SnapshotFailure;

use super::directory::{DirectoryError, FileWriter, SnapshotDirectory};
use super::walked::{Walked, write_dump};

/// Reason why no new snapshot was written. Older snapshots are unchanged.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// File could not be written.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// Lane has stopped, so that its holders cannot be dumped.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Writing failed in the middle of the file.
    #[error("cannot write the snapshot: {0}")]
    Write(#[from] std::io::Error),
    /// Another snapshot is being written.
    #[error(
        "another snapshot is still being written; raise snapshots.interval_seconds if this happens often"
    )]
    Busy,
}

impl SaveError {
    /// Returns the word for this error in metrics.
    pub fn failure(&self) -> SnapshotFailure {
        match self {
            Self::Directory(error) => error.failure(),
            Self::Pool(_) => SnapshotFailure::LaneStopped,
            Self::Write(error) if error.kind() == std::io::ErrorKind::StorageFull => {
                SnapshotFailure::DiskFull
            }
            Self::Write(_) => SnapshotFailure::Write,
            Self::Busy => SnapshotFailure::Busy,
        }
    }
}

/// Snapshot that has been written, with facts about its writing.
#[derive(Debug)]
pub struct Saved {
    /// Path of the snapshot's file.
    pub path: PathBuf,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// Totals of the snapshot's content.
    pub totals: SnapshotTotals,
    /// Time that writing the snapshot took.
    pub elapsed: Duration,
    /// Error that kept outdated snapshots from being removed. `None` if they were removed.
    pub prune_error: Option<DirectoryError>,
}

/// Writer of one daemon's snapshots, one at a time.
pub struct Snapshotter {
    pool: Arc<LanePool>,
    directory: SnapshotDirectory,
    position: Arc<StreamPosition>,
    trust: Arc<StreamTrust>,
    saving: Mutex<()>,
}

impl Snapshotter {
    /// Makes a snapshotter that writes the holders of `pool` to `directory`.
    ///
    /// - `position` tells up to which position of the events stream the lanes have been handed the messages.
    /// - `trust` tells the stream's present generation, which changes when messages are lost. A holder that no batch
    ///   has confirmed in this generation is written as unverified.
    pub fn new(
        pool: Arc<LanePool>,
        directory: SnapshotDirectory,
        position: Arc<StreamPosition>,
        trust: Arc<StreamTrust>,
    ) -> Self {
        Self {
            pool,
            directory,
            position,
            trust,
            saving: Mutex::new(()),
        }
    }

    /// Returns the directory of the snapshots.
    pub fn directory(&self) -> &SnapshotDirectory {
        &self.directory
    }

    /// Writes all holders to a new snapshot, and removes outdated snapshots. Must be called where blocking is allowed.
    ///
    /// Each holder is dumped between two of its batches. A lane pauses for one holder at a time, to take its cursor. If
    /// a walk over the index cannot find the holder's blocks, the lane also collects events that rebuild them. Walking,
    /// encoding, compressing and writing happen on the calling thread. Queries do not wait.
    pub fn save(&self, begun_us: u64, runtime: &Handle) -> Result<Saved, SaveError> {
        let _alone = self.saving.try_lock().ok_or(SaveError::Busy)?;
        let started = Instant::now();
        let written = self
            .directory
            .write::<SaveError>(begun_us, |writer| self.fill(writer, runtime))?;
        Ok(Saved {
            path: written.path,
            bytes: written.bytes,
            totals: written.totals,
            elapsed: started.elapsed(),
            prune_error: self.directory.prune().err(),
        })
    }

    /// Runs `work` while no snapshot can be written: takes the lock that writing a snapshot needs.
    #[cfg(test)]
    pub(super) fn while_saving<T>(&self, work: impl FnOnce() -> T) -> T {
        let _alone = self.saving.lock();
        work()
    }

    fn fill(&self, writer: &mut FileWriter<'_, '_>, runtime: &Handle) -> Result<(), SaveError> {
        // Position and generation are read before the first dump. So messages after the position are replayed, and a
        // loss of messages after this moment degrades the holders again. The position is read before the generation: a
        // loss before the position has then already changed the generation.
        let cursor = self.position.get();
        let generation = self.trust.generation();
        let mut walked = Walked::default();
        if let Some(cursor) = cursor {
            // A message before the position may still wait for its lane. Its publisher may be refused only then.
            runtime.block_on(self.pool.drain())?;
            writer.write_stream(&StreamCursor {
                intake: Some(self.position.intake()),
                has_all: cursor.has_all && !self.pool.drops_some(),
                ..cursor
            })?;
        }
        for lane in 0..self.pool.lane_count() {
            let mut position = None;
            loop {
                let dumping = self.pool.dump_next(lane, position.take(), false, generation);
                let Some((next, mut dump)) = runtime.block_on(dumping)? else {
                    break;
                };
                walked.note(lane, &next, &mut dump);
                write_dump(writer, dump)?;
                position = Some(next);
            }
        }
        walked.write_forests(writer)?;
        walked.write_changed(writer, &self.pool, generation, runtime)
    }
}
