//! Counts and log lines about queries.

use std::collections::HashMap;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use metrics::{Counter, Histogram};
use parking_lot::Mutex;

use kvatlas_core::wire::{ErrorCode, NamespaceName};

use super::declare::{DEPTHS, LATENCIES, SHARES, metric_group};
use super::labels::{
    AnswerState, NAMESPACE_LABELS_MAX, PerLabel, QueryKind, ReplyDropReason, UNATTRIBUTED_NAMESPACE,
    namespace_label,
};
use super::log_gated;

/// Numbers of blocks in the answer about one prompt, and the answer's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AnsweredPrompt {
    /// Number of blocks of the prompt.
    pub asked_blocks: u32,
    /// Number of leading blocks of the prompt that the best holder has.
    pub matched_blocks: u32,
    /// Largest number of leading blocks of the prompt that a request can reuse at one holder.
    pub usable_blocks: u32,
    /// Certainty of the answer.
    pub state: AnswerState,
}

metric_group! {
    /// Metrics about queries of a namespace.
    QueryMetrics::for_namespace(namespace: &str) {
        /// Queries answered without an error, by the form in which they name the prompt.
        answered: PerLabel<QueryKind, Counter> = "kvatlas_queries_total", Count;
        /// Time from receiving a query until its reply is handed to the connection.
        duration: Histogram = "kvatlas_query_duration_seconds", Seconds, LATENCIES;
        /// Answers about a prompt, by how certain they are; each query of a batch has an answer.
        answers: PerLabel<AnswerState, Counter> = "kvatlas_query_answers_total", Count;
        /// Share of a prompt's blocks that the best holder in the answer has, from 0 to 1.
        matched_ratio: Histogram = "kvatlas_query_matched_ratio", Count, SHARES;
        /// Leading blocks of a prompt that the best holder in the answer has.
        matched_blocks: Histogram = "kvatlas_query_matched_blocks", Count, DEPTHS;
        /// Share of the best holder's leading blocks that a request can reuse, from 0 to 1; prompts of which no holder
        /// has the first block are left out.
        usable_ratio: Histogram = "kvatlas_query_usable_ratio", Count, SHARES;
    }
}

impl QueryMetrics {
    /// Makes handles for queries that ask about the whole daemon and name no namespace.
    pub fn unattributed() -> Self {
        Self::for_namespace(UNATTRIBUTED_NAMESPACE)
    }

    /// Counts a query that was answered without an error, and records how long it took.
    pub fn answered(&self, kind: QueryKind, elapsed: Duration) {
        self.answered.get(kind).increment(1);
        self.duration.record(elapsed);
    }

    /// Counts the answer about one prompt, and records its numbers of blocks. A share of zero blocks is not recorded.
    pub fn found(&self, prompt: AnsweredPrompt) {
        self.answers.get(prompt.state).increment(1);
        self.matched_blocks.record(f64::from(prompt.matched_blocks));
        if prompt.asked_blocks > 0 {
            let ratio = f64::from(prompt.matched_blocks) / f64::from(prompt.asked_blocks);
            self.matched_ratio.record(ratio.min(1.0));
        }
        if prompt.matched_blocks > 0 {
            let ratio = f64::from(prompt.usable_blocks) / f64::from(prompt.matched_blocks);
            self.usable_ratio.record(ratio.min(1.0));
        }
    }
}

/// Query metrics by namespace. The metrics of a namespace are made when a query about the namespace is first answered.
#[derive(Default)]
pub struct QueryMetricsByNamespace {
    /// Map from namespaces to their metrics. It is replaced as a whole (copy on write) when a namespace is added.
    known: ArcSwap<HashMap<NamespaceName, Arc<QueryMetrics>>>,
    adding: Mutex<()>,
}

impl QueryMetricsByNamespace {
    /// Returns the metrics of a namespace that exists, and makes them if the map does not have them. The map also keeps
    /// entries of namespaces that no longer exist. So it is emptied before it would exceed [`NAMESPACE_LABELS_MAX`]
    /// entries, and then filled again.
    pub fn of(&self, namespace: &NamespaceName) -> Arc<QueryMetrics> {
        self.of_labelled(namespace, namespace_label)
    }

    /// Counts answered queries about a namespace that exists. Also counts the answers about their prompts.
    pub fn count(
        &self,
        namespace: &NamespaceName,
        kind: QueryKind,
        queries: usize,
        elapsed: Duration,
        prompts: impl Iterator<Item = AnsweredPrompt>,
    ) {
        let metrics = self.of(namespace);
        (0..queries).for_each(|_| metrics.answered(kind, elapsed));
        prompts.for_each(|prompt| metrics.found(prompt));
    }

    fn of_labelled(&self, namespace: &NamespaceName, label: fn(&str) -> &str) -> Arc<QueryMetrics> {
        if let Some(found) = self.known.load().get(namespace) {
            return Arc::clone(found);
        }
        let _adding = self.adding.lock();
        let mut known = HashMap::clone(&self.known.load());
        if known.len() >= NAMESPACE_LABELS_MAX {
            known.clear();
        }
        let made = known
            .entry(namespace.clone())
            .or_insert_with(|| Arc::new(QueryMetrics::for_namespace(label(namespace.as_str()))));
        let made = Arc::clone(made);
        self.known.store(Arc::new(known));
        made
    }
}

