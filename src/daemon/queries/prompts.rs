//! What an answer found of each prompt, as metrics and the page count it.

use crate::daemon::metrics::AnsweredPrompt;
use crate::daemon::metrics::labels::AnswerState;
use kvatlas_core::wire::{BatchReply, QueryReply, QueryResult};

/// What was found of each prompt of a batch that was answered.
pub(super) fn prompts_of(reply: &BatchReply) -> impl Iterator<Item = AnsweredPrompt> {
    reply.results.iter().filter_map(|result| match result {
        QueryResult::Reply(reply) => Some(prompt_of(reply)),
        QueryResult::Error(_) => None,
    })
}

/// What an answer found of its prompt, as far as it says.
pub(super) fn prompt_of(reply: &QueryReply) -> AnsweredPrompt {
    let best = reply.holders.iter().map(|holder| holder.matched_blocks).max();
    AnsweredPrompt {
        asked_blocks: reply.query_blocks,
        matched_blocks: best.unwrap_or_default(),
        state: state_of(reply.holders.iter().map(|holder| holder.exact)),
    }
}

/// How certain an answer is; `holders` says of each holder in it whether its state is certain.
pub(super) fn state_of(mut holders: impl Iterator<Item = bool>) -> AnswerState {
    match holders.next() {
        None => AnswerState::Empty,
        Some(first) if first && holders.all(|is_exact| is_exact) => AnswerState::Exact,
        Some(_) => AnswerState::Degraded,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_as_certain_as_its_least_certain_holder() {
        let state = |holders: &[bool]| state_of(holders.iter().copied());
        assert_eq!(state(&[]), AnswerState::Empty);
        assert_eq!(state(&[true, true]), AnswerState::Exact);
        assert_eq!(state(&[true, false]), AnswerState::Degraded);
        assert_eq!(state(&[false]), AnswerState::Degraded);
    }
}
