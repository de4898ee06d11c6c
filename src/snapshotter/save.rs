//! Writing a snapshot while serving.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::ingest::{LanePool, PoolError, StreamPosition};
use crate::snapshot::{SnapshotFormat, SnapshotTotals};
use crate::telemetry::labels::SnapshotFailure;
use crate::tracking::StreamTrust;

use super::directory::{DirectoryError, FileWriter, SnapshotDirectory};
use super::forest::{Walked, write_dump};

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
    /// Another snapshot is being written.
    #[error(
        "another snapshot is still being written; raise snapshots.interval_seconds if this happens often"
    )]
    Busy,
}

impl SaveError {
    /// The word for it in metrics.
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

/// A snapshot that has been written.
#[derive(Debug)]
pub struct Saved {
    /// The file.
    pub path: PathBuf,
    /// Its length in bytes.
    pub bytes: u64,
    /// What it holds.
    pub totals: SnapshotTotals,
    /// How long it took.
    pub elapsed: Duration,
    /// Why the outdated ones are still there, if they are.
    pub prune_error: Option<DirectoryError>,
}

/// Writes the snapshots of one daemon, one at a time.
pub struct Snapshotter {
    pool: Arc<LanePool>,
    directory: SnapshotDirectory,
    position: Arc<StreamPosition>,
    trust: Arc<StreamTrust>,
    format: SnapshotFormat,
    saving: Mutex<()>,
}

impl Snapshotter {
    /// Writes what the lanes of `pool` have to `directory`. `position` is how far the lanes have got in the events stream; holders
    /// that are not confirmed in the generation of `trust` are marked so.
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
            format: SnapshotFormat::default(),
            saving: Mutex::new(()),
        }
    }

    /// Writes in this format from now on.
    #[must_use]
    pub fn with_format(mut self, format: SnapshotFormat) -> Self {
        self.format = format;
        self
    }

    /// The directory that the snapshots are in.
    pub fn directory(&self) -> &SnapshotDirectory {
        &self.directory
    }

    /// Dumps all holders, one after the other, into a new snapshot, and removes outdated ones. Blocks: to be called where blocking
    /// is allowed.
    ///
    /// Every holder's cursor is caught between two of its batches, so the batches after it can be applied on top; see the module for what
    /// they are applied to. A lane pauses for one holder at a time, to tell its cursor, and to collect its events where it is written as
    /// events; walking, encoding, compressing and writing is not its work. Queries do not notice.
    pub fn save(&self, runtime: &Handle) -> Result<Saved, SaveError> {
        let _alone = self.saving.try_lock().ok_or(SaveError::Busy)?;
        let started = Instant::now();
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let created_us = u64::try_from(since_epoch.as_micros()).unwrap_or(u64::MAX);
        let written = self
            .directory
            .write::<SaveError>(created_us, self.format, |writer| self.fill(writer, runtime))?;
        Ok(Saved {
            path: written.path,
            bytes: written.bytes,
            totals: written.totals,
            elapsed: started.elapsed(),
            prune_error: self.directory.prune().err(),
        })
    }

    /// Does `work` as if a snapshot were being written.
    #[cfg(test)]
    pub(super) fn while_saving<T>(&self, work: impl FnOnce() -> T) -> T {
        let _alone = self.saving.lock();
        work()
    }

    fn fill(&self, writer: &mut FileWriter<'_, '_>, runtime: &Handle) -> Result<(), SaveError> {
        // Both before the first dump: what comes meanwhile is applied again, or doubted again.
        let generation = self.trust.generation();
        let mut walked = Walked::default();
        if let Some(cursor) = self.position.get() {
            writer.write_stream(&cursor)?;
        }
        for lane in 0..self.pool.lane_count() {
            let mut position = None;
            loop {
                let dumping = self
                    .pool
                    .dump_next(lane, position.take(), generation, self.format);
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
