//! Numbers of blocks that answers have found for prompts. They serve the metrics and the page.

use kvatlas_core::wire::{BatchReply, HolderMatch, QueryReply, QueryResult};
use kvatlas_telemetry::AnsweredPrompt;
use kvatlas_telemetry::labels::AnswerState;

/// Returns the numbers of blocks asked for and found, for each prompt of a batch. Prompts that were answered with an
/// error are left out.
pub(super) fn prompts_of(reply: &BatchReply) -> impl Iterator<Item = AnsweredPrompt> {
    reply.results.iter().filter_map(|result| match result {
        QueryResult::Reply(reply) => Some(prompt_of(reply)),
        QueryResult::Error(_) => None,
    })
}

/// Returns the numbers of the prompt's blocks that an answer was asked for and has found, and the certainty of the
/// answer.
pub(super) fn prompt_of(reply: &QueryReply) -> AnsweredPrompt {
    let most = |blocks: fn(&HolderMatch) -> u32| reply.holders.iter().map(blocks).max().unwrap_or_default();
    AnsweredPrompt {
        asked_blocks: reply.query_blocks,
        matched_blocks: most(|holder| holder.matched_blocks),
        usable_blocks: most(HolderMatch::usable),
        state: state_of(reply),
    }
}

/// Returns how certain an answer is.
fn state_of(reply: &QueryReply) -> AnswerState {
    AnswerState::of(reply.is_exact(), reply.holders.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvatlas_core::wire::{Gathered, PROTOCOL_VERSION};

    fn reply(holders: &[bool]) -> QueryReply {
        let holders: Vec<_> = holders
            .iter()
            .map(|exact| serde_json::json!({ "worker": "a", "rank": 0, "matched_blocks": 1, "exact": exact }))
            .collect();
        let reply = serde_json::json!({
            "v": PROTOCOL_VERSION, "query_blocks": 1, "holders_total": holders.len(), "holders": holders,
        });
        serde_json::from_value(reply).unwrap()
    }

    #[test]
    fn an_answer_is_as_certain_as_its_least_certain_part() {
        assert_eq!(state_of(&reply(&[])), AnswerState::Empty);
        assert_eq!(state_of(&reply(&[true, true])), AnswerState::Exact);
        assert_eq!(state_of(&reply(&[true, false])), AnswerState::Degraded);
        let gathered = |missing| Some(Gathered { shards: 2, missing });
        for holders in [&[][..], &[true]] {
            let whole = QueryReply {
                gathered: gathered(Vec::new()),
                ..reply(holders)
            };
            assert_eq!(state_of(&whole), state_of(&reply(holders)));
            let uncertain = [
                QueryReply {
                    doubtful_holders: 1,
                    ..reply(holders)
                },
                QueryReply {
                    foreign_holders: 1,
                    ..reply(holders)
                },
                QueryReply {
                    gathered: gathered(vec![1]),
                    ..reply(holders)
                },
            ];
            for reply in uncertain {
                assert_eq!(state_of(&reply), AnswerState::Degraded, "{reply:?}");
            }
        }
    }
}
