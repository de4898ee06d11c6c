//! Changes of one holder's state over time.

use std::collections::VecDeque;

use kvatlas_core::wire::DegradedReasons;

/// Age in seconds up to which all changes of a holder are kept. States are noted once a second.
const BY_SECOND_S: u64 = 60 * 60;
/// Age in seconds up to which the last change of each minute is kept.
const BY_MINUTE_S: u64 = 24 * 60 * 60;
/// Maximum number of changes kept for a holder. If a holder changes often, its history covers a shorter time.
const CHANGES_MAX: usize = 256;

/// State of a holder at one time, for the history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HistoryState {
    /// Holder exists, with these reasons for doubt. No reason means exact.
    Known(DegradedReasons),
    /// Holder was removed.
    Gone,
    /// No daemon was running, so the state is not known.
    Unwatched,
}

/// Number that stands for [`HistoryState::Gone`]: a bit that no reason for doubt uses.
const GONE: u32 = 1 << 31;
const UNWATCHED: u32 = 1 << 30;

impl HistoryState {
    pub(super) fn bits(self) -> u32 {
        match self {
            Self::Known(reasons) => reasons.bits(),
            Self::Gone => GONE,
            Self::Unwatched => UNWATCHED,
        }
    }

    pub(super) fn from_bits(bits: u32) -> Self {
        match bits {
            GONE => Self::Gone,
            UNWATCHED => Self::Unwatched,
            _ => Self::Known(DegradedReasons::from_bits(bits)),
        }
    }

    fn is_inexact(self) -> bool {
        matches!(self, Self::Known(reasons) if !reasons.is_empty())
    }
}

/// State of a holder, and the time from which the holder had it, in seconds since the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StateChange {
    pub(crate) at_s: u64,
    pub(crate) state: HistoryState,
}

/// Changes of one holder's state, the oldest first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Changes(VecDeque<StateChange>);

impl Changes {
    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = &StateChange> {
        self.0.iter()
    }

    pub(super) fn last(&self) -> Option<StateChange> {
        self.0.back().copied()
    }

    /// Notes the holder's state at a time. Returns by how much the number of changes has grown. Negative if old changes
    /// were dropped. If earlier changes have later times, the clock has been set back since, and they get this time.
    pub(super) fn note(&mut self, at_s: u64, state: HistoryState) -> isize {
        let ahead = self.0.iter_mut().rev().take_while(|change| change.at_s > at_s);
        ahead.for_each(|change| change.at_s = at_s);
        if self.last().is_some_and(|last| last.state == state) {
            return 0;
        }
        let before = self.0.len();
        self.0.push_back(StateChange { at_s, state });
        self.compact(at_s);
        self.0.len().cast_signed() - before.cast_signed()
    }

    /// Drops the oldest change, to make room for another.
    pub(super) fn drop_first(&mut self) {
        self.0.pop_front();
    }

    /// Returns the time since which the holder has been in doubt, in seconds since the Unix epoch. `None` if the
    /// holder's last state is exact, removed or not known. A holder that was in doubt before and after a time without a
    /// running daemon counts as in doubt all the time.
    pub(super) fn inexact_since_s(&self) -> Option<u64> {
        let mut since = None;
        for change in self.0.iter().rev() {
            match change.state {
                HistoryState::Unwatched => {}
                state if state.is_inexact() => since = Some(change.at_s),
                _ => break,
            }
        }
        self.last().filter(|last| last.state.is_inexact()).and(since)
    }

