//! Questions to etcd, over its HTTP gateway.

use std::time::Duration;

use hyper::Method;
use hyper::header::CONTENT_TYPE;
use serde_json::Value;
use tokio::time::timeout;

use crate::http::{HttpConnection, HttpError};

/// Longest time that etcd may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Error of a question to etcd.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// The connection, or the exchange over HTTP, failed.
    #[error("{0}")]
    Http(HttpError),
    /// No answer came in time.
    #[error("no answer within {PATIENCE:?}")]
    TimedOut,
    /// Etcd refused the question, with this HTTP status.
    #[error("etcd answers with status {0}")]
    Status(u16),
    /// The answer is not readable JSON, or is too long.
    #[error("the answer of etcd cannot be read")]
    Answer,
}

impl From<HttpError> for EtcdError {
    fn from(error: HttpError) -> Self {
        match error {
            HttpError::Request(_) | HttpError::Body(_) => Self::Answer,
            HttpError::Connection(_) | HttpError::Protocol(_) => Self::Http(error),
        }
    }
}

/// Sends one request to etcd at `authority`, and returns the answer. `method` is the path below `/v3/`, and `body` the request's
/// body. The answer may have at most `bytes_max` bytes.
///
/// # Errors
///
/// [`EtcdError`]. The function always returns within two seconds.
pub async fn ask_etcd(
    authority: &str,
    method: &str,
    body: &Value,
    bytes_max: usize,
) -> Result<Value, EtcdError> {
    let asking = async {
        let mut connection = HttpConnection::open(authority).await?;
        let request = connection.request(Method::POST, &format!("/v3/{method}"));
        let request = request.header(CONTENT_TYPE, "application/json");
        let (status, body) = connection
            .ask(request, body.to_string().into(), bytes_max)
            .await?;
        match status.is_success() {
            true => serde_json::from_slice(&body).map_err(|_| EtcdError::Answer),
            false => Err(EtcdError::Status(status.as_u16())),
        }
    };
    timeout(PATIENCE, asking).await.map_err(|_| EtcdError::TimedOut)?
}
