//! Position in the events stream up to which messages have been handed to the lanes.

use parking_lot::Mutex;

use kvatlas_core::snapshot::StreamCursor;

/// Last message of the events stream that has been handed to the lanes; `None` without JetStream.
///
/// A snapshot reads the position and then dumps the holders. A dump waits in a lane's queue for the messages before it.
/// So every message up to the position is part of the snapshot.
#[derive(Debug, Default)]
pub struct StreamPosition(Mutex<Option<StreamCursor>>);

impl StreamPosition {
    /// Returns the stream position.
    pub fn get(&self) -> Option<StreamCursor> {
        self.0.lock().clone()
    }

    /// Sets the position after which messages are read from the stream.
    pub fn set(&self, cursor: StreamCursor) {
        *self.0.lock() = Some(cursor);
    }

    /// Moves the position to message `sequence` of the stream. `digest` is the digest of that message, or `None` if the
    /// message was not read.
    pub(crate) fn advance(&self, sequence: u64, digest: Option<u64>) {
        if let Some(cursor) = self.0.lock().as_mut() {
            (cursor.sequence, cursor.digest) = (sequence, digest);
        }
    }

    /// Returns the sequence number of the last message; 0 if there is none.
    pub(crate) fn sequence(&self) -> u64 {
        self.0.lock().as_ref().map_or(0, |cursor| cursor.sequence)
    }
}
