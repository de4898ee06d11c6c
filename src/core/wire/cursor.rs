//! The mark of how far a holder's batches have been applied.

/// Name of the last batch of a holder that was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct BatchCursor {
    /// The publisher's incarnation.
    pub epoch: u64,
    /// Number of the batch in its epoch, from 1.
    pub seq: u64,
}
