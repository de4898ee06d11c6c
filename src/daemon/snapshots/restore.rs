//! Restoring of a snapshot when a daemon starts.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use crate::lanes::{LanePool, PoolError, RestoreOrigin, StreamPosition};
use kvatlas_client::unix_time_us;
use kvatlas_core::snapshot::{
    Frame, HolderFrame, SnapshotContent, SnapshotError, SnapshotReader, SnapshotTotals, StreamCursor, verify,
};
use kvatlas_core::stream::{StreamGeneration, StreamTrust};
use kvatlas_core::wire::WireLimits;
use kvatlas_telemetry::labels::SnapshotRejection;
use kvatlas_telemetry::{RestoredSnapshot, SnapshotMetrics};

use super::directory::{DirectoryError, SnapshotDirectory};
use kvatlas_process::storage::open_regular;

/// Maximum number of snapshots that the log names as not loaded.
const NAMED_MAX: usize = 16;

/// Snapshot from which the daemon started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restored {
    /// Path of the snapshot's file.
    pub path: PathBuf,
    /// Totals of the snapshot's content.
    pub totals: SnapshotTotals,
    /// Time at which the snapshot was begun, in microseconds since the Unix epoch.
    pub created_us: u64,
    /// Position in the events stream up to which the snapshot includes all messages. `None` if the snapshot has no
    /// position in that stream, or if it was written under other settings.
    pub cursor: Option<StreamCursor>,
    /// Time that checking and loading took.
    pub elapsed: Duration,
}

/// Reason why the daemon cannot start from its snapshots.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// Directory cannot be read.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// Lane has stopped, so that it cannot take over holders.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

/// Restorer that loads a snapshot into the lanes.
pub struct Restorer {
    /// Lanes that take over the snapshot's holders.
    pub pool: Arc<LanePool>,
    /// Bounds on the batches in the snapshot.
    pub limits: WireLimits,
    /// Name of the events stream that will be read after the snapshot is restored. `None` with core NATS.
    pub stream: Option<String>,
    /// Position in the events stream up to which messages need not be read. [`Self::restore_newest`] sets it to the
    /// snapshot's position.
    pub position: Arc<StreamPosition>,
    /// State of the events stream. If reading goes on from the snapshot's position, holders that were exact in the
    /// snapshot count as confirmed. The confirmation is for the stream's present generation, that is, until messages
    /// are lost.
    pub trust: Arc<StreamTrust>,
    /// Metrics that count restored and rejected snapshots.
    pub metrics: Arc<SnapshotMetrics>,
}

enum ApplyError {
    Snapshot(SnapshotError),
    Pool(PoolError),
}

impl Restorer {
    /// Loads the newest whole snapshot into the lanes, and waits until they have applied it. Returns `None` if there is
    /// no whole snapshot. Must be called where blocking is allowed.
    ///
    /// - A file that is not whole is logged as an error, counted, and left in place.
    /// - A file is read twice: first to check it to its end, then to apply it. So no part of a damaged file is applied.
    pub fn restore_newest(
        &self,
        directory: &SnapshotDirectory,
        runtime: &Handle,
    ) -> Result<Option<Restored>, RestoreError> {
        let mut snapshots = directory.snapshots()?.into_iter();
        while let Some(path) = snapshots.next() {
            let started = Instant::now();
            let content = match open(&path).and_then(|file| verify(file, &self.limits)) {
                Ok(content) => content,
                Err(error) => {
                    self.reject(&path, &error);
                    continue;
                }
            };
            let cursor = self.cursor_of(&content);
            if cursor.as_ref().is_some_and(|cursor| !cursor.has_all) {
                // The snapshot does not know every publisher. In the new generation that begins here, its holders can
                // still be confirmed.
                self.trust.doubt();
            }
            // Only a stream proves that nothing is missing after the snapshot.
            let generation = cursor
                .as_ref()
                .map_or(StreamGeneration::default(), |_| self.trust.generation());
            let has_whole_stream = self.stream.is_some() && cursor.is_none();
            match self.apply(&path, (generation, has_whole_stream), runtime) {
                Ok(()) => {
                    log_others(&snapshots.collect::<Vec<_>>());
                    return Ok(Some(self.restored(path, &content, cursor, started.elapsed())));
                }
                // The file was damaged after it was checked. Whole holders stay, but no stream position proves that they are complete.
                Err(ApplyError::Snapshot(error)) => {
                    self.trust.doubt();
                    self.reject(&path, &error);
                }
                Err(ApplyError::Pool(error)) => return Err(error.into()),
            }
        }
        Ok(None)
    }

