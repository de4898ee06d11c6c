//! File of the engines that were registered over HTTP.

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
    /// List of registered engines that was written last.
    written: Mutex<Vec<GivenEngine>>,
}

impl Registered {
    /// Returns the registered engines that are saved in `directory`, and the keeper of their file. The list is empty if
    /// the file is missing or cannot be used.
    pub(in super::super) fn open(directory: StateDirectory) -> (Vec<GivenEngine>, Self) {
        let kept = directory.read(NAME, StateFileKind::Registered, BYTES_MAX);
        let engines: Vec<GivenEngine> = kept.unwrap_or_default();
        let written = Mutex::new(engines.clone());
        (engines, Self { directory, written })
    }

    /// Writes the list of registered engines that `current` returns, if it has changed. A client is told that its
    /// engine is registered only after this. A failed write is logged and counted. The new registration is then lost
    /// when the bridge ends, unless a later change writes the whole list.
    pub(in super::super) fn keep(&self, current: impl FnOnce() -> Vec<GivenEngine>, metrics: &BridgeMetrics) {
        // The lock is taken first, so that the last writer has the newest list.
        let mut written = self.written.lock();
        let engines = current();
        let is_new = *written != engines;
        if is_new
            && self
                .directory
                .write(NAME, StateFileKind::Registered, &engines, BYTES_MAX, metrics)
        {
            *written = engines;
        }
    }
}
