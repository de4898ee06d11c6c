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

/// The time that etcd may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The reason why etcd did not answer.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// The connection.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The protocol.
    #[error("{0}")]
    Http(#[from] hyper::Error),
    /// Nothing came in time.
    #[error("no answer within {PATIENCE:?}")]
    TimedOut,
    /// The answer is a refusal.
    #[error("etcd answers with status {0}")]
    Status(u16),
    /// The answer is none, or too long.
    #[error("the answer of etcd cannot be read")]
    Answer,
}

/// The answer of `authority` to one question: a method below `/v3/`, and its body. It may have `bytes_max` bytes.
///
/// # Errors
///
/// [`EtcdError`], at the latest after a bounded time.
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
