//! Failure of the newest snapshots: their error, and the time since which they fail.

use parking_lot::Mutex;
use serde::Serialize;

/// Failure of the newest snapshot. `None` if the newest snapshot was written.
#[derive(Debug, Default)]
pub(crate) struct SnapshotFailing(Mutex<Option<FailingSnapshots>>);

/// Failure of consecutive snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct FailingSnapshots {
    /// Error of the newest failed snapshot.
    pub(crate) error: String,
    /// Time of the first failed snapshot, in microseconds since the Unix epoch.
    pub(crate) since_us: u64,
}

impl SnapshotFailing {
    /// Notes the result of a snapshot: success, or its error. `now_us` is in microseconds since the Unix epoch.
    pub(super) fn note(&self, written: &Result<(), String>, now_us: u64) {
        let mut failing = self.0.lock();
        let since_us = failing.as_ref().map_or(now_us, |failing| failing.since_us);
        *failing = written.as_ref().err().map(|error| FailingSnapshots {
            error: error.clone(),
            since_us,
        });
    }

    /// Returns the failure while snapshots cannot be written. `None` if the newest snapshot was written, or if there
    /// was no snapshot yet.
    pub(crate) fn now(&self) -> Option<FailingSnapshots> {
        self.0.lock().clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_failures_begins_with_the_first() {
        let failing = SnapshotFailing::default();
        let told = || failing.now().map(|failing| (failing.error, failing.since_us));
        failing.note(&Ok(()), 1);
        assert_eq!(told(), None);
        failing.note(&Err("disk full".to_owned()), 2);
        failing.note(&Err("read-only".to_owned()), 3);
        assert_eq!(told(), Some(("read-only".to_owned(), 2)));
        failing.note(&Ok(()), 4);
        assert_eq!(told(), None);
        failing.note(&Err("disk full".to_owned()), 5);
        assert_eq!(told(), Some(("disk full".to_owned(), 5)));
    }
}
