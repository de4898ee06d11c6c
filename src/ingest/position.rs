//! How far the events stream has been read.

use parking_lot::Mutex;

use crate::snapshot::StreamCursor;

/// Up to where the messages of the events stream have been handed to the lanes; none without JetStream.
///
/// A snapshot that reads it and then dumps the holders has all messages up to it: a dump waits in the lane's queue behind them.
#[derive(Debug, Default)]
pub struct StreamPosition(Mutex<Option<StreamCursor>>);

impl StreamPosition {
    /// The position.
    pub fn get(&self) -> Option<StreamCursor> {
        self.0.lock().clone()
    }

    /// Begins at a position.
    pub fn set(&self, cursor: StreamCursor) {
        *self.0.lock() = Some(cursor);
    }

    /// Moves on within the stream.
    pub(super) fn advance(&self, sequence: u64) {
        if let Some(cursor) = self.0.lock().as_mut() {
            cursor.sequence = sequence;
        }
    }

    /// The sequence number of the last message handed to the lanes; 0 where there is none.
    pub(super) fn sequence(&self) -> u64 {
        self.0.lock().as_ref().map_or(0, |cursor| cursor.sequence)
    }
}
