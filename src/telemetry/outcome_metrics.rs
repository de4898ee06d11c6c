//! Metrics and log lines about outcomes. An outcome compares the blocks that an answer promised with the blocks that the request
//! found.

use std::fmt::Display;

use metrics::{Counter, Histogram};

use super::declare::{SHARES, metric_group};
use super::labels::{HolderState, OutcomeRefusal, PerLabel};
use super::log_gated;

metric_group! {
    /// Metrics about outcomes that routers report about a namespace.
    OutcomeMetrics::for_namespace(namespace: &str) {
        /// Requests whose outcome a router has reported, by how certain the answer was.
        requests: PerLabel<HolderState, Counter> = "kvatlas_outcomes_total", Count;
        /// Blocks that answers promised to requests whose outcome a router has reported, by how certain the answer was.
        promised: PerLabel<HolderState, Counter> = "kvatlas_outcome_promised_blocks_total", Count;
        /// Blocks that the answer promised and the request did not find, by how certain the answer was.
        missing: PerLabel<HolderState, Counter> = "kvatlas_outcome_missing_blocks_total", Count;
        /// Blocks that the request found beyond those that the answer promised, by how certain the answer was.
        unpromised: PerLabel<HolderState, Counter> = "kvatlas_outcome_unpromised_blocks_total", Count;
        /// Share of the promised blocks that the request did not find, by how certain the answer was.
        missing_ratio: PerLabel<HolderState, Histogram> = "kvatlas_outcome_missing_ratio", Count, SHARES;
    }
}

metric_group! {
    /// Metrics about outcomes that were refused.
    OutcomeErrorMetrics::new() {
        /// Outcomes, or whole reports of outcomes, that were refused, by reason.
        refused: PerLabel<OutcomeRefusal, Counter> = "kvatlas_outcomes_refused_total", Count;
    }
}

metric_group! {
    /// Metrics about outcomes that routers report about one holder.
    HolderOutcomeMetrics::of_holder(namespace: &str, holder: &str) {
        /// Blocks that answers promised to requests whose outcome a router has reported, by holder and by how certain the answer
        /// was.
        promised: PerLabel<HolderState, Counter> = "kvatlas_holder_promised_blocks_total", Count;
        /// Blocks that the answer promised and the request did not find, by holder and by how certain the answer was.
        missing: PerLabel<HolderState, Counter> = "kvatlas_holder_missing_blocks_total", Count;
    }
}

/// The outcome of one request, in numbers of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CountedOutcome {
    /// Blocks that the answer promised.
    pub promised_blocks: u64,
    /// Promised blocks that the request did not find.
    pub missing_blocks: u64,
    /// Blocks that the request found beyond the promised ones.
    pub unpromised_blocks: u64,
    /// Whether the answer called the holder exact.
    pub is_exact: bool,
}

impl CountedOutcome {
    fn state(self) -> HolderState {
        match self.is_exact {
            true => HolderState::Exact,
            false => HolderState::Degraded,
        }
    }
}

impl OutcomeMetrics {
    /// Counts an outcome: the blocks that one request found. Outcomes of answers that called the holder exact are counted apart from
    /// the others. If blocks were promised, the fraction of them that was missing goes into a histogram.
    pub fn told(&self, outcome: CountedOutcome) {
        let state = outcome.state();
        self.requests.get(state).increment(1);
        self.promised.get(state).increment(outcome.promised_blocks);
        self.missing.get(state).increment(outcome.missing_blocks);
        self.unpromised.get(state).increment(outcome.unpromised_blocks);
        if outcome.promised_blocks > 0 {
            let ratio = outcome.missing_blocks as f64 / outcome.promised_blocks as f64;
            self.missing_ratio.get(state).record(ratio);
        }
    }
}

impl OutcomeErrorMetrics {
    /// Counts `times` outcomes (numbers of blocks that requests found) that were not taken. Also writes a log line at
    /// level debug.
    pub fn refused(&self, reason: OutcomeRefusal, times: u64, detail: &dyn Display) {
        self.refused.get(reason).increment(times);
        log_gated!(debug "an outcome was not taken" per OutcomeRefusal(reason); %reason, %detail);
    }
}

impl HolderOutcomeMetrics {
    /// Counts an outcome (the blocks that one request found) by whether its answer called the holder exact.
    pub fn told(&self, outcome: CountedOutcome) {
        let state = outcome.state();
        self.promised.get(state).increment(outcome.promised_blocks);
        self.missing.get(state).increment(outcome.missing_blocks);
    }
}
