//! Connections to engines' servers over gRPC: questions with one answer, and the stream of
//! [`SubscribedEvents`](super::subscribed::SubscribedEvents).

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use kvatlas_engines::Format;
use kvatlas_engines::described::Ask;
use kvatlas_engines::subscribe::{KvEventFrame, SubscribeRequest};
use tokio::time::timeout;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_prost::ProstCodec;

/// Maximum size of a frame, in bytes. A chunk of a snapshot has 2,048 blocks, and a block can have thousands of tokens.
const FRAME_BYTES_MAX: usize = 64 << 20;
/// Maximum size of an engine's description, in bytes.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// Batch number that no batch reaches. A server refuses a subscription that begins after this number, before it sends
/// anything.
const NEVER_SEEN: u64 = i64::MAX.unsigned_abs();
/// Time without traffic on a connection for questions, after which the client sends a ping.
const PING_AFTER: Duration = Duration::from_secs(1);
/// Pause before each question for a sign of life while a stream of frames is open.
const LIFE_AFTER: Duration = Duration::from_secs(1);
/// Method of gRPC's health checks. A server that lacks the method answers with an error, which also shows that it is alive.
const HEALTH_PATH: &str = "/grpc.health.v1.Health/Check";

/// Error that keeps a stream of frames from being opened, or has ended it.
#[derive(Debug, thiserror::Error)]
pub(super) enum GrpcError {
    /// The text is no valid endpoint for gRPC.
    #[error("{0} is not grpc://HOST:PORT or grpcs://HOST:PORT")]
    Endpoint(String),
    /// Servers of this format have no gRPC method that sends events.
    #[error("{} is not served over gRPC", .0.as_str())]
    Format(Format),
    /// The connection failed.
    #[error("{}", in_words(.0))]
    Transport(#[from] tonic::transport::Error),
    /// No answer came within this time.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The server does not have the method.
    #[error(
        "the server has no KV events to hand on: start the engine with --kv-events-config, or --enable-kv-cache-events ({0})"
    )]
    Off(String),
    /// The server has lost events. Or it is another process than before, which counts its batches anew.
    #[error("the server has lost events, and is asked from the start: {0}")]
    Lost(String),
    /// The server answered with any other status.
    #[error("{code:?}: {text}")]
    Status {
        /// Status code of gRPC.
        code: Code,
        /// Message of the server.
        text: String,
    },
    /// The connection failed during a question.
    #[error("{code:?}: {text}")]
    Broken {
        /// Status code that the client gives the failure.
        code: Code,
        /// Error of the connection.
        text: String,
    },
    /// The server has ended the stream.
    #[error("the server has ended the stream")]
    Ended,
}

impl GrpcError {
    /// Returns whether the error means that the server lacks the method.
    pub(super) fn is_absent(&self) -> bool {
        matches!(self, Self::Off(_))
    }

    /// Returns whether the server has answered.
    pub(super) fn is_answer(&self) -> bool {
        matches!(self, Self::Off(_) | Self::Lost(_) | Self::Status { .. })
    }
}

impl From<Status> for GrpcError {
    fn from(status: Status) -> Self {
        let text = status.message().to_owned();
        // A status that the server has sent has no source.
        let is_sent = std::error::Error::source(&status).is_none();
        match status.code() {
            code if !is_sent => Self::Broken { code, text },
            Code::Unimplemented => Self::Off(text),
            Code::DataLoss | Code::OutOfRange => Self::Lost(text),
            code => Self::Status { code, text },
        }
    }
}

/// Returns the text of an error and its causes. Tonic's own text is only `transport error`.
fn in_words(error: &tonic::transport::Error) -> String {
    let mut words = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        words = format!("{words}: {error}");
        cause = error.source();
    }
    words
}

