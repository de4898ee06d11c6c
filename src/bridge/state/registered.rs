//! File of the engines that were registered over HTTP.

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

/// Keeps the list of registered engines in its file.
#[derive(Debug)]
pub(in super::super) struct Registered {
    directory: StateDirectory,
    /// List of registered engines in the file; `None` if the file could not be read.
    written: Mutex<Option<Vec<GivenEngine>>>,
    /// Whether the file could not be read, or lacks the last change.
    is_behind: AtomicBool,
}

impl Registered {
    /// Returns the registered engines that are saved in `directory`, and the keeper of their file. The list is empty if
    /// the file is missing or cannot be used; it is `None` if the file cannot be read for now.
    pub(in super::super) fn open(directory: StateDirectory) -> (Option<Vec<GivenEngine>>, Self) {
        let read: Option<Vec<GivenEngine>> = directory.read(NAME, StateFileKind::Registered, BYTES_MAX);
        let is_unread = directory.is_unread(NAME);
        let engines = (!is_unread).then(|| read.unwrap_or_default());
        let registered = Self {
            written: Mutex::new(engines.clone()),
            is_behind: is_unread.into(),
            directory,
        };
        (engines, registered)
    }

    /// Returns the registered engines in a file that could not be read before; `None` if it still cannot be read. Blocks
    /// the thread, and holds no lock meanwhile.
    pub(in super::super) fn read_late(&self, metrics: &BridgeMetrics) -> Option<Vec<GivenEngine>> {
        let read: Option<Vec<GivenEngine>> =
            self.directory
                .read_again(NAME, StateFileKind::Registered, BYTES_MAX, metrics);
        (!self.directory.is_unread(NAME)).then(|| read.unwrap_or_default())
    }

    /// Writes the list of registered engines that `current` returns, if it has changed. `current` returns `None` as long
    /// as it lacks the engines of a file that could not be read; that file stays. A client is told that its engine is
    /// registered only after this. A failed write is logged and counted, and leaves the file [behind](Self::is_behind).
    pub(in super::super) fn keep(
        &self,
        current: impl FnOnce() -> Option<Vec<GivenEngine>>,
        metrics: &BridgeMetrics,
    ) {
        // The lock is taken first, so that the last writer has the newest list.
        let mut written = self.written.lock();
        let engines = current();
        let is_kept = engines.as_ref().is_some_and(|list| {
            *written == engines
                || self
                    .directory
                    .write(NAME, StateFileKind::Registered, list, BYTES_MAX, metrics)
        });
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
