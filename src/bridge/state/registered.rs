//! The engines that were registered over HTTP.

use parking_lot::Mutex;

use kvatlas_process::registry::GivenEngine;

use super::file::{Kind, read_file};
use super::{StateDirectory, refused};

const NAME: &str = "registered";
/// Most bytes of the file.
const BYTES_MAX: u64 = 16 << 20;

/// Keeps their list.
#[derive(Debug)]
pub(in super::super) struct Registered {
    directory: StateDirectory,
    /// As it was written last.
    written: Mutex<Vec<GivenEngine>>,
}

impl Registered {
    /// The list in `directory`, and its keeper.
    pub(in super::super) fn open(directory: StateDirectory) -> (Vec<GivenEngine>, Self) {
        let path = directory.inner.path.join(NAME);
        let kept = read_file(&path, Kind::Registered, BYTES_MAX);
        let engines: Vec<GivenEngine> = kept
            .inspect_err(|error| refused(&path, error))
            .ok()
            .flatten()
            .unwrap_or_default();
        let written = Mutex::new(engines.clone());
        (engines, Self { directory, written })
    }

    /// Writes the list that `current` gives, if it is another than before: who is told that an engine is registered can rely on it.
    pub(in super::super) fn keep(&self, current: impl FnOnce() -> Vec<GivenEngine>) {
        // Taken first, so that the last to write has the newest list.
        let mut written = self.written.lock();
        let engines = current();
        if *written != engines {
            self.directory.write(NAME, Kind::Registered, &engines, BYTES_MAX);
            *written = engines;
        }
    }
}