/// Returns the path of the gRPC method by which servers of a format send events; `None` if the format has no such method.
pub(super) fn method_path(format: Format) -> Option<&'static str> {
    match format {
        Format::Vllm => Some("/vllm.grpc.engine.VllmEngine/SubscribeKvEvents"),
        Format::Sglang => Some("/sglang.grpc.scheduler.SglangScheduler/SubscribeKvEvents"),
        Format::TokenSpeed => Some("/tokenspeed.grpc.scheduler.TokenSpeedScheduler/SubscribeKvEvents"),
        Format::TensorRt => Some("/trtllm.TrtllmService/SubscribeKvEvents"),
        Format::Mooncake | Format::Dynamo => None,
    }
}

/// Parses the endpoint of a channel: `grpc://HOST:PORT`, or `grpcs://HOST:PORT` with TLS.
pub(super) fn parse_endpoint(endpoint: &str) -> Result<Endpoint, GrpcError> {
    let refused = || GrpcError::Endpoint(endpoint.to_owned());
    let (authority, is_secure) = match endpoint.strip_prefix("grpcs://") {
        Some(authority) => (authority, true),
        None => (endpoint.strip_prefix("grpc://").ok_or_else(refused)?, false),
    };
    let port = authority
        .rsplit_once(':')
        .map(|(host, port)| (host, port.parse::<u16>()));
    let is_address =
        matches!(port, Some((host, Ok(1..))) if !host.is_empty()) && !authority.contains(['@', '/']);
    if !is_address {
        return Err(refused());
    }
    let scheme = if is_secure { "https" } else { "http" };
    let channel = Endpoint::from_shared(format!("{scheme}://{authority}")).map_err(|_| refused())?;
    Ok(match is_secure {
        true => channel.tls_config(ClientTlsConfig::new().with_native_roots())?,
        false => channel,
    })
}

/// Connects to the server at `endpoint`, for questions. `patience` bounds the time to connect, and the wait for a sign of life.
pub(super) async fn connect(endpoint: &str, patience: Duration) -> Result<Channel, GrpcError> {
    let endpoint = patient_endpoint(endpoint, patience)?
        .http2_keep_alive_interval(PING_AFTER)
        .keep_alive_timeout(patience)
        .keep_alive_while_idle(true);
    Ok(endpoint.connect().await?)
}

fn patient_endpoint(endpoint: &str, patience: Duration) -> Result<Endpoint, GrpcError> {
    let endpoint = parse_endpoint(endpoint)?;
    Ok(endpoint.connect_timeout(patience).tcp_nodelay(true))
}

