//! What is counted, and logged, about queries.

use std::fmt::Display;
use std::time::Duration;

use metrics::{Counter, Histogram};

use crate::wire::ErrorCode;

use super::labels::{LabelValue, PerLabel, QueryKind, ReplyDropReason, UNATTRIBUTED_NAMESPACE};
use super::{LogGate, names};

static ERROR_GATES: [LogGate; ErrorCode::ALL.len()] = [const { LogGate::new() }; ErrorCode::ALL.len()];
static REPLY_DROP_GATES: [LogGate; ReplyDropReason::COUNT] =
    [const { LogGate::new() }; ReplyDropReason::COUNT];

/// The handles for the queries of one namespace. Make it once and hold it.
pub struct QueryMetrics {
    answered: PerLabel<QueryKind, Counter>,
    duration: Histogram,
}

impl QueryMetrics {
    /// The handles of a namespace that was admitted: the caller bounds how many there are.
    pub fn for_namespace(namespace: &str) -> Self {
        Self {
            answered: PerLabel::new(|kind: QueryKind| names::QUERIES.with([namespace, kind.as_str()])),
            duration: names::QUERY_DURATION.with([namespace]),
        }
    }

    /// The handles for queries that ask after the daemon as a whole and so name no namespace.
    pub fn unattributed() -> Self {
        Self::for_namespace(UNATTRIBUTED_NAMESPACE)
    }

    /// Counts a query that was answered without an error.
    pub fn answered(&self, kind: QueryKind, elapsed: Duration) {
        self.answered.get(kind).increment(1);
        self.duration.record(elapsed);
    }
}

/// The handles for queries that went wrong, in whichever namespace: a failed query may not name one.
pub struct QueryErrorMetrics {
    errors: PerLabel<ErrorCode, Counter>,
    replies_dropped: PerLabel<ReplyDropReason, Counter>,
}

impl QueryErrorMetrics {
    /// Looks the handles up.
    #[expect(
        clippy::new_without_default,
        reason = "it registers series with the recorder, which a default should not"
    )]
    pub fn new() -> Self {
        Self {
            errors: PerLabel::new(|code: ErrorCode| names::QUERY_ERRORS.with([code.as_str()])),
            replies_dropped: PerLabel::new(|reason: ReplyDropReason| {
                names::QUERY_REPLIES_DROPPED.with([reason.as_str()])
            }),
        }
    }

    /// Counts a query that was answered with an error, and logs it at level debug, since the client is told.
    pub fn failed(&self, code: ErrorCode, detail: &dyn Display) {
        self.errors.get(code).increment(1);
        let Some(suppressed) = ERROR_GATES[code.index()].admit() else {
            return;
        };
        tracing::debug!(code = code.as_str(), %detail, suppressed, "query refused");
    }

    /// Counts a reply that was not sent, and logs it.
    pub fn reply_dropped(&self, reason: ReplyDropReason, detail: &dyn Display) {
        self.replies_dropped.get(reason).increment(1);
        if let Some(suppressed) = REPLY_DROP_GATES[reason.index()].admit() {
            tracing::warn!(%reason, %detail, suppressed, "reply to a query dropped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::metrics::tests::rendered;
    use super::*;

    #[test]
    fn each_call_reaches_its_own_series() {
        let text = rendered(|| {
            let queries = QueryMetrics::for_namespace("a");
            queries.answered(QueryKind::SequenceHashes, Duration::from_millis(2));
            queries.answered(QueryKind::SequenceHashes, Duration::from_millis(2));
            QueryMetrics::unattributed().answered(QueryKind::Status, Duration::from_millis(2));
            let errors = QueryErrorMetrics::new();
            errors.failed(ErrorCode::BadRequest, &"no tokens");
            errors.failed(ErrorCode::Unavailable, &"draining");
            errors.reply_dropped(ReplyDropReason::NoReplySubject, &"kv.query.a");
        });
        for line in [
            "kvatlas_queries_total{namespace=\"a\",kind=\"sequence_hashes\"} 2",
            "kvatlas_queries_total{namespace=\"a\",kind=\"tokens\"} 0",
            "kvatlas_queries_total{namespace=\"(none)\",kind=\"status\"} 1",
            "kvatlas_query_duration_seconds_count{namespace=\"a\"} 2",
            "kvatlas_query_errors_total{code=\"bad_request\"} 1",
            "kvatlas_query_errors_total{code=\"unavailable\"} 1",
            "kvatlas_query_replies_dropped_total{reason=\"no_reply_subject\"} 1",
            "kvatlas_query_replies_dropped_total{reason=\"publish_failed\"} 0",
        ] {
            assert!(
                text.lines().any(|candidate| candidate == line),
                "missing: {line}\n{text}"
            );
        }
    }
}
