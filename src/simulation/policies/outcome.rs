//! Results of running one routing policy.

use hdrhistogram::{CreationError, Histogram};
use serde::Serialize;

use super::super::attention::CacheModel;

/// Figures of one policy under one scenario.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PolicyOutcome {
    /// The scenario's name. If the cache also keeps windows or states, the name is followed by a description of the
    /// cache.
    pub scenario: String,
    /// The policy's name.
    pub policy: &'static str,
    /// Requests served.
    pub requests: usize,
    /// Share of the prompts' blocks that the serving worker could reuse from its cache.
    pub hit_rate: f64,
    /// Share of the prompts' blocks that the router expected the chosen worker to reuse from its cache.
    pub promised_rate: f64,
    /// Number of blocks that the workers had to compute, because their caches did not have them.
    pub computed_blocks: u64,
    /// Mean time to the first token, in milliseconds.
    pub first_token_ms_mean: f64,
    /// Median time to the first token, in milliseconds.
    pub first_token_ms_p50: f64,
    /// 99th percentile of the time to the first token, in milliseconds.
    pub first_token_ms_p99: f64,
}

/// Longest time that is recorded exactly, in microseconds: a day. Longer times count as a day.
const LONGEST_US: u64 = 86_400_000_000;

/// Counts of a run of one policy, from which its outcome is made.
#[derive(Debug)]
pub(super) struct Counts {
    prompt_blocks: u64,
    hit_blocks: u64,
    promised_blocks: u64,
    computed_blocks: u64,
    first_token_us: Histogram<u64>,
}

impl Counts {
    pub(super) fn new() -> Result<Self, CreationError> {
        Ok(Self {
            prompt_blocks: 0,
            hit_blocks: 0,
            promised_blocks: 0,
            computed_blocks: 0,
            first_token_us: Histogram::new_with_bounds(1, LONGEST_US, 3)?,
        })
    }

    /// Counts the blocks of a prompt that the router expects the worker to reuse from its cache.
    pub(super) fn promised(&mut self, blocks: u64) {
        self.promised_blocks += blocks;
    }

    /// Counts the blocks that a worker must compute for a prompt that it begins: all except the cached `hit_blocks`.
    pub(super) fn begun(&mut self, prompt_blocks: u64, hit_blocks: u64) {
        self.computed_blocks += prompt_blocks.saturating_sub(hit_blocks);
    }

    /// Counts a request whose first token has come: the blocks of its prompt, the reused blocks among them, and the
    /// time from the request to the first token.
    pub(super) fn first_token(&mut self, prompt_blocks: u64, hit_blocks: u64, waited_us: u64) {
        self.prompt_blocks += prompt_blocks;
        self.hit_blocks += hit_blocks;
        self.first_token_us.saturating_record(waited_us);
    }

    #[allow(clippy::cast_precision_loss, reason = "figures for people")]
    pub(super) fn outcome(&self, scenario: &str, cache: CacheModel, policy: &'static str) -> PolicyOutcome {
        let share = |blocks: u64| blocks as f64 / self.prompt_blocks.max(1) as f64;
        let first_token_ms = |us: u64| us as f64 / 1000.0;
        PolicyOutcome {
            scenario: if cache.is_hybrid() {
                format!("{scenario}, {cache}")
            } else {
                scenario.to_owned()
            },
            policy,
            requests: usize::try_from(self.first_token_us.len()).unwrap_or(usize::MAX),
            hit_rate: share(self.hit_blocks),
            promised_rate: share(self.promised_blocks),
            computed_blocks: self.computed_blocks,
            first_token_ms_mean: self.first_token_us.mean() / 1000.0,
            first_token_ms_p50: first_token_ms(self.first_token_us.value_at_quantile(0.5)),
            first_token_ms_p99: first_token_ms(self.first_token_us.value_at_quantile(0.99)),
        }
    }
}
