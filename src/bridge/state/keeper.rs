//! Keeper of one engine's file: decides when it is written, so that writing neither delays batches nor happens too often.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

use kvatlas_client::publish::PublishedHolder;
use kvatlas_telemetry::BridgeMetrics;

use super::super::continuity::HeardBatch;
use super::{KeptEngine, REFRESHED_AFTER, StateDirectory, engine_file};

/// Minimum ratio of the whole time to the time spent on writing. A value of 20 means that writing takes at most a
/// twentieth of the time.
const SHARE: u32 = 20;

/// Right to write a file. One engine of a bridge has it at a time.
#[derive(Debug)]
pub(in super::super) struct WriteTurn {
    _permit: OwnedSemaphorePermit,
}

/// Decides when one engine's file is written, and writes it.
pub(in super::super) struct Keeper {
    directory: StateDirectory,
    holder: PublishedHolder,
    bytes_max: u64,
    metrics: Arc<BridgeMetrics>,
    /// Number of changes in the file that was last written successfully.
    written: Arc<AtomicU64>,
    due_at: Instant,
    /// Time at which the file is written again, even if nothing has changed; `None` if there is no file.
    pub(super) refresh_at: Option<Instant>,
    writing: Option<JoinHandle<()>>,
    /// Whether an earlier bridge's file may be there, but could not be read.
    is_unread: bool,
    /// Attempt to read an earlier bridge's file that could not be read. It returns what [`Self::read_late`] returns.
    reading: Option<JoinHandle<Option<HeardBatch>>>,
    /// The last batch in a file that could not be read before, and has been read since; `None` if there is no
    /// such file.
    late: Option<HeardBatch>,
    /// Time that the last writing took, in microseconds.
    took_us: Arc<AtomicU64>,
}

impl Keeper {
    /// Makes the keeper of an engine's file. `is_of_earlier` says that the bridge has begun with the file of an earlier
    /// bridge. That file may be old, so it is written again soon.
    pub(in super::super) fn new(
        directory: StateDirectory,
        holder: PublishedHolder,
        bytes_max: u64,
        is_of_earlier: bool,
        metrics: Arc<BridgeMetrics>,
    ) -> Self {
        let now = Instant::now();
        Self {
            due_at: now + directory.inner.interval,
            refresh_at: is_of_earlier.then_some(now),
            is_unread: directory.is_unread(&engine_file(&holder)),
            directory,
            holder,
            bytes_max,
            metrics,
            written: Arc::default(),
            writing: None,
            reading: None,
            late: None,
            took_us: Arc::default(),
        }
    }

    /// Whether an earlier bridge's file may be there that could not be read, or was read late. It must not be written over
    /// by less.
    pub(in super::super) fn is_unread(&self) -> bool {
        self.is_unread
    }

    /// Whether a file that could not be read is being read again.
    #[cfg(test)]
    pub(super) fn is_reading(&self) -> bool {
        self.reading.is_some()
    }

    /// Allows that a file that could not be read is written over, because all of the engine's blocks are known, or the file
    /// is of no use.
    pub(in super::super) fn write_over(&mut self) {
        (self.is_unread, self.reading, self.late) = (false, None, None);
        self.directory.write_over(&self.holder);
    }

