//! Recognisers of regular expressions.

use std::collections::HashMap;

use regex_automata::dfa::dense::{BuildError, Builder, Config, DFA};
use regex_automata::dfa::{Automaton, StartKind};
use regex_automata::nfa::thompson;
use regex_automata::util::primitives::StateID;
use regex_automata::util::{start, syntax};
use regex_automata::{Anchored, MatchKind};

use super::table::{TABLE_STATES_MAX, TableError, TableRow, TransitionTable};

/// Bounds on the cost of a regular expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RegexLimits {
    /// Maximum memory, in bytes, of each stage of building the automaton.
    pub stage_bytes_max: usize,
    /// Maximum number of states of the automaton; each takes 1 KiB in the table. Never more than
    /// [`TABLE_STATES_MAX`].
    pub states_max: usize,
}

impl Default for RegexLimits {
    fn default() -> Self {
        Self {
            stage_bytes_max: 32 << 20,
            states_max: 1 << 15,
        }
    }
}

/// Reason why an expression cannot be made into an automaton.
#[derive(Debug, thiserror::Error)]
pub enum RegexError {
    /// The expression is wrong, or building its automaton takes more memory than allowed. An expression is also wrong
    /// if a part of it cannot be decided byte by byte, such as a Unicode word boundary.
    #[error("the expression cannot be used: {}", describe(.0))]
    Expression(#[source] Box<BuildError>),
    /// The expression needs to know the text before its start, which is not available.
    #[error("the expression cannot be started: {0}; remove what looks at the text before it")]
    Start(String),
    /// The automaton is too large.
    #[error(
        "the expression needs more than {states_max} states; make it simpler, above all its counted repetitions"
    )]
    TooManyStates {
        /// Maximum number of states.
        states_max: usize,
    },
    /// The rows of the automaton do not make a table.
    #[error("the expression's automaton cannot be used: {0}")]
    Table(#[from] TableError),
}

/// Returns the text of the innermost reason. For a wrong expression, the text shows the place of the mistake.
fn describe(error: &BuildError) -> String {
    let mut reason: &dyn std::error::Error = error;
    while let Some(source) = reason.source() {
        reason = source;
    }
    reason.to_string()
}

/// The deterministic automaton of a regular expression over bytes.
///
/// A text is recognised if *all* of it matches: the expression is anchored at both ends. Pushed bytes are allowed as
/// long as some continuation of them is recognised. States without such a continuation are left out. So a token is
/// allowed exactly if the text, the token and some bytes after it (maybe none) together match.
///
/// The syntax is that of the `regex` crate, in Unicode mode, over UTF-8. A token may end within a character.
#[derive(Debug, Clone)]
pub struct RegexAutomaton {
    table: TransitionTable,
}

impl RegexAutomaton {
    /// Compiles an expression.
    ///
    /// # Errors
    ///
    /// If the expression is wrong or exceeds the limits.
    pub fn new(expression: &str, limits: RegexLimits) -> Result<Self, RegexError> {
        let dfa = compile(expression, limits)?;
        let anchored = start::Config::new().anchored(Anchored::Yes);
        let started = dfa.start_state(&anchored);
        let started = started.map_err(|error| RegexError::Start(error.to_string()))?;
        let states_max = limits.states_max.min(TABLE_STATES_MAX);
        let rows = rows(&dfa, started, states_max)?;
        Ok(Self {
            table: TransitionTable::new(&without_dead_ends(&rows))?,
        })
    }

    /// Returns the table of the automaton. It has no states if the expression matches no text.
    #[must_use]
    pub fn table(&self) -> &TransitionTable {
        &self.table
    }
}

fn compile(expression: &str, limits: RegexLimits) -> Result<DFA<Vec<u32>>, RegexError> {
    let bytes = Some(limits.stage_bytes_max);
    let config = Config::new()
        .start_kind(StartKind::Anchored)
        // Else `a|ab` would end at `a`.
        .match_kind(MatchKind::All)
        .accelerate(false)
        .dfa_size_limit(bytes)
        .determinize_size_limit(bytes);
    Builder::new()
        .configure(config)
        .syntax(syntax::Config::new().utf8(false))
        .thompson(thompson::Config::new().utf8(false).nfa_size_limit(bytes))
        .build(expression)
        .map_err(|error| RegexError::Expression(Box::new(error)))
}

