//! The query string of `/workers`.

use kvatlas_core::wire::{DegradedReason, DegradedReasons};
use serde::{Deserialize, Deserializer};
use thiserror::Error;

use super::{ParametersError, parameters};

/// Default limit on the number of holders in one answer of `/workers`.
pub const WORKERS_LIMIT_DEFAULT: usize = 1000;
/// Largest limit on the number of holders that a client of `/workers` may set.
pub const WORKERS_LIMIT_MAX: usize = 10_000;

/// Selection of holders by a client of `/workers`. Every parameter is optional.
///
/// | parameter | meaning |
/// |---|---|
/// | `namespace=NAME` | only the holders of this namespace |
/// | `state=exact` or `state=degraded` | only the holders in this state |
/// | `reason=REASON` | only the holders that are degraded for this reason, alone or among others |
/// | `worker=NAME` | only the holders of this worker |
/// | `changes=true` | adds the changes of each holder's state: of the last hour by the second, of the last day by the minute |
/// | `limit=COUNT` | at most so many holders, 1 to [`WORKERS_LIMIT_MAX`] |
/// | `after=NAMESPACE/WORKER/RANK` | the next page: the value of `next` in the page before |
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkersQuery {
    /// Only the holders of this namespace; `None` for all namespaces.
    pub namespace: Option<String>,
    /// Only the holders in this state.
    pub state: Option<StateFilter>,
    /// Only the holders that are degraded for this reason.
    #[serde(deserialize_with = "reason")]
    pub reason: Option<DegradedReason>,
    /// Only the holders of this worker.
    pub worker: Option<String>,
    /// Whether the answer also tells how the holders' states have changed.
    #[serde(rename = "changes")]
    pub has_changes: bool,
    /// Largest number of holders to return, 1 to [`WORKERS_LIMIT_MAX`].
    pub limit: usize,
    /// Only the holders after this cursor. Holders are ordered by namespace, worker and rank.
    pub after: Option<WorkersCursor>,
}

/// State of the holders that a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateFilter {
    /// The holder's blocks are known for certain.
    Exact,
    /// The holder's blocks are not known for certain.
    Degraded,
}

/// Cursor for the next page: the last holder of the previous page.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(try_from = "String")]
pub struct WorkersCursor {
    /// Namespace of the holder.
    pub namespace: String,
    /// Worker of the holder.
    pub worker: String,
    /// Data-parallel rank of the holder.
    pub rank: u32,
}

impl WorkersCursor {
    /// Returns the cursor as text for the parameter `after`. Names never contain a slash.
    pub fn to_text(&self) -> String {
        format!("{}/{}/{}", self.namespace, self.worker, self.rank)
    }
}

impl TryFrom<String> for WorkersCursor {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, &'static str> {
        let parts: Vec<&str> = text.split('/').collect();
        let rank = parts.last().and_then(|rank| rank.parse().ok());
        match (&parts[..], rank) {
            (&[namespace, worker, _], Some(rank)) if !namespace.is_empty() && !worker.is_empty() => {
                Ok(Self {
                    namespace: namespace.to_owned(),
                    worker: worker.to_owned(),
                    rank,
                })
            }
            _ => Err("must be what the last page gave as next: NAMESPACE/WORKER/RANK"),
        }
    }
}

impl Default for WorkersQuery {
    fn default() -> Self {
        Self {
            namespace: None,
            state: None,
            reason: None,
            worker: None,
            has_changes: false,
            limit: WORKERS_LIMIT_DEFAULT,
            after: None,
        }
    }
}