metric_group! {
    /// Metrics about failed queries, of all namespaces together.
    QueryErrorMetrics::new() {
        /// Queries answered with an error, by its code.
        errors: PerLabel<ErrorCode, Counter> = "kvatlas_query_errors_total", Count;
        /// Replies to queries that were not sent, by reason.
        replies_dropped: PerLabel<ReplyDropReason, Counter> = "kvatlas_query_replies_dropped_total", Count;
        /// Searches for routers that name no namespace which left out namespaces, because there were too many.
        unsearched: Counter = "kvatlas_query_namespaces_unsearched_total", Count;
    }
}

impl QueryErrorMetrics {
    /// Counts and logs a query that was answered with an error. The line is at level debug, because the client gets the error,
    /// too.
    pub fn failed(&self, code: ErrorCode, detail: &dyn Display) {
        self.errors.get(code).increment(1);
        log_gated!(debug "query refused" per ErrorCode(code); code = code.as_str(), %detail);
    }

    /// Counts and logs a search that has left out `namespaces` namespaces, because there were too many.
    pub fn unsearched(&self, namespaces: usize) {
        self.unsearched.increment(1);
        log_gated!(
            warn "routers that name no namespace are told nothing of some models: more than 64 namespaces would have to be searched, and \
                  the last by name are left out; give models to daemons of their own (limits.named_namespaces_only)";
            namespaces
        );
    }

    /// Counts and logs a reply that was not sent.
    pub fn reply_dropped(&self, reason: ReplyDropReason, detail: &dyn Display) {
        self.replies_dropped.get(reason).increment(1);
        log_gated!(warn "reply to a query dropped" per ReplyDropReason(reason); %reason, %detail);
    }
}

#[cfg(test)]
mod tests {
    use super::super::recorder::rendered;
    use super::*;

    #[test]
    fn the_metrics_of_many_namespaces_are_bounded() {
        // All namespaces of this test share one label, so the test uses up no labels that other tests need.
        let label: fn(&str) -> &str = |_| "bounded";
        let metrics = QueryMetricsByNamespace::default();
        for number in 0..=NAMESPACE_LABELS_MAX {
            let namespace = NamespaceName::new(&format!("n{number}")).unwrap();
            let first = metrics.of_labelled(&namespace, label);
            assert!(Arc::ptr_eq(&first, &metrics.of_labelled(&namespace, label)));
            assert!(metrics.known.load().len() <= NAMESPACE_LABELS_MAX);
        }
    }

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            let queries = QueryMetrics::for_namespace("a");
            queries.answered(QueryKind::SequenceHashes, Duration::from_millis(2));
            queries.answered(QueryKind::SequenceHashes, Duration::from_millis(2));
            for (matched_blocks, state) in [(3, AnswerState::Exact), (0, AnswerState::Empty)] {
                queries.found(AnsweredPrompt {
                    asked_blocks: 4,
                    matched_blocks,
                    usable_blocks: matched_blocks / 2,
                    state,
                });
            }
            QueryMetrics::unattributed().answered(QueryKind::Status, Duration::from_millis(2));
            let errors = QueryErrorMetrics::new();
            errors.failed(ErrorCode::BadRequest, &"no tokens");
            errors.failed(ErrorCode::Unavailable, &"draining");
            errors.reply_dropped(ReplyDropReason::NoReplySubject, &"kv.query.a");
            errors.unsearched(3);
        });
        for line in [
            "kvatlas_queries_total{namespace=\"a\",kind=\"sequence_hashes\"} 2",
            "kvatlas_queries_total{namespace=\"a\",kind=\"tokens\"} 0",
            "kvatlas_queries_total{namespace=\"(none)\",kind=\"status\"} 1",
            "kvatlas_query_duration_seconds_count{namespace=\"a\"} 2",
            "kvatlas_query_answers_total{namespace=\"a\",state=\"exact\"} 1",
            "kvatlas_query_answers_total{namespace=\"a\",state=\"empty\"} 1",
            "kvatlas_query_matched_ratio_bucket{namespace=\"a\",le=\"0\"} 1",
            "kvatlas_query_matched_ratio_bucket{namespace=\"a\",le=\"0.7\"} 1",
            "kvatlas_query_matched_ratio_bucket{namespace=\"a\",le=\"0.8\"} 2",
            "kvatlas_query_matched_blocks_bucket{namespace=\"a\",le=\"2\"} 1",
            "kvatlas_query_matched_blocks_sum{namespace=\"a\"} 3",
            "kvatlas_query_usable_ratio_bucket{namespace=\"a\",le=\"0.3\"} 0",
            "kvatlas_query_usable_ratio_bucket{namespace=\"a\",le=\"0.4\"} 1",
            "kvatlas_query_usable_ratio_count{namespace=\"a\"} 1",
            "kvatlas_query_errors_total{code=\"bad_request\"} 1",
            "kvatlas_query_errors_total{code=\"unavailable\"} 1",
            "kvatlas_query_replies_dropped_total{reason=\"no_reply_subject\"} 1",
            "kvatlas_query_replies_dropped_total{reason=\"publish_failed\"} 0",
            "kvatlas_query_namespaces_unsearched_total 1",
        ] {
            assert!(
                text.lines().any(|candidate| candidate == line),
                "missing: {line}\n{text}"
            );
        }
    }
}
