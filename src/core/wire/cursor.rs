//! Cursor: the last batch of a holder that has been applied.

/// Epoch and number of the last applied batch of a holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct BatchCursor {
    /// Epoch of the batch: the incarnation of the publisher.
    pub epoch: u64,
    /// Number of the batch in its epoch, from 1.
    pub seq: u64,
}
