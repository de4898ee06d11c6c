//! States of a follower, and the changes that lead from one state to another.
//!
//! State of the connection. A row is the state before a change, a column is the change, and a cell is the state after it:
//!
//! | | `Reconnected` | `Contradicted` | `Continued` | `Checked` | `Agreed` |
//! |---|---|---|---|---|---|
//! | `Unverified` | `Unverified` | `Unverified` | `Verified` | `Verified` | `Unverified` |
//! | `Verified` | `Unverified` | `Unverified` | `Verified` | `Verified` | `Proven` |
//! | `Proven` | `Unverified` | `Unverified` | `Proven` | `Verified` | `Proven` |
//!
//! State of the replay socket. The changes are a question that begins, and the results of questions:
//!
//! | | `Asked` | `Unanswered` | `Contradicted` | `Agreed` |
//! |---|---|---|---|---|
//! | `Believed` | `Believed` | `Silent` | `Contradicting` | `Believed` |
//! | `Silent` | `Believed` | `Silent` | `Contradicting` | `Believed` |
//! | `Contradicting` | `Believed` | `Contradicting` | `Contradicting` | `Believed` |
//!
//! State of the batches that the replay socket has: whether they are also published on the connection. `Published` and
//! `Unpublished` are the findings of looks. `Overdue` is the finding `Unpublished` after the allowed time:
//!
//! | | `Published` | `Unpublished` | `Overdue` |
//! |---|---|---|---|
//! | `Heard` | `Heard` | `Since` | `Since` |
//! | `Since` | `Heard` | `Since` | `Unheard` |
//! | `Unheard` | `Heard` | `Unheard` | `Unheard` |

use std::time::{Duration, Instant};

/// Verdict on the batches of a connection so far: whether they come from the process whose batches have been applied,
/// and continue them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionState {
    /// The batches may be those of another process, as after each reconnect.
    Unverified,
    /// The batches come from the process whose batches have been applied, and continue them.
    Verified,
    /// As in `Verified`. In addition, the replay socket and the connection have given the same bytes under the same
    /// number, so both belong to one process.
    Proven,
}

/// Change that decides the next state of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionChange {
    /// The connection is new.
    Reconnected,
    /// The replay socket and the connection have given different bytes under the same number.
    Contradicted,
    /// The bridge has taken a batch of the connection as the next one to apply. Later batches of the connection
    /// continue from there.
    Continued,
    /// The replay socket has given all batches that were missing.
    Checked,
    /// The replay socket has given a batch with the same number and bytes as a batch that was published on the connection.
    Agreed,
}

impl ConnectionState {
    /// Returns the state that follows this state after `change`.
    #[must_use]
    pub(super) fn after(self, change: ConnectionChange) -> Self {
        use ConnectionChange::{Agreed, Checked, Continued, Contradicted, Reconnected};
        match (self, change) {
            (_, Reconnected | Contradicted) => Self::Unverified,
            (_, Checked) | (Self::Unverified | Self::Verified, Continued) => Self::Verified,
            // The connection's batches are not applied yet, so agreement about one batch does not verify the
            // connection.
            (Self::Unverified, Agreed) => Self::Unverified,
            (Self::Verified | Self::Proven, Agreed) | (Self::Proven, Continued) => Self::Proven,
        }
    }

    /// Whether the connection's batches are known to come from the process whose batches have been applied.
    pub(super) fn is_verified(self) -> bool {
        self != Self::Unverified
    }
}

/// A replay socket that is not believed, with the reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Useless {
    /// Time at which the socket is asked again.
    pub(super) ask_at: Instant,
    /// Text that says why the socket is not believed.
    pub(super) error: String,
}

/// Whether the replay socket is believed. While it is not, the engine is followed like an engine without one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ReplayState {
    /// The socket is asked whenever batches may be missing.
    Believed,
    /// The socket does not answer.
    Silent(Useless),
    /// The socket contradicts the published batches, or keeps no batches. The bridge believes the socket again once the
    /// socket agrees with a published batch. At the next connection, the bridge asks the socket for everything instead in two
    /// cases: no batch has been applied, or the socket had been proven to be the engine's.
    Contradicting(Useless),
}

/// Change that decides the next state of a replay socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ReplayChange {
    /// The bridge is about to ask the socket for batches. It believes the socket until the answer decides the next
    /// state.
    Asked,
    /// The socket has left too many consecutive questions unanswered.
    Unanswered(Useless),
    /// The socket has given batches that differ from those that the engine has published on the connection, or keeps no
    /// batches.
    Contradicted(Useless),
    /// The socket has given a batch with the same number and bytes as a batch that the engine has published.
    Agreed,
}

impl ReplayState {
    /// Returns the state that follows this state after `change`.
    #[must_use]
    pub(super) fn after(self, change: ReplayChange) -> Self {
        match (self, change) {
            (_, ReplayChange::Asked | ReplayChange::Agreed) => Self::Believed,
            (_, ReplayChange::Contradicted(useless)) => Self::Contradicting(useless),
            // A missing answer does not settle an earlier contradiction.
            (Self::Contradicting(_), ReplayChange::Unanswered(useless)) => Self::Contradicting(useless),
            (Self::Believed | Self::Silent(_), ReplayChange::Unanswered(useless)) => Self::Silent(useless),
        }
    }

    /// Whether the replay socket's answers are believed.
    pub(super) fn is_believed(&self) -> bool {
        *self == Self::Believed
    }

    /// Whether the socket does not answer.
    pub(super) fn is_silent(&self) -> bool {
        matches!(self, Self::Silent(_))
    }

    /// Whether a socket that did not answer is to be asked again at `now`.
    pub(super) fn is_silence_over(&self, now: Instant) -> bool {
        matches!(self, Self::Silent(useless) if useless.ask_at <= now)
    }

