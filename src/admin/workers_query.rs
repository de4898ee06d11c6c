//! The query string of `/workers`.

use thiserror::Error;

/// How many workers `/workers` returns unless told otherwise.
pub const WORKERS_LIMIT_DEFAULT: usize = 1000;
/// How many workers `/workers` returns at most.
pub const WORKERS_LIMIT_MAX: usize = 10_000;

/// Which workers a client of `/workers` asks for: `?namespace=NAME&limit=COUNT`, both optional.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkersQuery {
    /// Only the workers of this namespace; all namespaces if absent.
    pub namespace: Option<String>,
    /// At most so many workers, 1 to [`WORKERS_LIMIT_MAX`].
    pub limit: usize,
}

impl Default for WorkersQuery {
    fn default() -> Self {
        Self {
            namespace: None,
            limit: WORKERS_LIMIT_DEFAULT,
        }
    }
}

/// Why a query string was refused. The message is the answer to the client.
#[derive(Debug, Error, PartialEq, Eq)]
pub(super) enum WorkersQueryError {
    #[error("limit must be a number from 1 to {WORKERS_LIMIT_MAX}")]
    Limit,
    #[error("namespace must not be empty; leave it out to get every namespace")]
    EmptyNamespace,
    #[error("the query string has a percent sign without two hexadecimal digits, or is not UTF-8")]
    Encoding,
    #[error("parameter {0} is given more than once; give it once")]
    Repeated(&'static str),
    #[error("there are only the parameters namespace and limit; leave others out")]
    UnknownParameter,
}

impl WorkersQuery {
    /// Reads the part of a request target after the question mark.
    pub(super) fn parse(query: Option<&str>) -> Result<Self, WorkersQueryError> {
        let (mut namespace, mut limit) = (None, None);
        for pair in query
            .unwrap_or_default()
            .split('&')
            .filter(|pair| !pair.is_empty())
        {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = percent_decode(value)?;
            match key {
                "namespace" if namespace.is_some() => return Err(WorkersQueryError::Repeated("namespace")),
                "namespace" if value.is_empty() => return Err(WorkersQueryError::EmptyNamespace),
                "namespace" => namespace = Some(value),
                "limit" if limit.is_some() => return Err(WorkersQueryError::Repeated("limit")),
                "limit" => limit = Some(parse_limit(&value)?),
                _ => return Err(WorkersQueryError::UnknownParameter),
            }
        }
        Ok(Self {
            namespace,
            limit: limit.unwrap_or(WORKERS_LIMIT_DEFAULT),
        })
    }
}

fn parse_limit(value: &str) -> Result<usize, WorkersQueryError> {
    let limit = value.parse().map_err(|_| WorkersQueryError::Limit)?;
    if (1..=WORKERS_LIMIT_MAX).contains(&limit) {
        Ok(limit)
    } else {
        Err(WorkersQueryError::Limit)
    }
}

/// Decodes `%XX`, and nothing else: a plus sign is a plus sign (RFC 3986, section 2.1).
fn percent_decode(text: &str) -> Result<String, WorkersQueryError> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            decoded.push(byte);
            continue;
        }
        let mut digit = || {
            bytes
                .next()
                .and_then(hexadecimal_digit)
                .ok_or(WorkersQueryError::Encoding)
        };
        let (high, low) = (digit()?, digit()?);
        decoded.push(high << 4 | low);
    }
    String::from_utf8(decoded).map_err(|_| WorkersQueryError::Encoding)
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
        ] {
            assert_eq!(WorkersQuery::parse(Some(query)), Err(error), "{query}");
        }
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