    /// Makes old changes coarser. Of the changes older than an hour, the last one of each minute is kept. Of the
    /// changes older than a day, only the last one is kept: it gives the state at the start of the last 24 hours.
    fn compact(&mut self, now_s: u64) {
        let (by_minute, forgotten) = (
            now_s.saturating_sub(BY_SECOND_S),
            now_s.saturating_sub(BY_MINUTE_S),
        );
        let mut kept: VecDeque<StateChange> = VecDeque::with_capacity(self.0.len());
        for change in self.0.drain(..) {
            let replaces = kept.back().is_some_and(|last| {
                change.at_s <= forgotten || change.at_s <= by_minute && last.at_s / 60 == change.at_s / 60
            });
            if replaces {
                kept.pop_back();
            }
            kept.push_back(change);
        }
        while kept.len() > CHANGES_MAX {
            kept.pop_front();
        }
        self.0 = kept;
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_core::wire::DegradedReason;
    use proptest::prelude::*;

    use super::*;

    fn gap() -> HistoryState {
        HistoryState::Known(DegradedReasons::of(DegradedReason::Gap))
    }

    fn stale() -> HistoryState {
        HistoryState::Known(DegradedReasons::of(DegradedReason::Stale))
    }

    fn exact() -> HistoryState {
        HistoryState::Known(DegradedReasons::default())
    }

    fn times(changes: &Changes) -> Vec<u64> {
        changes.iter().map(|change| change.at_s).collect()
    }

    #[test]
    fn a_state_lasts_from_its_first_doubt() {
        let mut changes = Changes::default();
        for (at_s, state, since) in [
            (100, exact(), None),
            (110, gap(), Some(110)),
            (111, gap(), Some(110)),
            (120, stale(), Some(110)),
            (130, HistoryState::Unwatched, None),
            (140, stale(), Some(110)),
            (150, exact(), None),
            (160, HistoryState::Unwatched, None),
            (170, gap(), Some(170)),
            (180, HistoryState::Gone, None),
        ] {
            changes.note(at_s, state);
            assert_eq!(changes.inexact_since_s(), since, "at {at_s}");
        }
        assert_eq!(times(&changes), [100, 110, 120, 130, 140, 150, 160, 170, 180]);
    }

    #[test]
    fn times_of_a_clock_that_was_ahead_become_those_of_the_clock_that_was_set_back() {
        let mut changes = Changes::default();
        changes.note(100, exact());
        changes.note(500, gap());
        changes.note(510, stale());
        changes.note(101, stale());
        assert_eq!(times(&changes), [100, 101, 101]);
        assert_eq!(changes.inexact_since_s(), Some(101));
        changes.note(120, exact());
        assert_eq!(times(&changes), [100, 101, 101, 120]);
    }

    #[test]
    fn old_changes_become_coarser_and_then_go() {
        let mut changes = Changes::default();
        for second in 0..10 {
            changes.note(600 + second, if second % 2 == 0 { gap() } else { exact() });
        }
        assert_eq!(changes.iter().len(), 10);
        changes.note(600 + BY_SECOND_S + 60, gap());
        assert_eq!(times(&changes), [609, 600 + BY_SECOND_S + 60]);
        changes.note(700 + BY_MINUTE_S, exact());
        changes.note(800 + BY_MINUTE_S + BY_SECOND_S, gap());
        assert_eq!(
            times(&changes),
            [
                600 + BY_SECOND_S + 60,
                700 + BY_MINUTE_S,
                800 + BY_MINUTE_S + BY_SECOND_S
            ]
        );
    }

    proptest! {
        #[test]
        fn the_last_state_is_known_and_memory_is_bounded(steps in prop::collection::vec((0..5000_u64, 0..4_usize), 1..600)) {
            let (mut changes, mut now_s, mut count) = (Changes::default(), 1_000_000, 0);
            for (seconds, state) in steps {
                now_s += seconds;
                let state = [exact(), gap(), stale(), HistoryState::Gone][state];
                count += changes.note(now_s, state);
                prop_assert_eq!(changes.last().map(|last| last.state), Some(state));
                prop_assert_eq!(changes.iter().len().cast_signed(), count);
                prop_assert!(changes.iter().len() <= CHANGES_MAX);
                prop_assert!(changes.iter().is_sorted_by_key(|change| change.at_s));
                let day_began_s = changes.last().map_or(0, |last| last.at_s.saturating_sub(BY_MINUTE_S));
                prop_assert!(changes.iter().skip(1).all(|change| change.at_s > day_began_s));
            }
        }
    }
}
