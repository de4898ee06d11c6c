//! The parameters of a request: the query string.

use axum::extract::Query;
use axum::extract::rejection::QueryRejection;
use hyper::Uri;
use hyper::http::uri::InvalidUri;
use serde::de::DeserializeOwned;

/// Reason why a query string cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ParametersError {
    /// The text has a character that no query string may have.
    #[error("the query string: {0}")]
    Text(#[from] InvalidUri),
    /// A parameter is missing, not known, or given twice, or its value has the wrong form.
    #[error("{}", .0.body_text())]
    Parameters(#[from] QueryRejection),
}

/// Reads the parameters of a request: the part of its target after the question mark. A plus sign stays a plus sign
/// (RFC 3986, section 2.1).
///
/// # Errors
///
/// [`ParametersError`], whose message is an answer for the client.
pub fn parameters<T: DeserializeOwned>(query: Option<&str>) -> Result<T, ParametersError> {
    let target = format!("/?{}", query.unwrap_or_default().replace('+', "%2B"));
    let Query(parameters) = Query::try_from_uri(&target.parse::<Uri>()?)?;
    Ok(parameters)
}
