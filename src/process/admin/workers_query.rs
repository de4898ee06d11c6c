//! The query string of `/workers`.

use kvatlas_core::wire::{DegradedReason, DegradedReasons};
use thiserror::Error;

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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkersQuery {
    /// Only the holders of this namespace; `None` for all namespaces.
    pub namespace: Option<String>,
    /// Only the holders in this state.
    pub state: Option<StateFilter>,
    /// Only the holders that are degraded for this reason.
    pub reason: Option<DegradedReason>,
    /// Only the holders of this worker.
    pub worker: Option<String>,
    /// Whether the answer also tells how the holders' states have changed.
    pub has_changes: bool,
    /// Largest number of holders to return, 1 to [`WORKERS_LIMIT_MAX`].
    pub limit: usize,
    /// Only holders after this cursor, in the order of namespace, worker and rank.
    pub after: Option<WorkersCursor>,
}

/// State of the holders that a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateFilter {
    /// The holder's blocks are known for certain.
    Exact,
    /// The holder's blocks are not known for certain.
    Degraded,
}

/// Cursor for the next page: the last holder of the previous page.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
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

    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('/').map(str::to_owned);
        let (namespace, worker) = (parts.next()?, parts.next()?);
        let rank = parts.next()?.parse().ok()?;
        let is_whole = parts.next().is_none() && !namespace.is_empty() && !worker.is_empty();
        is_whole.then_some(Self {
            namespace,
            worker,
            rank,
        })
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
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum WorkersQueryError {
    #[error("limit must be a number from 1 to {WORKERS_LIMIT_MAX}")]
    Limit,
    #[error("namespace must not be empty; leave it out to get every namespace")]
    EmptyNamespace,
    #[error("worker must not be empty; leave it out to get every worker")]
    EmptyWorker,
    #[error("changes must be true or false")]
    Changes,
    #[error("state must be exact or degraded")]
    State,
    #[error("reason must be one of {}", reasons())]
    Reason,
    #[error("after must be what the last page gave as next: NAMESPACE/WORKER/RANK")]
    After,
    #[error("the query string has a percent sign without two hexadecimal digits, or is not UTF-8")]
    Encoding,
    #[error("parameter {0} is given more than once; give it once")]
    Repeated(&'static str),
    #[error(
        "there are only the parameters namespace, worker, state, reason, changes, limit and after; leave others out"
    )]
    UnknownParameter,
}

fn reasons() -> String {
    DegradedReason::WORDS.join(", ")
}

impl WorkersQuery {
    /// Reads the query string: the part of a request's target after the question mark.
    pub(super) fn parse(query: Option<&str>) -> Result<Self, WorkersQueryError> {
        use WorkersQueryError as Fault;
        let (mut namespace, mut state, mut reason, mut limit, mut after) = (None, None, None, None, None);
        let (mut worker, mut changes) = (None, None);
        for pair in query
            .unwrap_or_default()
            .split('&')
            .filter(|pair| !pair.is_empty())
        {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = percent_decode(value).ok_or(Fault::Encoding)?;
            match key {
                "namespace" if value.is_empty() => return Err(Fault::EmptyNamespace),
                "namespace" => set_once(&mut namespace, "namespace", value)?,
                "worker" if value.is_empty() => return Err(Fault::EmptyWorker),
                "worker" => set_once(&mut worker, "worker", value)?,
                "changes" => set_once(
                    &mut changes,
                    "changes",
                    value.parse().map_err(|_| Fault::Changes)?,
                )?,
                "state" => set_once(&mut state, "state", parse_state(&value)?)?,
                "reason" => set_once(&mut reason, "reason", parse_reason(&value)?)?,
                "limit" => set_once(&mut limit, "limit", parse_limit(&value)?)?,
                "after" => {
                    let cursor = WorkersCursor::parse(&value).ok_or(Fault::After)?;
                    set_once(&mut after, "after", cursor)?;
                }
                _ => return Err(Fault::UnknownParameter),
            }
        }
        Ok(Self {
            namespace,
            state,
            reason,
            worker,
            has_changes: changes.unwrap_or_default(),
            limit: limit.unwrap_or(WORKERS_LIMIT_DEFAULT),
            after,
        })
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

fn set_once<T>(slot: &mut Option<T>, name: &'static str, value: T) -> Result<(), WorkersQueryError> {
    match slot.replace(value) {
        None => Ok(()),
        Some(_) => Err(WorkersQueryError::Repeated(name)),
    }
}

fn parse_state(value: &str) -> Result<StateFilter, WorkersQueryError> {
    match value {
        "exact" => Ok(StateFilter::Exact),
        "degraded" => Ok(StateFilter::Degraded),
        _ => Err(WorkersQueryError::State),
    }
}

fn parse_reason(value: &str) -> Result<DegradedReason, WorkersQueryError> {
    DegradedReason::of_word(value).ok_or(WorkersQueryError::Reason)
}

fn parse_limit(value: &str) -> Result<usize, WorkersQueryError> {
    let limit = value.parse().map_err(|_| WorkersQueryError::Limit)?;
    if (1..=WORKERS_LIMIT_MAX).contains(&limit) {
        Ok(limit)
    } else {
        Err(WorkersQueryError::Limit)
    }
}

/// Decodes `%XX` and nothing else: a plus sign stays a plus sign (RFC 3986, section 2.1). `None` if a percent sign is not
/// followed by two hexadecimal digits, or if the result is not UTF-8.
pub fn percent_decode(text: &str) -> Option<String> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let mut digit = || bytes.next().and_then(hexadecimal_digit);
        let (high, low) = (digit()?, digit()?);
        decoded.push(high << 4 | low);
    }
    String::from_utf8(decoded).ok()
}