/// Reason why a query string was refused. Its message is the answer to the client.
#[derive(Debug, Error)]
pub(super) enum WorkersQueryError {
    #[error("limit must be a number from 1 to {WORKERS_LIMIT_MAX}")]
    Limit,
    #[error("{0} must not be empty; leave it out to get every {0}")]
    Empty(&'static str),
    #[error(transparent)]
    Parameters(#[from] ParametersError),
}

fn reason<'de, D: Deserializer<'de>>(word: D) -> Result<Option<DegradedReason>, D::Error> {
    let word = String::deserialize(word)?;
    let reason = DegradedReason::of_word(&word);
    let words = || {
        serde::de::Error::custom(format_args!(
            "must be one of {}",
            DegradedReason::WORDS.join(", ")
        ))
    };
    reason.map(Some).ok_or_else(words)
}

impl WorkersQuery {
    /// Reads the query string: the part of a request's target after the question mark.
    pub(super) fn parse(query: Option<&str>) -> Result<Self, WorkersQueryError> {
        let query: Self = parameters(query)?;
        for (key, name) in [("namespace", &query.namespace), ("worker", &query.worker)] {
            if name.as_deref() == Some("") {
                return Err(WorkersQueryError::Empty(key));
            }
        }
        match query.limit {
            1..=WORKERS_LIMIT_MAX => Ok(query),
            _ => Err(WorkersQueryError::Limit),
        }
    }

    /// Whether the query selects a holder with these reasons for being degraded. A holder without reasons is exact.
    pub fn wants(&self, reasons: DegradedReasons) -> bool {
        let in_state = match self.state {
            None => true,
            Some(StateFilter::Exact) => reasons.is_empty(),
            Some(StateFilter::Degraded) => !reasons.is_empty(),
        };
        in_state && self.reason.is_none_or(|reason| reasons.contains(reason))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn absent_parameters_have_defaults() {
        assert_eq!(WorkersQuery::parse(None).unwrap(), WorkersQuery::default());
        assert_eq!(WorkersQuery::parse(Some("")).unwrap(), WorkersQuery::default());
        assert_eq!(WorkersQuery::default().limit, 1000);
    }

    #[test]
    fn parameters_in_any_order() {
        let expected = WorkersQuery {
            namespace: Some("llama-3".to_owned()),
            limit: 10_000,
            ..WorkersQuery::default()
        };
        assert_eq!(
            WorkersQuery::parse(Some("namespace=llama-3&limit=10000")).unwrap(),
            expected
        );
        assert_eq!(
            WorkersQuery::parse(Some("limit=10000&&namespace=llama%2d3")).unwrap(),
            expected
        );
    }

    fn refused(query: &str) -> WorkersQueryError {
        WorkersQuery::parse(Some(query)).unwrap_err()
    }

    #[test]
    fn values_out_of_range_are_refused() {
        for query in ["limit=0", "limit=10001"] {
            let error = refused(query);
            assert!(matches!(error, WorkersQueryError::Limit), "{query}: {error}");
        }
        for (query, field) in [("namespace=", "namespace"), ("worker=", "worker")] {
            let error = refused(query);
            assert!(
                matches!(error, WorkersQueryError::Empty(name) if name == field),
                "{query}: {error}"
            );
        }
        let error = refused("namespace=a b");
        assert!(
            matches!(error, WorkersQueryError::Parameters(ParametersError::Text(_))),
            "{error}"
        );
    }

    /// The library that reads parameters has one type for these errors, with a text.
    #[test]
    fn parameters_of_another_form_are_told() {
        for (query, told) in [
            ("limit=-1", "limit: invalid digit"),
            ("limit=", "limit: cannot parse"),
            ("limit", "limit: cannot parse"),
            ("limit=99999999999999999999999", "limit: number too large"),
            ("limit=1&limit=2", "duplicate field `limit`"),
            ("namespace=a&namespace=a", "duplicate field `namespace`"),
            (
                "namespaces=a",
                "unknown field `namespaces`, expected one of `namespace`",
            ),
            (
                "state=",
                "state: unknown variant ``, expected `exact` or `degraded`",
            ),
            ("worker=a&worker=b", "duplicate field `worker`"),
            (
                "changes=yes",
                "changes: provided string was not `true` or `false`",
            ),
            ("state=exact&state=exact", "duplicate field `state`"),
            ("reason=hunger", "reason: must be one of gap"),
            ("after=a/b", "after: must be what the last page gave"),
            ("after=a/b/-1", "after: must be what the last page gave"),
            ("after=a/b/1/c", "after: must be what the last page gave"),
            ("after=/b/1", "after: must be what the last page gave"),
        ] {
            let error = refused(query);
            assert!(
                matches!(&error, WorkersQueryError::Parameters(ParametersError::Parameters(rejected))
                    if rejected.body_text().contains(told)),
                "{query}: {error}"
            );
        }
    }

    #[test]
    fn state_and_reason_select_together() {
        let gap = DegradedReasons::of(DegradedReason::Gap).with(DegradedReason::Unverified);
        let stale = DegradedReasons::of(DegradedReason::Stale);
        let exact = DegradedReasons::default();
        for (query, wanted) in [
            ("", [true, true, true]),
            ("state=exact", [false, false, true]),
            ("state=degraded", [true, true, false]),
            ("reason=unverified", [true, false, false]),
            ("state=degraded&reason=stale", [false, true, false]),
            ("state=exact&reason=gap", [false, false, false]),
        ] {
            let parsed = WorkersQuery::parse(Some(query)).unwrap();
            assert_eq!(
                [gap, stale, exact].map(|reasons| parsed.wants(reasons)),
                wanted,
                "{query}"
            );
        }
    }

    #[test]
    fn a_plus_sign_stays_one() {
        let query = WorkersQuery::parse(Some("worker=a+b%2Bc")).unwrap();
        assert_eq!(query.worker.as_deref(), Some("a+b+c"));
    }

    #[test]
    fn a_cursor_is_read_as_it_was_written() {
        let cursor = WorkersCursor {
            namespace: "llama".to_owned(),
            worker: "gpu-0".to_owned(),
            rank: 3,
        };
        let query = WorkersQuery::parse(Some(&format!("after={}", cursor.to_text()))).unwrap();
        assert_eq!(query.after, Some(cursor));
    }

    proptest! {
        #[test]
        fn any_text_gives_an_answer_within_the_limit(query in ".{0,60}") {
            if let Ok(parsed) = WorkersQuery::parse(Some(&query)) {
                prop_assert!((1..=WORKERS_LIMIT_MAX).contains(&parsed.limit));
            }
        }

        #[test]
        fn what_is_encoded_is_decoded(namespace in "\\PC{1,20}") {
            let encoded: String = namespace.bytes().map(|byte| format!("%{byte:02X}")).collect();
            let parsed = WorkersQuery::parse(Some(&format!("namespace={encoded}")));
            prop_assert_eq!(parsed.unwrap().namespace, Some(namespace));
        }
    }
}
