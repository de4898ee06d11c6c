//! Client for HTTP/1.1, which bounds the size of answers and follows no redirects. The caller bounds the time.

use std::io;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::header::HOST;
use hyper::http::request::Builder;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// Error of a request over HTTP.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The connection cannot be made. No request was sent.
    #[error("{0}")]
    Connection(#[from] io::Error),
    /// The HTTP exchange on the connection failed.
    #[error("{0}")]
    Protocol(#[from] hyper::Error),
    /// The request cannot be built, because a part of it is not valid.
    #[error("{0}")]
    Request(#[from] hyper::http::Error),
    /// The body of the answer cannot be read to its end, or is longer than allowed.
    #[error("the answer cannot be read: {0}")]
    Body(String),
}

/// A connection to a server. After an error it cannot be used again.
#[derive(Debug)]
pub struct HttpConnection {
    sender: SendRequest<Full<Bytes>>,
    authority: String,
}

impl HttpConnection {
    /// Connects to the server at `authority`, which is `HOST:PORT`.
    ///
    /// # Errors
    ///
    /// [`HttpError::Connection`], [`HttpError::Protocol`].
    pub async fn open(authority: &str) -> Result<Self, HttpError> {
        let stream = TcpStream::connect(authority).await?;
        Self::on(stream, authority).await
    }

    /// Makes an HTTP connection on `stream`, which is connected to the server at `authority`.
    ///
    /// # Errors
    ///
    /// [`HttpError::Protocol`].
    pub async fn on(
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        authority: &str,
    ) -> Result<Self, HttpError> {
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        // This task ends when the connection ends: after the sender has been dropped and the last answer's body has
        // been read.
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection to a server has ended");
            }
        });
        Ok(Self {
            sender,
            authority: authority.to_owned(),
        })
    }

    /// Whether the server has ended the connection.
    pub fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    /// Begins a request for `target`, which is a path with its query. Headers can be added to the request.
    pub fn request(&self, method: Method, target: &str) -> Builder {
        let request = Request::builder().method(method).uri(target);
        request.header(HOST, &self.authority)
    }

    /// Sends a request. Returns the answer's head, with a body that the caller still has to read.
    ///
    /// # Errors
    ///
    /// [`HttpError::Protocol`], [`HttpError::Request`].
    pub async fn send(&mut self, request: Builder, body: Bytes) -> Result<Response<Incoming>, HttpError> {
        self.sender.ready().await?;
        let request = request.body(Full::new(body))?;
        Ok(self.sender.send_request(request).await?)
    }

    /// Sends a request. Returns the answer's status and its whole body. A body of more than `bytes_max` bytes is an error.
    ///
    /// # Errors
    ///
    /// [`HttpError`].
    pub async fn ask(
        &mut self,
        request: Builder,
        body: Bytes,
        bytes_max: usize,
    ) -> Result<(StatusCode, Bytes), HttpError> {
        let answer = self.send(request, body).await?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), bytes_max).collect().await;
        let body = body.map_err(|error| HttpError::Body(error.to_string()))?;
        Ok((status, body.to_bytes()))
    }
}
