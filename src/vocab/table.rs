//! Recognisers that are tables: a state and a byte determine the next state.

use super::recognizer::Recognizer;

/// Maximum number of states of a table. Each takes 1 KiB.
pub const TABLE_STATES_MAX: usize = 1 << 16;

/// Number of transitions of a state, which is the number of entries of a row.
const ROW: usize = 1 << u8::BITS;

/// State of a [`TransitionTable`], valid only for that table. Used with another table, the same value may stand for any
/// state of that table, or for none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct State(pub(super) u32);

/// Row of a table: the transitions of one state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRow {
    /// Number of the next state for each byte; `None` rejects the byte.
    pub next: Vec<Option<u32>>,
    /// Whether a text may end in this state.
    pub is_match: bool,
}

/// Reason why rows do not make a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// There are too many rows.
    #[error("there are {states} states, and at most {TABLE_STATES_MAX} are allowed; use a simpler automaton")]
    TooManyStates {
        /// Number of rows.
        states: usize,
    },
    /// A row does not have one transition for each byte.
    #[error("state {state} has {transitions} transitions, and needs {ROW}: one a byte")]
    WrongRow {
        /// Number of the state.
        state: usize,
        /// Number of transitions of this state.
        transitions: usize,
    },
    /// A transition leads to a state that does not exist.
    #[error("state {state} leads to state {next}, but there are {states}")]
    NoSuchState {
        /// Number of the state with the transition.
        state: usize,
        /// Number of the state that the transition leads to.
        next: u32,
        /// Number of states that exist.
        states: usize,
    },
}

/// A deterministic automaton over bytes.
///
/// A state is stored as the index at which its row begins, so that finding the next state takes one load and no
/// multiplication. Bytes are not grouped into classes: the rows would be smaller, but the additional load at each node
/// costs more than that saves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TransitionTable {
    /// Rows of 256 entries, one for each byte. An entry is the index at which the next state's row begins. The first
    /// row belongs to the dead state, which rejects everything; all its entries are 0. Every entry is the index of a
    /// whole row.
    places: Vec<u32>,
    matches: Vec<bool>,
}

impl TransitionTable {
    pub(super) const DEAD: u32 = 0;

    /// Makes a table of `rows`. State number i has row i, and state 0 is the start.
    ///
    /// # Errors
    ///
    /// If there are too many rows, or a row has the wrong length or leads to a state that does not exist.
    pub fn new(rows: &[TableRow]) -> Result<Self, TableError> {
        let states = rows.len();
        if states > TABLE_STATES_MAX {
            return Err(TableError::TooManyStates { states });
        }
        let mut places = vec![Self::DEAD; ROW];
        let mut matches = vec![false];
        for (state, row) in rows.iter().enumerate() {
            if row.next.len() != ROW {
                return Err(TableError::WrongRow {
                    state,
                    transitions: row.next.len(),
                });
            }
            for next in &row.next {
                let place = next.map_or(Some(Self::DEAD), |next| place_of(next, states));
                places.push(place.ok_or(TableError::NoSuchState {
                    state,
                    next: next.unwrap_or_default(),
                    states,
                })?);
            }
            matches.push(row.is_match);
        }
        Ok(Self { places, matches })
    }

    /// Returns the state before the first byte of a text. `None` if the table has no states, so that it recognises no
    /// text.
    #[must_use]
    pub fn start(&self) -> Option<State> {
        place_of(0, self.states()).map(State)
    }

    /// Returns the number of states.
    #[must_use]
    pub fn states(&self) -> usize {
        self.matches.len() - 1
    }

    /// Returns the state after `byte`; `None` if the byte is rejected.
    #[inline(always)]
    #[must_use]
    pub fn next(&self, state: State, byte: u8) -> Option<State> {
        let place = self.places.get(state.0 as usize + usize::from(byte)).copied();
        place.filter(|place| *place != Self::DEAD).map(State)
    }

    /// Returns the state after all of `bytes`; `None` if a byte is rejected.
    #[must_use]
    pub fn advance(&self, state: State, bytes: &[u8]) -> Option<State> {
        bytes
            .iter()
            .try_fold(state, |state, byte| self.next(state, *byte))
    }

    /// Whether a text may end in this state.
    #[must_use]
    pub fn is_match(&self, state: State) -> bool {
        self.matches
            .get(state.0 as usize / ROW)
            .copied()
            .unwrap_or_default()
    }

    /// Returns a recogniser with a stack, beginning in `state`, for traversals that work with any recogniser.
    #[must_use]
    pub fn recognizer(&self, state: State) -> TableRecognizer<'_> {
        TableRecognizer {
            table: self,
            states: vec![state],
            depth: 0,
        }
    }

    pub(super) fn places(&self) -> &[u32] {
        &self.places
    }

    /// Returns the transitions of a state: the row that begins at the state's index. `None` if the table has no row
    /// there.
    pub(super) fn row(&self, state: State) -> Option<&[u32; ROW]> {
        let start = state.0 as usize;
        self.places.get(start..)?.first_chunk()
    }
}

/// Returns the index at which the row of state number `state` begins, in a table of `states` states. `None` if there is
/// no such state.
fn place_of(state: u32, states: usize) -> Option<u32> {
    let row = usize::try_from(state).ok().filter(|state| *state < states)? + 1;
    u32::try_from(row * ROW).ok()
}

/// Recogniser with a stack over a [`TransitionTable`].
#[derive(Debug, Clone)]
pub struct TableRecognizer<'a> {
    table: &'a TransitionTable,
    /// The first state, then one state for each pushed byte, then unused states of popped bytes. So a pop only lowers
    /// `depth`.
    states: Vec<State>,
    /// Number of pushed bytes; always less than the number of states.
    depth: usize,
}

impl TableRecognizer<'_> {
    /// Returns the state after all pushed bytes.
    #[inline(always)]
    #[must_use]
    pub fn state(&self) -> State {
        let state = self.states.get(self.depth).copied();
        state.unwrap_or(State(TransitionTable::DEAD))
    }
}

impl Recognizer for TableRecognizer<'_> {
    #[inline(always)]
    fn try_push_byte(&mut self, byte: u8) -> bool {
        let Some(next) = self.table.next(self.state(), byte) else {
            return false;
        };
        self.depth += 1;
        match self.states.get_mut(self.depth) {
            Some(state) => *state = next,
            None => self.states.push(next),
        }
        true
    }

    #[inline(always)]
    fn pop_bytes(&mut self, count: usize) {
        self.depth = self.depth.saturating_sub(count);
    }

    #[inline(always)]
    fn byte_allowed(&mut self, byte: u8) -> bool {
        self.table.next(self.state(), byte).is_some()
    }
}