fn hexadecimal_digit(byte: u8) -> Option<u8> {
    match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        b'A'..=b'F' => Some(byte - b'A' + 10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn absent_parameters_have_defaults() {
        assert_eq!(WorkersQuery::parse(None), Ok(WorkersQuery::default()));
        assert_eq!(WorkersQuery::parse(Some("")), Ok(WorkersQuery::default()));
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
            WorkersQuery::parse(Some("namespace=llama-3&limit=10000")),
            Ok(expected.clone())
        );
        assert_eq!(
            WorkersQuery::parse(Some("limit=10000&&namespace=llama%2d3")),
            Ok(expected)
        );
    }

    #[test]
    fn faults_are_typed() {
        for (query, error) in [
            ("limit=0", WorkersQueryError::Limit),
            ("limit=10001", WorkersQueryError::Limit),
            ("limit=-1", WorkersQueryError::Limit),
            ("limit=", WorkersQueryError::Limit),
            ("limit", WorkersQueryError::Limit),
            ("limit=99999999999999999999999", WorkersQueryError::Limit),
            ("limit=1&limit=2", WorkersQueryError::Repeated("limit")),
            (
                "namespace=a&namespace=a",
                WorkersQueryError::Repeated("namespace"),
            ),
            ("namespace=", WorkersQueryError::EmptyNamespace),
            ("namespace=%", WorkersQueryError::Encoding),
            ("namespace=%a", WorkersQueryError::Encoding),
            ("namespace=%+1", WorkersQueryError::Encoding),
            ("namespace=%ff", WorkersQueryError::Encoding),
            ("namespaces=a", WorkersQueryError::UnknownParameter),
            ("state=", WorkersQueryError::State),
            ("worker=", WorkersQueryError::EmptyWorker),
            ("worker=a&worker=b", WorkersQueryError::Repeated("worker")),
            ("changes=yes", WorkersQueryError::Changes),
            ("state=exact&state=exact", WorkersQueryError::Repeated("state")),
            ("reason=hunger", WorkersQueryError::Reason),
            ("after=a/b", WorkersQueryError::After),
            ("after=a/b/-1", WorkersQueryError::After),
            ("after=a/b/1/c", WorkersQueryError::After),
            ("after=/b/1", WorkersQueryError::After),
        ] {
            assert_eq!(WorkersQuery::parse(Some(query)), Err(error), "{query}");
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
            prop_assert_eq!(parsed.map(|query| query.namespace), Ok(Some(namespace)));
        }
    }
}
