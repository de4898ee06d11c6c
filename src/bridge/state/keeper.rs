//! Keeper of one engine's file: decides when it is written, so that writing neither delays batches nor happens too often.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;

use kvatlas_client::publish::PublishedHolder;
use kvatlas_telemetry::BridgeMetrics;

use super::{KeptEngine, StateDirectory};

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
    writing: Option<JoinHandle<()>>,
    /// Time that the last writing took, in microseconds.
    took_us: Arc<AtomicU64>,
}

impl Keeper {
    pub(in super::super) fn new(
        directory: StateDirectory,
        holder: PublishedHolder,
        bytes_max: u64,
        metrics: Arc<BridgeMetrics>,
    ) -> Self {
        Self {
            due_at: Instant::now() + directory.inner.interval,
            directory,
            holder,
            bytes_max,
            metrics,
            written: Arc::default(),
            writing: None,
            took_us: Arc::default(),
        }
    }

    /// Returns the right to write. `None` if the file already contains all `changes` so far, if the next write has to
    /// wait, or if another file is being written.
    pub(in super::super) fn turn(&mut self, changes: u64) -> Option<WriteTurn> {
        if self.contains(changes) || Instant::now() < self.due_at {
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
        if self.contains(changes) {
            return None;
        }
        let permit = Arc::clone(&self.directory.inner.writing).acquire_owned().await;
        permit.ok().map(|permit| WriteTurn { _permit: permit })
    }

    /// Writes `kept` on a thread that may block. `changes` is the number of changes that `kept` contains.
    pub(in super::super) fn write(&mut self, turn: WriteTurn, changes: u64, kept: KeptEngine) {
        let begun = Instant::now();
        self.due_at = begun + self.directory.inner.interval;
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
