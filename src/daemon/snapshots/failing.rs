//! Failures to write or to send snapshots: the newest error, and the time since which snapshots fail.

use parking_lot::Mutex;
use serde::Serialize;

/// Failures that last at present: one of writing snapshots, one of sending them to the Object Store. Each is `None`
/// while there is no such failure.
#[derive(Debug, Default)]
pub(crate) struct SnapshotFailing {
    writing: Mutex<Option<FailingSnapshots>>,
    sending: Mutex<Option<FailingSnapshots>>,
}

/// Consecutive snapshots that could not be written, or could not be sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct FailingSnapshots {
    /// Error of the newest failed snapshot.
    pub(crate) error: String,
    /// Time of the first failed snapshot, in microseconds since the Unix epoch.
    pub(crate) since_us: u64,
}

impl SnapshotFailing {
    /// Notes the result of writing a snapshot: success, or its error. `now_us` is in microseconds since the Unix epoch.
    pub(super) fn note_written(&self, written: Result<(), String>, now_us: u64) {
        note(&self.writing, written, now_us);
    }

    /// Notes the result of sending a snapshot to the Object Store: success, or its error. `now_us` is in microseconds since the
    /// Unix epoch.
    pub(super) fn note_sent(&self, sent: Result<(), String>, now_us: u64) {
        note(&self.sending, sent, now_us);
    }

    /// Returns the failure while snapshots cannot be written. `None` if the newest snapshot was written, or if there was no
    /// snapshot yet.
    pub(crate) fn writing(&self) -> Option<FailingSnapshots> {
        self.writing.lock().clone()
    }

    /// Returns the failure while snapshots cannot be sent to the Object Store. `None` if the last attempt to send one
    /// succeeded, or if there was no attempt yet.
    pub(crate) fn sending(&self) -> Option<FailingSnapshots> {
        self.sending.lock().clone()
    }
}

fn note(failing: &Mutex<Option<FailingSnapshots>>, done: Result<(), String>, now_us: u64) {
    let mut failing = failing.lock();
    let since_us = failing.as_ref().map_or(now_us, |failing| failing.since_us);
    *failing = done.err().map(|error| FailingSnapshots { error, since_us });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_of_failures_begins_with_the_first() {
        let failing = SnapshotFailing::default();
        let told = || failing.writing().map(|failing| (failing.error, failing.since_us));
        failing.note_written(Ok(()), 1);
        assert_eq!(told(), None);
        failing.note_written(Err("disk full".to_owned()), 2);
        failing.note_written(Err("read-only".to_owned()), 3);
        assert_eq!(told(), Some(("read-only".to_owned(), 2)));
        failing.note_written(Ok(()), 4);
        assert_eq!(told(), None);
        failing.note_written(Err("disk full".to_owned()), 5);
        assert_eq!(told(), Some(("disk full".to_owned(), 5)));
    }

    #[test]
    fn a_snapshot_that_is_written_may_still_not_be_sent() {
        let failing = SnapshotFailing::default();
        failing.note_sent(Err("no bucket".to_owned()), 1);
        failing.note_written(Ok(()), 2);
        failing.note_sent(Err("no room".to_owned()), 3);
        let sending = failing.sending().unwrap();
        assert_eq!((sending.error.as_str(), sending.since_us), ("no room", 1));
        assert_eq!(failing.writing(), None);
        failing.note_sent(Ok(()), 4);
        assert_eq!(failing.sending(), None);
    }
}