/// Returns the rows of all states that can be reached from `started`. The state `started` gets number 0.
fn rows(dfa: &DFA<Vec<u32>>, started: StateID, states_max: usize) -> Result<Vec<TableRow>, RegexError> {
    let mut numbers = HashMap::from([(started, 0)]);
    let mut states = vec![started];
    let mut rows = Vec::new();
    while let Some(state) = states.get(rows.len()).copied() {
        let mut next_states = Vec::with_capacity(1 << u8::BITS);
        for byte in 0..=u8::MAX {
            let next = dfa.next_state(state, byte);
            if dfa.is_dead_state(next) || dfa.is_quit_state(next) {
                next_states.push(None);
                continue;
            }
            let unused = states.len();
            let number = *numbers.entry(next).or_insert(unused);
            if number == unused {
                if unused >= states_max {
                    return Err(RegexError::TooManyStates { states_max });
                }
                states.push(next);
            }
            next_states.push(u32::try_from(number).ok());
        }
        rows.push(TableRow {
            next: next_states,
            is_match: dfa.is_match_state(dfa.next_eoi_state(state)),
        });
    }
    Ok(rows)
}

/// Removes all states from which no text can be recognised, and renumbers the others. The first state stays the first.
/// If no text can be recognised from the first state, returns no rows.
fn without_dead_ends(rows: &[TableRow]) -> Vec<TableRow> {
    let mut before: Vec<Vec<u32>> = vec![Vec::new(); rows.len()];
    for (state, row) in (0_u32..).zip(rows) {
        for next in row.next.iter().flatten() {
            if let Some(before) = before
                .get_mut(*next as usize)
                .filter(|before| before.last() != Some(&state))
            {
                before.push(state);
            }
        }
    }
    let mut is_live = vec![false; rows.len()];
    let matching = (0_u32..).zip(rows).filter(|(_, row)| row.is_match);
    let mut found: Vec<u32> = matching.map(|(state, _)| state).collect();
    while let Some(state) = found.pop() {
        if let Some(is_live) = is_live.get_mut(state as usize).filter(|is_live| !**is_live) {
            *is_live = true;
            found.extend(before.get(state as usize).into_iter().flatten());
        }
    }
    if is_live.first() != Some(&true) {
        return Vec::new();
    }
    let mut next_number = 0_u32..;
    let numbers: Vec<Option<u32>> = is_live
        .iter()
        .map(|is_live| is_live.then(|| next_number.next()).flatten())
        .collect();
    let number = |state: Option<u32>| numbers.get(state? as usize).copied().flatten();
    let live = rows.iter().zip(&is_live).filter(|(_, is_live)| **is_live);
    live.map(|(row, _)| TableRow {
        next: row.next.iter().map(|next| number(*next)).collect(),
        is_match: row.is_match,
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(expression: &str) -> TransitionTable {
        RegexAutomaton::new(expression, RegexLimits::default())
            .unwrap()
            .table
    }

    /// Returns whether `text` is the beginning of a match, and whether it is a whole match.
    fn judge(expression: &str, text: &str) -> (bool, bool) {
        let table = table(expression);
        let state = table
            .start()
            .and_then(|start| table.advance(start, text.as_bytes()));
        (state.is_some(), state.is_some_and(|state| table.is_match(state)))
    }

    #[test]
    fn all_of_a_text_must_match() {
        assert_eq!(judge("a|ab", ""), (true, false));
        assert_eq!(judge("a|ab", "a"), (true, true));
        assert_eq!(judge("a|ab", "ab"), (true, true));
        assert_eq!(judge("a|ab", "abc"), (false, false));
        assert_eq!(judge("a|ab", "b"), (false, false));
        assert_eq!(judge("(?:ab)*", ""), (true, true));
        assert_eq!(judge("é+", "éé"), (true, true));
        assert_eq!(judge("^x$", "x"), (true, true));
        assert_eq!(judge("[0-9]{1,3}", "123"), (true, true));
        assert_eq!(judge("[0-9]{1,3}", "1234"), (false, false));
    }

    #[test]
    fn dead_ends_are_left_out() {
        // After `a`, nothing can ever match.
        let table = table(r"a[^\s\S]|b");
        let start = table.start().unwrap();
        assert!(table.next(start, b'a').is_none());
        assert!(table.next(start, b'b').is_some());
        assert!(
            RegexAutomaton::new(r"[^\s\S]", RegexLimits::default())
                .unwrap()
                .table
                .start()
                .is_none()
        );
    }

    #[test]
    fn what_is_too_much_is_refused() {
        let compile = |expression, limits| RegexAutomaton::new(expression, limits).map(|_| ()).unwrap_err();
        let few = RegexLimits {
            states_max: 100,
            ..RegexLimits::default()
        };
        let refused = compile("[0-9]{200}", few);
        assert!(
            matches!(refused, RegexError::TooManyStates { states_max: 100 }),
            "{refused}"
        );
        for expression in [
            r"\pL{1000}{1000}",
            "(?:a|b)*a(?:a|b){20}",
            r"\bword\b",
            "(",
            r"(a)\1",
        ] {
            let refused = compile(expression, RegexLimits::default());
            assert!(matches!(refused, RegexError::Expression(_)), "{refused}");
            assert!(!refused.to_string().is_empty());
        }
    }
}