    /// Whether it is time, at `now`, to ask a contradicting socket for the next published batch.
    pub(super) fn is_contradiction_due(&self, now: Instant) -> bool {
        matches!(self, Self::Contradicting(useless) if useless.ask_at <= now)
    }

    /// Returns a text that says why the socket is not believed; `None` if it is believed.
    pub(super) fn error(&self) -> Option<&str> {
        match self {
            Self::Believed => None,
            Self::Silent(useless) | Self::Contradicting(useless) => Some(&useless.error),
        }
    }

    /// Postpones the next question to `ask_at`, if the socket is not believed.
    pub(super) fn ask_at(&mut self, ask_at: Instant) {
        match self {
            Self::Believed => {}
            Self::Silent(useless) | Self::Contradicting(useless) => useless.ask_at = ask_at,
        }
    }
}

/// Whether new batches of the replay socket have also come over this connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hearing {
    /// The last new batch came over the connection, or the connection is new.
    Heard,
    /// Time since which looks (checks) have found batches at the replay socket that did not come over the connection.
    Since(Instant),
    /// Looks (checks) have found batches at the replay socket that did not come over the connection, for longer than
    /// allowed.
    Unheard,
}

impl Hearing {
    /// Returns the state after a look that found a batch at the replay socket that did not come over the connection.
    /// The look began at `begun` and ended at `now`. After looks with this finding over a time of `max`, the state is
    /// `Unheard`.
    #[must_use]
    pub(super) fn after_unpublished(self, begun: Instant, now: Instant, max: Duration) -> Self {
        let since = match self {
            Self::Heard => begun,
            Self::Since(since) => since,
            Self::Unheard => return Self::Unheard,
        };
        match now.saturating_duration_since(since) >= max {
            true => Self::Unheard,
            false => Self::Since(since),
        }
    }
}

#[cfg(test)]
mod tests {
    use kvatlas_lab::transitions::table;

    use super::*;

    /// Returns the name of a state or change, without its fields.
    fn name(value: &impl std::fmt::Debug) -> String {
        let text = format!("{value:?}");
        text.split('(').next().unwrap().to_owned()
    }

    /// Asserts that the table `number` in this file's documentation is right: from each of the `states`, each of the
    /// `changes` leads to the state in the table's cell. `after` computes the next state.
    fn assert_table<S: std::fmt::Debug, C>(
        number: usize,
        states: &[S],
        changes: &[(String, C)],
        after: impl Fn(&S, &C) -> S,
    ) {
        let (columns, rows) = table(include_str!("standing.rs"), number);
        assert!(columns.iter().eq(changes.iter().map(|(name, _)| name)));
        assert_eq!(rows.len(), states.len());
        for (state, (row, cells)) in states.iter().zip(rows) {
            assert_eq!(row, name(state));
            let found: Vec<_> = changes
                .iter()
                .map(|(_, change)| name(&after(state, change)))
                .collect();
            assert_eq!(cells, found, "{row}");
        }
    }

    fn named<C: std::fmt::Debug>(changes: impl IntoIterator<Item = C>) -> Vec<(String, C)> {
        changes
            .into_iter()
            .map(|change| (name(&change), change))
            .collect()
    }

    #[test]
    fn connections_change_as_the_table_says() {
        use ConnectionChange::{Agreed, Checked, Continued, Contradicted, Reconnected};
        use ConnectionState::{Proven, Unverified, Verified};
        let changes = named([Reconnected, Contradicted, Continued, Checked, Agreed]);
        let states = [Unverified, Verified, Proven];
        assert_table(0, &states, &changes, |state, change| state.after(*change));
        assert_eq!(states.map(ConnectionState::is_verified), [false, true, true]);
    }

    fn useless(ask_at: Instant, error: &str) -> Useless {
        Useless {
            ask_at,
            error: error.to_owned(),
        }
    }

    #[test]
    fn replay_sockets_change_as_the_table_says() {
        use ReplayChange::{Agreed, Asked, Contradicted, Unanswered};
        use ReplayState::{Believed, Contradicting, Silent};
        let now = Instant::now();
        let old = useless(now, "old");
        let new = useless(now + Duration::from_secs(1), "new");
        let states = [Believed, Silent(old.clone()), Contradicting(old)];
        let changes = named([Asked, Unanswered(new.clone()), Contradicted(new.clone()), Agreed]);
        assert_table(1, &states, &changes, |state, change| {
            let after = state.clone().after(change.clone());
            assert!(after.error().is_none_or(|error| error == "new"));
            after
        });
        let due = |state: &ReplayState| (state.is_silence_over(now), state.is_contradiction_due(now));
        let expected = [(false, false), (true, false), (false, true)];
        for (mut state, expected) in states.into_iter().zip(expected) {
            assert_eq!(due(&state), expected);
            state.ask_at(new.ask_at);
            assert_eq!(due(&state), (false, false));
        }
    }

    #[test]
    fn hearing_changes_as_the_table_says() {
        let max = Duration::from_secs(3);
        let begun = Instant::now();
        let later = begun + Duration::from_secs(1);
        let states = [Hearing::Heard, Hearing::Since(begun), Hearing::Unheard];
        let changes = [
            ("Published".to_owned(), None),
            ("Unpublished".to_owned(), Some(later)),
            ("Overdue".to_owned(), Some(begun + max)),
        ];
        assert_table(2, &states, &changes, |state, found| match found {
            None => Hearing::Heard,
            Some(now) => state.after_unpublished(*now, *now, max),
        });
        let since = Hearing::Since(begun).after_unpublished(later, later, max);
        assert_eq!(since, Hearing::Since(begun), "the first look counts");
    }
}
