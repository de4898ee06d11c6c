//! States of a holder on its lane, and the changes that lead from one state to another.
//!
//! State of the blocks after each change:
//!
//! | state | `Replaced` | `Missed` | `CountRestarted` | `EpochEnded` | `Released` |
//! |---|---|---|---|---|---|
//! | `Whole` | `Whole` | `Torn` | `Recounted` | `Outlived` | `Whole` |
//! | `Torn` | `Whole` | `Torn` | `Recounted` | `Outlived` | `Torn` |
//! | `Recounted` | `Whole` | `Recounted` | `Recounted` | `Outlived` | `Recounted` |
//! | `Outlived` | `Whole` | `Outlived` | `Recounted`, cleared | `Outlived` | `Torn`, cleared |
//!
//! State of the publisher after each news of its answers:
//!
//! | state | `Answered` | `Failed` | `Refused` | `Reconsidered` |
//! |---|---|---|---|---|
//! | `Answers` | `Answers` | `Unheard` | `Mute` | `Answers` |
//! | `Unheard` | `Answers` | `Unheard` | `Mute` | `Unheard` |
//! | `Mute` | `Answers` | `Unheard` | `Mute` | `Unheard` |

/// State of a holder's blocks, compared with the blocks that its publisher had at the cursor of the last applied batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BlocksState {
    /// Blocks are exactly the same as the publisher's. Only from this state do later batches lead to an exact state.
    Whole,
    /// Blocks may be missing or surplus.
    Torn,
    /// Blocks may be missing or surplus, and the publisher has begun to count from 1 again in the same epoch. The
    /// publisher's cursor may be lower than the cursor here.
    Recounted,
    /// Blocks are those of an ended epoch. They are kept until the blocks of the new epoch are known.
    Outlived,
}

/// Change that affects the state of a holder's blocks, compared with its publisher's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BlocksChange {
    /// Blocks were cleared, or replaced by a full state.
    Replaced,
    /// Events about blocks were lost, refused or contradicted.
    Missed,
    /// Publisher has begun to count its batches from 1 again without a new epoch.
    CountRestarted,
    /// A new epoch has begun, and its first batches are missing. The old epoch has ended.
    EpochEnded,
    /// Held batches are applied without the missing batches before them.
    Released,
}

impl BlocksState {
    /// Returns the state of the blocks after `change`. Also returns whether the holder must clear its blocks at this
    /// change.
    #[must_use]
    pub(super) fn after(self, change: BlocksChange) -> (Self, bool) {
        use BlocksChange::{CountRestarted, EpochEnded, Missed, Released, Replaced};
        match (self, change) {
            (_, Replaced) => (Self::Whole, false),
            (_, EpochEnded) => (Self::Outlived, false),
            (Self::Whole, Missed) => (Self::Torn, false),
            (state, Missed) => (state, false),
            (state, CountRestarted) => (Self::Recounted, state == Self::Outlived),
            // Batches of the new epoch do not continue the blocks of the old one.
            (Self::Outlived, Released) => (Self::Torn, true),
            (state, Released) => (state, false),
        }
    }
}

/// State of a holder's publisher: whether it answers requests for batches or for the full state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PublisherState {
    /// Last request was answered, or there was none.
    Answers,
    /// Last request was not answered. The next one may be.
    Unheard,
    /// Last request was not answered, and asking again does not help.
    Mute,
}

/// News about whether a publisher answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PublisherChange {
    /// Publisher has answered.
    Answered,
    /// Publisher has not answered. Asking again may help.
    Failed,
    /// Publisher has not answered, and will not answer.
    Refused,
    /// Publisher may be asked again, because a new epoch has begun or an operator wishes it.
    Reconsidered,
}

impl PublisherState {
    /// Returns the state of the publisher after `change`.
    #[must_use]
    pub(super) fn after(self, change: PublisherChange) -> Self {
        match (self, change) {
            (_, PublisherChange::Answered) => Self::Answers,
            (_, PublisherChange::Failed) | (Self::Mute, PublisherChange::Reconsidered) => Self::Unheard,
            (_, PublisherChange::Refused) => Self::Mute,
            (state, PublisherChange::Reconsidered) => state,
        }
    }

    /// Whether the publisher may answer the next request.
    pub(super) fn may_answer(self) -> bool {
        self != Self::Mute
    }

    /// Whether the publisher did not answer the last request. If such a publisher clears its state or begins a new
    /// epoch, this also ends the doubt about undecodable messages.
    pub(super) fn has_failed(self) -> bool {
        self != Self::Answers
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_lab::transitions::table;

    use super::*;

    #[test]
    fn blocks_change_as_the_table_says() {
        use BlocksChange::{CountRestarted, EpochEnded, Missed, Released, Replaced};
        use BlocksState::{Outlived, Recounted, Torn, Whole};
        let (changes, rows) = table(include_str!("standing.rs"), 0);
        let all = [Replaced, Missed, CountRestarted, EpochEnded, Released];
        assert_eq!(changes, all.map(|change| format!("{change:?}")));
        assert_eq!(rows.len(), 4);
        for (state, (name, cells)) in [Whole, Torn, Recounted, Outlived].into_iter().zip(rows) {
            assert_eq!(name, format!("{state:?}"));
            let after = all.map(|change| match state.after(change) {
                (next, true) => format!("{next:?}, cleared"),
                (next, false) => format!("{next:?}"),
            });
            assert_eq!(cells, after, "{state:?}");
        }
    }

    #[test]
    fn publishers_change_as_the_table_says() {
        use PublisherChange::{Answered, Failed, Reconsidered, Refused};
        use PublisherState::{Answers, Mute, Unheard};
        let (changes, rows) = table(include_str!("standing.rs"), 1);
        let all = [Answered, Failed, Refused, Reconsidered];
        assert_eq!(changes, all.map(|change| format!("{change:?}")));
        assert_eq!(rows.len(), 3);
        for (state, (name, cells)) in [Answers, Unheard, Mute].into_iter().zip(rows) {
            assert_eq!(name, format!("{state:?}"));
            assert_eq!(
                cells,
                all.map(|change| format!("{:?}", state.after(change))),
                "{state:?}"
            );
        }
    }
}