    fn restored(
        &self,
        path: PathBuf,
        content: &SnapshotContent,
        cursor: Option<StreamCursor>,
        elapsed: Duration,
    ) -> Restored {
        if let Some(cursor) = &cursor {
            self.position.set(cursor.clone());
        }
        self.metrics.restored(&RestoredSnapshot {
            holders: content.totals.holders,
            blocks: content.totals.blocks,
            created_us: content.created_us,
            elapsed,
        });
        Restored {
            path,
            totals: content.totals,
            created_us: content.created_us,
            cursor,
            elapsed,
        }
    }

    fn reject(&self, path: &Path, error: &SnapshotError) {
        self.metrics
            .rejected(SnapshotRejection::from(error), &path.display(), error);
    }

    /// Returns the position of the snapshot in the events stream that this daemon reads. `None` in two cases:
    ///
    /// - The snapshot has no position in that stream.
    /// - The snapshot was written under other settings. Those settings may have dropped messages that this daemon
    ///   needs, so it reads the stream from its beginning.
    fn cursor_of(&self, content: &SnapshotContent) -> Option<StreamCursor> {
        let stream = self.stream.as_ref()?;
        let mut cursors = content.streams.iter();
        let cursor = cursors.find(|cursor| cursor.stream == *stream)?;
        let is_same = cursor.intake == Some(self.position.intake());
        if !is_same {
            tracing::info!(
                stream,
                "the snapshot was written under other settings of shards, limits or namespaces, or by an older version: the stream \
                 is read from its beginning"
            );
        }
        is_same.then(|| cursor.clone())
    }

    fn apply(
        &self,
        path: &Path,
        (generation, has_whole_stream): (StreamGeneration, bool),
        runtime: &Handle,
    ) -> Result<(), ApplyError> {
        let file = open(path).map_err(ApplyError::Snapshot)?;
        let mut reader = SnapshotReader::new(file).map_err(ApplyError::Snapshot)?;
        // The clock may have been set back. A time in the future does not tell the age.
        let age_us = unix_time_us().checked_sub(reader.created_us());
        let age = age_us.map_or(Duration::MAX, Duration::from_micros);
        let origin = RestoreOrigin::new(generation, age).with_whole_stream(has_whole_stream);
        let mut restored = Restoring::default();
        let applied = self.apply_frames(&mut reader, &mut restored, origin, runtime);
        if matches!(applied, Err(ApplyError::Snapshot(_))) {
            for holder in restored.incomplete() {
                runtime
                    .block_on(self.pool.abandon_restore(holder))
                    .map_err(ApplyError::Pool)?;
            }
        }
        runtime
            .block_on(self.pool.end_restore())
            .map_err(ApplyError::Pool)?;
        applied
    }

    fn apply_frames(
        &self,
        reader: &mut SnapshotReader<BufReader<File>>,
        restoring: &mut Restoring,
        origin: RestoreOrigin,
        runtime: &Handle,
    ) -> Result<(), ApplyError> {
        while let Some(frame) = reader.next_frame().map_err(ApplyError::Snapshot)? {
            if let Frame::Holder(next) = &frame {
                restoring.begin(next);
            }
            let sent = match (frame, &restoring.holder) {
                (Frame::Forest(chunk), _) => runtime.block_on(self.pool.restore_forest(chunk)),
                (frame, Some(holder)) => runtime.block_on(self.pool.restore(holder, frame, origin)),
                (_, None) => Ok(()),
            };
            sent.map_err(ApplyError::Pool)?;
        }
        Ok(())
    }
}

/// Logs the snapshots that are older than the loaded one. Some of them may be snapshots of other shards.
fn log_others(older: &[PathBuf]) {
    if older.is_empty() {
        return;
    }
    let names = older.iter().filter_map(|path| path.file_name()).take(NAMED_MAX);
    let names: Vec<_> = names.map(|name| name.to_string_lossy()).collect();
    tracing::info!(
        count = older.len(),
        files = names.join(", "),
        "one snapshot is loaded, and not these older ones"
    );
}

/// Holders of a snapshot file that is being applied.
#[derive(Debug, Default)]
struct Restoring {
    /// Holder in the last holder frame that was read. A holder frame is a record with a holder's name and cursor.
    holder: Option<HolderFrame>,
    /// Holders of the file whose blocks are stored in forests. A forest has the blocks of many holders together.
    in_forest: Vec<HolderFrame>,
}

impl Restoring {
    fn begin(&mut self, holder: &HolderFrame) {
        if holder.forest.is_some() {
            self.in_forest.push(holder.clone());
        }
        self.holder = Some(holder.clone());
    }

    /// Returns the holders that have been begun, and may lack blocks if the file ends here.
    fn incomplete(&self) -> impl Iterator<Item = &HolderFrame> {
        self.in_forest.iter().chain(&self.holder)
    }
}

fn open(path: &Path) -> Result<BufReader<File>, SnapshotError> {
    open_regular(path)
        .map(|file| BufReader::with_capacity(1 << 20, file))
        .map_err(SnapshotError::Io)
}
