//! Starting from a snapshot.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use tokio::runtime::Handle;

use crate::ingest::{LanePool, PoolError};
use crate::snapshot::{Frame, HolderFrame, SnapshotError, SnapshotReader, SnapshotTotals, summarise};
use crate::telemetry::SnapshotMetrics;
use crate::wire::WireLimits;

use super::directory::{DirectoryError, SnapshotDirectory};

/// The snapshot that the daemon started from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restored {
    /// The file.
    pub path: PathBuf,
    /// What it holds.
    pub totals: SnapshotTotals,
    /// When it was begun, in microseconds since the Unix epoch.
    pub created_us: u64,
}

/// Brings the newest snapshot that is whole to the lanes, and waits until they have it. A file that is not whole is refused with a
/// warning, counted, and left where it is. Blocks: to be called where blocking is allowed.
///
/// A file is read twice: first to the end, checking everything, then to apply it; nothing of a damaged file is applied.
pub fn restore_newest(
    pool: &LanePool,
    directory: &SnapshotDirectory,
    limits: &WireLimits,
    metrics: &SnapshotMetrics,
    runtime: &Handle,
) -> Result<Option<Restored>, RestoreError> {
    for path in directory.snapshots()? {
        let checked = open(&path).and_then(|file| summarise(file, limits));
        let summary = match checked {
            Ok(summary) => summary,
            Err(error) => {
                metrics.rejected(&path.display(), &error);
                continue;
            }
        };
        match apply(&path, pool, runtime) {
            Ok(()) => {
                return Ok(Some(Restored {
                    path,
                    totals: summary.totals,
                    created_us: summary.created_us,
                }));
            }
            // Damaged since it was checked. The holders that are whole stay, unverified like all of a snapshot.
            Err(ApplyError::Snapshot(error)) => metrics.rejected(&path.display(), &error),
            Err(ApplyError::Pool(error)) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// Why the daemon cannot start from its snapshots.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The directory cannot be read.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// A lane has stopped.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

enum ApplyError {
    Snapshot(SnapshotError),
    Pool(PoolError),
}

fn open(path: &Path) -> Result<BufReader<File>, SnapshotError> {
    File::open(path)
        .map(|file| BufReader::with_capacity(1 << 20, file))
        .map_err(SnapshotError::Io)
}

fn apply(path: &Path, pool: &LanePool, runtime: &Handle) -> Result<(), ApplyError> {
    let file = open(path).map_err(ApplyError::Snapshot)?;
    let mut reader = SnapshotReader::new(file).map_err(ApplyError::Snapshot)?;
    let mut holder: Option<HolderFrame> = None;
    loop {
        let frame = match reader.next_frame() {
            Ok(Some(frame)) => frame,
            Ok(None) => break,
            Err(error) => {
                if let Some(holder) = &holder {
                    runtime
                        .block_on(pool.abandon_restore(holder))
                        .map_err(ApplyError::Pool)?;
                }
                return Err(ApplyError::Snapshot(error));
            }
        };
        if let Frame::Holder(next) = &frame {
            holder = Some(next.clone());
        }
        if let Some(holder) = &holder {
            runtime
                .block_on(pool.restore(holder, frame))
                .map_err(ApplyError::Pool)?;
        }
    }
    runtime.block_on(pool.drain()).map_err(ApplyError::Pool)
}