    /// Returns the last batch in a file that could not be read, and can be read by now. `None` if it still
    /// cannot be read, or has no batch. Reads it on a thread that may block, and tries again after a pause. Returns the
    /// batch again after each pause, until the file may be [written over](Self::write_over). `cache` is the text of the
    /// engine's settings.
    pub(in super::super) fn read_late(&mut self, cache: &str) -> Option<HeardBatch> {
        if let Some(reading) = &mut self.reading {
            let read = reading.now_or_never()?;
            self.reading = None;
            // A thread that has failed has logged that.
            self.late = read.unwrap_or_default();
            self.is_unread = self.late.is_some() || self.directory.is_unread(&engine_file(&self.holder));
            return self.late;
        }
        if Instant::now() < self.due_at {
            return None;
        }
        self.due_at = Instant::now() + self.directory.inner.interval;
        if self.late.is_none() {
            let (directory, holder) = (self.directory.clone(), self.holder.clone());
            let (cache, bytes_max) = (cache.to_owned(), self.bytes_max);
            let metrics = Arc::clone(&self.metrics);
            let read = move || {
                directory
                    .late_engine(&holder, &cache, bytes_max, &metrics)?
                    .continuity
                    .last_batch()
            };
            self.reading = Some(tokio::task::spawn_blocking(read));
        }
        self.late
    }

    /// Returns the right to write. `None` if the file already contains all `changes` so far, and is not old. Also
    /// `None` if the next write has to wait, if another file is being written, or if the file is [unread](Self::is_unread).
    pub(in super::super) fn turn(&mut self, changes: u64) -> Option<WriteTurn> {
        if !self.needs_write(changes) || Instant::now() < self.due_at {
            return None;
        }
        if self.writing.take_if(|writing| writing.is_finished()).is_some() {
            let took = Duration::from_micros(self.took_us.load(Ordering::Acquire));
            self.due_at = Instant::now() + took * (SHARE - 1);
        }
        if self.writing.is_some() || Instant::now() < self.due_at {
            return None;
        }
        let permit = Arc::clone(&self.directory.inner.writing).try_acquire_owned();
        permit.ok().map(|permit| WriteTurn { _permit: permit })
    }

    /// Waits for the right to write the last file; `None` if there is nothing to write.
    pub(in super::super) async fn last_turn(&mut self, changes: u64) -> Option<WriteTurn> {
        self.wait().await;
        if !self.needs_write(changes) {
            return None;
        }
        let permit = Arc::clone(&self.directory.inner.writing).acquire_owned().await;
        permit.ok().map(|permit| WriteTurn { _permit: permit })
    }

    /// Writes `kept` on a thread that may block. `changes` is the number of changes that `kept` contains.
    pub(in super::super) fn write(&mut self, turn: WriteTurn, changes: u64, kept: KeptEngine) {
        let begun = Instant::now();
        self.due_at = begun + self.directory.inner.interval;
        self.refresh_at = Some(begun + REFRESHED_AFTER);
        let (directory, holder, bytes_max) = (self.directory.clone(), self.holder.clone(), self.bytes_max);
        let (took_us, written) = (Arc::clone(&self.took_us), Arc::clone(&self.written));
        let metrics = Arc::clone(&self.metrics);
        self.writing = Some(tokio::task::spawn_blocking(move || {
            if directory.write_engine(&holder, &kept, bytes_max, &metrics) {
                written.store(changes, Ordering::Release);
            }
            let took = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
            took_us.store(took, Ordering::Release);
            drop(turn);
        }));
    }

    /// Returns whether the last written file contains all `changes` so far.
    fn contains(&self, changes: u64) -> bool {
        self.written.load(Ordering::Acquire) == changes
    }

    /// Whether the file lacks some of the `changes` so far, or is old, and may be written.
    fn needs_write(&self, changes: u64) -> bool {
        let is_kept = self.contains(changes) && !self.is_old();
        !is_kept && !self.is_unread()
    }

    /// Whether the file has to be written again, although nothing may have changed.
    fn is_old(&self) -> bool {
        self.refresh_at.is_some_and(|at| at <= Instant::now())
    }

    /// Whether bridges share the file. The bridge that reports the engine to daemons writes it.
    pub(in super::super) fn is_shared(&self) -> bool {
        self.directory.shared().is_some()
    }

    /// Waits until nothing is being written.
    pub(in super::super) async fn wait(&mut self) {
        if let Some(writing) = self.writing.take() {
            // A thread that has failed has logged that.
            let _ = writing.await;
        }
    }
}
