//! Outcomes, which routers publish. An outcome is about one request. It gives the number of blocks that an answer
//! promised at a holder, and the number of tokens that the engine then found in its cache.
//!
//! The subject is `PREFIX.v1.outcome.NAMESPACE`. Engines report how many tokens a request found in their caches, as
//! `usage.prompt_tokens_details.cached_tokens`.

use serde::{Deserialize, Serialize};

use super::PROTOCOL_VERSION;
use super::entries::coded;
use super::reply::HolderMatch;
use super::subject::{Rank, WorkerName};

/// Maximum number of outcomes in one report.
pub const OUTCOMES_MAX: usize = 256;

/// Outcome of one request that a router sent to a worker because of an answer of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Worker to which the request was sent.
    pub worker: WorkerName,
    /// The worker's data-parallel rank.
    #[serde(default)]
    pub rank: Rank,
    /// Number of blocks that the request could reuse at the worker, according to the answer: its `usable_blocks`.
    pub promised_blocks: u32,
    /// Number of the prompt's tokens that the engine found in its cache.
    pub found_tokens: u32,
    /// Number of tokens of the prompt. An engine always computes the last token anew. The answer to a query by hashes
    /// may nevertheless promise the block with the last token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u32>,
    /// Whether the answer called the holder exact.
    #[serde(default)]
    pub exact: bool,
}

/// Report of outcomes of several requests in one namespace.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct OutcomeReport {
    /// Version of the contract.
    #[serde(default = "current_version")]
    pub v: u64,
    /// The outcomes, at most [`OUTCOMES_MAX`].
    pub outcomes: Vec<Outcome>,
}

/// Version that an absent `v` stands for.
fn current_version() -> u64 {
    PROTOCOL_VERSION
}

impl Outcome {
    /// Returns the outcome of a request that was sent to `promised`, a holder listed in an answer. Of the request's
    /// `prompt_tokens` tokens, the engine found `found_tokens` in its cache.
    pub fn of(promised: &HolderMatch, found_tokens: u32, prompt_tokens: u32) -> Self {
        Self {
            worker: promised.worker.clone(),
            rank: promised.rank,
            promised_blocks: promised.usable(),
            found_tokens,
            prompt_tokens: Some(prompt_tokens),
            exact: promised.exact,
        }
    }
}

impl OutcomeReport {
    /// Makes a report of `outcomes`.
    pub fn new(outcomes: Vec<Outcome>) -> Self {
        Self {
            v: PROTOCOL_VERSION,
            outcomes,
        }
    }
}

coded!(OutcomeReport);

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn outcome() -> Outcome {
        Outcome {
            worker: WorkerName::new("gpu-0").unwrap(),
            rank: 2,
            promised_blocks: 10,
            found_tokens: 144,
            prompt_tokens: Some(170),
            exact: true,
        }
    }

    #[test]
    fn a_report_is_read_as_it_was_written() {
        let report = OutcomeReport::new(vec![outcome()]);
        assert_eq!(OutcomeReport::decode(&report.encode()).unwrap(), report);
        assert!(OutcomeReport::decode(b"garbage").is_err());
    }

    #[test]
    fn what_is_left_out_has_its_default_and_what_is_unknown_is_passed_over() {
        let sent = json!({ "outcomes": [
            { "worker": "gpu-0", "promised_blocks": 1, "found_tokens": 16, "later": [1] },
        ]});
        let report = OutcomeReport::decode(&rmp_serde::to_vec_named(&sent).unwrap()).unwrap();
        assert_eq!(report.v, 1);
        assert_eq!((report.outcomes[0].rank, report.outcomes[0].exact), (0, false));
        for wrong in [
            json!({ "outcomes": [{ "worker": "a.b", "promised_blocks": 1, "found_tokens": 1 }] }),
            json!({ "outcomes": [{ "worker": "a", "promised_blocks": -1, "found_tokens": 1 }] }),
            json!({ "outcomes": [{ "worker": "a" }] }),
            json!({}),
        ] {
            let payload = rmp_serde::to_vec_named(&wrong).unwrap();
            assert!(OutcomeReport::decode(&payload).is_err(), "{wrong}");
        }
    }
}
