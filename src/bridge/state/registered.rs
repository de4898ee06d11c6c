//! File of the engines that were registered over HTTP.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use kvatlas_process::registry::GivenEngine;
use kvatlas_telemetry::BridgeMetrics;

use super::StateDirectory;
use super::file::StateFileKind;

const NAME: &str = "registered";
/// Maximum size of the file, in bytes.
const BYTES_MAX: u64 = 16 << 20;
/// Maximum number of unregistered engines that are remembered while the file cannot be read.
const GONE_MAX: usize = 1024;

/// Keeps the list of registered engines in its file.
#[derive(Debug)]
pub(in super::super) struct Registered {
    directory: StateDirectory,
    /// List of registered engines that was written last.
    written: Mutex<Vec<GivenEngine>>,
    /// Whether the file could not be read, or lacks the last change.
    is_behind: AtomicBool,
    meanwhile: Mutex<Meanwhile>,
}

/// Changes while the file could not be read. Its list is older than these.
#[derive(Debug, Default)]
struct Meanwhile {
    /// List of registered engines at the last change.
    last: Vec<GivenEngine>,
    /// Engines that were unregistered, and not registered again.
    gone: VecDeque<GivenEngine>,
}

impl Meanwhile {
    fn changed(&mut self, engines: &[GivenEngine]) {
        let has = |engine: &GivenEngine| engines.iter().any(|other| other.is_same_engine(engine));
        self.gone.extend(std::mem::take(&mut self.last));
        self.gone.retain(|engine| !has(engine));
        let excess = self.gone.len().saturating_sub(GONE_MAX);
        self.gone.drain(..excess);
        self.last = engines.to_vec();
    }

    fn has_gone(&self, engine: &GivenEngine) -> bool {
        self.gone.iter().any(|gone| gone.is_same_engine(engine))
    }
}

impl Registered {
    /// Returns the registered engines that are saved in `directory`, and the keeper of their file. The list is empty if
    /// the file is missing or cannot be used.
    pub(in super::super) fn open(directory: StateDirectory) -> (Vec<GivenEngine>, Self) {
        let kept = directory.read(NAME, StateFileKind::Registered, BYTES_MAX);
        let engines: Vec<GivenEngine> = kept.unwrap_or_default();
        let registered = Self {
            written: Mutex::new(engines.clone()),
            is_behind: directory.is_unread(NAME).into(),
            meanwhile: Mutex::default(),
            directory,
        };
        (engines, registered)
    }

    /// Returns the registered engines in a file that could not be read before, but for those that were unregistered
    /// since then; `None` if there is no such file, or it still cannot be read.
    pub(in super::super) fn read_late(&self) -> Option<Vec<GivenEngine>> {
        if !self.directory.is_unread(NAME) {
            return None;
        }
        // Nothing is kept during this, so no change is missed.
        let _written = self.written.lock();
        let mut engines: Vec<GivenEngine> =
            self.directory
                .read_again(NAME, StateFileKind::Registered, BYTES_MAX)?;
        let meanwhile = std::mem::take(&mut *self.meanwhile.lock());
        engines.retain(|engine| !meanwhile.has_gone(engine));
        Some(engines)
    }

    /// Writes the list of registered engines that `current` returns, if it has changed. A client is told that its
    /// engine is registered only after this. A failed write is logged and counted, and leaves the file
    /// [behind](Self::is_behind).
    pub(in super::super) fn keep(&self, current: impl FnOnce() -> Vec<GivenEngine>, metrics: &BridgeMetrics) {
        // The lock is taken first, so that the last writer has the newest list.
        let mut written = self.written.lock();
        let engines = current();
        if self.directory.is_unread(NAME) {
            self.meanwhile.lock().changed(&engines);
        }
        let is_kept = *written == engines && !self.directory.is_unread(NAME)
            || self
                .directory
                .write(NAME, StateFileKind::Registered, &engines, BYTES_MAX, metrics);
        self.is_behind.store(!is_kept, Ordering::Release);
        if is_kept {
            *written = engines;
        }
    }

    /// Whether the file has to be read or written again, because that failed.
    pub(in super::super) fn is_behind(&self) -> bool {
        self.is_behind.load(Ordering::Acquire)
    }

    /// Returns the pause before a failed write is tried again.
    pub(in super::super) fn interval(&self) -> Duration {
        self.directory.inner.interval
    }
}
