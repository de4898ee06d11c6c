//! The states of a holder on its lane, and what leads from one to another.
//!
//! State of the blocks, by the change:
//!
//! | | `Replaced` | `Missed` | `CountRestarted` | `EpochEnded` | `Released` |
//! |---|---|---|---|---|---|
//! | `Whole` | `Whole` | `Torn` | `Recounted` | `Outlived` | `Whole` |
//! | `Torn` | `Whole` | `Torn` | `Recounted` | `Outlived` | `Torn` |
//! | `Recounted` | `Whole` | `Recounted` | `Recounted` | `Outlived` | `Recounted` |
//! | `Outlived` | `Whole` | `Outlived` | `Recounted`, cleared | `Outlived` | `Torn`, cleared |
//!
//! State of the publisher, by the news of its answers:
//!
//! | | `Answered` | `Failed` | `Refused` | `Reconsidered` |
//! |---|---|---|---|---|
//! | `Answers` | `Answers` | `Unheard` | `Mute` | `Answers` |
//! | `Unheard` | `Answers` | `Unheard` | `Mute` | `Unheard` |
//! | `Mute` | `Answers` | `Unheard` | `Mute` | `Unheard` |

/// How a holder's blocks compare with its publisher's at the cursor of the last batch applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BlocksState {
    /// The blocks are exactly the publisher's. Only from this state do the next batches lead to an exact state.
    Whole,
    /// Some blocks may be missing, or surplus.
    Torn,
    /// Some blocks may be missing or surplus, and numbering has restarted within the epoch: the publisher's cursor may be behind
    /// ours.
    Recounted,
    /// The blocks are those of an ended epoch, kept until the blocks of the new epoch are known.
    Outlived,
}

/// A change of a holder's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum BlocksChange {
    /// The blocks were cleared, or replaced by a full state.
    Replaced,
    /// News of the blocks was lost, refused or contradicted.
    Missed,
    /// Numbering has restarted without a new epoch.
    CountRestarted,
    /// The epoch has ended: a new epoch has begun, and its first batches are missing.
    EpochEnded,
    /// The held batches are applied without the missing batches before them.
    Released,
}

impl BlocksState {
    /// Returns the state after `change`, and whether the blocks are to be cleared first.
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

/// Whether a holder's publisher answers questions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PublisherState {
    /// The last question was answered, or there was none.
    Answers,
    /// The last question found no answer; the next one may.
    Unheard,
    /// The last question found no answer, and asking again does not help.
    Mute,
}

/// News of a publisher's answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PublisherChange {
    /// An answer came.
    Answered,
    /// No answer came; asking again may help.
    Failed,
    /// No answer came, and none will.
    Refused,
    /// A new epoch, or an operator's wish: the publisher may be asked again.
    Reconsidered,
}

impl PublisherState {
    /// Returns the state after `change`.
    #[must_use]
    pub(super) fn after(self, change: PublisherChange) -> Self {
        match (self, change) {
            (_, PublisherChange::Answered) => Self::Answers,
            (_, PublisherChange::Failed) | (Self::Mute, PublisherChange::Reconsidered) => Self::Unheard,
            (_, PublisherChange::Refused) => Self::Mute,
            (state, PublisherChange::Reconsidered) => state,
        }
    }

    /// Whether a question may be answered.
    pub(super) fn may_answer(self) -> bool {
        self != Self::Mute
    }

    /// Whether the last question failed. A publisher that does not answer is believed when it clears its state.
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
