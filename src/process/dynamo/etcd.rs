//! Questions to etcd, over its HTTP gateway.

use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Longest time that etcd may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Error of a question to etcd.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// The connection failed.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The exchange over HTTP failed.
    #[error("{0}")]
    Http(#[from] hyper::Error),
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

/// Asks etcd at `authority` one question, and returns its answer. `method` is the path below `/v3/`, `body` the body of
/// the request. The answer may have at most `bytes_max` bytes.
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
        let stream = TcpStream::connect(authority).await?;
        let (mut sender, connection) = handshake(TokioIo::new(stream)).await?;
        let driver = tokio::spawn(connection);
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("/v3/{method}"))
            .header(HOST, authority)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.to_string())))
            .map_err(|_| EtcdError::Answer)?;
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), bytes_max).collect().await;
        driver.abort();
        let body = body.map_err(|_| EtcdError::Answer)?.to_bytes();
        match status.is_success() {
            true => serde_json::from_slice(&body).map_err(|_| EtcdError::Answer),
            false => Err(EtcdError::Status(status.as_u16())),
        }
    };
    timeout(PATIENCE, asking).await.map_err(|_| EtcdError::TimedOut)?
}