/// Asks a question that has one answer.
pub(super) async fn ask<Answer>(channel: &Channel, path: &'static str) -> Result<Answer, GrpcError>
where
    Answer: prost::Message + Default + 'static,
{
    let mut client = tonic::client::Grpc::new(channel.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
    client.ready().await?;
    let codec: ProstCodec<Ask, Answer> = ProstCodec::default();
    let asked = client.unary(Request::new(Ask {}), PathAndQuery::from_static(path), codec);
    Ok(asked.await?.into_inner())
}

/// Returns whether the server can send events by the gRPC method that servers of `format` have.
pub(super) async fn hands_on(channel: &Channel, format: Format) -> Result<bool, GrpcError> {
    match open(channel, format, NEVER_SEEN).await {
        Ok(_) | Err(GrpcError::Lost(_)) => Ok(true),
        Err(error) if error.is_absent() => Ok(false),
        Err(error) => Err(error),
    }
}

/// A subscription that the server has confirmed. While a frame is awaited, the server is asked for signs of life.
pub(super) struct Frames {
    stream: Streaming<KvEventFrame>,
    silence: BoxFuture<'static, GrpcError>,
    /// Frames that were put back, which come before those that are still to be read.
    unread: VecDeque<KvEventFrame>,
}

impl fmt::Debug for Frames {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Frames")
    }
}

impl Frames {
    /// Subscribes to the events of the server at `endpoint`, from the first event on. Returns once the server has
    /// confirmed the subscription.
    pub(super) async fn subscribe(
        endpoint: &str,
        format: Format,
        patience: Duration,
    ) -> Result<Self, GrpcError> {
        let subscribing = async {
            let channel = patient_endpoint(endpoint, patience)?.connect().await?;
            let stream = open(&channel, format, 0).await?;
            Ok(Self {
                stream,
                silence: silence(channel, patience).boxed(),
                unread: VecDeque::new(),
            })
        };
        let subscribed = timeout(patience, subscribing).await;
        subscribed.map_err(|_| GrpcError::TimedOut(patience))?
    }

    /// Waits for the next frame, and returns it. Not to be called again after an error.
    pub(super) async fn next(&mut self) -> Result<KvEventFrame, GrpcError> {
        if let Some(frame) = self.unread.pop_front() {
            return Ok(frame);
        }
        tokio::select! {
            biased;
            frame = self.stream.message() => frame?.ok_or(GrpcError::Ended),
            error = &mut self.silence => Err(error),
        }
    }

    /// Puts back `frames`, which [`Self::next`] has returned in this order. It returns them again.
    pub(super) fn put_back(&mut self, frames: impl IntoIterator<Item = KvEventFrame>) {
        self.unread.extend(frames);
    }
}

/// Asks the server again and again for a sign of life. Returns the error once an answer takes longer than `patience`.
///
/// HTTP/2 pings are not enough. A server in Python ends a connection if more than two pings come without a frame
/// between them (counted over ten seconds or over five minutes). If the server sends live events only, the events until
/// the next connection are then lost. A question avoids that, because its answer is a frame between two pings.
async fn silence(channel: Channel, patience: Duration) -> GrpcError {
    loop {
        tokio::time::sleep(LIFE_AFTER).await;
        // Any answer is a sign of life, an error too. A connection that breaks ends the stream.
        if timeout(patience, ask::<Ask>(&channel, HEALTH_PATH))
            .await
            .is_err()
        {
            return GrpcError::TimedOut(patience);
        }
    }
}

/// Subscribes to the batches after number `seen`; 0 asks for everything from the start.
async fn open(channel: &Channel, format: Format, seen: u64) -> Result<Streaming<KvEventFrame>, GrpcError> {
    let path = method_path(format).ok_or(GrpcError::Format(format))?;
    let mut client = tonic::client::Grpc::new(channel.clone()).max_decoding_message_size(FRAME_BYTES_MAX);
    client.ready().await?;
    let codec: ProstCodec<SubscribeRequest, KvEventFrame> = ProstCodec::default();
    let request = Request::new(SubscribeRequest {
        start_sequence_number: seen,
    });
    let response = client.server_streaming(request, PathAndQuery::from_static(path), codec);
    Ok(response.await?.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_server_sends_a_status_without_a_source() {
        for sent in [
            Status::unauthenticated("no key"),
            Status::unavailable("the engine is loading"),
            Status::unimplemented(""),
            Status::data_loss(""),
        ] {
            assert!(GrpcError::from(sent.clone()).is_answer(), "{sent:?}");
        }
        let broken = Status::from_error(std::io::Error::from(std::io::ErrorKind::ConnectionReset).into());
        assert!(!GrpcError::from(broken).is_answer());
        assert!(!GrpcError::TimedOut(Duration::ZERO).is_answer());
    }

    #[tokio::test]
    async fn endpoints_have_a_host_and_a_port() {
        for taken in [
            "grpc://vllm-0:50051",
            "grpc://[::1]:50051",
            "grpcs://vllm-0.llm:443",
        ] {
            assert!(parse_endpoint(taken).is_ok(), "{taken}");
        }
        for refused in [
            "http://vllm-0:1",
            "grpc://vllm-0",
            "grpc://:1",
            "grpc://a@b:1",
            "grpc://a:1/x",
            "grpc://a:0",
        ] {
            assert!(parse_endpoint(refused).is_err(), "{refused}");
        }
    }

    #[test]
    fn an_absent_method_and_lost_events_are_errors_of_their_own() {
        let off = GrpcError::from(Status::unimplemented("x"));
        assert!(matches!(&off, GrpcError::Off(text) if text == "x"), "{off}");
        let lost = GrpcError::from(Status::data_loss("incarnation 1"));
        assert!(
            matches!(&lost, GrpcError::Lost(text) if text == "incarnation 1"),
            "{lost}"
        );
    }
}
